"""The paper's statements on grounded heads and their ablations, compared with measured rows; figures 2 and 5 to 8.

A difference counts as noise if it is smaller than two standard errors of the difference between two rows' means over
seeds; with one seed the noise is unknown, and the line says so. The picture has top-1 above, top-5 below, and one
column for each figure.
"""
# K head

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from heads.evaluation.pictures import DARK, MARKERS, PALETTE, head_colors, label_ends, save_figure, tidy

GAIN = 0.43  # tokens a pass, grounded over Medusa (section 5.2)
LATE_HEADS = (3, 4)


def claims(rows: Mapping[str, Sequence[Any]]) -> list[str]:
    """One line for each statement whose rows were measured (benchmarks/paper/grounded_ablation.py)."""
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
    """Section 5.1: better at every head, by more at later heads; section 5.2: tokens per pass.

    Top-1 of heads 1 to 4: medusa 40 25 15 10, grounded 42 30 24 20  ->  ahead by +2 +5 +9 +10: both reached.
    """
    ahead = points_ahead(medusa, grounded, "top1")
    by_head = " ".join(f"{points:+.1f}" for points in ahead)
    fourth, fifths = accuracy(grounded, "top1")[-1], accuracy(medusa, "top5")[-1]
    return [
        f"grounded beats medusa at every head: {verdict(min(ahead) > 0)} (top-1 points, by head: {by_head})",
        f"by more at later heads: {verdict(sorted(ahead) == ahead)} ({by_head})",
        gain_over("hard labels", medusa, grounded),
        gain_over("hard labels, all on Medusa's tree of 63 nodes", medusa, grounded, "on_one_tree"),
        f"the last head's top-1 is above medusa's top-5: {verdict(fourth > fifths)} ({fourth:.1f} and {fifths:.1f} %)",
    ]


def gain_over(labels: str, medusa: Sequence[Any], grounded: Sequence[Any], measured: str = "tokens_per_pass") -> str:
    """Section 5.2, for heads of both families with the same labels: each with its own tree, or all with one tree."""
    gain = mean_of(grounded, measured) - mean_of(medusa, measured)
    return f"grounded over medusa, {labels}, at least +{GAIN} tokens a pass: {verdict(gain >= GAIN)} ({gain:+.2f})"


def gru_beside_grounded(grounded: Sequence[Any], gru: Sequence[Any]) -> str:
    """Section 5.3.4; the target for gru is to be better than grounded at heads 3 and 4, or worse only by noise."""
    pairs = [(k, points_of(grounded, k), points_of(gru, k)) for k in LATE_HEADS if k <= len(accuracy(gru, "top1"))]
    differences = {k: statistics.mean(theirs) - statistics.mean(ours) for k, ours, theirs in pairs}
    by_head = ", ".join(f"head {k} {points:+.1f} points" for k, points in differences.items())
    statement = "gru within noise of grounded or better at heads 3 and 4"
    if min(len(grounded), len(gru)) < 2:
        better = "better with one seed" if min(differences.values()) >= 0 else "not settled by one seed"
        return f"{statement}: {better} ({by_head}); give --seeds 3"
    noises = {k: noise(ours, theirs) for k, ours, theirs in pairs}
    holds = all(points >= -noises[k] for k, points in differences.items())
    allowed = ", ".join(f"{value:.1f}" for value in noises.values())
    return f"{statement}: {verdict(holds)} ({by_head}; noise {allowed})"


