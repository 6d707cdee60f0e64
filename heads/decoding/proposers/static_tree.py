"""Fill a static tree with the heads' best tokens: level by level for grounded families, else one row a head.

A grounded head k reads the tokens drafted before it, so depth k is drafted from the nodes of depth k - 1 (Ankner et
al., section 3.2, "grounded tree candidates"). An independent head gives every node of a depth the same candidates
(the Cartesian product of Cai et al., section 2.1), so one row a head is computed, and all nodes read it.
"""
# B batch, N tree node, M expanding node of one level (over all rows), R candidate rank, C candidate of one level = M·R

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.backbone.projection import Projection
from heads.decoding.trees.static import Tree
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class LevelIndex:
    """A tree level's indices for a batch: row b's nodes stand at b·m … b·m + m - 1.

    Attributes:
        parents_M: each node's parent among the nodes of the level above.
        taken_M: which of the level above's candidates (C,) each node is; of the first level nothing is asked.
    """

    parents_M: Tensor
    taken_M: Tensor
    num_candidates: int


class TreeIndex:
    """A tree's indices on one device for one batch size, made once and used by all passes.

    Args:
        chain: nodes of a second branch below the root, whose tokens come from elsewhere; 0: none.

    Attributes:
        order_BN: where each node's token stands in (the roots, the candidates of level 0, those of level 1, …).
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
    """Tokens of the tree's nodes (B, N): the root's given ones, the others as the heads propose them.

    Args:
        projections: head k's at index k - 1, read once for each `generate` call.
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
    """The same from the level above the root: nothing but arithmetic, which may be compiled."""
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
