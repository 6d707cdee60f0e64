"""Tree decoding beside plain `generate`: how tests run both, and what statistics have to add up to."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from plain_text import plain_generate
from throwaway_families import fitted_heads
from tiny import PAD, random_tokens, tiny_model
from torch import Tensor

import heads
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.request.output import DecodingStats

NUM_HEADS = 3
# Every rank up to 2 at the first depth, so that paths beside the first are taken too: 0; 00 01; 000; 1; 10; 2.
TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [0, 1, 0], [1], [1, 0], [1, 0, 0], [2], [2, 0]])
PROMPT = random_tokens(1, 5, seed=50)
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
WITH_AND_WITHOUT_LOOKUP = pytest.mark.parametrize("lookup", [DEFAULT_LOOKUP, 0], ids=["default", "heads_alone"])


def decoding_of(family: str = "grounded", name: str = "llama", **options: Any) -> tuple[Any, heads.TreeDecoding]:
    token_heads = fitted_heads(family, name)
    return token_heads.backbone.model, heads.TreeDecoding(token_heads, options.pop("tree", TREE), **options)


def both(model: Any, decoding: Any, tokens: Tensor = PROMPT, **options: Any) -> tuple[Any, Any]:
    """What `generate` gives, and what it gives with the decoding, from the same seed."""
    options = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True, **options}
    plain = plain_generate(model, tokens, seed=0, **options)
    torch.manual_seed(0)
    ours = model.generate(tokens, custom_generate=decoding, **options)
    return plain, ours


def texts_with_packed_heads(family: str, plain: Any, packed: Any) -> tuple[Tensor, Tensor]:
    """Plain generation of one model, and what new heads on a packed one decode, packed themselves."""
    torch.manual_seed(0)
    token_heads = heads.create(family, packed, num_heads=2)
    heads.pack_weights(token_heads)
    prompt, settings = random_tokens(1, 6), {"max_new_tokens": 16, "do_sample": False}
    expected = plain.generate(prompt, **settings)
    return expected, packed.generate(prompt, custom_generate=heads.TreeDecoding(token_heads, 8), **settings)


def check_stats(stats: DecodingStats, sequences: Tensor, prompt_length: int, pad: int | None = None) -> None:
    """The counts agree with one another and with the text."""
    emitted = [len(row) for row in stats.drafted]
    assert stats.tokens == sum(emitted)
    assert max(emitted) == sequences.shape[1] - prompt_length
    for row, count in zip(sequences.tolist(), emitted, strict=True):
        assert all(token == pad for token in row[prompt_length + count :])
    drafted = sum(sum(row) for row in stats.drafted)
    assert drafted == sum(stats.accepted_per_depth)
    assert sorted(stats.accepted_per_depth, reverse=True) == stats.accepted_per_depth, "depth 2 needs depth 1"
    # A row's pass emits what it accepted and one token more; only the pass that ended a row may lack that one.
    own = stats.tokens - drafted
    assert stats.row_passes - len(emitted) <= own <= stats.row_passes
    assert stats.passes <= stats.row_passes <= stats.passes * len(emitted)
    assert stats.tokens_per_pass == pytest.approx(stats.tokens / stats.row_passes, rel=1e-12)  # one division
    assert not any(row[0] for row in stats.drafted), "the prefill's token is nobody's draft"
    assert set(stats.seconds) == {"prefill", "draft", "verify", "accept", "commit"}
    assert all(seconds >= 0 for seconds in stats.seconds.values())


@functools.cache
def five_tokens() -> Any:
    return tiny_model("llama", attn="sdpa", seed=3, vocab_size=5, pad_token_id=None)
