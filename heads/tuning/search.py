"""Search for the tree with the most tokens per second: 1 + E[accepted] over the seconds of a pass.

Static trees: for each limit on depth and on expanding nodes, the best trees of all sizes are the first nodes of one
sequence (heads/tuning/acceptance_rates.py). Without a limit on expanding nodes they are optimal for their size and
depth; limits are searched because each level and each expanding node costs drafting time.
Dynamic trees: every node budget, depth and beam width is replayed.

The tokens per pass of a static tree would be too high on the texts that it was grown on. So the texts are split in two
halves, and trees grown on one half are replayed on the other.
"""
# P position, K depth

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.tuning.acceptance_rates import RankCounts, best_nodes, places_of, tokens_per_pass
from heads.tuning.pass_times import PassTimes
from heads.tuning.replay import Replay

EXPANDING_LIMITS = (1, 2, 4, 8, None)
LEADERS = 3
"""How many trees of each kind have whole passes timed, since the best of many noisy predictions is too optimistic."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A tree with its predicted speed.

    Attributes:
        tokens_per_pass: tokens that a row emits in a pass.
        places: for static trees, the (P, K) array of `places_of` for each text.
    """

    tree: Tree | DynamicTree
    nodes: int
    depth: int
    tokens_per_pass: float
    seconds_per_pass: float
    batch: int
    places: Sequence[np.ndarray] | None = field(default=None, repr=False, compare=False)

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.tokens_per_pass / self.seconds_per_pass


def static_choices(replays: Sequence[Replay], times: PassTimes) -> Iterator[Choice]:
    """The best tree for each depth, limit on expanding nodes and timed size; and chains, where levels cost time."""
    ranks = [replay.ranks_PK for replay in replays]
    halves = [(ranks[0::2], ranks[1::2]), (ranks[1::2], ranks[0::2])]
    counted, counts = [RankCounts(grown_on) for grown_on, _ in halves], RankCounts(ranks)
    largest = max(times.verify)
    for depth in range(1, ranks[0].shape[1] + 1):
        for width in EXPANDING_LIMITS if times.grounded and depth > 1 else (None,):
            best = partial(best_nodes, nodes=largest - 1, depth=depth, width=width)
            nodes = best(counts)
            places = [
                places_of(best(half), ranks_PK)
                for half, (_, replayed_on) in zip(counted, halves, strict=True)
                for ranks_PK in replayed_on
            ]
            yield from static_sizes(nodes, places, times)
        if times.level and depth + 1 in times.verify:
            yield choice_of(Tree([[0] * k for k in range(1, depth + 1)]), replays, times)


def static_sizes(
    nodes: Sequence[tuple[float, tuple[int, ...]]], places: Sequence[np.ndarray], times: PassTimes
) -> Iterator[Choice]:
    for size in sorted(times.verify):
        if not 2 <= size <= 1 + len(nodes):
            continue
        tree = Tree([path for _, path in nodes[: size - 1]])
        yield Choice(
            tree=tree,
            nodes=size,
            depth=tree.depth,
            tokens_per_pass=tokens_per_pass(places, size),
            seconds_per_pass=times.static(tree),
            batch=times.batch,
            places=in_order(places),
        )


def in_order(places: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Sort into the texts' order a list that has the texts with odd indices first, then those with even ones.

    >>> in_order([1, 3, 0, 2, 4])
    [0, 1, 2, 3, 4]
    """
    odd, even = places[: len(places) // 2], places[len(places) // 2 :]
    return [(even, odd)[i % 2][i // 2] for i in range(len(places))]


def choice_of(tree: Tree, replays: Sequence[Replay], times: PassTimes) -> Choice:
    """A static tree of a timed size with its predicted speed."""
    nodes = [(0.0, path) for path in tree.paths[1:]]
    places = [places_of(nodes, one.ranks_PK) for one in replays]
    return Choice(
        tree=tree,
        nodes=tree.num_nodes,
        depth=tree.depth,
        tokens_per_pass=tokens_per_pass(places, tree.num_nodes),
        seconds_per_pass=times.static(tree),
        batch=times.batch,
        places=places,
    )


def dynamic_choices(replays: Sequence[Replay], times: PassTimes) -> Iterator[Choice]:
    """Dynamic trees of each budget, depth and width that was timed."""
    for depth, width in times.grow:
        places = [replay.dynamic[width][:, depth - 1] for replay in replays]
        for size in sorted(times.verify):
            if size < 2:
                continue
            tree = DynamicTree(nodes=size, depth=depth, width=width)
            yield Choice(
                tree=tree,
                nodes=size,
                depth=depth,
                tokens_per_pass=tokens_per_pass(places, size),
                seconds_per_pass=times.dynamic(tree),
                batch=times.batch,
            )


def fastest(choices: Sequence[Choice]) -> Choice:
    """The choice with the most tokens per second, with the smallest tree among equals."""
    return max(choices, key=lambda choice: (choice.tokens_per_second, -choice.nodes))


def leaders(choices: Sequence[Choice]) -> list[Choice]:
    """The `LEADERS` fastest different trees, of those with an accepted draft."""
    ordered = sorted(choices, key=lambda choice: (-choice.tokens_per_second, choice.nodes))
    found: dict[DynamicTree | tuple[tuple[int, ...], ...], Choice] = {}
    for choice in ordered:
        if choice.tokens_per_pass > 1 and len(found) < LEADERS:
            found.setdefault(choice.tree.paths if isinstance(choice.tree, Tree) else choice.tree, choice)
    return list(found.values())


def best_by_size(choices: Sequence[Choice]) -> list[Choice]:
    """The fastest choice for each number of nodes."""
    sizes = sorted({choice.nodes for choice in choices})
    return [fastest([choice for choice in choices if choice.nodes == size]) for size in sizes]


def pays_from(choices: Sequence[Choice], head: int) -> int | None:
    """The smallest number of nodes from which every fastest tree uses this head; None if there is none.

    >>> trees = [Tree([[0]]), Tree([[0], [0, 0]]), Tree([[0], [1], [2]]), Tree([[0], [0, 0], [0, 0, 0], [1]])]
    >>> choices = [Choice(tree=tree, nodes=tree.num_nodes, depth=tree.depth, tokens_per_pass=1.5, seconds_per_pass=1.0,
    ...                   batch=1) for tree in trees]                  # of 2, 3, 4 and 5 nodes, depths 1, 2, 1 and 3
    >>> [pays_from(choices, head) for head in (1, 2, 3, 4)]
    [2, 5, 5, None]
    """
    first = None
    for choice in reversed(best_by_size(choices)):
        if choice.depth < head:
            break
        first = choice.nodes
    return first
