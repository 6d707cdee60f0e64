"""Sampled drafts: from the distribution that the proposal names, without replacement, and anew at each node."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from throwaway_families import FAMILIES, make_heads
from tiny import random_tokens, shared_model
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

import heads
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.proposers.static_tree import (
    SampledTreeIndex,
    rank_by_place,
    sample_tree,
    sample_without_replacement,
    shape_distribution,
)

# Ranks with gaps: only the shape counts.
TREE = heads.Tree([[0], [0, 1], [0, 1, 0], [0, 3], [2], [2, 0], [2, 0, 0], [2, 0, 4], [5]])
COOL = LogitsProcessorList([TemperatureLogitsWarper(0.7), RepetitionPenaltyLogitsProcessor(3.0)])


@functools.cache
def heads_of(family: str) -> Any:
    return make_heads(family, Backbone(shared_model("llama", "sdpa")), num_heads=3)


def state_after(token_heads: Any, tokens_BT: Tensor) -> Any:
    valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    with torch.no_grad():
        _, output = token_heads.backbone.prefill(tokens_BT, valid_BT, token_heads.taps)
        plan = CommitPlan.whole(valid_BT)
        return token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)


@torch.no_grad()
def sampled(family: str, rows: int = 2, processors: LogitsProcessorList = COOL, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and distributions of one drafting, for rows of different texts."""
    token_heads = heads_of(family)
    index = SampledTreeIndex(TREE, rows, "cpu", grounded=token_heads.grounded)
    projections = [token_heads.projection(k) for k in (1, 2, 3)]
    state = state_after(token_heads, random_tokens(rows, 6, seed=7))
    root_B = random_tokens(rows, seed=8)
    return sample_tree(token_heads, projections, state, root_B, index, processors, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "tree", [TREE, heads.Tree([[0]]), heads.Tree([[1], [1, 1]]), heads.Tree([[3], [3, 2], [3, 7], [4]])]
)
def test_ranks_by_draw_keep_the_shape(tree):
    ranked = rank_by_place(tree)
    assert ranked.parents == tree.parents
    assert all(
        [ranked.paths[child][-1] for child in ranked.children[node]] == list(range(len(ranked.children[node])))
        for node in range(tree.num_nodes)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_q_is_the_heads_distribution_at_the_very_node(family):
    """Each node's q, against a walk down to that node alone; a shifted or swapped row would be silently lossy."""
    token_heads = heads_of(family)
    tokens_BN, q_BQV = sampled(family)
    index = SampledTreeIndex(TREE, 2, "cpu", grounded=token_heads.grounded)
    assert q_BQV.shape[1] == (max(index.sampled_from) + 1) < TREE.num_nodes
    assert index.sampled_from[0] == -1
    state = state_after(token_heads, random_tokens(2, 6, seed=7))
    for row, node in itertools.product(range(2), range(1, TREE.num_nodes)):
        with torch.no_grad():
            level, parents = token_heads.first_level(state), torch.tensor([row])
            path = TREE.ancestors(node)
            for k, above in enumerate(path[:-1], start=1):
                hidden_1D, level = token_heads.step(k, level, tokens_BN[row, above][None], parents)
                parents = torch.tensor([0])
            logits_1V = token_heads.projection(len(path) - 1)(hidden_1D)
        wanted_V = torch.softmax(logits_1V[0].float() / 0.7, dim=-1)
        # The same products in float64 over other numbers of rows, rounded to float32.
        torch.testing.assert_close(q_BQV[row, index.sampled_from[node]], wanted_V, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["medusa", "own_output"])
def test_siblings_differ_and_a_seed_repeats_them(family):
    tokens_BN, _ = sampled(family)
    for row in tokens_BN.tolist():
        for node in range(TREE.num_nodes):
            below = [row[child] for child in TREE.children[node]]
            assert len(set(below)) == len(below)
    assert tokens_BN.equal(sampled(family)[0])
    assert not tokens_BN.equal(sampled(family, seed=1)[0])


def test_a_request_for_the_best_token_drafts_it_first():
    best = LogitsProcessorList([TopKLogitsWarper(1)])
    tokens_BN, q_BQV = sampled("grounded", processors=best)
    index = SampledTreeIndex(TREE, 2, "cpu", grounded=True)
    assert ((q_BQV == 0) | (q_BQV == 1)).all()
    firsts = [TREE.children[node][0] for node in range(TREE.num_nodes) if TREE.children[node]]
    for row, node in itertools.product(range(2), firsts):
        assert q_BQV[row, index.sampled_from[node], tokens_BN[row, node]] == 1


def test_q_is_shaped_by_what_shapes_a_distribution_alone():
    """A penalty depends on the text, which a head at a later place has not seen in whole; it acts on p."""
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(shape_distribution(logits, COOL), torch.softmax(logits / 0.7, dim=-1))
    top_3 = shape_distribution(logits, LogitsProcessorList([TopKLogitsWarper(3)]))
    assert (top_3 > 0).sum(dim=-1).tolist() == [3, 3, 3]
    plain = shape_distribution(logits, LogitsProcessorList())
    torch.testing.assert_close(plain, torch.softmax(logits, dim=-1))


def chi_square_p_value(found: Tensor, wanted: Tensor) -> float:
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    return float(torch.special.gammaincc(torch.tensor((found.numel() - 1) / 2), torch.tensor(statistic / 2)))


def test_draws_are_without_replacement_and_independent_of_other_rows():
    """Ordered pairs of two nodes that share q, 30,000 times; one seed in 10,000 is below 1e-4, this one is fixed."""
    q_V, count = torch.tensor([0.5, 0.3, 0.15, 0.05]), 30_000
    draws_MC = sample_without_replacement(q_V.repeat(2 * count, 1), 2, torch.Generator().manual_seed(0))
    pairs_M = draws_MC[:, 0] * 4 + draws_MC[:, 1]
    law = torch.tensor([[0 if a == b else q_V[a] * q_V[b] / (1 - q_V[a]) for b in range(4)] for a in range(4)]).double()
    possible = law.flatten() > 0
    found = torch.bincount(pairs_M, minlength=16).double()
    assert found[~possible].sum() == 0
    assert chi_square_p_value(found[possible], law.flatten()[possible] * 2 * count) > 1e-4
    with_replacement = (q_V[:, None] * q_V).flatten().double()[possible]
    wrong = with_replacement / with_replacement.sum() * 2 * count
    assert chi_square_p_value(found[possible], wrong) < 1e-12, "the test tells the two laws apart"

    first, second = draws_MC[:count, 0], draws_MC[count:, 0]
    together = torch.bincount(first * 4 + second, minlength=16).double()
    assert chi_square_p_value(together, (q_V[:, None] * q_V).flatten().double() * count) > 1e-4


def test_tokens_that_q_forbids_only_fill_up():
    q_V = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0])
    draws_MC = sample_without_replacement(q_V.repeat(200, 1), 4, torch.Generator().manual_seed(1))
    assert {tuple(sorted(pair)) for pair in draws_MC[:, :2].tolist()} == {(1, 3)}
    assert not torch.isin(draws_MC[:, 2:], torch.tensor([1, 3])).any()
    assert all(len(set(row)) == 4 for row in draws_MC.tolist())
