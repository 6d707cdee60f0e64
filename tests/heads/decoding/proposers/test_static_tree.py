"""Drafting a whole tree for a batch equals drafting each node's path alone, one step at a time."""

from __future__ import annotations

import pytest
import torch
from throwaway_families import FAMILIES, make_heads
from tiny import left_padded, random_tokens, shared_model

from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.proposers.static_tree import TreeIndex, best_candidates, draft
from heads.decoding.trees.static import Tree

TREES = {
    "mixed": Tree([[0], [0, 0], [0, 0, 0], [0, 2], [0, 2, 1], [1], [1, 1], [3], [3, 0], [3, 0, 0], [3, 0, 1]]),
    "chain": Tree([[0], [0, 0], [0, 0, 0]]),
    "flat": Tree([[0], [2], [5]]),
    "second_only": Tree([[1], [1, 1], [1, 1, 1]]),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_node_is_the_candidate_of_its_rank(family, tree):
    token_heads = make_heads(family, Backbone(shared_model("llama", "sdpa")), num_heads=3)
    tokens_BT, mask_BT = left_padded([random_tokens(5, seed=40).tolist(), random_tokens(8, seed=41).tolist()])
    _, output = token_heads.backbone.prefill(tokens_BT, mask_BT.bool(), token_heads.taps)
    plan = CommitPlan.whole(mask_BT.bool())
    state = token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)
    root_B = torch.tensor([7, 11])
    index = TreeIndex(tree, 2, "cpu", grounded=token_heads.grounded)
    drafted_BN = draft(
        token_heads, [token_heads.projection(k + 1) for k in range(token_heads.num_heads)], state, root_B, index
    )
    assert drafted_BN.shape == (2, tree.num_nodes)
    assert torch.equal(drafted_BN[:, 0], root_B)
    for node, path in enumerate(tree.paths):
        level, tokens_B = token_heads.first_level(state), root_B
        for k, rank in enumerate(path, start=1):
            hidden_BD, level = token_heads.step(k, level, tokens_B, torch.arange(2))
            logits_BV = token_heads.projection(k)(hidden_BD)
            tokens_B = logits_BV.argsort(dim=-1, descending=True)[:, rank]
        assert torch.equal(drafted_BN[:, node], tokens_B), f"node {node}, path {path}"


def test_candidates_are_the_likeliest_best_first():
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0], [0.0, -1.0, -2.0, 5.0]])
    assert best_candidates(logits, 3).tolist() == [[1, 2, 3], [3, 0, 1]]
    assert best_candidates(logits, 1).tolist() == [[1], [3]]
