"""Static token trees: which candidates of which head are verified together in one backbone pass.

A tree is a set of paths of ranks. The path (0, 2) is the best candidate of head 1, followed by the third best candidate
of head 2 (for a grounded family: given that first token). The root is the backbone's own next token.

        root                    paths [[0], [0, 0], [0, 1], [1]]
        ├─ 0                    nodes in depth-first order: the likeliest path comes first,
        │  ├─ 0                 and committing it moves no cache slot
        │  └─ 1
        └─ 1
"""
# N tree node

from __future__ import annotations

import heapq
import itertools
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

MAX_NODES = 1024
TypicalAccuracy = tuple[tuple[float, ...], ...]

# P(rank r of head k is the backbone's token | the path up to it was), measured with grounded heads on small models.
# Trees are grown from it unless the heads' checkpoint has measured figures of its own.
TYPICAL_ACCURACY: TypicalAccuracy = tuple(
    tuple(first * 0.33**rank for rank in range(10)) for first in (0.60, 0.55, 0.52, 0.50, 0.48, 0.46, 0.44, 0.42)
)


@dataclass(frozen=True)
class TreeLevel:
    """The nodes of one depth that have children, and which of the heads' candidates their children are.

    Attributes:
        parents: for each expanding node its index among the expanding nodes of the level above (0 for the root).
        ranks: for each expanding node its rank among its parent's candidates.
        num_candidates: how many candidates a node of this level must offer.
        child_parents: for each child its parent's index among this level's expanding nodes.
        child_ranks: for each child its rank.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    num_candidates: int
    child_parents: tuple[int, ...]
    child_ranks: tuple[int, ...]


class Shape:
    """Parents, depths and children of the nodes of one pass: all that verification and acceptance need.

    >>> shape = Shape((-1, 0, 1, 0))
    >>> shape.depths, shape.children
    ((0, 1, 2, 1), ((1, 3), (2,), (), ()))
    """

    def __init__(self, parents: Sequence[int]) -> None:
        self.parents = tuple(parents)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        self.depths = tuple(depths)
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        self.children: tuple[tuple[int, ...], ...] = tuple(map(tuple, children))

    @property
    def num_nodes(self) -> int:
        """The number of nodes, the root included."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        return max(self.depths)

    def with_chain(self, length: int) -> Shape:
        """The same nodes and a second branch below the root: a chain of `length` nodes, numbered after all others.

        >>> Shape((-1, 0)).with_chain(2).parents
        (-1, 0, 0, 2)
        """
        first = self.num_nodes
        return Shape((*self.parents, 0, *range(first, first + length - 1)))

    def ancestors(self, node: int) -> list[int]:
        """The path from the root to a node, both included.

        >>> Shape((-1, 0, 1, 0)).ancestors(2)
        [0, 1, 2]
        """
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def depth_tensor(self, device: torch.device | str) -> Tensor:
        return torch.tensor(self.depths, device=device)

    def sees_NN(self, device: torch.device | str = "cpu") -> Tensor:  # noqa: N802 - its shape, like a tensor's
        """(N, N): True where a row's node sees a column's: itself and its ancestors.

        >>> Shape((-1, 0, 1, 0)).sees_NN().int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
        """
        sees = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                sees[node] |= sees[parent]
        return sees.to(device)


