"""What the paper says of grounded heads and their ablations, held against measured rows: reached or not, with figures.

A difference is within noise where it is smaller than two standard errors of the difference between the rows' means over
seeds; with one seed there is no noise to hold it against, and the line says so.
"""
# K head

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GAIN = 0.43  # tokens a pass, grounded over Medusa (section 5.2)
LATE_HEADS = (3, 4)


def claims(rows: Mapping[str, Sequence[Any]]) -> list[str]:
    """One line for each statement whose rows are here; rows as benchmarks/paper/grounded_ablation.py has them."""
    lines: list[str] = []
    if {"medusa", "grounded"} <= set(rows):
        lines += grounded_over_medusa(rows["medusa"], rows["grounded"])
    if {"grounded", "gru"} <= set(rows) and len(accuracy(rows["gru"], "top1")) >= LATE_HEADS[0]:
        lines.append(gru_beside_grounded(rows["grounded"], rows["gru"]))
    if {"medusa_soft", "soft"} <= set(rows):
        lines.append(gain_over("both with soft labels", rows["medusa_soft"], rows["soft"]))
    if "grounded" in rows:
        lines += list(beside_grounded(rows))
    return lines


def grounded_over_medusa(medusa: Sequence[Any], grounded: Sequence[Any]) -> list[str]:
    """Section 5.1: better at every head, by more at later heads; section 5.2: tokens a pass.

    Top-1 of heads 1 to 4: medusa 40 25 15 10, grounded 42 30 24 20  ->  ahead by +2 +5 +9 +10: both reached.
    """
    ahead = points_ahead(medusa, grounded, "top1")
    told = " ".join(f"{points:+.1f}" for points in ahead)
    fourth, fifths = accuracy(grounded, "top1")[-1], accuracy(medusa, "top5")[-1]
    return [
        f"grounded beats medusa at every head: {verdict(min(ahead) > 0)} (top-1 points, by head: {told})",
        f"by more at later heads: {verdict(sorted(ahead) == ahead)} ({told})",
        gain_over("hard labels", medusa, grounded),
        f"the last head's top-1 is above medusa's top-5: {verdict(fourth > fifths)} ({fourth:.1f} and {fifths:.1f} %)",
    ]


def gain_over(labels: str, medusa: Sequence[Any], grounded: Sequence[Any]) -> str:
    """Section 5.2, for heads of both families that were taught alike."""
    gain = mean_of(grounded, "tokens_per_pass") - mean_of(medusa, "tokens_per_pass")
    return f"grounded over medusa, {labels}, at least +{GAIN} tokens a pass: {verdict(gain >= GAIN)} ({gain:+.2f})"


def gru_beside_grounded(grounded: Sequence[Any], gru: Sequence[Any]) -> str:
    """Section 5.3.4 and the target: within noise of grounded, or better, at heads 3 and 4."""
    pairs = [(k, points_of(grounded, k), points_of(gru, k)) for k in LATE_HEADS if k <= len(accuracy(gru, "top1"))]
    differences = {k: statistics.mean(theirs) - statistics.mean(ours) for k, ours, theirs in pairs}
    told = ", ".join(f"head {k} {points:+.1f} points" for k, points in differences.items())
    statement = "gru within noise of grounded or better at heads 3 and 4"
    if min(len(grounded), len(gru)) < 2:
        better = "better with one seed" if min(differences.values()) >= 0 else "one seed does not tell"
        return f"{statement}: {better} ({told}); give --seeds 3"
    noises = {k: noise(ours, theirs) for k, ours, theirs in pairs}
    holds = all(points >= -noises[k] for k, points in differences.items())
    allowed = ", ".join(f"{value:.1f}" for value in noises.values())
    return f"{statement}: {verdict(holds)} ({told}; noise {allowed})"


def beside_grounded(rows: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """What sections 5.3.1 to 5.3.3 report, as differences in the mean over heads; nothing is said of "negligible"."""
    said = {
        "layers_2": "deeper MLPs: negligible",
        "layers_3": "deeper MLPs: negligible",
        "layers_4": "deeper MLPs: negligible",
        "offset_1": "offsets up to a quarter of the layers: negligible",
        "offset_2": "offsets up to a quarter of the layers: negligible",
        "offset_4": "half of the layers: significantly worse",
        "embeddings": "input embeddings: vastly worse",
    }
    for name, words in said.items():
        if name in rows:
            mean = statistics.mean(points_ahead(rows["grounded"], rows[name], "top1"))
            yield f"{name} beside grounded: {mean:+.1f} points of top-1, mean of heads (paper, {words})"


def points_ahead(of: Sequence[Any], by: Sequence[Any], metric: str) -> list[float]:
    return [theirs - ours for ours, theirs in zip(accuracy(of, metric), accuracy(by, metric), strict=True)]


def accuracy(found: Sequence[Any], metric: str) -> list[float]:
    """Percent by head at the end of training, means over seeds."""
    last = [row.evaluations[-1] for row in found]
    heads = sum(name.startswith("head") and name.endswith(f"_{metric}") for name in last[0])
    return [100 * statistics.mean(entry[f"head{k}_{metric}"] for entry in last) for k in range(1, heads + 1)]


def points_of(found: Sequence[Any], k: int) -> list[float]:
    """Percent top-1 of head k, by seed."""
    return [100 * row.evaluations[-1][f"head{k}_top1"] for row in found]


def mean_of(found: Sequence[Any], name: str) -> float:
    return statistics.mean(getattr(row, name) for row in found)


def noise(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Two standard errors of the difference between two means; 0 where there is one value of each.

    >>> round(noise([1.0, 3.0], [2.0, 2.0]), 3)   # 2 · sqrt(2 / 2 + 0)
    2.0
    """
    spreads = [statistics.variance(values) / len(values) for values in (ours, theirs) if len(values) > 1]
    return 2 * math.sqrt(sum(spreads))


def verdict(holds: bool) -> str:
    return "reached" if holds else "not reached"
