"""Draw PNG pictures of training and speed: accuracy of each head, tokens per pass, and speeds side by side.

Colours are Okabe and Ito's palette, which colour-blind readers can distinguish, and every line is named at its end.
matplotlib comes with `headway[plots]` and is imported only when a picture is drawn, through `new_figure`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heads.evaluation.throughput import MethodResult
from heads.extras import needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
GREY, DARK = "#8C8C8C", "#333333"
MARKERS = "osD^vP"
STYLE: dict[str, Any] = {"fontsize": 9, "color": DARK}
DOTS_PER_INCH = 150

Series = list[tuple[int, float]]
"""(step, value) pairs."""


def draw_report(metrics: str | Path, blocks: Mapping[str, Sequence[MethodResult]], path: str | Path) -> None:
    """A run's picture: top-1 and top-5 by head and tokens per pass through training, below them speeds by block.

    Args:
        metrics: the run's metrics.jsonl.
        blocks: measured speeds of the same methods by how tokens were chosen; the first of each is plain `generate`.

    Raises:
        ValueError: the file holds no evaluation of heads.
    """
    lines = read_metrics(metrics)
    tall = height_of(blocks)
    figure = new_figure(13.5, 3.6 + tall)
    # Each half has its own layout: long names below cost no width above.
    halves: Any = figure.subfigures(2, 1, height_ratios=(3.6, tall))
    upper, lower = halves
    top1, top5, per_pass = upper.subplots(1, 3)
    draw_accuracy(top1, lines, "top1", "top-1 accuracy on held-out text")
    draw_accuracy(top5, lines, "top5", "top-5 accuracy on held-out text")
    draw_tokens_per_pass(per_pass, series(lines, "eval_tokens_per_pass"))
    draw_panels(lower, blocks)
    save_figure(figure, path)


def draw_speed_blocks(blocks: Mapping[str, Sequence[MethodResult]], path: str | Path) -> None:
    """Bars of tokens per second, one panel for each block of results."""
    figure = new_figure(5.5 * len(blocks), height_of(blocks))
    draw_panels(figure, blocks)
    save_figure(figure, path)


def height_of(blocks: Mapping[str, Sequence[MethodResult]]) -> float:
    """Inches that the bars of the longest block need."""
    return 1.2 + 0.3 * max(map(len, blocks.values()))


def draw_panels(figure: Figure | SubFigure, blocks: Mapping[str, Sequence[MethodResult]]) -> None:
    """One panel for each block; its title says how much of the text repeats itself, since copies draft that well."""
    panels = figure.subplots(1, len(blocks), squeeze=False)[0]
    for axes, (name, results) in zip(panels, blocks.items(), strict=True):
        draw_speeds(axes, results, f"{name}; {results[0].repeated_4grams:.0%} of 4-grams repeat")
    names = {tuple(result.name for result in results) for results in blocks.values()}
    for axes in panels[1:] if len(names) == 1 else ():
        axes.tick_params(labelleft=False)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes are in inches. Commands that draw at their end call this first, to fail early.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with needs_extra("plots", "A picture was requested"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The evaluations of a run; if a step was evaluated twice, as after a resume, the last one."""
    if not Path(path).is_file():
        raise ValueError(f"{path} does not exist; a run writes it with `report_to: [jsonl]`.")
    try:
        lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        by_step = {line["step"]: line for line in lines if "eval_head1_top1" in line}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is no metrics.jsonl of a run ({type(error).__name__}: {error}); give the file in a run's folder."
        ) from None
    if not by_step:
        raise ValueError(f"{path} holds no evaluation of heads; give data.eval and evaluation.every_steps to the run.")
    return [by_step[step] for step in sorted(by_step)]


def series(lines: Sequence[dict[str, Any]], name: str) -> Series:
    return [(line["step"], line[name]) for line in lines if name in line]


