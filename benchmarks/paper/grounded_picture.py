"""The paper's figures 2 and 5 to 8 from measured rows, in one PNG: top-1 above, top-5 below, one column a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.paper.grounded_claims import accuracy
from heads.evaluation.pictures import DARK, MARKERS, PALETTE, head_colors, label_ends, save_figure, tidy

PANELS = {
    "5: layers of the MLP": {"grounded": "1", "layers_2": "2", "layers_3": "3", "layers_4": "4"},
    "6: offset of the hidden state": {"grounded": "0", "offset_1": "1", "offset_2": "2", "offset_4": "4 of 8"},
    "7: what heads read": {"grounded": "final hidden state", "embeddings": "input embeddings"},
    "8: recurrent heads": {"grounded": "MLP", "gru": "GRU"},
}
METRICS = {"top1": "top-1", "top5": "top-5"}


def draw(rows: Mapping[str, Sequence[Any]], path: str | Path) -> None:
    """Panels whose rows are not here stay empty and say so."""
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
    """A line for each variant: accuracy at the end of training against the head's number, means over seeds."""
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
