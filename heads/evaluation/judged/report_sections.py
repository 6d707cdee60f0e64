"""Report sections of the judged suites, of one run or several: DynaMo's figures 21 to 23 and the pictures' tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from heads.evaluation.judged.pictures import (
    base_score,
    draw_histograms,
    draw_kinds,
    draw_rates,
    draw_scores,
    draw_shares,
)
from heads.evaluation.judged.win_rates import describe, show_rate
from heads.evaluation.report.sections import Section, Table
from heads.evaluation.runs.ratios import LEAST_UNITS

WON = {"A": "heads", "B": "baseline", "tie": "tie", None: "unreadable"}


def judged_sections(results: dict[str, Any]) -> list[Section]:
    overall, counts = results["overall"], results["counts"]
    text = (
        f"Judge: {results['judge']}. Baseline: plain generation of {results['base']}. Same-quality speed-up in tokens "
        f"per pass: {describe(overall)} (* theoretical, at most the tokens that a pass can emit). Brackets: 95 % "
        f"intervals over prompts. {results['unreadable']} of {results['asked']} verdicts could not be read "
        f"and count nowhere. Repeated 4-grams of the baseline: {results['base_repeated']:.1%}."
    )
    without = [f"{e:g}" for e, r in zip(results["thresholds"], overall["rates"], strict=True) if r is None]
    if without:
        text += f" No text lost at ε_b {', '.join(without)}, so these have no rate and the line leaves them out."
    columns = ["ε_b", "tokens per pass", "wins", "ties", "losses", "wins / losses", "score", "repeated 4-grams"]
    rows = [
        [
            f"{e:g}",
            show_rate(overall["speeds"][i], overall["speed_intervals"][i]),
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
            tables=[Table(columns=columns, rows=rows, note=f"Mean score of the baseline: {base_score(results):.2f}.")],
            pictures=[draw_rates({"heads": results}), draw_shares(results)],
        ),
        Section(title="Scores", pictures=[draw_histograms(results), draw_scores({"heads": results})]),
        Section(title="By type", tables=[kinds_table(results["kinds"])], pictures=[draw_kinds(results)]),
        Section(
            title="Texts",
            text=f"Continuations of: {prompt}",
            tables=[Table(columns=["ε_b", "tokens per pass", "text", "better"], rows=example_rows)],
        ),
    ]


def kinds_table(kinds: Mapping[str, dict[str, Any]]) -> Table:
    rows = [
        [kind, show_rate(found["rate"], found["interval"]), show_rate(found["speed"], found["speed_interval"])]
        for kind, found in kinds.items()
    ]
    note = f"A type of fewer than {LEAST_UNITS} prompts has no interval."
    return Table(columns=["type", "wins / losses", "tokens per pass"], rows=rows, note=note)


def compare_judged(runs: Mapping[str, dict[str, Any]]) -> list[Section]:
    """Several runs in one picture and table: model sizes (figures 3, 17 and 20) or settings (figures 10, 13, table 8).

    Raises:
        ValueError: the runs have different judges, prompts or lengths of texts, or one is of an earlier version.
    """
    for name, run in runs.items():
        if "by_score" not in run:
            raise ValueError(f"The run {name} was written by an earlier version; run its command again.")
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
        Section(
            title="Win rate against speed", tables=[Table(columns=columns, rows=rows)], pictures=[draw_rates(runs)]
        ),
        Section(title="Scores", pictures=[draw_scores(runs)]),
    ]
