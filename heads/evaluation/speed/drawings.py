"""The pictures of the suite `speed`: by category, by depth, by position, by phase, and the tree with its edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from heads.evaluation.pictures import DARK, GREY, PALETTE, STYLE, new_figure, tidy
from heads.evaluation.report.sections import Picture
from heads.evaluation.report.svg import as_picture
from heads.evaluation.speed.measuring import SpeedFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 4.4  # inches; text of 9 points has 10 px on a phone of 360 px
PHASE_COLORS = {
    "prefill": PALETTE[4], "draft": PALETTE[1], "verify": PALETTE[0], "accept": PALETTE[3], "commit": PALETTE[2],
    "whole": PALETTE[5], "other": GREY,
}  # fmt: skip
LONG_NAME = 18
WHISKER = 1.6
"""A bar's interval is cut off at this multiple of the longest bar: three questions can give very wide ones."""
LEAST_SHARE = 0.001
"""Edges of a tree are at least as wide as for this share of passes."""


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Plain is grey, the others take the palette's colours in order."""
    others = [name for name in names if name != "plain"]
    return {"plain": GREY} | {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)}


def draw_bars(
    groups: Mapping[str, Mapping[str, tuple[float, float, float]]],
    shows: str,
    x_label: str,
    reference: float | None = None,
) -> Picture:
    """Horizontal bars with intervals: a block for each group, a bar for each name in it.

    Args:
        groups: (value, low, high) by group and name.
        reference: where a dashed line stands, such as plain generation.
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    colors, height = colors_of(names), 0.8 / len(names)
    figure = new_figure(WIDTH, 0.9 + 0.24 * len(names) * len(groups))
    axes = figure.subplots()
    for i, name in enumerate(names):
        there = [(g, bars[name]) for g, bars in enumerate(groups.values()) if name in bars]
        at = [g + (i - (len(names) - 1) / 2) * height for g, _ in there]
        values = [value for _, (value, _, _) in there]
        errors = [[to_end(v, low, low < high) for _, (v, low, high) in there]]
        errors += [[to_end(high, v, low < high) for _, (v, low, high) in there]]
        bar_style = {"ecolor": DARK, "elinewidth": 0.9, "capsize": 2}
        axes.barh(at, values, height=0.9 * height, color=colors[name], label=name, xerr=errors, error_kw=bar_style)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    longest = max(bar[0] for bars in groups.values() for bar in bars.values())
    axes.set_xlim(0, min(axes.get_xlim()[1], WHISKER * longest))
    if reference is not None:
        axes.axvline(reference, color=DARK, linestyle="--", linewidth=1)
    tidy(axes, "", x_label)
    axes.grid(visible=False, axis="y")
    show_names(axes, names)
    return as_picture(figure, shows)


def to_end(upper: float, lower: float, measured: bool) -> float:
    """The length of one side of an interval; none is drawn where one question gives none.

    >>> to_end(2.0, 1.5, True), to_end(2.0, 2.0, False)
    (0.5, nan)
    """
    return max(0.0, upper - lower) if measured else float("nan")


def show_names(axes: Axes, names: Sequence[str]) -> None:
    """A legend above the axes; long names stand one below another, since a wider one would take the axes' room."""
    if len(names) > 1:
        columns = 1 if max(map(len, names)) > LONG_NAME else min(len(names), 3)
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=9, labelcolor=DARK,
            borderaxespad=0, handlelength=1.2, columnspacing=1.2,
        )  # fmt: skip


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    shows: str,
    x_label: str,
    y_label: str,
    *,
    percent: bool = False,
    whole_steps: bool = False,
) -> Picture:
    """Lines of points by name, from 0 upwards."""
    figure = new_figure(WIDTH, 3.2)
    axes = figure.subplots()
    colors = colors_of(list(lines))
    for i, (name, points) in enumerate(lines.items()):
        style = "-" if i % 2 == 0 else "--"
        axes.plot(*zip(*points, strict=True), color=colors[name], marker="o", markersize=4, linestyle=style, label=name)
    axes.set_ylim(0, 1.08 * max(y for points in lines.values() for _, y in points) or 1)  # all may be 0
    if percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    if whole_steps:
        axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
    axes.set_ylabel(y_label, **STYLE)
    tidy(axes, "", x_label)
    show_names(axes, list(lines))
    return as_picture(figure, shows)


def draw_phases(phases: Mapping[str, Mapping[str, float]], shows: str) -> Picture:
    """One stacked bar for each method: milliseconds of a pass by part."""
    figure = new_figure(WIDTH, 1.2 + 0.5 * len(phases))
    axes = figure.subplots()
    starts = [0.0] * len(phases)
    for phase in dict.fromkeys(name for found in phases.values() for name in found):
        widths = [found.get(phase, 0.0) for found in phases.values()]
        axes.barh(range(len(phases)), widths, left=starts, height=0.6, color=PHASE_COLORS.get(phase, GREY), label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(phases)), list(phases))
    axes.invert_yaxis()
    tidy(axes, "", "ms per pass")
    axes.grid(visible=False, axis="y")
    show_names(axes, list(dict.fromkeys(name for found in phases.values() for name in found)))
    return as_picture(figure, shows)


def draw_tree(tree: SpeedFigures, shows: str) -> Picture:
    """The tree from left to right; an edge is as wide as its node is often accepted, and says how often."""
    parents, shares = tree["parents"], [count / max(1, tree["verified"]) for count in tree["accepted"]]
    depths, heights = lay_out(parents)
    leaves = 1 + max(heights)
    over_edges = {"facecolor": "#FFFFFF", "edgecolor": "none", "pad": 0.5}
    figure = new_figure(WIDTH, max(1.8, 0.6 + 0.24 * leaves))
    axes = figure.subplots()
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        x, y = [depths[parent], depths[node]], [heights[parent], heights[node]]
        axes.plot(x, y, color=PALETTE[0], linewidth=0.6 + 7 * max(LEAST_SHARE, shares[node]), solid_capstyle="round")
        text = f"{shares[node]:.0%}" if shares[node] >= 0.095 else f"{shares[node]:.1%}"
        axes.annotate(
            text, (x[1], y[1]), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, color=DARK,
            bbox=over_edges,
        )  # fmt: skip
    axes.plot(depths, heights, linestyle="", marker="o", markersize=4, color=DARK)
    axes.set_xlim(-0.15, max(depths) + 0.5)
    axes.set_xticks(range(max(depths) + 1), ["root", *map(str, range(1, max(depths) + 1))])
    axes.set_yticks([])
    axes.set_ylim(max(heights) + 0.6, -0.6)
    tidy(axes, "", "depth")
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    return as_picture(figure, shows)


def lay_out(parents: Sequence[int]) -> tuple[list[int], list[float]]:
    """Depth of each node, and its height: leaves in order, an inner node in the middle of its children.

    >>> lay_out([-1, 0, 1, 0])
    ([0, 1, 2, 1], [0.5, 0.0, 0.0, 1.0])
    """
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depths[node] = depths[parent] + 1
    heights = [0.0] * len(parents)
    leaves = 0

    def place(node: int) -> None:
        nonlocal leaves
        for child in children[node]:
            place(child)
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
        else:
            heights[node] = float(leaves)
            leaves += 1

    place(0)
    return depths, heights
