"""Where `generate`'s settings apply to dynamic decoding: at each place, or to the joint distribution."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from dynamic_runs import (
    NO_EOS,
    decoding_of,
    first_places,
    orders_of,
    run,
    table,
)
from tiny import VOCAB, left_padded, random_tokens, shared_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from heads.decoding.dynamo import candidates
from heads.decoding.dynamo.candidates import Candidates, find_candidates, read_penalty
from heads.decoding.dynamo.joint import decide
from heads.decoding.request.entry import read_request
from heads.decoding.request.request import Row


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


def test_candidates_are_on_the_device_of_the_rows(monkeypatch):
    """Those of a backbone whose end is on another device too; a meta device stands for the rows' here."""
    places = []

    def keep(probs_RV, top_k, *, place):
        found_Rk = probs_RV.topk(top_k, dim=1)  # meta tensors cannot be asked for NaN, as `take_candidates` asks
        places.append(Candidates(tokens_Bk=found_Rk.indices, probs_Bk=found_Rk.values))
        return places[-1]

    monkeypatch.setattr(candidates, "take_candidates", keep)
    request = SimpleNamespace(max_length=99, processors_of=lambda _: LogitsProcessorList(), criteria_of=lambda _: [])
    row = Row(request=request, tokens=[1, 2], device=torch.device("meta"))
    find_candidates([row], [torch.zeros(1, VOCAB), torch.zeros(1, VOCAB)], top_k=3)
    assert [place.tokens_Bk.device.type for place in places] == ["meta", "meta"]


class PrefixesSeen(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        self.seen.append(input_ids[0].tolist())
        return scores


def test_a_place_is_scored_behind_the_likeliest_tokens_before_it():
    model, decoding = decoding_of(threshold=0.0, adaptive=None)
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
