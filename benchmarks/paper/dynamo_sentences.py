"""DynaMo's sentence-completion benchmark (section 3.4, appendix A.3): `python -m benchmarks.paper.dynamo_sentences`.

Ten prompts, ten seeds each, are continued by plain sampling of the backbone before training and by dynamic decoding at
ε_b from 0 to 1. A judge scores each text alone (figures 15 and 16) and compares it with plain generation's text of the
same prompt and seed (figures 3, 4, 18 and 19); ablations of the method (figure 10, table 8) are compared at a few ε_b,
and with a quarter of the seeds. By default the judge is the log-likelihood under the demo's draft model, which tells
nothing of meaning, so tables name it and show the share of repeated 4-grams too; `--judge endpoint` asks a language
model. All of this is `headway evaluate HEADS --suite sentence-completion`, called here; dynamo_seconds.py adds measured
seconds. The demo was trained on Python, so the prompts are code; `--prompts english` takes those of table 7. Texts and
answers are stored, so a repeated call goes on where it was stopped, and measures all seconds anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.paper.dynamo_seconds import (
    add_judging_flags,
    by_seconds,
    config_of,
    describe_seconds,
    judge_texts,
    time_texts,
)
from benchmarks.shared import describe_cpu, figures_table, open_ngrams, parser_of, run_benchmark, say, wide_console
from heads.checkpoint.opening import open_heads
from heads.evaluation.judged.completion import thresholds_by
from heads.evaluation.judged.pictures import (
    base_score,
    plot_histograms,
    plot_kinds,
    plot_rates,
    plot_scores,
    plot_shares,
    plot_speeds,
)
from heads.evaluation.judged.win_rates import describe, show_rate
from heads.evaluation.pictures import new_figure, save_figure
from heads.evaluation.runs.task import SuiteTask

ABLATIONS: dict[str, dict[str, Any]] = {
    "CO + AT + G-3": {"adaptive": "static_first", "blur": 3},
    "CO + AT": {"adaptive": "static_first"},
    "CO": {"adaptive": "none"},
    "CO-0.5 + AT + G-3": {"adaptive": "static_first", "blur": 3, "transparency": 0.5},
    "AT + G-3": {"adaptive": "static_first", "blur": 3, "cooccurrence": None},
}
"""Table 8: co-occurrence masks, adaptive threshold, Gaussian blur."""
ABLATED_AT = 0.5
COARSE_STEP = 0.1
"""Between values of ε_b in the ablations and against the other baseline, unless --step is larger."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    if options.quick:
        options.seeds, options.step, options.repeats = min(options.seeds, 2), max(options.step, 0.25), 1
        options.tokens = min(options.tokens, 16)
    console, config = wide_console(), config_of(options)
    check_step(options.step)
    open_ngrams(open_heads([options.heads]))
    results = judge_texts(options.heads, config)
    own = None
    if config.judge != "endpoint":  # its questions cost money
        own = judge_texts(options.heads, config_of(options, baseline="own", **few_of(options)))
    ablated = {
        name: judge_texts(options.heads, config_of(options, **few_of(options), **changed))
        for name, changed in ABLATIONS.items()
    }
    task = SuiteTask(folder=Path(options.heads))
    rates, scores = by_seconds(results, time_texts(task, config, results["thresholds"], options.repeats))
    say(
        console,
        f"{options.heads} against plain generation of {results['base']}; {len(results['prompts'])} {options.prompts} "
        f"prompts × {options.seeds} seeds, at most {options.tokens} new tokens, judge: {results['judge']}; "
        f"{describe_cpu()}\n{describe_seconds(options.repeats)}",
    )
    show(console, results, rates)
    show_ablations(console, ablated)
    if own is not None:
        show_baselines(console, results, own)
    if options.picture:
        draw(results, rates, scores, ablated, options.picture)


def check_step(step: float) -> None:
    """Check that the few ε_b of ablations are among those of --step, and ABLATED_AT among the few.

    Raises:
        ValueError: they are not.
    """
    few = thresholds_by(max(step, COARSE_STEP))
    if ABLATED_AT not in few or not set(few) <= set(thresholds_by(step)):
        raise ValueError(
            f"--step {step:g} was given; {COARSE_STEP} has to be a multiple of it or, if it is larger, {ABLATED_AT}: "
            f"0.02, 0.05, 0.1 and 0.25 are allowed, for instance."
        )


