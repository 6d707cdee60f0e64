"""What several tests of tuning share: a clock that counts, ranks and times made up, one tuning of tiny heads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from throwaway_families import fitted_heads
from tiny import random_tokens

from heads.tuning.acceptance_rates import RankCounts
from heads.tuning.config import TuneConfig
from heads.tuning.pass_times import PassTimes
from heads.tuning.replay import RANKS
from heads.tuning.tune import tune
from heads.tuning.tuned_tree import Tuning

Ticks = Callable[[], float]


def counting_clock() -> Ticks:
    """A clock that goes on by a second each time it is read."""
    return functools.partial(next, map(float, itertools.count()))


MISS = RANKS


def some_ranks(seed: int, places: int = 60, depth: int = 3, ranks: int = 3) -> np.ndarray:
    """Ranks that depend on the whole path before them, so that no product of marginals describes them."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(places):
        row: list[int] = []
        for _ in range(depth):
            odds = np.random.default_rng([seed, len(row), *row]).dirichlet(np.ones(ranks + 1))
            rank = int(rng.choice(ranks + 1, p=odds))
            row += [rank] if rank < ranks else [MISS] * (depth - len(row))
        rows.append(row[:depth])
    return np.array(rows)


def probability(counts: RankCounts, path: tuple[int, ...]) -> float:
    return float(np.prod([counts.conditional(path[:d], path[d]) for d in range(len(path))]))


def expected_length(counts: RankCounts, paths: Any) -> float:
    return sum(probability(counts, path) for path in paths)


def all_trees(depth: int, ranks: int, nodes: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every tree of so many nodes below the root."""
    universe = [path for d in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(universe, nodes):
        known = {(), *chosen}
        if all(path[:-1] in known for path in chosen):
            yield chosen


def some_times(**changed: Any) -> PassTimes:
    fields: dict[str, Any] = {
        "batch": 1,
        "context": 9,
        "plain": 1.0,
        "verify": {n: 1.0 + 0.1 * n for n in range(1, 7)},
        "step": {(k, m): 0.2 + 0.1 * m for k in (1, 2, 3) for m in (1, 4)},
        "grow": {(k, 2): 0.3 * k for k in (1, 2, 3)},
        "rest_static": 0.05,
        "rest_dynamic": 0.07,
        "grounded": True,
    }
    return PassTimes(**fields | changed)


@functools.cache
def tuned_tiny() -> Tuning:
    """On a clock on which every pass of a single row takes a second, whatever the tree."""
    prompts = [random_tokens(1, 5, seed=seed) for seed in range(50, 54)]
    config = TuneConfig(new_tokens=24, repeats=1)
    return tune(fitted_heads("grounded", "llama"), prompts, config, clock=counting_clock())
