"""Dynamic decoding in `generate`: its two ends, one token as plain sampling and all K + 1, and what lies between them.

Models and heads run in float64. A plain loop without caches, batches or passes decides the same n-grams from the same
distributions, so a state that is committed wrongly shows as another text.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from backbone_passes import shapes
from dynamic_runs import (
    INDEPENDENT,
    NAMES,
    NO_EOS,
    NUM_HEADS,
    PROMPT,
    SAMPLING,
    check_stats,
    decoding_of,
    first_places,
    orders_of,
    run,
    table,
)
from throwaway_families import fitted_heads, make_heads
from tiny import EOS, PAD, left_padded, random_tokens, tiny_model
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.dynamo.candidates import take_candidates
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.decoding.dynamo.joint import decide
from heads.decoding.dynamo.settings import JointConfig
from heads.interface.token_heads import TokenHeads


@torch.no_grad()
def plain_loop(token_heads: TokenHeads, tokens: list[int], config: JointConfig, new_tokens: int) -> list[list[int]]:
    """Greedy n-grams of one text, which is read anew from its start for each; nothing is kept."""
    backbone, ngrams = token_heads.backbone, []
    while (left := new_tokens - sum(map(len, ngrams))) > 0:
        text = torch.tensor([tokens + [t for ngram in ngrams for t in ngram]])
        _, output = backbone.prefill(text, torch.ones_like(text, dtype=torch.bool), token_heads.taps)
        plan = CommitPlan.whole(torch.ones_like(text, dtype=torch.bool))
        state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
        logits, level = [backbone.logits(output.final_BND[:, -1])], token_heads.first_level(state)
        for k in range(1, token_heads.num_heads + 1):
            hidden_BD, level = token_heads.step(k, level, text[:, -1], torch.zeros(1, dtype=torch.long))
            logits.append(token_heads.projection(k)(hidden_BD))
        places = [take_candidates(torch.softmax(x.float(), dim=1), config.top_k) for x in logits]
        decision = decide(places, config, cooccurrence=table())
        best = [here.best()[0] for here in decision.ngrams]
        ngrams.append((best[0] if best else [int(logits[0].argmax())])[:left])
    return ngrams


@pytest.mark.parametrize("family", INDEPENDENT)
@pytest.mark.parametrize("name", NAMES)
def test_a_pass_emits_what_a_plain_loop_decides(family, name):
    taken = set()
    for threshold, seed in ((0.3, 50), (0.8, 51), (0.3, 1)):
        model, decoding = decoding_of(family, name, threshold=threshold, cooccurrence=table())
        tokens = random_tokens(1, 5, seed=seed)
        ours = run(model, decoding, tokens, max_new_tokens=18)
        expected = plain_loop(decoding.token_heads, tokens[0].tolist(), decoding.config, 18)
        assert ours.sequences[0, 5:].tolist() == [token for ngram in expected for token in ngram]
        assert orders_of(ours.stats) == [[len(ngram) for ngram in expected]]
        check_stats(ours.stats, ours.sequences, 5)
        taken |= {len(ngram) for ngram in expected[:-1]}
    assert {1, 4} <= taken, f"orders {taken}: the equality shows too little"


@pytest.mark.parametrize("family", INDEPENDENT)
@pytest.mark.parametrize("name", ["gpt_neox", "mistral_windowed"])
def test_a_padded_batch_is_its_rows(family, name):
    """Rows of different length that emit different numbers of tokens in a pass and end at different places."""
    model, decoding = decoding_of(family, name, threshold=0.5, cooccurrence=table())
    prompts = [random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)] + [PROMPT[0].tolist()]
    tokens, mask = left_padded(prompts)
    alone = [run(model, decoding, torch.tensor([prompt])) for prompt in prompts]
    free = run(model, decoding, tokens, attention_mask=mask)
    assert orders_of(free.stats) == [orders_of(single.stats)[0] for single in alone]
    for row, single, prompt in zip(free.sequences, alone, prompts, strict=True):
        assert row[9:].tolist() == single.sequences[0, len(prompt) :].tolist()
    ragged = {len(set(orders)) for orders in itertools.zip_longest(*orders_of(free.stats))}
    assert max(ragged) > 1, "rows never differed in a pass"

    new = free.sequences[:, 9:].tolist()
    eos = max(set(itertools.chain(*new)), key=lambda t: len({row.index(t) if t in row else 99 for row in new}))
    with shapes(decoding.token_heads.backbone) as passes:
        ended = run(model, decoding, tokens, attention_mask=mask, eos_token_id=eos)
    sizes = [batch for batch, _ in passes]
    assert sizes == sorted(sizes, reverse=True), "rows only leave"
    assert len(set(sizes)) > 1
    assert (len(sizes), sum(sizes)) == (ended.stats.passes, ended.stats.row_passes), "a row that ended is in no pass"
    for row, text in zip(ended.sequences[:, 9:].tolist(), new, strict=True):
        kept = text[: text.index(eos) + 1] if eos in text else text
        assert row == kept + [PAD] * (len(row) - len(kept))
    assert len({len(row) for row in ended.stats.drafted}) > 1, "rows end at different places"
    check_stats(ended.stats, ended.sequences, 9)


def test_decoding_again_and_with_another_batch_size():
    model, decoding = decoding_of("kv", threshold=0.4)
    first = run(model, decoding)
    run(model, decoding, random_tokens(3, 6, seed=53))
    again = run(model, decoding)
    assert torch.equal(first.sequences, again.sequences)
    assert orders_of(first.stats) == orders_of(again.stats)


@pytest.mark.parametrize("family", INDEPENDENT)
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_threshold_of_0_always_emits_all_tokens(family, do_sample):
    for name in ("llama", "gpt_neox"):
        model, decoding = decoding_of(family, name, threshold=0.0, cooccurrence=table())
        ours = run(model, decoding, random_tokens(2, 5, seed=3), do_sample=do_sample)
        assert orders_of(ours.stats) == [[NUM_HEADS + 1] * 6] * 2
        assert ours.stats.tokens_per_pass == NUM_HEADS + 1
        assert ours.stats.accepted_per_depth == [12] * NUM_HEADS
        assert ours.stats.passes == 6


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "the paper's": {**SAMPLING, "repetition_penalty": 1.1},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.8, "temperature": 1.3},
    "bans": {"do_sample": True, "top_k": 0, "no_repeat_ngram_size": 2, "suppress_tokens": [3, 8]},
    "min_new_tokens": {"do_sample": True, "top_k": 0, "min_new_tokens": 12, "eos_token_id": list(range(3, 20))},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("family", INDEPENDENT)
def test_a_threshold_of_1_is_plain_generate(family, settings):
    """One token a pass, from the same draws: the text is the same for the same seed."""
    for seed, name in enumerate(("llama", "gpt_neox")):
        model, decoding = decoding_of(family, name, threshold=1.0, cooccurrence=table())
        options = {**NO_EOS, "max_new_tokens": 18, **SETTINGS[settings]}
        ours = run(model, decoding, seed=seed, **options)
        torch.manual_seed(seed)
        plain = model.generate(PROMPT, **options)
        assert torch.equal(ours.sequences, plain)
        assert ours.stats.tokens_per_pass == 1
        assert sum(ours.stats.accepted_per_depth) == 0


def test_greedy_batches_at_a_threshold_of_1_are_plain_generates():
    model, decoding = decoding_of("kv", "gpt_neox", threshold=1.0)
    tokens, mask = left_padded([random_tokens(n, seed=80 + n).tolist() for n in (3, 8, 5)])
    options = {"attention_mask": mask, "repetition_penalty": 1.4}
    ours = run(model, decoding, tokens, **options)
    plain = model.generate(tokens, max_new_tokens=24, do_sample=False, **options, **NO_EOS)
    assert torch.equal(ours.sequences, plain)


def test_a_higher_threshold_takes_more_passes():
    """On the whole: texts differ, so a single text may go the other way."""
    found = []
    for threshold in (0.0, 0.3, 0.6, 0.9, 1.0):
        model, decoding = decoding_of(threshold=threshold)
        found.append(run(model, decoding, random_tokens(6, 5, seed=50)).stats.tokens_per_pass)
    assert found[0] == NUM_HEADS + 1
    assert found[-1] == 1
    assert found == sorted(found, reverse=True)


def test_an_end_token_inside_an_ngram_ends_it():
    model, decoding = decoding_of(threshold=0.0)
    free = run(model, decoding).sequences[0, 5:].tolist()
    ends = [i for i in range(4, 24) if i % 4 in (1, 2) and free[i] not in free[:i]]
    assert ends, "no new token inside an n-gram; take another prompt"
    ours = run(model, decoding, eos_token_id=[EOS, free[ends[0]]])
    assert ours.sequences[0, 5:].tolist() == free[: ends[0] + 1]
    assert orders_of(ours.stats)[0][-1] == ends[0] % 4 + 1
    check_stats(ours.stats, ours.sequences, 5)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8])
def test_a_length_cuts_an_ngram(length):
    model, decoding = decoding_of("kv", threshold=0.0)
    ours, free = run(model, decoding, max_new_tokens=length), run(model, decoding)
    assert torch.equal(ours.sequences, free.sequences[:, : 5 + length])
    assert ours.stats.passes == -(-length // 4), "nothing is read behind the last token"
    check_stats(ours.stats, ours.sequences, 5)


class StopAt(StoppingCriteria):
    """Ends a row behind a token, and keeps the lengths it was asked about."""

    def __init__(self, token: int) -> None:
        self.token, self.lengths = token, []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_ragged_batches_end_with_a_position_table():
    """GPT-2 has learned positions; what fills up a shorter row must not ask for one that is not there."""
    model = tiny_model("gpt2", n_positions=16, max_position_embeddings=16)
    token_heads = make_heads("medusa", Backbone(model), num_heads=2)
    for seed in range(6):
        decoding = DynamicDecoding(token_heads, threshold=0.3, generator=torch.Generator().manual_seed(seed))
        options = {"max_length": 16, "do_sample": True, "eos_token_id": None}
        sequences = model.generate(random_tokens(3, 5), custom_generate=decoding, **options)
        assert sequences.shape == (3, 16)


def test_stopping_criteria_see_every_prefix():
    model, decoding = decoding_of(threshold=0.0)
    free = run(model, decoding).sequences[0].tolist()
    end = next(i for i in range(10, 29) if i % 4 == 2 and free[i] not in free[5:i])
    criterion = StopAt(free[end])
    ours = run(model, decoding, stopping_criteria=StoppingCriteriaList([criterion]))
    assert ours.sequences[0].tolist() == free[: end + 1]
    assert criterion.lengths == list(range(6, end + 2))


def test_a_model_in_place_of_heads_is_refused():
    with pytest.raises(ValueError, match="a LlamaForCausalLM was given in place of token heads"):
        DynamicDecoding(tiny_model("llama"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threshold": "a"}, "threshold='a' was given; allowed are numbers"),
        ({"threshold": None}, "threshold=None was given; allowed are numbers"),
        ({"threshold": True}, "threshold=True was given; allowed are numbers"),
        ({"transparency": [1]}, r"transparency=\[1\] was given; allowed are numbers"),
        ({"blur": 1.5}, "blur=1.5 was given; allowed are integers"),
        ({"top_k": "3"}, "top_k='3' was given; allowed are integers"),
        ({"top_k": True}, "top_k=True was given; allowed are integers"),
        ({"cooccurrence": 7}, "cooccurrence=7 was given; give a table"),
        ({"generator": 3}, "generator=3 was given; give None, or a torch.Generator"),
    ],
)
def test_options_of_another_type_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        decoding_of(**options)


def test_a_generator_makes_sampling_repeatable():
    token_heads, texts = fitted_heads("medusa", "llama"), []
    for seed in (1, 1, 2):
        decoding = DynamicDecoding(token_heads, 0.2, generator=torch.Generator().manual_seed(seed))
        out = run(token_heads.backbone.model, decoding, seed=len(texts), do_sample=True, temperature=1.5, top_k=0)
        texts.append(out.sequences)  # the global source differs each time and must not matter
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_sampled_ngrams_follow_the_joint():
    """Chi-square of the first n-gram of 1500 sampled texts against J, which is known exactly."""
    token_heads = fitted_heads("kv", "llama")
    decoding = DynamicDecoding(
        token_heads, 0.0, table(), torch.Generator().manual_seed(4), adaptive=None, transparency=0.5, top_k=3
    )
    draws = 1500
    out = run(
        token_heads.backbone.model, decoding, do_sample=True, top_k=0, max_new_tokens=4, num_return_sequences=draws
    )
    (here,) = decide(
        [place.first(3) for place in first_places(token_heads, PROMPT)],
        decoding.config,
        cooccurrence=table(),
    ).ngrams
    cells = list(itertools.product(range(3), repeat=4))
    wanted = {
        tuple(int(place.tokens_Bk[0, i]) for place, i in zip(here.places, cell, strict=True)): float(
            here.joint[0][cell]
        )
        for cell in cells
    }
    found = [tuple(row) for row in out.sequences[:, 5:].tolist()]
    assert set(found) <= set(wanted)
    frequent = [ngram for ngram, value in wanted.items() if value * draws >= 5]
    chi_square = sum((found.count(n) - wanted[n] * draws) ** 2 / (wanted[n] * draws) for n in frequent)
    rest = draws * (1 - sum(wanted[n] for n in frequent))
    rare = len([n for n in found if n not in frequent])
    chi_square += (rare - rest) ** 2 / max(rest, 1.0)
    # 81 cells at most: 126.1 is exceeded by chance once in a thousand seeds at 80 degrees of freedom.
    assert len(frequent) > 5
    assert chi_square < 126.1
