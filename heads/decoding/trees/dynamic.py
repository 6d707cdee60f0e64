"""Dynamic token trees: for each pass and each row the likeliest paths under the heads themselves, within a node budget.

A node's score is the log-probability of its path under the heads, which never rises along a path. So the `nodes` best
candidates over all levels form a tree: the ancestors of a selected node score at least as much and come first (EAGLE-2,
Li et al., 2024). Grounded heads draft level by level, and expand only the `width` best nodes of a level, since each of
them costs a row of the next head. Independent heads compute one row each and give every node of a depth the same
candidates, so that all nodes which can still be selected are expanded.
"""
# B batch, W expanding node of a level, C candidate of one node, M = B·W (or B, where heads are independent),
# E candidate of a level, T candidate of all levels, N selected node, L looked-up token

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.backbone.projection import Projection
from heads.decoding.trees.static import MAX_NODES, Shape
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class DynamicTree:
    """Settings of the tree that `TreeDecoding(token_heads, heads.DynamicTree(nodes=16))` grows for each pass and row.

    Attributes:
        nodes: nodes that a pass verifies, the root included, 2 to 1024; fewer if the vocabulary offers fewer.
        depth: the most drafted tokens along a path; None: as many as there are heads.
        width: how many nodes of a level grounded heads expand; independent heads ignore it.

    Raises:
        ValueError: something that is no integer, or one outside the allowed range.

    >>> DynamicTree(nodes=8, depth=3, width=2)
    DynamicTree(nodes=8, depth=3, width=2)
    """

    nodes: int = 16
    depth: int | None = None
    width: int = 4

    def __post_init__(self) -> None:
        for name in ("nodes", "depth", "width"):
            if not (name == "depth" and self.depth is None):
                check_integer(getattr(self, name), f"DynamicTree({name}={getattr(self, name)!r})")
        if not 2 <= self.nodes <= MAX_NODES:
            raise ValueError(f"DynamicTree(nodes={self.nodes}) was given; allowed are 2 to {MAX_NODES}.")
        if self.depth is not None and self.depth < 1:
            raise ValueError(f"DynamicTree(depth={self.depth}) was given; allowed are 1 and more, or None: all heads.")
        if self.width < 1:
            raise ValueError(f"DynamicTree(width={self.width}) was given; allowed are 1 and more.")


def check_integer(value: Any, given: str) -> int:
    """`value`, if it is an integer; a bool is not.

    Args:
        given: the setting as the caller wrote it, for the error.

    Raises:
        ValueError: it is no integer.

    >>> check_integer(4, "nodes=4")
    4
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{given} was given; allowed are integers.") from None


@dataclass(frozen=True, kw_only=True)
class TreeCandidates:
    """Nodes to select from: those of one level, or of all levels in order, the root first.

    Attributes:
        scores_BE: log-probability of each candidate's path under the heads.
        parents_BE: the index of each candidate's parent among those of all levels; the root's is 0.
        likeliest_BE: whether every token of the candidate's path is the best one after its parent.
    """

    tokens_BE: Tensor
    scores_BE: Tensor
    parents_BE: Tensor
    likeliest_BE: Tensor
    depths_E: Tensor

    @property
    def count(self) -> int:
        return self.tokens_BE.shape[1]


@dataclass(frozen=True, kw_only=True)
class GrownTrees:
    """The selected nodes of each row. The likeliest path comes first, so that committing it moves no cache slot."""

    tokens_BN: Tensor
    parents_BN: Tensor
    depth_BN: Tensor
    sees_BNN: Tensor

    def shapes(self) -> list[Shape]:
        """Each row's nodes on the host; the loop copies them with the chosen tokens (heads/decoding/loop.py)."""
        return [Shape((-1, *parents[1:])) for parents in self.parents_BN.tolist()]

    def with_chains(self, chains_BL: Tensor) -> GrownTrees:
        """The same trees with a chain as a second branch below the root, numbered as in `Shape.with_chain`."""
        (batch, length), nodes, device = chains_BL.shape, self.tokens_BN.shape[1], chains_BL.device
        depth_BL = torch.arange(1, length + 1, device=device).expand(batch, length)
        parents_BL = (depth_BL + (nodes - 2)).masked_fill(depth_BL == 1, 0)
        sees = torch.zeros(batch, nodes + length, nodes + length, dtype=torch.bool, device=device)
        sees[:, :nodes, :nodes] = self.sees_BNN
        sees[:, nodes:, nodes:] = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        sees[:, nodes:, 0] = True
        return GrownTrees(
            tokens_BN=torch.cat([self.tokens_BN, chains_BL], dim=1),
            parents_BN=torch.cat([self.parents_BN, parents_BL], dim=1),
            depth_BN=torch.cat([self.depth_BN, depth_BL], dim=1),
            sees_BNN=sees,
        )


def grow(
    token_heads: TokenHeads, projections: Sequence[Projection], state: Any, root_B: Tensor, tree: DynamicTree
) -> GrownTrees:
    """The likeliest `tree.nodes` nodes of each row; arguments as in `static_tree.draft`."""
    found = list_candidates(token_heads, projections, state, root_B, tree)
    return keep_best(found, tree.nodes, tree.depth or token_heads.num_heads)


