"""Compiled drafting against plain drafting: the same tokens, one graph for a tree and a batch, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from matrices import covering
from throwaway_families import VARIANTS, fitted_heads, make_heads
from tiny import PAD, left_padded, random_tokens, tiny_model

import heads
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.proposers.heads import compiled_drafting
from heads.decoding.proposers.static_tree import TreeIndex, draft
from heads.decoding.trees.static import Tree

TREE = Tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
ROOM: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@torch.no_grad()
def draft_both(token_heads, graph_rows: int, texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, N) by the graph of so many rows, and plainly."""
    tokens_BT, mask_BT = left_padded(texts)
    _, output = token_heads.backbone.prefill(tokens_BT, mask_BT.bool(), token_heads.taps)
    plan = CommitPlan.whole(mask_BT.bool())
    state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    root_B = random_tokens(len(texts), seed=5)
    projections = [token_heads.projection(k) for k in range(1, token_heads.num_heads + 1)]
    index, own = (TreeIndex(TREE, rows, "cpu", grounded=token_heads.grounded) for rows in (graph_rows, len(texts)))
    fast = compiled_drafting(token_heads).draft(token_heads, projections, state, root_B, index)
    return fast, draft(token_heads, projections, state, root_B, own)


@covering(family=[*heads.families(), *VARIANTS, "mtp, per head", "kv", "own_output"], rows=[1, 3])
def test_a_graph_drafts_the_same_tokens(family, rows, captured):
    """Two texts in a graph of three rows: the third is dead."""
    token_heads = make_heads(family, Backbone(tiny_model("llama", attn="sdpa")))
    texts = [random_tokens(7, seed=1).tolist(), random_tokens(4, seed=2).tolist()][: min(rows, 2)]
    fast, plain = draft_both(token_heads, rows, texts)
    assert fast.shape == (len(texts), TREE.num_nodes)
    assert torch.equal(fast, plain)
    assert len({tuple(row) for row in fast.tolist()}) == len(texts), "texts are drafted apart"


def test_inductor_drafts_the_same_tokens():
    """float64: no rounding of another order of sums reaches a choice between candidates here."""
    token_heads = make_heads("grounded", Backbone(tiny_model("llama", attn="sdpa")), prefix_layers=1)
    fast, plain = draft_both(token_heads, 1, [random_tokens(7, seed=1).tolist()])
    assert torch.equal(fast, plain)


def test_draft_vocabularies_stay_whole_tokens(captured):
    token_heads = fitted_heads("grounded", "llama", draft_tokens=tuple(range(0, 29, 3)))
    fast, plain = draft_both(token_heads, 1, [random_tokens(7, seed=1).tolist()])
    assert torch.equal(fast, plain)
    assert bool((fast[:, 1:] % 3 == 0).all())


def test_one_graph_for_a_tree_and_a_batch_that_shrinks(captured):
    """Rows end one after another; calls and decoders of the same heads share the graphs."""
    token_heads = fitted_heads("grounded", "llama")
    model = token_heads.backbone.model
    drafting = compiled_drafting(token_heads)
    drafting.graphs.clear()
    drafting.compile_seconds.clear()
    tokens, mask = left_padded([random_tokens(n, seed=n).tolist() for n in (3, 9, 5)])
    settings = {**ROOM, "attention_mask": mask, "max_new_tokens": 24}
    plain = model.generate(tokens, **settings)
    settings["eos_token_id"] = int(plain[0, -20])  # some rows end early, and the graph is left with fewer
    plain = model.generate(tokens, **settings)
    assert bool((plain == PAD).any())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            decoding = heads.TreeDecoding(token_heads, Tree(TREE.paths[1:]), lookup=3, compile=True)
            assert torch.equal(model.generate(tokens, custom_generate=decoding, **settings), plain)
    assert list(drafting.graphs) == [(TREE.paths, 3)]
    assert list(drafting.compile_seconds) == [(TREE.paths, 3)]
    assert drafting.compile_seconds[TREE.paths, 3] > 0


def test_heads_that_make_no_graph_are_refused_in_a_sentence(captured, monkeypatch):
    token_heads = make_heads("medusa", Backbone(tiny_model("llama", attn="sdpa")))
    step = token_heads.step

    def asks_the_host(*args: Any) -> Any:
        torch._dynamo.graph_break()
        return step(*args)

    monkeypatch.setattr(token_heads, "step", asks_the_host)
    with pytest.raises(ValueError, match=r"torch makes no graph of drafting with medusa heads.*give compile=False"):
        draft_both(token_heads, 1, [[3, 4, 5]])


def test_graphs_do_not_keep_heads_alive(captured):
    token_heads = make_heads("medusa", Backbone(tiny_model("llama", attn="sdpa")))
    draft_both(token_heads, 1, [[3, 4, 5]])
    assert compiled_drafting(token_heads).graphs
    gone = weakref.ref(token_heads)
    del token_heads
    gc.collect()
    assert gone() is None
