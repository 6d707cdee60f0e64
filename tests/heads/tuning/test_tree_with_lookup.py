"""Simulated decoding with prompt lookup is what decoding does, pass by pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from throwaway_families import make_heads
from tiny import PAD, random_tokens, tiny_model
from tuning_cases import (
    some_times,
)

import heads
from heads.backbone.model import Backbone
from heads.decoding.trees.static import Tree
from heads.tuning import search, tree_with_lookup
from heads.tuning.replay import Replay, replay, write_texts

LOOPS = [torch.tensor([[5, 6, 7, 8] * 3 + [5, 6]]), torch.tensor([[9, 3, 9, 3, 9]]), random_tokens(1, 7, seed=8)]


@pytest.mark.parametrize("lookup", [2, 5])
@pytest.mark.parametrize("sharpen", [False, True], ids=["text that loops", "text that wanders"])
def test_what_is_simulated_beside_lookup_is_what_decoding_does(sharpen, lookup, monkeypatch):
    """Pass by pass: the same number of them, and the nodes of each, for a tree deeper and one shallower than chains."""
    token_heads = make_heads("grounded", Backbone(tiny_model("llama", sharpen=sharpen)), num_heads=3)
    model, tree = token_heads.backbone.model, Tree([[0], [0, 0], [1], [0, 0, 0]])
    request = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": PAD}
    each = write_texts(model, LOOPS, request, rows=1, advance=lambda: None)
    replays = [one for texts in each for one in replay(token_heads, texts, widths=[], nodes=8, advance=lambda: None)]
    times = some_times(
        verify={n: float(n) for n in range(1, 65)},
        step={(k, 1): 0.0 for k in (1, 2, 3)},
        rest_static=0.0,
    )
    choice = search.choice_of(tree, replays, times)
    simulated = tree_with_lookup.simulate(choice, replays, times, lookup)
    read: list[int] = []
    verify = token_heads.backbone.verify
    monkeypatch.setattr(
        token_heads.backbone,
        "verify",
        lambda state, tokens_BN, *a: read.append(tokens_BN.shape[1]) or verify(state, tokens_BN, *a),
    )
    decoding = heads.TreeDecoding(token_heads, tree, lookup=lookup)
    stats = [
        model.generate(prompt, custom_generate=decoding, return_dict_in_generate=True, **request).stats
        for prompt in LOOPS
    ]
    tokens, passes = (sum(getattr(one, name) - 1 for one in stats) for name in ("tokens", "passes"))
    assert len(read) == passes > 20
    assert len(set(read)) > 1, "passes with a chain and without"
    assert simulated.tokens_per_pass == pytest.approx(tokens / passes)
    assert tokens / simulated.tokens_per_second == pytest.approx(sum(read)), "a node takes a second, all else nothing"


def test_where_the_chain_alone_is_verified_the_tree_accepts_nothing():
    """The second pass verifies a doubled chain, which breaks off at once; the tree would have come two tokens far."""
    text = [5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 9, 8, 7, 1, 2]
    one = Replay(ranks_PK=np.zeros((10, 2)), dynamic={}, text=text, prompt=4)
    found = tree_with_lookup.simulate_passes(one, np.full(10, 2), lookup=4, depth=2)
    assert found == [(4, 5, True), (8, 1, False), (0, 3, True), (0, 1, True)]
