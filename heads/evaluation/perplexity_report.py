"""Show perplexities and accuracies as tables and pictures.

The pictures are PPL_d against tokens per pass (DynaMo, figure 14) and held-out loss through training (figure 6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from heads.evaluation.accuracy import HeadAccuracy
from heads.evaluation.lossy.dynamic_perplexity import DynamicPerplexity
from heads.evaluation.perplexity import Estimate, Perplexity
from heads.evaluation.pictures import (
    DARK,
    MARKERS,
    PALETTE,
    STYLE,
    head_colors,
    label_ends,
    new_figure,
    read_metrics,
    save_figure,
    series,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = Callable[["Axes"], None]


def names_of_places(places: Sequence[int]) -> str:
    """The subscript of a joint perplexity, as the paper writes it.

    >>> names_of_places([1, 2, 3]), names_of_places(range(1, 12))
    ('123', '1:11')
    """
    return "".join(map(str, places)) if max(places) < 10 else f"{places[0]}:{places[-1]}"


def perplexity_rows(found: Perplexity) -> list[tuple[str, Estimate]]:
    """PPL_1, PPL_2, …, then PPL_12, PPL_123, …, as in the paper's table 9."""
    places = range(1, len(found.nth) + 1)
    nth = [(f"PPL_{n}", found.nth[n - 1]) for n in places]
    return nth + [(f"PPL_{names_of_places(range(1, n + 1))}", found.joint[n - 1]) for n in places[1:]]


def perplexity_table(found: Perplexity, title: str) -> Table:
    table = new_table(title, "perplexity", ("value", "95 % interval", "terms"))
    for name, estimate in perplexity_rows(found):
        table.add_row(name, number(estimate.value), interval(estimate), f"{estimate.terms:,}")
    return table


def dynamic_table(points: Sequence[DynamicPerplexity], title: str) -> Table:
    table = new_table(title, "ε_b", ("tokens\nper pass", "PPL_d\n", "95 % interval\n"))
    for point in points:
        found = point.perplexity
        table.add_row(f"{point.threshold:g}", f"{point.tokens_per_pass:.2f}", number(found.value), interval(found))
    return table


def accuracy_table(meters: Sequence[HeadAccuracy], title: str) -> Table:
    """One line for the backbone and one for each head; agreement is with the backbone's own next token."""
    table = new_table(title, "", ("top-1", "top-5", "agreement", "loss"))
    for k, meter in enumerate(meters):
        agreement = f"{meter.agreement:.1%}" if k else "—"
        name = f"head {k}" if k else "backbone"
        table.add_row(name, f"{meter.top1:.1%}", f"{meter.top5:.1%}", agreement, f"{meter.loss:.3f}")
    return table


def new_table(title: str, first: str, others: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def number(value: float) -> str:
    """A perplexity with at least three figures.

    >>> number(7.1249), number(45.16), number(1455.8)
    ('7.12', '45.2', '1,456')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "one text"
    return f"{number(estimate.low)}–{number(estimate.high)}"


def draw_panels(panels: Sequence[Panel], path: str | Path) -> None:
    """Draw panels side by side into one PNG."""
    figure = new_figure(6.4 * len(panels), 4.4)
    for draw, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw(axes)
    save_figure(figure, path)


def draw_dynamic(axes: Axes, points: Sequence[DynamicPerplexity]) -> None:
    """Draw PPL_d against tokens per pass, a dot for each ε_b; if the sweep holds ε_b = 1, PPL_1 as a dashed line."""
    points = sorted(points, key=lambda point: point.threshold, reverse=True)
    speeds = [point.tokens_per_pass for point in points]
    values = [point.perplexity.value for point in points]
    bounds = [(p.perplexity.low or v, p.perplexity.high or v) for p, v in zip(points, values, strict=True)]
    lows, highs = zip(*bounds, strict=True)
    axes.fill_between(speeds, lows, highs, color=PALETTE[0], alpha=0.15, linewidth=0)
    axes.plot(speeds, values, color=PALETTE[0], marker="o", markersize=4.5, linewidth=1.6)
    low, high = min(lows), max(highs)
    axes.set_ylim(max(0.0, low - 0.15 * (high - low)), high + 0.1 * (high - low))
    room = 0.06 * (max(speeds) - min(speeds) or 1)
    axes.set_xlim(min(speeds) - room, max(speeds) + 3 * room)
    if points[0].threshold == 1:
        axes.axhline(values[0], color=DARK, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"PPL$_1$ = {number(values[0])}", (1, values[0]), xycoords=("axes fraction", "data"), xytext=(-4, -5),
            textcoords="offset points", ha="right", va="top", **STYLE,
        )  # fmt: skip
    label_thresholds(axes, points, speeds, values)
    axes.set_ylabel("PPL$_d$", **STYLE)
    tidy(axes, "dynamic multi-token perplexity PPL$_d$, a dot for each threshold ε$_b$", "tokens per pass")


def label_thresholds(
    axes: Axes, points: Sequence[DynamicPerplexity], speeds: Sequence[float], values: Sequence[float]
) -> None:
    """Write ε_b below the first dot, right of the last, and above those in between that have room for it."""
    width, height = (high - low for low, high in (axes.get_xlim(), axes.get_ylim()))
    labelled: list[tuple[float, float]] = []
    last = len(points) - 1
    for i in dict.fromkeys((0, last, *range(1, last))):
        x, y = speeds[i] / width, values[i] / height
        if any(abs(x - other_x) < 0.06 and abs(y - other_y) < 0.06 for other_x, other_y in labelled):
            continue
        labelled.append((x, y))
        text = f"{'' if i else 'ε$_b$ = '}{points[i].threshold:g}"
        offset, side, height_at = ((-6, 3), "right", "bottom") if i != last else ((8, 0), "left", "center")
        if i == 0:
            offset, side, height_at = (-4, -7), "left", "top"
        axes.annotate(
            text, (speeds[i], values[i]), xytext=offset, textcoords="offset points", ha=side, va=height_at,
            fontsize=9, color=PALETTE[0], fontweight="bold",
        )  # fmt: skip


def draw_validation_loss(axes: Axes, metrics: str | Path) -> None:
    """Draw a run's loss on held-out text: the backbone's, each head's, and their mean, which is log PPL_1:K+1.

    Args:
        metrics: the run's metrics.jsonl.

    Raises:
        ValueError: no such file, or no evaluation of heads in it.
    """
    lines = read_metrics(metrics)
    num_heads = 1
    while f"eval_head{num_heads + 1}_loss" in lines[0]:
        num_heads += 1
    colors = head_colors(num_heads)
    curves: list[tuple[str, str, Any, str]] = [("backbone", "eval_backbone_loss", DARK, "--")]
    curves += [(f"head {k}", f"eval_head{k}_loss", colors[k - 1], "-") for k in range(1, num_heads + 1)]
    curves.append(("mean", "eval_multi_token_loss", DARK, "-"))
    labels = []
    for i, (name, key, color, style) in enumerate(curves):
        if curve := series(lines, key):
            marker = "." if color == DARK else MARKERS[(i - 1) % len(MARKERS)]
            axes.plot(
                *zip(*curve, strict=True), color=color, linestyle=style, marker=marker, markersize=4, linewidth=1.6
            )
            labels.append((curve[-1][1], f"{name}  {curve[-1][1]:.2f}", color))
    if not labels:
        raise ValueError(f"{metrics} holds evaluations without losses; it was written by another version of Headway.")
    label_ends(axes, lines[-1]["step"], labels)
    tidy(axes, "loss on held-out text (mean = log PPL$_{1:n}$)", "training step")
