"""Dynamic decoding in `generate`: its two ends, one token as plain sampling and all K + 1, and what lies between them.

Models and heads run in float64. A plain loop without caches, batches or passes decides the same n-grams from the same
distributions, so a state that is committed wrongly shows as another text.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from test_joint import DenseTable
from throwaway_families import fitted_heads, make_heads
from tiny import EOS, PAD, VOCAB, left_padded, random_tokens, shared_model, tiny_model
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

import heads
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.dynamo.candidates import read_penalty, take_candidates
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.decoding.dynamo.joint import JointConfig, decide
from heads.decoding.request.output import DecodingStats
from heads.decoding.request.request import Row, read_request
from heads.interface.token_heads import TokenHeads

NUM_HEADS = 3
PROMPT = random_tokens(1, 5, seed=50)
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
NAMES = ("llama", "gpt_neox", "mistral_windowed", "gemma")
INDEPENDENT = ("medusa", "kv")
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 50}


@functools.cache
def table(order: int = NUM_HEADS + 1) -> DenseTable:
    return DenseTable(VOCAB, order=order, zeros=0.0)


def decoding_of(family: str = "medusa", name: str = "llama", **options: Any) -> tuple[Any, DynamicDecoding]:
    token_heads = fitted_heads(family, name)
    return token_heads.backbone.model, DynamicDecoding(token_heads, **{"top_k": 8, **options})


def run(model: Any, decoding: Any, tokens: Tensor = PROMPT, seed: int = 0, **options: Any) -> Any:
    options = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **NO_EOS, **options}
    torch.manual_seed(seed)
    return model.generate(tokens, custom_generate=decoding, **options)


def check_stats(stats: DecodingStats, sequences: Tensor, prompt_length: int) -> None:
    """The counts agree with one another and with the text."""
    emitted = [len(row) for row in stats.drafted]
    assert stats.tokens == sum(emitted)
    assert max(emitted) == sequences.shape[1] - prompt_length
    drafted = sum(sum(row) for row in stats.drafted)
    assert drafted == sum(stats.accepted_per_depth)
    assert stats.row_passes == stats.tokens - drafted, "each pass of a row begins with a token of the backbone's own"
    assert sorted(stats.accepted_per_depth, reverse=True) == stats.accepted_per_depth
    assert stats.tokens_per_pass == pytest.approx(stats.tokens / stats.row_passes, rel=1e-12)
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    assert all(row[0] is False for row in stats.drafted)


def orders_of(stats: DecodingStats) -> list[list[int]]:
    """The tokens of each pass, row by row: a pass begins where a token is not the heads'."""
    orders = []
    for row in stats.drafted:
        starts = [i for i, drafted in enumerate(row) if not drafted]
        orders.append([b - a for a, b in itertools.pairwise([*starts, len(row)])])
    return orders


# --- against a plain loop ---------------------------------------------------------------------------------------------


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
    ended = run(model, decoding, tokens, attention_mask=mask, eos_token_id=eos)
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


# --- the two ends -----------------------------------------------------------------------------------------------------


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


# --- where a text ends ------------------------------------------------------------------------------------------------


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


# --- generate's settings ----------------------------------------------------------------------------------------------


def test_top_k_of_generate_and_of_the_decoding_are_the_same():
    model, ours = decoding_of(threshold=0.3, top_k=4)
    _, theirs = decoding_of(threshold=0.3)
    for seed in range(3):
        a = run(model, ours, seed=seed, do_sample=True, top_k=0)
        b = run(model, theirs, seed=seed, do_sample=True, top_k=4)
        if min(a.stats.accepted_per_depth[:1] + b.stats.accepted_per_depth[:1]) == 0:
            continue
        first = min(orders_of(a.stats)[0][0], orders_of(b.stats)[0][0])
        assert orders_of(a.stats)[0][0] == orders_of(b.stats)[0][0]
        if first > 1:  # a pass of one token draws by generate's own top_k alone
            assert a.sequences[0, 5 : 5 + first].tolist() == b.sequences[0, 5 : 5 + first].tolist()
    decided = [run(model, d, max_new_tokens=4, do_sample=True, top_k=k) for d, k in ((ours, 0), (theirs, 4))]
    assert orders_of(decided[0].stats)[0][0] > 1
    assert torch.equal(decided[0].sequences, decided[1].sequences)


def test_temperature_acts_on_every_head():
    """Cold logits make sure joints of unsure ones: more tokens a pass at the same threshold."""
    found = []
    for temperature in (0.2, 1.0, 3.0):
        model, decoding = decoding_of(threshold=0.5)
        stats = run(model, decoding, random_tokens(4, 5, seed=51), do_sample=True, temperature=temperature).stats
        found.append(stats.tokens_per_pass)
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] + 0.5


