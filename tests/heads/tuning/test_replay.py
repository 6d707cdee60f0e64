"""Replayed tokens per pass are those of decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from throwaway_families import FAMILIES, fitted_heads
from tiny import PAD, left_padded, random_tokens

import heads
from heads.decoding.trees.dynamic import DynamicTree
from heads.tuning.acceptance_rates import RankCounts, best_nodes, places_of, tokens_per_pass
from heads.tuning.replay import replay, write_texts


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_tokens_per_pass_are_those_of_decoding(family):
    """Static and dynamic trees, on ragged prompts, some texts ending early: exactly, in float64."""
    token_heads = fitted_heads(family, "llama")
    model = token_heads.backbone.model
    prompts = [random_tokens(1, n, seed=70 + n) for n in (3, 9, 6, 5)]
    free = model.generate(prompts[0], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    eos = int(free[0, 3 + 15])
    request = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": eos, "pad_token_id": PAD}
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, eos
    try:
        texts = write_texts(model, prompts, request, rows=3, advance=lambda: None)
    finally:
        model.generation_config.eos_token_id = before
    replays = [
        one for text in texts for one in replay(token_heads, text, widths=[1, 3], nodes=16, advance=lambda: None)
    ]
    assert [len(text.lengths) for text in texts] == [3, 1]
    assert min(length for text in texts for length in text.lengths) < 24, "a text ended early"
    nodes = best_nodes(RankCounts([one.ranks_PK for one in replays]), nodes=15, depth=3)
    trees: list[tuple[Any, list[np.ndarray], int]] = [
        (heads.Tree([path for _, path in nodes[: size - 1]]), [places_of(nodes, r.ranks_PK) for r in replays], size)
        for size in (2, 6, 1 + len(nodes))
    ]
    trees += [
        (DynamicTree(nodes=size, depth=depth, width=width), [r.dynamic[width][:, depth - 1] for r in replays], size)
        for size, depth, width in ((2, 3, 3), (7, 1, 3), (7, 3, 1), (16, 3, 1), (16, 3, 3))
    ]
    tokens, mask = left_padded([prompt[0].tolist() for prompt in prompts])
    found = set()
    for tree, places, size in trees:
        decoding = heads.TreeDecoding(token_heads, tree, lookup=0)
        stats = model.generate(
            tokens, attention_mask=mask, custom_generate=decoding, return_dict_in_generate=True, **request
        ).stats
        drafted, passes = stats.tokens - len(prompts), stats.row_passes - len(prompts)
        assert tokens_per_pass(places, size) == drafted / passes, tree
        found.add(drafted / passes)
    assert len(found) > 2, "trees differ, and some accept"