def few_of(options: argparse.Namespace) -> dict[str, Any]:
    """A quarter of the seeds at a few ε_b, for the ablations and the other baseline."""
    return {"draws": max(1, options.seeds // 4), "step": max(options.step, COARSE_STEP)}


def show(console: Console, results: dict[str, Any], rates: dict[str, Any]) -> None:
    """The table by ε_b, and the same-quality speed-ups.

    Args:
        results: the suite's.
        rates: its win rates against measured speed-ups.
    """
    table = figures_table("\nagainst plain generation", "ε_b", "× plain", *COLUMNS)
    for i, threshold in enumerate(results["thresholds"]):
        times = show_rate(rates["speeds"][i], rates["speed_intervals"][i])
        table.add_row(f"{threshold:.2f}", times, *cells(results, i))
    console.print(table)
    say(console, f"plain generation's score: {base_score(results):.2f}; repeated: {results['base_repeated']:.0%}")
    say(console, f"same-quality speed-up: {describe(rates)}")
    say(console, f"same-quality speed-up with free drafting, in tokens per pass: {describe(results['overall'])}")
    say(console, f"verdicts that could not be read: {results['unreadable']} of {results['asked']}")


COLUMNS = ("tokens\nper pass", "wins", "ties", "losses", "wins / losses", "score", "repeated\n4-grams")


def cells(results: dict[str, Any], i: int) -> list[str]:
    """One threshold's figures."""
    overall, scores = results["overall"], results["by_score"]["means"]
    return [
        show_rate(overall["speeds"][i], overall["speed_intervals"][i]),
        *(f"{results['counts'][name][i]:.0f}" for name in ("wins", "ties", "losses")),
        show_rate(overall["rates"][i], overall["rate_intervals"][i]),
        show_rate(scores[i], None),
        f"{results['repeated'][i]:.0%}",
    ]


def show_ablations(console: Console, ablated: Mapping[str, dict[str, Any]]) -> None:
    draws = next(iter(ablated.values()))["draws"]
    title = f"\nablations at ε_b = {ABLATED_AT} (table 8; figure 10), texts of each prompt: {draws}"
    table = figures_table(title, "method", *COLUMNS, "same quality,\ntokens per pass")
    for name, results in ablated.items():
        table.add_row(name, *cells(results, results["thresholds"].index(ABLATED_AT)), describe(results["overall"]))
    console.print(table)


def show_baselines(console: Console, results: dict[str, Any], own: dict[str, Any]) -> None:
    """Wins / losses against both baselines at the ε_b of both."""
    names = (f"{one['base']},\ntexts of each prompt: {one['draws']}" for one in (results, own))
    table = figures_table("\nwins / losses against two baselines", "ε_b", *names)
    for i, threshold in enumerate(own["thresholds"]):
        j = results["thresholds"].index(threshold)
        pairs = ((results["overall"], j), (own["overall"], i))
        table.add_row(f"{threshold:.2f}", *(show_rate(one["rates"][k], one["rate_intervals"][k]) for one, k in pairs))
    table.add_row("the baseline's score", f"{base_score(results):.2f}", f"{base_score(own):.2f}")
    console.print(table)
    say(console, f"same quality as the heads' own backbone, in tokens per pass: {describe(own['overall'])}")


def draw(
    results: dict[str, Any],
    rates: dict[str, Any],
    scores: dict[str, Any],
    ablated: Mapping[str, dict[str, Any]],
    path: str,
) -> None:
    """Figures 3, 4, 10, 15, 16, 18 and 19."""
    figure = new_figure(13, 13)
    cells = figure.add_gridspec(3, 6)
    places = [figure.add_subplot(cells[row, 2 * i : 2 * i + 2]) for row in (0, 1) for i in range(3)]
    plot_rates(places[0], {"heads": rates}, "× plain; band: 95 %")
    plot_shares(places[1], results)
    speeds = {"× plain, measured": rates["speeds"], "tokens per pass": results["overall"]["speeds"]}
    plot_speeds(places[2], results["thresholds"], speeds)
    plot_histograms(places[3], results)
    plot_scores(places[4], {"heads": scores}, {"heads": base_score(results)}, "× plain; dashed: plain's score")
    plot_rates(places[5], {name: found["overall"] for name, found in ablated.items()})
    titles = ("figure 3", "figures 4, 18", "figure 18", "figure 15", "figure 16", "figure 10")
    for axes, title in zip(places, titles, strict=True):
        axes.set_title(title, fontsize=9)
    plot_kinds([figure.add_subplot(cells[2, i : i + 3], projection="polar") for i in (0, 3)], results["kinds"])
    save_figure(figure, path)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_sentences", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads that are not grounded")
    add_judging_flags(parser, seeds=10, step=0.02, repeats=3)
    parser.add_argument("--quick", action="store_true", help="at most 2 seeds of 16 tokens, steps of 0.25, one timing")
    parser.add_argument("--picture", metavar="FILE", help="draw the figures here")
    return parser


if __name__ == "__main__":
    run_benchmark(main)