def test_suppressed_tokens_never_come():
    model, decoding = decoding_of("kv", threshold=0.0)
    banned = list(range(3, 20))
    ours = run(model, decoding, random_tokens(4, 5), do_sample=True, suppress_tokens=banned, temperature=2.0)
    assert not set(ours.sequences[:, 5:].flatten().tolist()) & set(banned)


@pytest.mark.parametrize("new_tokens", [5, 6, 7, 8])
def test_lengths_that_processors_see_are_the_places(new_tokens):
    """A forced last token comes last, and an end token comes not before its time, wherever an n-gram begins."""
    model, decoding = decoding_of(threshold=0.0)
    forced = run(model, decoding, max_new_tokens=new_tokens, forced_eos_token_id=7)
    assert forced.sequences[0, -1] == 7
    assert forced.sequences.shape[1] == 5 + new_tokens
    free = run(model, decoding, max_new_tokens=24).sequences[0, 5:].tolist()
    early = run(model, decoding, eos_token_id=sorted(set(free)), min_new_tokens=new_tokens)
    assert early.sequences.shape[1] >= 5 + new_tokens
    assert all(token not in free for token in early.sequences[0, 5 : 5 + new_tokens].tolist())


class PrefixesSeen(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        self.seen.append(input_ids[0].tolist())
        return scores


def test_a_place_is_judged_behind_the_likeliest_tokens_before_it():
    model, decoding = decoding_of(threshold=0.0, adaptive=False)
    processor = PrefixesSeen()
    ours = run(model, decoding, max_new_tokens=8, logits_processor=[processor])
    text = ours.sequences[0].tolist()
    # Unmasked and greedy, the n-gram is the likeliest token of each place.
    assert processor.seen == [text[: 5 + i] for i in range(8)]


def test_the_repetition_penalty_divides_the_joint_and_rescales_no_logits():
    """Through the whole loop: what is emitted is what `decide` gives with the tokens of the text as seen."""
    model, decoding = decoding_of(threshold=0.5, cooccurrence=table())
    changed = 0
    for seed in range(50, 58):
        tokens = random_tokens(1, 5, seed=seed)
        seen = torch.zeros(1, VOCAB, dtype=torch.bool)
        seen[0, tokens[0]] = True
        found = []
        for penalty in (1.0, 50.0):
            places = first_places(decoding.token_heads, tokens)
            decision = decide(places, decoding.config, cooccurrence=table(), seen_BV=seen, penalty=penalty)
            ours = run(model, decoding, tokens, repetition_penalty=penalty, max_new_tokens=4)
            n = int(decision.order_B)
            assert orders_of(ours.stats)[0][0] == n
            if n > 1:
                best = decision.ngrams[0].best()[0]
                assert ours.sequences[0, 5 : 5 + n].tolist() == best
            found.append(n)
        changed += found[0] != found[1]
    assert changed, "the penalty never made a pass back off"


@torch.no_grad()
def first_places(token_heads: TokenHeads, tokens: Tensor) -> list[Any]:
    """The candidates of the first pass over a prompt, without processors."""
    backbone, valid = token_heads.backbone, torch.ones_like(tokens, dtype=torch.bool)
    _, output = backbone.prefill(tokens, valid, token_heads.taps)
    plan = CommitPlan.whole(valid)
    state = token_heads.commit(None, tokens, output.taps, output.positions_BN, plan)
    logits, level = [backbone.logits(output.final_BND[:, -1])], token_heads.first_level(state)
    for k in range(1, token_heads.num_heads + 1):
        hidden_BD, level = token_heads.step(k, level, tokens[:, -1], torch.arange(len(tokens)))
        logits.append(token_heads.projection(k)(hidden_BD))
    return [take_candidates(torch.softmax(x.float(), dim=1), 8) for x in logits]


def test_a_padded_rows_penalty_ignores_the_padding():
    """The pad token stands in the row but not in its text, as in generate."""
    tokens, mask = left_padded([[5, 6], [7, 8, 9, 7], [4]])
    seen = []

    def keep(model, input_ids, logits_processor, stopping_criteria, generation_config, **more):
        request = read_request(input_ids, logits_processor, stopping_criteria, generation_config, more, None)
        rows = [
            Row(request=request, tokens=row, device=tokens.device, index=b) for b, row in enumerate(tokens.tolist())
        ]
        seen.append(read_penalty(rows, VOCAB))
        return input_ids

    model = shared_model("llama", "sdpa")
    model.generate(
        tokens, attention_mask=mask, repetition_penalty=1.3, custom_generate=keep, max_new_tokens=4, **NO_EOS
    )
    model.generate(tokens[:1], attention_mask=mask[:1], custom_generate=keep, max_new_tokens=4, **NO_EOS)
    penalty, seen_RV = seen[0]
    assert penalty == 1.3
    assert [row.nonzero()[:, 0].tolist() for row in seen_RV] == [[5, 6], [7, 8, 9], [4]]
    assert seen[1] == (1.0, None)


# --- sampling ---------------------------------------------------------------------------------------------------------


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
        token_heads, 0.0, table(), torch.Generator().manual_seed(4), adaptive=False, transparency=0.5, top_k=3
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


# --- streaming and outputs --------------------------------------------------------------------------------------------


class Puts:
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class DraftedPuts(Puts):
    def __init__(self) -> None:
        super().__init__()
        self.flags: list[list[bool]] = []

    def put_drafted(self, tokens: Tensor, drafted: list[bool]) -> None:
        self.puts.append(tokens.tolist())
        self.flags.append(drafted)


@pytest.mark.parametrize("kind", [Puts, DraftedPuts])
def test_a_streamer_gets_each_passes_tokens(kind):
    model, decoding = decoding_of(threshold=0.4)
    streamer = kind()
    out = heads.generate(
        model, decoding, inputs=PROMPT, streamer=streamer, max_new_tokens=24, return_dict_in_generate=True, **NO_EOS
    )
    assert streamer.puts[0] == PROMPT[0].tolist()
    assert list(itertools.chain(*streamer.puts)) == out.sequences[0].tolist()
    assert [len(put) for put in streamer.puts[1:]] == orders_of(out.stats)[0]
    assert streamer.ended == 1
    if kind is DraftedPuts:
        assert all(flags == [False] + [True] * (len(flags) - 1) for flags in streamer.flags)


def test_only_what_is_asked_for_is_returned():
    model, decoding = decoding_of()
    out = run(model, decoding)
    assert list(out.keys()) == ["sequences"]
    bare = run(model, decoding, return_dict_in_generate=False)
    assert torch.equal(bare, out.sequences)
    assert not bare.requires_grad


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_grounded_heads_are_refused():
    with pytest.raises(ValueError, match=r"family 'grounded' are grounded .* use TreeDecoding, or heads of another"):
        DynamicDecoding(fitted_heads("grounded", "llama"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"top_k": 0}, "top_k=0 was given; allowed are 1"),
        ({"threshold": 1.01}, "threshold=1.01 was given; allowed are 0"),
        ({"threshold": -1}, "threshold=-1 was given"),
        ({"transparency": -0.5}, "transparency=-0.5 was given"),
        ({"blur": 4}, "blur=4 was given; allowed are odd"),
        ({"cooccurrence": DenseTable(VOCAB, order=3)}, "n-grams of 3 tokens but .* of 4; count it again with order=4"),
        ({"cooccurrence": DenseTable(VOCAB + 1, order=2)}, "of another tokenizer"),
        ({"cooccurrence": "/no/such/folder"}, "no/such/folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),  # objects would be named by address
)
def test_bad_settings_are_refused_at_once(options, said):
    with pytest.raises((ValueError, OSError), match=said):
        decoding_of(**options)


def test_more_heads_than_a_joint_can_hold_are_refused():
    backbone = Backbone(shared_model("llama", "sdpa"))
    DynamicDecoding(make_heads("medusa", backbone, num_heads=17, unembedding="shared"))
    token_heads = make_heads("medusa", backbone, num_heads=18, unembedding="shared")
    with pytest.raises(
        ValueError, match=r"of 19 tokens with two candidates each .* use at most 17 heads, there are 18"
    ):
        DynamicDecoding(token_heads)


def test_nan_logits_are_refused():
    model = tiny_model("llama", attn="sdpa")
    token_heads = make_heads("medusa", Backbone(model), num_heads=2)
    with torch.no_grad():
        next(token_heads.bodies[1].parameters()).fill_(float("nan"))
    with pytest.raises(
        ValueError, match="probabilities of head 2 for token 3 of the n-gram are NaN in row 0; look for"
    ):
        run(model, DynamicDecoding(token_heads))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"output_scores": True}, "output_scores or output_logits was given"),
        ({"output_logits": True}, "output_scores or output_logits was given"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"guidance_scale": 1.5}, "guidance"),
        ({"labels": PROMPT}, "generate was given labels"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "padding_side='left'"),
        ({"position_ids": torch.arange(1, 6)[None]}, "leave position_ids out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_equal_is_refused(options, said):
    model, decoding = decoding_of()
    with pytest.raises(ValueError, match=said):
        run(model, decoding, **options)


def test_another_model_is_refused():
    _, decoding = decoding_of()
    with pytest.raises(ValueError, match="another model than the heads' backbone"):
        run(tiny_model("llama"), decoding)
