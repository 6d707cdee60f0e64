"""Pictures of judged texts: DynaMo's figures 3, 4, 10, 13 and 15 to 19.

Each `plot_` function draws into axes that are given, so that one picture may hold several.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from heads.evaluation.pictures import PALETTE, new_figure, tidy
from heads.evaluation.report.sections import Picture
from heads.evaluation.report.svg import as_picture

SIZE = (4.4, 3.2)  # inches; text of 9 points has 10 px on a phone of 360 px
PER_PASS = "tokens per pass"


def plot_rates(axes: Any, overall: Mapping[str, dict[str, Any]], speed: str = PER_PASS) -> None:
    """Figures 3, 10 and 13: the win rate at each speed, with the line and its band, for each run.

    Args:
        overall: what `win_rates.sum_up` returns, by the run's name.
    """
    for (name, found), color in zip(overall.items(), PALETTE * len(overall), strict=False):
        plot_line(axes, name, color, found, found["rates"])
    axes.axhline(1, color="#000000", linestyle="--", linewidth=0.8)
    tidy(axes, "", speed)
    axes.set_ylabel("wins / losses")
    axes.legend(frameon=False, fontsize=9)


def plot_scores(
    axes: Any, by_score: Mapping[str, dict[str, Any]], bases: Mapping[str, float], speed: str = PER_PASS
) -> None:
    """Figures 16 and 17: the mean score at each speed, with the line and its band, for each run.

    Args:
        by_score: what `win_rates.line_of_scores` returns, by the run's name.
        bases: the mean score of each run's baseline, a dashed line.
    """
    for (name, found), color in zip(by_score.items(), PALETTE * len(by_score), strict=False):
        plot_line(axes, name, color, found, found["means"])
        axes.axhline(bases[name], color=color, linestyle="--", linewidth=0.8)
    tidy(axes, "", speed)
    axes.set_ylabel("mean score")
    axes.legend(frameon=False, fontsize=9)


def plot_line(axes: Any, name: str, color: str, found: dict[str, Any], values: list[float | None]) -> None:
    points = [(x, y) for x, y in zip(found["speeds"], values, strict=True) if y is not None]
    axes.plot(*zip(*points, strict=True) if points else ([], []), "o", color=color, markersize=3, label=name)
    if found["line"]:
        axes.plot(found["grid"], np.polyval(found["line"], found["grid"]), color=color)
    if found["band"]:
        axes.fill_between(found["grid"], *found["band"], color=color, alpha=0.2, linewidth=0)


def plot_shares(axes: Any, results: dict[str, Any]) -> None:
    """Figures 4 and 18: the shares of wins, ties and losses by ε_b."""
    below = np.zeros(len(results["thresholds"]))
    width = 0.8 / max(len(below) - 1, 1)
    total = np.sum([results["counts"][name] for name in ("wins", "ties", "losses")], axis=0)
    for name, color in (("wins", PALETTE[2]), ("ties", PALETTE[1]), ("losses", PALETTE[5])):
        share = np.array(results["counts"][name]) / np.maximum(total, 1)
        axes.bar(results["thresholds"], share, width, below, color=color, label=name)
        below += share
    tidy(axes, "", "ε_b")
    axes.set_ylabel("share of pairs")
    axes.set_ylim(0, 1.2)  # the legend stands above the bars
    axes.legend(frameon=False, fontsize=9, ncols=3)


def plot_speeds(axes: Any, thresholds: list[float], speeds: Mapping[str, list[float]]) -> None:
    """Figure 18: the speed-up by ε_b, measured in one way or several."""
    for (name, values), color in zip(speeds.items(), PALETTE, strict=False):
        axes.plot(thresholds, values, color=color, marker="o", markersize=3, label=name)
    tidy(axes, "", "ε_b")
    axes.set_ylabel("speed-up")
    axes.legend(frameon=False, fontsize=9)


def plot_histograms(axes: Any, results: dict[str, Any]) -> None:
    """Figure 15: how many texts have each score."""
    both = [results["base_scores"], results["scores"][-1]]
    axes.hist(both, bins=10, color=list(PALETTE[:2]), label=["baseline", f"heads, ε_b = {results['thresholds'][-1]:g}"])
    tidy(axes, "", "score")
    axes.legend(frameon=False, fontsize=9)


def draw_rates(runs: Mapping[str, dict[str, Any]]) -> Picture:
    figure = new_figure(*SIZE)
    plot_rates(figure.subplots(), {name: run["overall"] for name, run in runs.items()})
    return as_picture(figure, "Win rate against speed: one point for each ε_b, a line with its 95 % band.")


def draw_scores(runs: Mapping[str, dict[str, Any]]) -> Picture:
    figure = new_figure(*SIZE)
    plot_scores(
        figure.subplots(),
        {name: run["by_score"] for name, run in runs.items()},
        {name: base_score(run) for name, run in runs.items()},
    )
    return as_picture(figure, "Mean score against speed: a line with its 95 % band; dashed: the baseline.")


def base_score(results: dict[str, Any]) -> float:
    """The baseline's mean score; nan without a readable one."""
    return float(np.mean(results["base_scores"])) if results["base_scores"] else float("nan")


def draw_shares(results: dict[str, Any]) -> Picture:
    figure = new_figure(SIZE[0], 1.6 * SIZE[1])
    shares, speeds = figure.subplots(2, 1)
    plot_shares(shares, results)
    plot_speeds(speeds, results["thresholds"], {PER_PASS: results["overall"]["speeds"]})
    return as_picture(figure, "Shares of wins, ties and losses against the baseline by ε_b, and the speed.")


def draw_histograms(results: dict[str, Any]) -> Picture:
    figure = new_figure(*SIZE)
    plot_histograms(figure.subplots(), results)
    return as_picture(figure, "Texts by score: the baseline's, and those of heads at the highest ε_b.")


def draw_kinds(results: dict[str, Any]) -> Picture:
    """Figure 19."""
    figure = new_figure(SIZE[0], 2 * SIZE[1])
    panels = figure.subplots(2, 1, subplot_kw={"projection": "polar"})
    plot_kinds(panels, results["kinds"])
    return as_picture(figure, "Win rate and speed of each type, over all ε_b.")


def plot_kinds(panels: Any, kinds: Mapping[str, dict[str, Any]]) -> None:
    """Figure 19: two radar charts, of the win rate and of the tokens per pass.

    Args:
        panels: two polar axes.
    """
    angles = np.linspace(0, 2 * np.pi, len(kinds), endpoint=False)
    for axes, name, title in zip(panels, ("rate", "speed"), ("wins / losses", PER_PASS), strict=True):
        values = [np.nan if found[name] is None else found[name] for found in kinds.values()]
        axes.plot([*angles, angles[0]], [*values, values[0]], color=PALETTE[0], marker="o", markersize=3)
        axes.set_xticks(angles, list(kinds))
        axes.tick_params(labelsize=9)
        axes.tick_params(axis="x", pad=8)
        axes.set_yticks([tick for tick in axes.get_yticks() if tick > 0][1::2])  # all would cover each other
        axes.set_title(title, fontsize=9)
