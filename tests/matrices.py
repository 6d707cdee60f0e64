"""Matrices of tests: a balanced part in which every value occurs runs always, the other combinations are `wide`.

`make test` leaves tests with the mark `wide` out; `pytest -m wide` and `python -m benchmarks.wide_tests` run them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def wide(*values: Any) -> Any:
    """A row of a matrix whose statement other rows make too."""
    return pytest.param(*values, marks=pytest.mark.wide)


def covering(
    *, always: Callable[..., bool] = lambda **_: False, repeats: int = 1, **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """In place of one `parametrize` for each axis.

    Args:
        always: combinations that are known to interact, by their values; they are never wide.
        repeats: rows that always run, in lengths of the longest axis.
    """
    kept = set(balanced([len(axis) for axis in axes.values()], repeats))
    rows: list[Any] = []
    for place in itertools.product(*(range(len(axis)) for axis in axes.values())):
        values = [axis[i] for axis, i in zip(axes.values(), place, strict=True)]
        here = place in kept or always(**dict(zip(axes, values, strict=True)))
        rows.append(tuple(values) if here else wide(*values))
    return pytest.mark.parametrize(list(axes), rows, ids=spelled)


def spelled(value: Any) -> str | None:
    """A tuple of words and numbers by its parts; other values as pytest names them."""
    plain = isinstance(value, tuple) and all(isinstance(part, str | int) for part in value)
    return "-".join(map(str, value)) if plain else None


def balanced(sizes: Sequence[int], repeats: int) -> list[tuple[int, ...]]:
    """Places of a product: each takes the indices that were used least, and of these the most pairs that are new."""
    left = list(itertools.product(*map(range, sizes)))
    used: Counter[tuple[int, int]] = Counter()
    met: set[tuple[tuple[int, int], ...]] = set()
    taken: list[tuple[int, ...]] = []
    while left and len(taken) < repeats * max(sizes):
        place = min(left, key=lambda place: (sum(used[i] for i in enumerate(place)), -len(pairs(place) - met)))
        left.remove(place)
        taken.append(place)
        used.update(enumerate(place))
        met |= pairs(place)
    return taken


def pairs(place: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(place), 2))
