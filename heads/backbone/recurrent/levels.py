"""The nodes of a pass by level, so that a recurrent layer can run them parents first.

A node's level is the number of ancestors that it sees; nodes of one level are independent of each other. Parents are
read from the matrix of which node sees which, so each row may have its own tree. A slot that only pads sees itself
alone, and begins at the committed state like a root.
"""
# B row, N node, M node of one level

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Level:
    """Nodes of one level, of all rows.

    Attributes:
        nodes_M: indices into the flattened (B·N).
        parents_M: each node's parent, as an index into the level above; on the first level its row.
    """

    nodes_M: Tensor
    parents_M: Tensor


@dataclass(frozen=True, kw_only=True)
class Levels:
    """All levels of a pass.

    Attributes:
        levels: from the root down.
        places: `places[b][n]` is the level of node n of row b and its index there; on the host.
    """

    levels: tuple[Level, ...]
    places: tuple[tuple[tuple[int, int], ...], ...]


def find_levels(sees_BNN: Tensor, batch: int) -> Levels:
    """The levels of a pass.

    Args:
        sees_BNN: True where a node sees another: itself and its ancestors; (N, N) where all rows agree.
        batch: number of rows.

    >>> chain_and_sibling = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]).bool()
    >>> found = find_levels(chain_and_sibling, batch=1)
    >>> [(level.nodes_M.tolist(), level.parents_M.tolist()) for level in found.levels]
    [([0], [0]), ([1, 3], [0, 0]), ([2], [0])]
    """
    nodes = sees_BNN.shape[-1]
    level_BN = sees_BNN.sum(dim=-1) - 1
    others_BNN = sees_BNN & ~torch.eye(nodes, dtype=torch.bool, device=sees_BNN.device)
    ancestors_BNN = torch.where(others_BNN, level_BN[..., None, :], -1)
    parents_BN = ancestors_BNN.argmax(dim=-1)
    found = torch.stack([level_BN, parents_BN]).expand(2, *(batch, nodes)[-level_BN.ndim :]).tolist()
    level_of, parents = found if level_BN.ndim == 2 else ([found[0]] * batch, [found[1]] * batch)
    return _collect(level_of, parents, nodes, sees_BNN.device)


def _collect(level_of: list[list[int]], parents: list[list[int]], nodes: int, device: torch.device) -> Levels:
    depth = 1 + max(max(row) for row in level_of)
    members: list[list[tuple[int, int]]] = [[] for _ in range(depth)]
    places = [[(0, 0)] * nodes for _ in level_of]
    for b, row in enumerate(level_of):
        for n, level in enumerate(row):
            places[b][n] = level, len(members[level])
            members[level].append((b, n))

    def parent(b: int, n: int) -> int:
        return places[b][parents[b][n]][1] if level_of[b][n] else b

    levels = tuple(
        Level(
            nodes_M=torch.tensor([b * nodes + n for b, n in level], device=device),
            parents_M=torch.tensor([parent(b, n) for b, n in level], device=device),
        )
        for level in members
    )
    return Levels(levels=levels, places=tuple(map(tuple, places)))