class Tree(Shape):
    """A static tree over ranks.

    >>> tree = Tree([[0], [0, 0], [0, 1], [1]])
    >>> tree.num_nodes, tree.depth, tree.parents, tree.depths
    (5, 2, (-1, 0, 1, 1, 0), (0, 1, 2, 2, 1))

    Raises:
        ValueError: no list of paths, an empty one, a path whose parent is missing, a rank that is negative or no
            integer, or more than 1024 nodes.
    """

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        if not isinstance(paths, Iterable):
            raise ValueError(
                f"tree={paths!r} was given; a tree is a list of paths such as [[0], [0, 0]], or a node budget."
            )
        chosen = sorted({as_ranks(path) for path in paths})
        check_paths(chosen)
        self.paths: tuple[tuple[int, ...], ...] = ((), *chosen)
        index = {path: i for i, path in enumerate(self.paths)}
        super().__init__([-1 if not path else index[path[:-1]] for path in self.paths])

    @classmethod
    def root_only(cls) -> Tree:
        """The tree without drafts: each pass emits one token, and the heads are not run.

        >>> Tree.root_only().num_nodes, Tree.root_only().depth
        (1, 0)
        """
        tree = cls.__new__(cls)
        tree.paths = ((),)
        Shape.__init__(tree, (-1,))
        return tree

    @classmethod
    def product(cls, candidates: Sequence[int]) -> Tree:
        """All combinations of the best candidates[k - 1] tokens of each head k (Cai et al., section 2.1).

        >>> Tree.product([2, 1]).paths
        ((), (0,), (0, 0), (1,), (1, 0))

        Raises:
            ValueError: no list of counts, a head without candidates, or more than 1024 nodes.
        """
        try:
            counts = [operator.index(count) for count in candidates]
        except TypeError:  # 2.5 is no number of candidates, and 5 no list of them
            counts = []
        if not counts or min(counts) < 1 or 1 + sum(itertools.accumulate(counts, operator.mul)) > MAX_NODES:
            raise ValueError(
                f"Tree.product({candidates!r}) was given; allowed is a list of how many candidates of head 1, head 2, "
                f"… are combined, each 1 and more, {MAX_NODES} nodes in all."
            )
        depths = range(1, len(counts) + 1)
        return cls([path for depth in depths for path in itertools.product(*map(range, counts[:depth]))])

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """Levels 0 … depth - 1: those whose nodes have children."""
        return tuple(self._level(depth) for depth in range(self.depth))

    @cached_property
    def draft_order(self) -> tuple[int, ...]:
        """Each node's index in the order of drafting: the root, the children of level 0, those of level 1, …"""
        drafted = [
            0,
            *(child for depth in range(self.depth) for node in self._expanding(depth) for child in self.children[node]),
        ]
        return tuple(drafted.index(node) for node in range(self.num_nodes))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"paths": [list(p) for p in self.paths[1:]]}) + "\n", encoding="utf-8")

    def _expanding(self, depth: int) -> list[int]:
        return [node for node in range(self.num_nodes) if self.depths[node] == depth and self.children[node]]

    def _level(self, depth: int) -> TreeLevel:
        nodes = self._expanding(depth)
        above = self._expanding(depth - 1) if depth else [-1]
        children = [(i, child) for i, node in enumerate(nodes) for child in self.children[node]]
        ranks = tuple(self.paths[child][-1] for _, child in children)
        return TreeLevel(
            parents=tuple(above.index(self.parents[node]) for node in nodes),
            ranks=tuple(self.paths[node][-1] if depth else 0 for node in nodes),
            num_candidates=1 + max(ranks),
            child_parents=tuple(i for i, _ in children),
            child_ranks=ranks,
        )


def as_ranks(path: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(rank) for rank in path)
    except TypeError:  # a rank such as 0.7 or "a", or a path that is no list
        raise ValueError(f"A tree path is a list of ranks from 0 on, such as [0, 2]; got {path!r}.") from None


def check_paths(paths: Sequence[tuple[int, ...]]) -> None:
    known = {(), *paths}
    if not paths or len(paths) >= MAX_NODES:
        raise ValueError(f"A tree of {len(paths)} paths was given; allowed are 1 to {MAX_NODES - 1}.")
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"A tree path is a list of ranks from 0 on, such as [0, 2]; got {list(path)}.")
        if path[:-1] not in known:
            raise ValueError(f"The tree has the path {list(path)} but not its parent {list(path[:-1])}; add it.")


def grow_tree(num_nodes: int, num_heads: int, accuracy: Sequence[Sequence[float]] = TYPICAL_ACCURACY) -> Tree:
    """The tree of `num_nodes` nodes (the root counts) with the greatest expected accepted length.

    A node's probability is the product along its path, so growing best-first is optimal. Ranks are tried in the order
    of their accuracy, since a measured figure may exceed that of the rank before it.

    Args:
        accuracy: accuracy[k - 1][r] is the probability that rank r of head k is right, given that its path is; further
            heads count as equal to the last.

    Raises:
        ValueError: a budget below 2 or above 1024 nodes.

    >>> grow_tree(4, 2, [[0.5, 0.3], [0.7, 0.1]]).paths
    ((), (0,), (0, 0), (1,))
    """
    if not 2 <= num_nodes <= MAX_NODES:
        raise ValueError(f"A node budget of {num_nodes} was given; allowed are 2 to {MAX_NODES}.")
    table = [list(accuracy[min(k, len(accuracy) - 1)]) for k in range(num_heads)]
    order = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in table]

    def entry(parent: tuple[int, ...], above: float, place: int) -> tuple[float, tuple[int, ...], float, int]:
        rank = order[len(parent)][place]
        return (-above * table[len(parent)][rank], (*parent, rank), above, place)

    frontier = [entry((), 1.0, 0)]
    paths: list[tuple[int, ...]] = []
    while frontier and len(paths) < num_nodes - 1:
        negative, path, above, place = heapq.heappop(frontier)
        paths.append(path)
        if place + 1 < len(order[len(path) - 1]):
            heapq.heappush(frontier, entry(path[:-1], above, place + 1))
        if len(path) < num_heads:
            heapq.heappush(frontier, entry(path, -negative, 0))
    return Tree(paths)
