"""Fill a static tree with tokens of the heads: level by level for grounded families, else with one row of each head.

A grounded head k reads the tokens drafted before it, so depth k is drafted from the nodes of depth k - 1 (Ankner et
al., section 3.2, "grounded tree candidates"). An independent head gives every node of a depth the same candidates
(the Cartesian product of Cai et al., section 2.1), so it computes one row for each text.

For modified rejection sampling (heads/decoding/acceptance/probability.py) a node's children are instead sampled
without replacement from q, the distribution of the head that drafts them, in the order in which the rule tries them.
Only the tree's shape counts then: a node with three children gets three samples, whatever their ranks. Independent
heads have one q for all nodes of a depth, and each node gets its own samples from it. q has the request's temperature,
top-k, top-p and min-p, as p has. With independent exponential E(x), the tokens of the greatest q(x) / E(x), greatest
first, are such samples in order (the Gumbel-top-k trick; Kool et al., 2019), so one sort serves all nodes of a level.
"""
# B batch, N tree node, Q distribution that drafts were sampled from, M expanding node of one level (over all rows),
# R candidate rank or row that a head computes, C candidate of one level = M·R, V vocabulary, S token that heads score

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from heads.backbone.projection import Projection
from heads.decoding.trees.static import Tree
from heads.interface.token_heads import TokenHeads

SHAPING = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors that q gets too, as they need no text; all others act on p alone."""


@dataclass(frozen=True, kw_only=True)
class LevelIndex:
    """A tree level's indices for a batch: the m expanding nodes of row b have the indices b·m … b·m + m - 1.

    Attributes:
        parents_M: each node's parent among the expanding nodes of the level above.
        taken_M: which of the level above's candidates (C,) each node is; unused for the first level.
        num_candidates: how many candidates each node offers.
    """

    parents_M: Tensor
    taken_M: Tensor
    num_candidates: int


class TreeIndex:
    """A tree's indices on one device for one batch size, made once and used by all passes.

    Args:
        chain: nodes of a second branch below the root, whose tokens are looked up; 0: no branch.

    Attributes:
        order_BN: each node's index among the roots, followed by the candidates of level 0, those of level 1, …
    """

    def __init__(self, tree: Tree, batch: int, device: torch.device | str, *, grounded: bool, chain: int = 0) -> None:
        self.tree = tree
        self.shape = tree.with_chain(chain) if chain else tree
        self.depth_N = self.shape.depth_tensor(device)
        self.sees_NN = self.shape.sees_NN(device)
        self.rows_B = torch.arange(batch, device=device)
        self.levels = [self._level(depth, grounded) for depth in range(tree.depth)]
        self.order_BN = self._order(grounded)

    def _level(self, depth: int, grounded: bool) -> LevelIndex:
        level, device = self.tree.levels[depth], self.rows_B.device
        parents, ranks = (level.parents, level.ranks) if grounded else ((0,), (0,))
        above = self.tree.levels[depth - 1] if depth else level
        nodes_above = len(above.parents) if depth and grounded else 1
        parents_M = (self.rows_B[:, None] * nodes_above + torch.tensor(parents, device=device)).flatten()
        ranks_M = torch.tensor(ranks, device=device).repeat(len(self.rows_B))
        return LevelIndex(
            parents_M=parents_M, taken_M=parents_M * above.num_candidates + ranks_M, num_candidates=level.num_candidates
        )

    def _order(self, grounded: bool) -> Tensor:
        before, drafted = len(self.rows_B), [self.rows_B[:, None]]
        for level, index in zip(self.tree.levels, self.levels, strict=True):
            nodes, count = len(level.parents) if grounded else 1, index.num_candidates
            children = zip(level.child_parents, level.child_ranks, strict=True)
            places = [(parent if grounded else 0) * count + rank for parent, rank in children]
            of_row = torch.tensor(places, device=self.rows_B.device)
            drafted.append(before + self.rows_B[:, None] * (nodes * count) + of_row)
            before += len(index.parents_M) * count
        return torch.cat(drafted, dim=1)[:, list(self.tree.draft_order)]


def draft(
    token_heads: TokenHeads, projections: Sequence[Projection], state: Any, root_B: Tensor, index: TreeIndex
) -> Tensor:
    """Tokens of the tree's nodes (B, N), the given roots first, the others as the heads propose them.

    Args:
        projections: head k's at index k - 1.
        state: the family's state after the last commit.
    """
    return fill(token_heads, projections, token_heads.first_level(state), root_B, index.levels, index.order_BN)


def fill(
    token_heads: TokenHeads,
    projections: Sequence[Projection],
    level: Any,
    root_B: Tensor,
    levels: Sequence[LevelIndex],
    order_BN: Tensor,
) -> Tensor:
    """The same, given the family's first level: nothing but arithmetic, so that it can be compiled."""
    drafted, tokens_M = [root_B], root_B
    for k, at in enumerate(levels, start=1):
        if k > 1 and token_heads.grounded:
            tokens_M = drafted[-1].index_select(0, at.taken_M)
        hidden_MD, level = token_heads.step(k, level, tokens_M, at.parents_M)
        drafted.append(best_tokens(projections[k - 1], hidden_MD, at.num_candidates).flatten())
    return torch.cat(drafted).index_select(0, order_BN.flatten()).view(order_BN.shape)


