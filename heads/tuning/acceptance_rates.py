"""Estimate how likely each node of a tree is to be accepted, find the best trees, and count tokens per pass by replay.

A node is a path of ranks. P(rank r | path) is the share of positions at which the text continued with rank r, among
those at which it had followed that path. The ranks of a path are not independent: text that is hard to predict at one
position is hard at the next. Long paths are rare, so counts back off to a shorter condition with m = `BACK_OFF`:

    P(r | path)         = (n(path, r)     + m · P(r | depth, last rank)) / (n(path)        + m)
    P(r | depth, last)  = (n(d, last, r)  + m · P(r | depth))            / (n(d, last)     + m)
    P(r | depth)        =  n(d, r) / n(d)          given that the path was among the first RANKS at every depth before

A tree's expected number of accepted tokens is the sum of its nodes' probabilities, which never rise along a path. So
the n most likely nodes form a tree, which is the best one of that size (Sequoia, Chen et al., 2024, where acceptance
depends on the rank alone); the same holds within a limit on depth.
"""
# P position, K depth

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from heads.tuning.replay import NEVER, RANKS

BACK_OFF = 8.0
Path = tuple[int, ...]


class RankCounts:
    """Counts of the paths of ranks at the positions of one or several texts, each given as (P, K).

    >>> counts = RankCounts([np.array([[0, 1], [0, 0], [0, 1], [1, 0]])], back_off=0)
    >>> counts.conditional((), 0), counts.conditional((0,), 1), counts.conditional((1,), 1)
    (0.75, 0.6666666666666666, 0.0)
    """

    def __init__(self, ranks: Iterable[np.ndarray], *, back_off: float = BACK_OFF) -> None:
        self.back_off = back_off
        self.by_path: Counter[Path] = Counter()
        for ranks_PK in ranks:
            for ranks_K in ranks_PK.tolist():
                for depth in range(len(ranks_K) + 1):
                    if depth and ranks_K[depth - 1] >= RANKS:
                        break
                    self.by_path[tuple(ranks_K[:depth])] += 1
        self.by_last: Counter[tuple[int, int, int]] = Counter()
        self.by_depth: Counter[tuple[int, int]] = Counter()
        self.at_last: Counter[tuple[int, int]] = Counter()
        self.at_depth: Counter[int] = Counter()
        for path, count in self.by_path.items():
            self.at_depth[len(path)] += count
            if path:
                self.at_last[len(path), path[-1]] += count
                self.by_depth[len(path) - 1, path[-1]] += count
            if len(path) > 1:
                self.by_last[len(path) - 1, path[-2], path[-1]] += count

    def conditional(self, path: Path, rank: int) -> float:
        """P(rank | path), backed off as the file's head says."""
        depth = len(path)
        marginal = self.by_depth[depth, rank] / max(1, self.at_depth[depth])
        if not path:
            return marginal
        last = self._blend(self.by_last[depth, path[-1], rank], self.at_last[depth, path[-1]], marginal)
        return self._blend(self.by_path[*path, rank], self.by_path[path], last)

    def _blend(self, count: int, seen: int, shorter: float) -> float:
        weight = seen + self.back_off
        return (count + self.back_off * shorter) / weight if weight else shorter


def best_nodes(counts: RankCounts, *, nodes: int, depth: int, width: int | None = None) -> list[tuple[float, Path]]:
    """(probability, path) of the most likely nodes below the root, best first; the first n form a best tree.

    Args:
        nodes: how many to return; fewer are returned if no others were ever right.
        depth: length of the longest path.
        width: how many nodes of a level, the likeliest ones, may have children; None: any number.
    """
    level: list[tuple[float, Path]] = [(1.0, ())]
    found: list[tuple[float, Path]] = []
    for _ in range(depth):
        children = [
            (probability * share, (*path, rank))
            for probability, path in level
            for rank in range(RANKS)
            if (share := counts.conditional(path, rank)) > 0
        ]
        found += children
        level = heapq.nsmallest(nodes if width is None else min(width, nodes), children, key=order)
    return heapq.nsmallest(nodes, found, key=order)


def order(node: tuple[float, Path]) -> tuple[float, int, Path]:
    """Sort key: likelier nodes first; equally likely ones by depth, so that a parent precedes its child."""
    probability, path = node
    return (-probability, len(path), path)


def places_of(nodes: Sequence[tuple[float, Path]], ranks_PK: np.ndarray) -> np.ndarray:
    """(P, K): the place of the text's own node of each depth among the root and `nodes`, NEVER if it is not there.

    A tree of the root and the first n - 1 nodes holds that node if its place is below n.

    >>> places_of([(0.5, (0,)), (0.3, (0, 1))], np.array([[0, 1], [0, 0], [1, 1]])).tolist() == [
    ...     [1, 2], [1, NEVER], [NEVER, NEVER]]
    True
    """
    places: Mapping[Path, int] = {path: i for i, (_, path) in enumerate(nodes, start=1)}
    depths = range(1, ranks_PK.shape[1] + 1)
    found = [[places.get(tuple(ranks_K[:d]), NEVER) for d in depths] for ranks_K in ranks_PK.tolist()]
    return np.array(found, dtype=np.int64).reshape(ranks_PK.shape)


def accepted(places_PK: np.ndarray, nodes: int) -> np.ndarray:
    """(P,): the number of tokens accepted at each position with a tree of `nodes` nodes."""
    lengths_P: np.ndarray = (places_PK < nodes).sum(axis=1)
    return lengths_P


def count_passes(accepted_P: np.ndarray) -> int:
    """The number of passes that decode a text, given the tokens accepted at each position; a pass emits one more.

    >>> count_passes(np.array([2, 0, 0, 1, 0]))         # 3 tokens, then 2
    2
    """
    lengths = accepted_P.tolist()
    position = passes = 0
    while position < len(lengths):
        position += 1 + lengths[position]
        passes += 1
    return passes


def tokens_per_pass(places: Sequence[np.ndarray], nodes: int) -> float:
    """Tokens per pass over several texts, without the prompts' passes and first tokens."""
    tokens = sum(len(places_PK) for places_PK in places)
    return tokens / max(1, sum(count_passes(accepted(places_PK, nodes)) for places_PK in places))