def list_candidates(
    token_heads: TokenHeads, projections: Sequence[Projection], state: Any, root_B: Tensor, tree: DynamicTree
) -> TreeCandidates:
    """The candidates of all levels; each expanding node offers as many as the budget has room for."""
    rows_B1 = torch.arange(len(root_B), device=root_B.device)[:, None]
    width = tree.width if token_heads.grounded else tree.nodes - 1
    levels = [root_candidates(root_B)]
    level, parents_M, tokens_M = token_heads.first_level(state), rows_B1.flatten(), root_B
    best_BW, before, num_expanding, num_offered = torch.zeros_like(rows_B1), 0, 1, 1
    for k in range(1, (tree.depth or token_heads.num_heads) + 1):
        if k > 1:
            best_BW = levels[-1].scores_BE.topk(min(width, levels[-1].count), dim=1).indices
            if token_heads.grounded:
                parents_M = (rows_B1 * num_expanding + best_BW // num_offered).flatten()
                tokens_M = levels[-1].tokens_BE.gather(1, best_BW).flatten()
        hidden_MD, level = token_heads.step(k, level, tokens_M, parents_M)
        offered = offer(projections[k - 1], hidden_MD, tree.nodes - 1, len(root_B))
        num_expanding, num_offered = best_BW.shape[1], offered[0].shape[2]
        levels.append(children_of(levels[-1], best_BW, before, *offered))
        before += levels[-2].count
    return join(levels)


def root_candidates(root_B: Tensor) -> TreeCandidates:
    root_B1 = root_B[:, None]
    return TreeCandidates(
        tokens_BE=root_B1,
        scores_BE=torch.zeros(root_B1.shape, device=root_B.device),
        parents_BE=torch.zeros_like(root_B1),
        likeliest_BE=torch.ones_like(root_B1, dtype=torch.bool),
        depths_E=torch.zeros_like(root_B[:1]),
    )


def offer(projection: Projection, hidden_MD: Tensor, count: int, batch: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens of each node's best candidates, both (B, M / B, C), best first."""
    logits_MV = projection(hidden_MD)
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    best_MC, entries_MC = logits_MV.topk(min(count, logits_MV.shape[-1]), dim=-1)
    log_probs_MC = best_MC - logits_MV.logsumexp(dim=-1, keepdim=True)
    shape = (batch, -1, entries_MC.shape[1])
    return log_probs_MC.view(shape), projection.ids(entries_MC).view(shape)


def children_of(
    level: TreeCandidates, best_BW: Tensor, before: int, log_probs_BWC: Tensor, tokens_BWC: Tensor
) -> TreeCandidates:
    """The level below: the children of `level`'s candidates `best_BW`; levels above it have `before` candidates."""
    shape = (*best_BW.shape, tokens_BWC.shape[2])
    first_C = torch.arange(shape[2], device=best_BW.device) == 0
    return TreeCandidates(
        tokens_BE=tokens_BWC.expand(shape).flatten(1),
        scores_BE=(level.scores_BE.gather(1, best_BW)[:, :, None] + log_probs_BWC).flatten(1),
        parents_BE=(best_BW + before)[:, :, None].expand(shape).flatten(1),
        likeliest_BE=(level.likeliest_BE.gather(1, best_BW)[:, :, None] & first_C).flatten(1),
        depths_E=level.depths_E[:1].add(1).expand(shape[1] * shape[2]),
    )


def join(levels: Sequence[TreeCandidates]) -> TreeCandidates:
    return TreeCandidates(
        tokens_BE=torch.cat([level.tokens_BE for level in levels], dim=1),
        scores_BE=torch.cat([level.scores_BE for level in levels], dim=1),
        parents_BE=torch.cat([level.parents_BE for level in levels], dim=1),
        likeliest_BE=torch.cat([level.likeliest_BE for level in levels], dim=1),
        depths_E=torch.cat([level.depths_E for level in levels]),
    )


def keep_best(found: TreeCandidates, nodes: int, depth: int) -> GrownTrees:
    """The best `nodes` candidates of all levels, as trees with at most `depth` levels below the root.

    The sort is stable and the candidates come level by level, so a parent comes before a child of equal score. The
    parent of every selected node is therefore selected, and has a lower index than the node.
    """
    best_BN = found.scores_BE.sort(dim=1, descending=True, stable=True).indices[:, :nodes]
    behind_BN = best_BN + found.count * ~found.likeliest_BE.gather(1, best_BN)
    best_BN = best_BN.gather(1, behind_BN.argsort(dim=1))
    index_BN = torch.arange(best_BN.shape[1], device=best_BN.device).expand_as(best_BN)
    place_BT = torch.zeros_like(found.parents_BE).scatter_(1, best_BN, index_BN)
    parents_BN = place_BT.gather(1, found.parents_BE.gather(1, best_BN))
    return GrownTrees(
        tokens_BN=found.tokens_BE.gather(1, best_BN),
        parents_BN=parents_BN,
        depth_BN=found.depths_E[best_BN],
        sees_BNN=see_ancestors(parents_BN, depth),
    )


def see_ancestors(parents_BN: Tensor, depth: int) -> Tensor:
    """(B, N, N): each node sees itself and its ancestors, `depth` of them at most; the root's parent is itself.

    >>> see_ancestors(torch.tensor([[0, 0, 1, 0]]), depth=2)[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    """
    batch, nodes = parents_BN.shape
    sees_BNN = torch.eye(nodes, dtype=torch.bool, device=parents_BN.device).repeat(batch, 1, 1)
    ancestor_BN = parents_BN
    for _ in range(depth):
        sees_BNN.scatter_(2, ancestor_BN[:, :, None], value=True)
        ancestor_BN = parents_BN.gather(1, ancestor_BN)
    return sees_BNN