def draw_accuracy(axes: Axes, lines: Sequence[dict[str, Any]], metric: str, title: str) -> None:
    """Draw one line for each head, and the backbone's own next-token accuracy as a dashed reference."""
    num_heads = 1
    while f"eval_head{num_heads + 1}_{metric}" in lines[0]:
        num_heads += 1
    curves = [series(lines, f"eval_head{k}_{metric}") for k in range(1, num_heads + 1)]
    labels = []
    for k, (curve, color) in enumerate(zip(curves, head_colors(num_heads), strict=True), start=1):
        marker = MARKERS[(k - 1) % len(MARKERS)]
        axes.plot(*zip(*curve, strict=True), color=color, marker=marker, markersize=4, linewidth=1.6)
        labels.append((curve[-1][1], f"head {k}  {curve[-1][1]:.0%}", color))
    if backbone := series(lines, f"eval_backbone_{metric}"):
        axes.plot(*zip(*backbone, strict=True), color=DARK, linestyle="--", linewidth=1.2)
        labels.append((backbone[-1][1], f"backbone  {backbone[-1][1]:.0%}", DARK))
    highest = max(value for value, _, _ in labels)
    axes.set_ylim(0, min(1.02, 1.12 * max(highest, *(value for curve in curves for _, value in curve))))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    label_ends(axes, lines[-1]["step"], labels)
    tidy(axes, title, "training step")


def label_ends(axes: Axes, x: float, labels: list[tuple[float, str, str]]) -> None:
    """Write names at the right end of lines, moved apart where the values are close."""
    low, high = axes.get_ylim()
    gap = 0.065 * (high - low)
    heights: list[float] = []
    for value, _, _ in sorted(labels):
        heights.append(max(value, heights[-1] + gap) if heights else value)
    for height, (_, text, color) in zip(heights, sorted(labels), strict=True):
        axes.annotate(
            text, (x, height), xytext=(8, 0), textcoords="offset points", va="center", annotation_clip=False,
            fontsize=9, color=color, fontweight="bold",
        )  # fmt: skip


def draw_tokens_per_pass(axes: Axes, curve: Series) -> None:
    if curve:
        axes.plot(*zip(*curve, strict=True), color=PALETTE[0], marker="o", markersize=4, linewidth=1.6)
        axes.plot([curve[0][0], curve[-1][0]], [1, 1], color=DARK, linestyle="--", linewidth=1.2)
        label_ends(
            axes, curve[-1][0], [(1.0, "plain  1.00", DARK), (curve[-1][1], f"heads  {curve[-1][1]:.2f}", PALETTE[0])]
        )
    else:
        axes.text(0.5, 0.5, "not measured in this run", ha="center", transform=axes.transAxes, **STYLE)
    tidy(axes, "tokens per backbone pass on held-out prompts", "training step")


def draw_speeds(axes: Axes, results: Sequence[MethodResult], title: str) -> None:
    """Draw horizontal bars, the first result on top, each with its speed and its ratio to the first."""
    speeds = [result.tokens_per_second for result in results]
    axes.barh(range(len(results)), speeds, color=[GREY, *[PALETTE[4]] * (len(results) - 1)], height=0.66)
    for i, result in enumerate(results):
        text = f"{result.tokens_per_second:.0f}  ({result.ratio:.2f} ×)"
        axes.annotate(text, (speeds[i], i), xytext=(5, 0), textcoords="offset points", va="center", **STYLE)
    axes.set_yticks(range(len(results)), [result.name for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(speeds))
    tidy(axes, title, "tokens per second (× plain)")
    axes.grid(visible=False, axis="y")


def head_colors(num_heads: int) -> list[Any]:
    """The palette; for more heads than it has colours, a sequence from dark to light."""
    if num_heads <= len(PALETTE):
        return list(PALETTE[:num_heads])
    with needs_extra("plots", "A picture was requested"):
        from matplotlib import colormaps
    return [colormaps["viridis"](0.85 * i / (num_heads - 1)) for i in range(num_heads)]


def tidy(axes: Axes, title: str, x_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=DARK)
    axes.set_xlabel(x_label, **STYLE)
    axes.tick_params(labelsize=9, colors=DARK)
    axes.grid(visible=True, color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
