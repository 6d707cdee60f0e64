"""Report sections of the judged suites, of one run or several: DynaMo's figures 3, 4, 15, 16, 18, 19 and 21 to 23."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from heads.evaluation.judged.win_rates import describe, show_rate
from heads.evaluation.pictures import PALETTE, new_figure, tidy
from heads.evaluation.report.sections import Picture, Section, Table
from heads.evaluation.report.svg import as_picture

WON = {"A": "heads", "B": "baseline", "tie": "tie", None: "unreadable"}
SIZE = (4.4, 3.2)  # inches; text of 9 points has 10 px on a phone of 360 px


def judged_sections(results: dict[str, Any]) -> list[Section]:
    overall, counts = results["overall"], results["counts"]
    text = (
        f"Judge: {results['judge']}. Baseline: plain generation of {results['base']}. Same-quality speed-up in tokens "
        f"per pass: {describe(overall)} (* theoretical: beyond every measured speed). Brackets: 95 % intervals that "
        f"resample prompts. {results['unreadable']} of {results['asked']} verdicts could not be read and count "
        f"nowhere. Repeated 4-grams "
        f"of the baseline: {results['base_repeated']:.1%}."
    )
    without = [f"{e:g}" for e, r in zip(results["thresholds"], overall["rates"], strict=True) if r is None]
    if without:
        text += f" No text lost at ε_b {', '.join(without)}, so these have no rate and the line leaves them out."
    mean = np.mean(results["base_scores"]) if results["base_scores"] else np.nan
    columns = ["ε_b", "tokens per pass", "wins", "ties", "losses", "wins / losses", "score", "repeated 4-grams"]
    rows = [
        [
            f"{e:g}",
            f"{overall['speeds'][i]:.2f}",
            *(f"{counts[name][i]:.0f}" for name in ("wins", "ties", "losses")),
            show_rate(overall["rates"][i], overall["rate_intervals"][i]),
            f"{np.mean(results['scores'][i]):.2f}" if results["scores"][i] else "–",
            f"{results['repeated'][i]:.1%}",
        ]
        for i, e in enumerate(results["thresholds"])
    ]
    prompt, base, written = results["examples"]
    example_rows = [["baseline", "1.00", base, ""], *([f"{e:g}", f"{s:.2f}", t, WON[w]] for e, s, t, w in written)]
    return [
        Section(
            title="Win rate against speed",
            text=text,
            tables=[Table(columns=columns, rows=rows, note=f"Mean score of the baseline: {mean:.2f}.")],
            pictures=[draw_rates({"heads": results}), draw_counts(results)],
        ),
        Section(title="Scores", pictures=[draw_histograms(results), draw_scores(results)]),
        Section(title="By type", tables=[kinds_table(results["kinds"])], pictures=[draw_kinds(results)]),
        Section(
            title="Texts",
            text=f"Continuations of: {prompt}",
            tables=[Table(columns=["ε_b", "tokens per pass", "text", "better"], rows=example_rows)],
        ),
    ]


def kinds_table(kinds: Mapping[str, dict[str, Any]]) -> Table:
    rows = [
        [kind, show_rate(found["rate"], found["interval"]), f"{found['speed']:.2f}"] for kind, found in kinds.items()
    ]
    return Table(columns=["type", "wins / losses", "tokens per pass"], rows=rows)


def compare_judged(runs: Mapping[str, dict[str, Any]]) -> list[Section]:
    """Several runs in one picture and table: model sizes (figures 3, 17 and 20) or settings (figures 10, 13, table 8).

    Raises:
        ValueError: the runs have different judges, prompts or lengths of texts.
    """
    named = {"judge": "judges", "max_new_tokens": "lengths", "draws": "draws", "prompts": "prompts"}
    for name, called in named.items():
        values = [run[name] for run in runs.values()]
        if any(value != values[0] for value in values):
            shown = "" if name == "prompts" else f" ({', '.join(map(str, values))})"
            raise ValueError(f"The runs have different {called}{shown}; compare runs that differ in nothing else.")
    rows = [
        [name, describe(run["overall"]), f"{sum(run['counts']['wins']):.0f}", f"{sum(run['counts']['losses']):.0f}"]
        for name, run in runs.items()
    ]
    columns = ["run", "same-quality tokens per pass", "wins", "losses"]
    return [
        Section(title="Win rate against speed", tables=[Table(columns=columns, rows=rows)], pictures=[draw_rates(runs)])
    ]


def draw_rates(runs: Mapping[str, dict[str, Any]]) -> Picture:
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    for (name, run), color in zip(runs.items(), PALETTE * len(runs), strict=False):
        found = run["overall"]
        points = [(x, y) for x, y in zip(found["speeds"], found["rates"], strict=True) if y is not None]
        axes.plot(*zip(*points, strict=True) if points else ([], []), "o", color=color, markersize=3, label=name)
        if found["line"]:
            axes.plot(found["grid"], np.polyval(found["line"], found["grid"]), color=color)
            axes.fill_between(found["grid"], *found["band"], color=color, alpha=0.2, linewidth=0)
    axes.axhline(1, color="#000000", linestyle="--", linewidth=0.8)
    tidy(axes, "", "tokens per pass")
    axes.set_ylabel("wins / losses")
    axes.legend(frameon=False, fontsize=9)
    return as_picture(figure, "Win rate against speed: one point for each ε_b, a line with its 95 % band.")


def draw_counts(results: dict[str, Any]) -> Picture:
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    below = np.zeros(len(results["thresholds"]))
    width = 0.8 / max(len(below) - 1, 1)
    for name, color in (("wins", PALETTE[2]), ("ties", PALETTE[1]), ("losses", PALETTE[5])):
        found = np.array(results["counts"][name])
        axes.bar(results["thresholds"], found, width, below, color=color, label=name)
        below += found
    tidy(axes, "", "ε_b")
    axes.legend(frameon=False, fontsize=9, ncols=3)
    return as_picture(figure, "Wins, ties and losses against the baseline by ε_b.")


def draw_histograms(results: dict[str, Any]) -> Picture:
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    both = [results["base_scores"], results["scores"][-1]]
    axes.hist(both, bins=10, color=list(PALETTE[:2]), label=["baseline", f"heads, ε_b = {results['thresholds'][-1]:g}"])
    tidy(axes, "", "score")
    axes.legend(frameon=False, fontsize=9)
    return as_picture(figure, "Texts by score: the baseline's, and those of heads at the highest ε_b.")


def draw_scores(results: dict[str, Any]) -> Picture:
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    means = [np.mean(scores) if scores else np.nan for scores in results["scores"]]
    axes.plot(results["overall"]["speeds"], means, "o", color=PALETTE[0])
    if results["base_scores"]:
        axes.axhline(float(np.mean(results["base_scores"])), color="#000000", linestyle="--", linewidth=0.8)
    tidy(axes, "", "tokens per pass")
    axes.set_ylabel("mean score")
    return as_picture(figure, "Mean score against speed; dashed: the baseline.")


def draw_kinds(results: dict[str, Any]) -> Picture:
    figure = new_figure(SIZE[0], 2 * SIZE[1])
    panels = figure.subplots(2, 1, subplot_kw={"projection": "polar"})
    kinds = list(results["kinds"])
    angles = np.linspace(0, 2 * np.pi, len(kinds), endpoint=False)
    for axes, name, title in zip(panels, ("rate", "speed"), ("wins / losses", "tokens per pass"), strict=True):
        values = [np.nan if results["kinds"][kind][name] is None else results["kinds"][kind][name] for kind in kinds]
        axes.plot([*angles, angles[0]], [*values, values[0]], color=PALETTE[0], marker="o", markersize=3)
        axes.set_xticks(angles, kinds)
        axes.tick_params(labelsize=9)
        axes.tick_params(axis="x", pad=8)
        axes.set_yticks([tick for tick in axes.get_yticks() if tick > 0][1::2])  # all would cover each other
        axes.set_title(title, fontsize=9)
    return as_picture(figure, "Win rate and speed of each type, over all ε_b.")
