"""Batches: rows of any length that accept any number of tokens; a row that ended leaves and costs nothing.

Texts are held against plain generate's for the whole batch and for each row alone, in float64. That rows leave is seen
at the backbone: every pass is given as many rows as still run.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from backbone_passes import shapes
from matrices import covering
from plain_text import plain_generate
from throwaway_families import FAMILIES, fitted_heads
from tiny import PAD, left_padded, random_tokens
from torch import Tensor

import heads
from heads.backbone.cache import GROWTH_SLOTS, TreeCache
from heads.backbone.model import CommitPlan

TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]])
LENGTHS = (3, 12, 7, 9)
NEW_TOKENS = 40


@functools.cache
def ragged(name: str) -> tuple[Tensor, Tensor, int, list[int]]:
    """Prompts of different length, their mask, an end token that they reach far apart, and new tokens of each row."""
    model = fitted_heads("medusa", name).backbone.model
    best: tuple[int, Any] = (0, None)
    for seed in range(8):
        tokens, mask = left_padded([random_tokens(n, seed=100 * seed + n).tolist() for n in LENGTHS])
        asked = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        new = plain_generate(model, tokens, eos_token_id=None, pad_token_id=PAD, **asked)[:, tokens.shape[1] :].tolist()
        for eos in range(3, 29):
            ends = [row.index(eos) + 1 if eos in row else NEW_TOKENS for row in new]
            score = 1000 * len(set(ends)) + max(ends) - min(ends)
            best = max(best, (score, (tokens, mask, eos, ends)), key=lambda found: found[0])
    return best[1]


def generate(model: Any, tokens: Tensor, mask: Tensor, eos: int, **options: Any) -> Any:
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": PAD}
    return model.generate(tokens, attention_mask=mask, eos_token_id=eos, **asked, **options)


@covering(family=FAMILIES, name=["llama", "mistral_windowed"], lookup=[10, 0])
def test_rows_that_end_far_apart(family, name, lookup):
    tokens, mask, eos, ends = ragged(name)
    assert len(set(ends)) >= 3, "rows end at three places at least"
    assert max(ends) - min(ends) >= 15, "and far apart"
    token_heads = fitted_heads(family, name)
    model = token_heads.backbone.model
    plain = generate(model, tokens, mask, eos)
    with shapes(token_heads.backbone) as passes:
        ours = generate(model, tokens, mask, eos, custom_generate=heads.TreeDecoding(token_heads, TREE, lookup=lookup))
    assert torch.equal(ours.sequences, plain.sequences)
    assert [len(row) for row in ours.stats.drafted] == ends

    rows = [batch for batch, _ in passes]
    assert rows == sorted(rows, reverse=True), "rows only leave"
    assert (rows[0], rows[-1]) == (len(LENGTHS), sum(end == max(ends) for end in ends))
    assert len(set(rows)) >= 3
    # Each pass of a row emits a token at least: no pass has more rows than texts that are longer than passes so far.
    for done, batch in enumerate(rows):
        assert batch <= sum(end > done for end in ends)
    assert sum(rows) == ours.stats.row_passes
    assert len(rows) == ours.stats.passes


@pytest.mark.parametrize("family", ["grounded", "dynamo", "kv", "eagle"])
def test_a_row_of_a_batch_is_decoded_as_alone(family):
    """Drafts too: the heads' states of a row do not depend on its neighbours, nor on those that left."""
    tokens, mask, eos, _ = ragged("llama")
    token_heads = fitted_heads(family, "llama")
    decoding = heads.TreeDecoding(token_heads, TREE, lookup=0)
    together = generate(token_heads.backbone.model, tokens, mask, eos, custom_generate=decoding)
    for b, length in enumerate(LENGTHS):
        row = tokens[b : b + 1, -length:]
        alone = generate(token_heads.backbone.model, row, torch.ones_like(row), eos, custom_generate=decoding)
        assert alone.stats.drafted[0] == together.stats.drafted[b]


def test_sampled_rows_end_apart_too():
    """With one token to draw from, sampling is greedy whatever the order in which rows draw."""
    tokens, mask, eos, _ = ragged("llama")
    token_heads = fitted_heads("grounded", "llama")
    plain = generate(token_heads.backbone.model, tokens, mask, eos)
    decoding = heads.TreeDecoding(token_heads, TREE, generator=torch.Generator().manual_seed(1))
    asked = {"max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "pad_token_id": PAD, "attention_mask": mask}
    ours = token_heads.backbone.model.generate(tokens, do_sample=True, top_k=1, custom_generate=decoding, **asked)
    assert torch.equal(ours, plain.sequences)


def test_a_streamer_gets_the_rows_of_each_pass():
    """Rows come one after another in each pass; put together by turns they are the texts."""
    tokens, mask, eos, ends = ragged("llama")
    token_heads = fitted_heads("grounded", "llama")
    puts: list[list[int]] = []

    class Puts:
        def put(self, value: Tensor) -> None:
            puts.append(value.flatten().tolist())

        def end(self) -> None: ...

    decoding = heads.TreeDecoding(token_heads, TREE)
    asked = {"attention_mask": mask, "eos_token_id": eos, "pad_token_id": PAD, "max_new_tokens": NEW_TOKENS}
    out = heads.generate(token_heads.backbone.model, decoding, inputs=tokens, streamer=Puts(), do_sample=False, **asked)
    assert puts[0] == tokens.flatten().tolist()
    texts: list[list[int]] = [[] for _ in LENGTHS]
    left = list(range(len(LENGTHS)))
    turn = iter(puts[1:])
    while left:
        for row in list(left):
            texts[row] += next(turn)
        left = [row for row in left if len(texts[row]) < ends[row]]
    assert next(turn, None) is None
    padded = [text + [PAD] * (max(ends) - len(text)) for text in texts]
    assert padded == out[:, tokens.shape[1] :].tolist()


# --- what a row that left frees --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["grounded", "dynamo", "kv", "eagle"])
def test_caches_shrink_and_lose_the_holes_of_rows_that_left(family):
    token_heads = fitted_heads(family, "llama")
    backbone = token_heads.backbone
    tokens, mask = left_padded([random_tokens(n, seed=n).tolist() for n in (3, 30, 5)])
    plan = CommitPlan.whole(mask.bool())
    with torch.no_grad():
        state, output = backbone.prefill(tokens, mask.bool(), token_heads.taps)
        heads_state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    before = cache_numbers(state.cache)
    rows_R = torch.tensor([0, 2])
    state, heads_state = state.keep_rows(rows_R), token_heads.keep_rows(heads_state, rows_R)
    assert cache_numbers(state.cache) == before * 2 * (5 + GROWTH_SLOTS) // (3 * (30 + GROWTH_SLOTS))
    assert state.valid_BS.tolist() == [[False, False, True, True, True], [True] * 5]
    assert state.positions_BS[1].tolist() == [0, 1, 2, 3, 4]
    assert state.next_position_B.tolist() == [3, 5]
    layers_of_heads = len(state.cache.layers) - backbone.num_layers
    assert layers_of_heads == (token_heads.num_heads if family == "dynamo" else 0)


def cache_numbers(cache: TreeCache) -> int:
    """Numbers in all buffers, their room to grow included."""
    return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