def beside_grounded(rows: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Sections 5.3.1 to 5.3.3: differences averaged over heads, beside what the paper says, without a verdict."""
    in_the_paper = {
        "layers_2": "deeper MLPs: negligible",
        "layers_3": "deeper MLPs: negligible",
        "layers_4": "deeper MLPs: negligible",
        "offset_1": "offsets up to a quarter of the layers: negligible",
        "offset_2": "offsets up to a quarter of the layers: negligible",
        "offset_4": "half of the layers: significantly worse",
        "embeddings": "input embeddings: vastly worse",
    }
    for name, words in in_the_paper.items():
        if name in rows:
            mean = statistics.mean(points_ahead(rows["grounded"], rows[name], "top1"))
            yield f"{name} beside grounded: {mean:+.1f} points of top-1, mean of heads (paper, {words})"


def points_ahead(of: Sequence[Any], by: Sequence[Any], metric: str) -> list[float]:
    return [theirs - ours for ours, theirs in zip(accuracy(of, metric), accuracy(by, metric), strict=True)]


def accuracy(found: Sequence[Any], metric: str) -> list[float]:
    """Accuracy of each head at the end of training, in percent, as mean over seeds."""
    last = [row.evaluations[-1] for row in found]
    heads = sum(name.startswith("head") and name.endswith(f"_{metric}") for name in last[0])
    return [100 * statistics.mean(entry[f"head{k}_{metric}"] for entry in last) for k in range(1, heads + 1)]


def points_of(found: Sequence[Any], k: int) -> list[float]:
    """Percent top-1 of head k, by seed."""
    return [100 * row.evaluations[-1][f"head{k}_top1"] for row in found]


def mean_of(found: Sequence[Any], name: str) -> float:
    return statistics.mean(getattr(row, name) for row in found)


def noise(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Two standard errors of the difference between two means; 0 if there is only one value of each.

    >>> round(noise([1.0, 3.0], [2.0, 2.0]), 3)   # 2 · sqrt(2 / 2 + 0)
    2.0
    """
    spreads = [statistics.variance(values) / len(values) for values in (ours, theirs) if len(values) > 1]
    return 2 * math.sqrt(sum(spreads))


def verdict(holds: bool) -> str:
    return "reached" if holds else "not reached"


PANELS = {
    "5: layers of the MLP": {"grounded": "1", "layers_2": "2", "layers_3": "3", "layers_4": "4"},
    "6: offset of the hidden state": {"grounded": "0", "offset_1": "1", "offset_2": "2", "offset_4": "4 of 8"},
    "7: what heads read": {"grounded": "final hidden state", "embeddings": "input embeddings"},
    "8: recurrent heads": {"grounded": "MLP", "gru": "GRU"},
}
METRICS = {"top1": "top-1", "top5": "top-5"}


def draw(rows: Mapping[str, Sequence[Any]], path: str | Path) -> None:
    """Draw the picture; a panel without measured rows has a note instead."""
    figure = Figure(figsize=(4.2 * (1 + len(PANELS)), 7.6), layout="constrained")
    columns: Any = figure.subplots(len(METRICS), 1 + len(PANELS), squeeze=False)
    for line, (metric, words) in zip(columns, METRICS.items(), strict=True):
        highest = 1.1 * max(curve(found[0], f"backbone_{metric}")[1][-1] for found in rows.values())
        for axes in line:
            axes.set_ylim(0, highest)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
        draw_training(line[0], rows, metric, f"Figure 2: {words} through training")
        for axes, (title, names) in zip(line[1:], PANELS.items(), strict=True):
            shown = {label: rows[name] for name, label in names.items() if name in rows}
            draw_heads(axes, shown if len(shown) > 1 else {}, metric, f"Figure {title}, {words}")
    save_figure(figure, path)


def draw_training(axes: Axes, rows: Mapping[str, Sequence[Any]], metric: str, title: str) -> None:
    """Grounded solid and Medusa dashed, a colour for each head; the backbone's own next token as a dotted reference."""
    labels, last = [], 0.0
    for name, line in (("grounded", "-"), ("medusa", "--")):
        for row in rows.get(name, [])[:1]:
            heads = range(1, 1 + len(accuracy([row], metric)))
            for k, color in zip(heads, head_colors(len(heads)), strict=True):
                steps, values = curve(row, f"head{k}_{metric}")
                axes.plot(steps, values, color=color, linestyle=line, linewidth=1.6)
                labels.append((values[-1], f"{name} {k}", color))
    for found in list(rows.values())[:1]:
        steps, values = curve(found[0], f"backbone_{metric}")
        axes.plot(steps, values, color=DARK, linestyle=":", linewidth=1.4)
        labels.append((values[-1], "backbone", DARK))
        last = steps[-1]
    label_ends(axes, last, labels)
    tidy(axes, title, "training step")


def curve(row: Any, name: str) -> tuple[list[float], list[float]]:
    return [entry["step"] for entry in row.evaluations], [100 * entry[name] for entry in row.evaluations]


def draw_heads(axes: Axes, shown: Mapping[str, Sequence[Any]], metric: str, title: str) -> None:
    """A line for each variant: mean accuracy over seeds at the end of training, by head."""
    for i, (label, found) in enumerate(shown.items()):
        values = accuracy(found, metric)
        marker, color = MARKERS[i % len(MARKERS)], PALETTE[i % len(PALETTE)]
        axes.plot(range(1, len(values) + 1), values, color=color, marker=marker, linewidth=1.6, label=label)
        axes.set_xticks(range(1, len(values) + 1))
    if shown:
        axes.legend(fontsize=8, frameon=False, loc="upper right")
    else:
        axes.text(0.5, 0.5, "not trained in this call", ha="center", transform=axes.transAxes, fontsize=9, color=DARK)
    tidy(axes, title, "head")
