"""Tables and the picture of the decoding benchmark: speeds, where a pass goes, where each token's milliseconds go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from benchmarks.speed.parts import Parts
from heads.evaluation.pictures import GREY, PALETTE, draw_speeds, save_figure, tidy
from heads.evaluation.throughput import MethodResult

PHASES = ("draft", "verify", "accept", "commit", "other")


def phase_table(rows: Sequence[MethodResult], title: str) -> Table:
    """Where a pass goes, for methods that say it; the prompt's pass counts as verifying."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    for column in (*PHASES, "ms a pass"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        if row.milliseconds:
            spent = row.milliseconds | {"verify": row.milliseconds["verify"] + row.milliseconds["prefill"]}
            total = sum(spent[phase] for phase in PHASES)
            table.add_row(row.name, *(f"{spent[phase] / total:.0%}" for phase in PHASES), f"{total:.2f}")
    return table


def parts_table(parts: Sequence[Parts], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method")
    for column in (
        "backbone forward\n(with unembedding)",
        "head forwards\n(with projection)",
        "everything\nelse",
        "total\n",
    ):
        table.add_column(column, justify="right")
    for p in parts:
        table.add_row(p.name, *(f"{value:.2f}" for value in (p.backbone, p.heads, p.rest, p.total)))
    return table


def draw(blocks: dict[str, list[MethodResult]], parts: dict[str, list[Parts]], path: str) -> None:
    """Speeds above, milliseconds below, a column for each block."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    halves: Any = figure.subfigures(2, 1)
    upper, lower = halves
    for axes, name in zip(upper.subplots(1, len(parts)), parts, strict=True):
        draw_speeds(axes, blocks[name], f"tokens per second, {name}")
    for axes, (name, found) in zip(lower.subplots(1, len(parts)), parts.items(), strict=True):
        draw_parts(axes, found, f"milliseconds for each token, {name}")
    save_figure(figure, path)


def draw_parts(axes: Any, parts: Sequence[Parts], title: str) -> None:
    names = [p.name for p in parts]
    shares = {"backbone": PALETTE[0], "heads": PALETTE[1], "rest": GREY}
    labels = {"backbone": "backbone forward", "heads": "head forwards", "rest": "everything else"}
    left = [0.0] * len(parts)
    for part, color in shares.items():
        widths = [getattr(p, part) for p in parts]
        axes.barh(names, widths, left=left, color=color, height=0.6, label=labels[part])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    tidy(axes, title, "ms")
    axes.grid(visible=False, axis="y")
    axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
