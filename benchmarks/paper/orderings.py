"""Whether rows that were trained here with several seeds are ordered as those of a paper's table.

Two rows are compared seed by seed, since a seed fixes the batches of both. The interval is Student's 95 % interval of
the mean difference of their logarithms over seeds. If it excludes 0, the paper's ordering holds or does not hold;
otherwise these seeds do not settle it. A row that has not learnt what the paper's did gives no verdict.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Set
from dataclasses import dataclass

STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""The 97.5 % quantile of Student's t by degrees of freedom; for more of them the last is used, which is too wide."""


@dataclass(frozen=True, kw_only=True)
class Ordering:
    """In the paper, row `lower` has a smaller figure than row `higher`; `ratio` is the smaller over the larger."""

    lower: str
    higher: str
    ratio: float


def orderings(paper: Mapping[str, float], best: str) -> list[Ordering]:
    """Each row below the next larger one, and `best` below all larger ones; rows with equal figures are not ordered.

    Of rows with equal figures one is compared: `best` if it is among them, else the first.

    >>> [(o.lower, o.higher) for o in orderings({"a": 1.0, "b": 2.0, "c": 2.0, "d": 3.0}, best="c")]
    [('a', 'c'), ('c', 'd')]
    >>> [(o.lower, o.higher) for o in orderings({"a": 1.0, "b": 2.0, "c": 3.0}, best="a")]
    [('a', 'b'), ('b', 'c'), ('a', 'c')]
    """
    by_value: dict[float, list[str]] = {}
    for name, value in paper.items():
        by_value.setdefault(value, []).append(name)
    chain = [best if best in by_value[value] else by_value[value][0] for value in sorted(by_value)]
    behind = chain[chain.index(best) + 2 :]
    pairs = [*itertools.pairwise(chain), *((best, name) for name in behind)]
    return [Ordering(lower=low, higher=high, ratio=paper[low] / paper[high]) for low, high in pairs]


def compare(ordering: Ordering, logs: Mapping[str, Mapping[int, float]], unlearnt: Set[str] = frozenset()) -> str:
    """One sentence about an ordering.

    >>> order = Ordering(lower="a", higher="b", ratio=0.5)
    >>> compare(order, {"a": {0: 0.0, 1: 0.1, 2: 0.2}, "b": {0: 0.7, 1: 0.8, 2: 1.0}})
    'a < b: holds, 0.480 [0.416, 0.554] of it over 3 seeds (paper 0.500)'
    >>> compare(order, {"a": {0: 0.0}, "b": {0: 0.7}})
    'a < b: 0.497 of it with one seed, which has no interval (paper 0.500)'
    >>> compare(order, {"a": {}, "b": {0: 0.7}})
    'a < b: not run (paper 0.500)'
    >>> compare(order, {"a": {0: 0.0, 1: 0.1, 2: 0.2}, "b": {0: 0.7, 1: 0.8, 2: 1.0}}, {"b"})
    'a < b: not learnt in these steps, 0.480 [0.416, 0.554] of it over 3 seeds (paper 0.500)'

    Args:
        logs: the logarithm of the figure of each row, by seed; seeds that both have are compared.
        unlearnt: rows that have not learnt what the paper's did.
    """
    statement, paper = f"{ordering.lower} < {ordering.higher}", f"(paper {ordering.ratio:.3f})"
    lower, higher = logs[ordering.lower], logs[ordering.higher]
    differences = [lower[seed] - higher[seed] for seed in sorted(lower) if seed in higher]
    if not differences:
        return f"{statement}: not run {paper}"
    mean = statistics.mean(differences)
    if len(differences) == 1:
        return f"{statement}: {math.exp(mean):.3f} of it with one seed, which has no interval {paper}"
    student = STUDENT.get(len(differences) - 1, STUDENT[max(STUDENT)])
    half = student * statistics.stdev(differences) / math.sqrt(len(differences))
    verdict = "holds" if mean + half < 0 else "does not hold" if mean - half > 0 else "not settled by these seeds"
    verdict = "not learnt in these steps" if {ordering.lower, ordering.higher} & unlearnt else verdict
    interval = f"{math.exp(mean):.3f} [{math.exp(mean - half):.3f}, {math.exp(mean + half):.3f}] of it"
    return f"{statement}: {verdict}, {interval} over {len(differences)} seeds {paper}"
