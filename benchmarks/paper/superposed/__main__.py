"""Measure superposed decoding as its paper does: `python -m benchmarks.paper.superposed [PART …] [--quick]`.

Finished parts are stored, so an interrupted call goes on. With PART only these parts are measured, without a report.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.superposed.bench import QUICK, Plan, SuperposedBench
from benchmarks.paper.superposed.claims import Rows, judge_claims
from benchmarks.paper.superposed.facts import SHIPPED, measure_facts, read_facts
from benchmarks.paper.superposed.linearity import measure_linearity
from benchmarks.paper.superposed.pictures import draw_linearity, draw_quality
from benchmarks.paper.superposed.quality import measure_drafts, measure_long_texts, measure_sweeps
from benchmarks.paper.superposed.rankings import JUDGES, measure_rankings
from benchmarks.paper.superposed.report import print_report
from benchmarks.paper.superposed.tuning import settings_of, tune
from benchmarks.shared import parser_of, run_benchmark, say, wide_console

PARTS = {
    "tune": "α, τ and δ on the validation split (section 4.1, appendices B and C)",
    "drafts": "perplexity of each draft and the best, examples (tables 1 to 5, figures 4 and 14)",
    "rankings": "drafts ranked by a judge (figures 7 and 12)",
    "sweeps": "by number of drafts, prefix and length; repetition and Self-BLEU (figures 8 to 11)",
    "facts": "exact match on short answers (figure 5)",
    "linearity": "cosines of superposed and summed readings (figures 3 and 15)",
    "long": "texts of 200 tokens with and without resets (appendix I)",
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        raise ValueError(f"The part {sorted(unknown)[0]!r} was given; allowed are {', '.join(PARTS)}.")
    plan = QUICK if options.quick else Plan()
    bench = SuperposedBench(
        plan=dataclasses.replace(plan, prefixes=options.prefixes or plan.prefixes),
        backbone=options.backbone,
        second=options.second,
        folder=options.out,
        ngrams_folder=options.ngrams,
    )
    rows = measure(bench, options.parts or list(PARTS), options.facts, options.judge)
    if options.parts:
        return
    console = wide_console()
    claims = judge_claims(rows)
    print_report(console, bench, rows, claims)
    for draw, name in ((draw_quality, "superposed_quality.png"), (draw_linearity, "superposed_linearity.png")):
        if options.pictures:
            draw(rows, options.pictures / name)
            say(console, f"picture: {options.pictures / name}")


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.superposed", __doc__)
    parts = "; ".join(f"{name}: {text}" for name, text in PARTS.items())
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"measure these alone. {parts}")
    parser.add_argument("--quick", action="store_true", help="fewer prefixes, settings and points")
    parser.add_argument("--backbone", default="checkpoints/demo/base", help="the backbone that decodes")
    parser.add_argument(
        "--second", default="checkpoints/demo/draft", help="the judge, same tokenizer; decodes in table 2"
    )
    parser.add_argument("--ngrams", type=Path, default=Path("checkpoints/runs/demo-ngrams-6"), help="table of n-grams")
    parser.add_argument("--facts", type=Path, default=SHIPPED, help="JSONL of prompts and answers")
    parser.add_argument("--judge", choices=JUDGES, default="likelihood", help="who ranks; endpoint: HEADWAY_JUDGE_URL")
    parser.add_argument("--prefixes", type=int, help="prefixes of the test split")
    parser.add_argument(
        "--out", type=Path, default=Path("checkpoints/runs/superposed"), help="folder of finished parts"
    )
    parser.add_argument("--pictures", type=Path, help="folder to draw pictures in")
    return parser


def measure(bench: SuperposedBench, parts: Sequence[str], facts: Path, judge: str) -> Rows:
    """The rows of some parts; all but the cosines need the tuned settings, rankings need the drafts."""
    tuned = bench.row("tune", tune)
    settings = settings_of(tuned)
    rows = {"tune": tuned}
    if {"drafts", "rankings"} & set(parts):
        rows["drafts"] = bench.row("drafts", functools.partial(measure_drafts, settings=settings))
    if "rankings" in parts:
        ranked = functools.partial(measure_rankings, drafts=rows["drafts"], judge=judge)
        rows["rankings"] = bench.row("rankings", ranked, judge)
    if "sweeps" in parts:
        rows["sweeps"] = bench.row("sweeps", functools.partial(measure_sweeps, settings=settings))
    if "facts" in parts:
        asked = functools.partial(measure_facts, facts=facts, settings=settings)
        rows["facts"] = bench.row("facts", asked, read_facts(facts))
    if "linearity" in parts:
        rows["linearity"] = bench.row("linearity", measure_linearity)
    if "long" in parts:
        rows["long"] = bench.row("long", functools.partial(measure_long_texts, settings=settings))
    return rows


if __name__ == "__main__":
    run_benchmark(main)