def best_tokens(projection: Projection, hidden_MD: Tensor, count: int) -> Tensor:
    """The `count` most likely tokens of each row (M, count), best first, as ids of the whole vocabulary."""
    return projection.ids(best_candidates(projection(hidden_MD), count))


def best_candidates(logits_MV: Tensor, count: int) -> Tensor:
    """The `count` most likely entries of each row, best first (M, count)."""
    if count == 1:
        return logits_MV.argmax(dim=-1, keepdim=True)
    return logits_MV.topk(min(count, logits_MV.shape[-1]), dim=-1).indices


class SampledTreeIndex(TreeIndex):
    """A tree's indices for sampled drafts, whose ranks are the order in which they were sampled.

    Attributes:
        sampled_from: for each node its row of q, -1 for the root and the looked-up chain. Independent heads have one
            row of q for each depth, grounded heads one for each expanding node.
    """

    def __init__(self, tree: Tree, batch: int, device: torch.device | str, *, grounded: bool, chain: int = 0) -> None:
        super().__init__(rank_by_place(tree), batch, device, grounded=True, chain=chain)
        self.sampled_from = [*sources(self.tree, grounded), *[-1] * chain]


def rank_by_place(tree: Tree) -> Tree:
    """The same shape, node for node, with each child's rank set to its index among its siblings.

    >>> rank_by_place(Tree([[1], [1, 4], [3]])).paths
    ((), (0,), (0, 0), (1,))
    """
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents[1:], start=1):
        paths.append((*paths[parent], tree.children[parent].index(node)))
    return Tree(paths[1:])


def sources(tree: Tree, grounded: bool) -> list[int]:
    """Each node's row of q, -1 for the root; the rows of q are in order of their levels.

    >>> tree = Tree([[0], [0, 0], [1], [1, 0]])
    >>> sources(tree, grounded=False), sources(tree, grounded=True)
    ([-1, 0, 1, 0, 1], [-1, 0, 1, 0, 2])
    """
    if not grounded:
        return [depth - 1 for depth in tree.depths]
    expanding = sorted((node for node in range(tree.num_nodes) if tree.children[node]), key=tree.depths.__getitem__)
    return [-1 if parent < 0 else expanding.index(parent) for parent in tree.parents]


def sample_tree(
    token_heads: TokenHeads,
    projections: Sequence[Projection],
    state: Any,
    root_B: Tensor,
    index: SampledTreeIndex,
    processors: LogitsProcessorList,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Tokens of the tree's nodes (B, N), the given roots first, and the distributions of the others (B, Q, V).

    Args:
        processors: the request's; those in `SHAPING` shape q.
    """
    drafted, distributions = [root_B], []
    level, tokens_M = token_heads.first_level(state), root_B
    for k, at in enumerate(index.levels, start=1):
        parents_M = at.parents_M if token_heads.grounded else index.rows_B
        if k > 1 and token_heads.grounded:
            tokens_M = drafted[-1].index_select(0, at.taken_M)
        hidden_RD, level = token_heads.step(k, level, tokens_M, parents_M)
        q_RS = shape_distribution(projections[k - 1](hidden_RD), processors)
        q_RV = projections[k - 1].spread(q_RS, 0.0)  # tokens that the heads do not score are never sampled
        distributions.append(q_RV.view(len(root_B), -1, q_RV.shape[-1]))
        q_MS = q_RS.repeat_interleave(len(at.parents_M) // len(q_RS), dim=0)
        sampled_MC = projections[k - 1].ids(sample_without_replacement(q_MS, at.num_candidates, generator))
        drafted.append(sampled_MC.flatten())
    tokens_BN = torch.cat(drafted).index_select(0, index.order_BN.flatten()).view(index.order_BN.shape)
    return tokens_BN, torch.cat(distributions, dim=1)


def shape_distribution(logits_RV: Tensor, processors: LogitsProcessorList) -> Tensor:
    """softmax of the logits after the request's temperature, top-k, top-p and min-p."""
    scores_RV = logits_RV.to(torch.float32)
    no_text_R0 = torch.empty(len(scores_RV), 0, dtype=torch.long, device=scores_RV.device)
    for processor in processors:
        if isinstance(processor, SHAPING):
            scores_RV = processor(no_text_R0, scores_RV)
    return torch.softmax(scores_RV, dim=-1)


def sample_without_replacement(q_MV: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """(M, count): tokens sampled from each row without replacement, in order.

    A row with fewer possible tokens is filled up with tokens of probability 0, which the rule treats as looked up.
    Exponentials are float64: small float32 ones on an accelerator are multiples of 2^-24, so that rare tokens would be
    sampled less often than q says.

    >>> sample_without_replacement(torch.tensor([[0.0, 1.0, 0.0]]), 1, None)
    tensor([[1]])
    """
    waits_MV = torch.empty_like(q_MV, dtype=torch.float64).exponential_(generator=generator)
    waits_MV.clamp_(min=torch.finfo(torch.float64).tiny)  # 0 / 0 would be NaN, which topk takes first
    return (q_MV / waits_MV).topk(min(count, q_MV.shape[-1]), dim=-1).indices
