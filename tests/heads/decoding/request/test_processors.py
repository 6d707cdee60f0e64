"""Logits processors are called as plain generation calls them, and scores are returned as it returns them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from matrices import covering
from tiny import EOS, PAD, left_padded, random_tokens
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from tree_runs import NO_EOS, PROMPT, both, check_stats, decoding_of

from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(3, 20)), "pad_token_id": PAD},
    "min_length": {"min_length": 12, "eos_token_id": list(range(3, 20)), "pad_token_id": PAD},
    "bad_words": {"bad_words_ids": [[5], [8, 8], [3, 8], [24, 24], [12, 12]]},
    "suppress_tokens": {"suppress_tokens": [3, 8, 24, 14, 11]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 20))},
    "sequence_bias": {"sequence_bias": [[[4], 3.0], [[3, 8], -4.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": EOS, "pad_token_id": PAD},
    "forced_eos": {"forced_eos_token_id": 7, "eos_token_id": 7, "pad_token_id": PAD},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [8],
        "renormalize_logits": True,
    },
}


@functools.cache
def text_without_processors(name: str, eos: int | tuple[int, ...] | None) -> list[int]:
    model, _ = decoding_of("grounded", name)
    eos = list(eos) if isinstance(eos, tuple) else eos
    return model.generate(PROMPT, max_new_tokens=24, do_sample=False, eos_token_id=eos, pad_token_id=PAD)[0].tolist()


@covering(processor=[*PROCESSORS], lookup=[DEFAULT_LOOKUP, 0])
def test_processors_see_each_nodes_own_prefix(processor, lookup):
    changed = 0
    for name in ("llama", "qwen3", "codegen"):
        model, decoding = decoding_of("grounded", name, lookup=lookup)
        options = {**NO_EOS, **PROCESSORS[processor]}
        plain, ours = both(model, decoding, **options)
        assert torch.equal(ours.sequences, plain.sequences)
        check_stats(ours.stats, ours.sequences, PROMPT.shape[1])
        eos = options["eos_token_id"]
        without = text_without_processors(name, tuple(eos) if isinstance(eos, list) else eos)
        changed += without != plain.sequences[0].tolist()
    assert changed, "the processor changed no text, so the equality shows nothing"


class LengthsSeen(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.shape[1], int(input_ids[0, -1])))
        assert scores.dtype == torch.float32
        return scores


def test_custom_processors_are_called_once_a_token_in_order():
    model, decoding = decoding_of("grounded", "qwen3")
    theirs, mine = LengthsSeen(), LengthsSeen()
    options = {"max_new_tokens": 24, "do_sample": False, **NO_EOS}
    model.generate(PROMPT, logits_processor=LogitsProcessorList([theirs]), **options)
    model.generate(PROMPT, logits_processor=LogitsProcessorList([mine]), custom_generate=decoding, **options)
    assert mine.seen == theirs.seen


def test_processors_in_a_padded_batch():
    model, decoding = decoding_of("grounded", "qwen3")
    tokens, mask = left_padded([random_tokens(n, seed=80 + n).tolist() for n in (3, 8, 5)])
    # The repetition penalty is told each row's padding, so a row's penalty differs from that of a batch of one.
    options = {"attention_mask": mask, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3}
    plain, ours = both(model, decoding, tokens, **options, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)
    unpadded = random_tokens(2, 5, seed=83)
    plain, ours = both(model, decoding, unpadded, repetition_penalty=1.4, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize("processor", ["repetition_penalty", "bad_words"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_are_generates(processor, do_sample):
    model, decoding = decoding_of("grounded", "qwen3")
    plain, ours = both(
        model,
        decoding,
        output_scores=True,
        output_logits=True,
        do_sample=do_sample,
        **NO_EOS,
        **PROCESSORS[processor],
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.scores) == len(ours.logits) == 24
    for mine, theirs in ((ours.scores, plain.scores), (ours.logits, plain.logits)):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype == torch.float32
            # float64 logits that agree to 1e-14 and are then rounded to float32: one unit in the last place.
            torch.testing.assert_close(a, b, atol=2e-6, rtol=0.0)


class WritesInPlace(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ::2] = -float("inf")
        return scores


def test_logits_stay_raw_where_a_processor_writes_in_place():
    model, decoding = decoding_of()
    _, ours = both(model, decoding, output_logits=True, logits_processor=[WritesInPlace()], **NO_EOS)
    assert all(logits.isfinite().all() for logits in ours.logits)
    assert (ours.sequences[0, 5:] % 2 == 1).all()


def test_only_what_is_asked_for_is_returned():
    model, decoding = decoding_of()
    _, ours = both(model, decoding, output_logits=True, **NO_EOS)
    assert ours.scores is None
    assert len(ours.logits) == 24
    _, ours = both(model, decoding, **NO_EOS)
    assert ours.scores is None
    assert ours.logits is None
    assert list(ours.keys()) == ["sequences", "past_key_values"]
    bare = model.generate(PROMPT, custom_generate=decoding, max_new_tokens=24, do_sample=False, **NO_EOS)
    assert torch.equal(bare, ours.sequences)
