"""Fill a static tree with the heads' best tokens: level by level for grounded families, else one row a head.

A grounded head k reads the tokens drafted before it, so depth k is drafted from the nodes of depth k - 1 (Ankner et
al., section 3.2, "grounded tree candidates"). An independent head gives every node of a depth the same candidates
(the Cartesian product of Cai et al., section 2.1), so one row a head is computed, and all nodes read it.
"""
# B batch, N tree node, M expanding node of one level (over all rows), C child, R candidate rank

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
    """A tree level's indices for a batch: row b's nodes stand at b·m … b·m + m - 1."""

    parents_M: Tensor
    ranks_M: Tensor
    child_parents_BC: Tensor
    child_ranks_C: Tensor
    num_candidates: int


class TreeIndex:
    """A tree's indices on one device for one batch size, made once and used by all passes.

    Args:
        chain: nodes of a second branch below the root, whose tokens come from elsewhere; 0: none.
    """

    def __init__(self, tree: Tree, batch: int, device: torch.device | str, *, grounded: bool, chain: int = 0) -> None:
        self.tree = tree
        self.shape = tree.with_chain(chain) if chain else tree
        self.depth_N = self.shape.depth_tensor(device)
        self.sees_NN = self.shape.sees_NN(device)
        self.order_N = torch.tensor(tree.draft_order, device=device)
        self.rows_B = torch.arange(batch, device=device)
        self.levels = [self._level(depth, device, grounded) for depth in range(tree.depth)]

    def _level(self, depth: int, device: torch.device | str, grounded: bool) -> LevelIndex:
        level = self.tree.levels[depth]
        nodes, above = (
            (len(level.parents), len(self.tree.levels[depth - 1].parents) if depth else 1) if grounded else (1, 1)
        )
        parents_m = torch.tensor(level.parents if grounded else [0], device=device)
        child_parents_C = (
            torch.tensor(level.child_parents, device=device)
            if grounded
            else torch.zeros_like(torch.tensor(level.child_parents, device=device))
        )
        return LevelIndex(
            parents_M=(self.rows_B[:, None] * above + parents_m).flatten(),
            ranks_M=torch.tensor(level.ranks if grounded else [0], device=device).repeat(len(self.rows_B)),
            child_parents_BC=self.rows_B[:, None] * nodes + child_parents_C,
            child_ranks_C=torch.tensor(level.child_ranks, device=device),
            num_candidates=level.num_candidates,
        )


def draft(
    token_heads: TokenHeads, projections: Sequence[Projection], state: Any, root_B: Tensor, index: TreeIndex
) -> Tensor:
    """Tokens of the tree's nodes (B, N): the root's given ones, the others as the heads propose them.

    Args:
        projections: head k's at index k - 1, read once for each `generate` call.
        state: the family's state after the last commit.
    """
    return fill(token_heads, projections, token_heads.first_level(state), root_B, index.levels, index.order_N)


def fill(
    token_heads: TokenHeads,
    projections: Sequence[Projection],
    level: Any,
    root_B: Tensor,
    levels: Sequence[LevelIndex],
    order_N: Tensor,
) -> Tensor:
    """The same from the level above the root: nothing but arithmetic, which may be compiled."""
    drafted = [root_B[:, None]]
    tokens_M = root_B
    candidates_MR = root_B[:, None]
    for k, at in enumerate(levels, start=1):
        if k > 1 and token_heads.grounded:
            tokens_M = candidates_MR[at.parents_M, at.ranks_M]
        hidden_MD, level = token_heads.step(k, level, tokens_M, at.parents_M)
        candidates_MR = best_tokens(projections[k - 1], hidden_MD, at.num_candidates)
        drafted.append(candidates_MR[at.child_parents_BC, at.child_ranks_C])
    return torch.cat(drafted, dim=1)[:, order_N]


def best_tokens(projection: Projection, hidden_MD: Tensor, count: int) -> Tensor:
    """The `count` most likely tokens of each row (M, count), best first, as ids of the whole vocabulary."""
    return projection.ids(best_candidates(projection(hidden_MD), count))


def best_candidates(logits_MV: Tensor, count: int) -> Tensor:
    """The `count` most likely entries of each row, best first (M, count)."""
    if count == 1:
        return logits_MV.argmax(dim=-1, keepdim=True)
    return logits_MV.topk(min(count, logits_MV.shape[-1]), dim=-1).indices
