"""DynaMo against the backbone's size (figures 3, 17 and 20): `python -m benchmarks.paper.dynamo_sizes`.

Three backbones of the demo's architecture are trained from random weights by `configs/demo/base.yaml`, then each with
DynaMo heads by `configs/demo/dynamo.yaml`, on equal data with equal steps and rates. Their texts are judged as in
benchmarks/paper/dynamo_sentences.py. Figure 3 shows the win rate against the speed-up for each size, figure 17 the
texts' scores. Figure 20 shows the same-quality speed-up, by measured seconds and by tokens per pass, against the
backbone's size and against the parameters that heads add.

Runs, texts and answers are stored, so a repeated call goes on where it was stopped, even within a training; seconds are
measured anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from heads.evaluation.judged.pictures import base_score, plot_rates, plot_scores
from heads.evaluation.judged.win_rates import Figures, describe, show_rate
from heads.evaluation.pictures import PALETTE, new_figure, save_figure, tidy
from heads.evaluation.runs.ratios import LEAST_UNITS, student
from heads.evaluation.runs.task import SuiteTask

BASE = Path("checkpoints/demo/base")
DEMO = "checkpoints/demo/dynamo"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
HEAD_DIM = 32


@dataclass(frozen=True, kw_only=True)
class Size:
    """A backbone of the demo's kind."""

    width: int
    layers: int

    @property
    def name(self) -> str:
        return f"{self.width} wide, {self.layers} layers"

    @property
    def folder(self) -> str:
        return f"{self.width}x{self.layers}"


SIZES = (Size(width=64, layers=3), Size(width=96, layers=4), Size(width=128, layers=6))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One size.

    Attributes:
        results: the suite's, with tokens per pass as the speed.
        rates, scores: its lines against measured speed-ups.
    """

    size: Size
    backbone: int
    overhead: float
    perplexity: float
    results: dict[str, Any]
    rates: dict[str, Any]
    scores: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    open_ngrams(open_heads([DEMO]))  # the demo's table, which serves all sizes: one tokenizer, one corpus
    found = [judged(size, options, console) for size in SIZES]
    say(
        console,
        f"\n{options.steps} steps of the backbone, {options.heads_steps} with heads; {options.prompts} prompts × "
        f"{options.seeds} seeds, {options.tokens} new tokens, judge: {options.judge}; {describe_cpu()}\n"
        f"{describe_seconds(options.repeats)}",
    )
    console.print(table_of(found))
    for line in orderings(found):
        say(console, line)
    draw(found, options.picture or str(Path(options.out) / "sizes.png"))


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_sizes", __doc__)
    parser.add_argument("--steps", type=int, default=600, help="steps of each backbone, of 16 blocks of 256 tokens")
    parser.add_argument("--heads-steps", type=int, default=300, help="steps with heads, of 8 blocks")
    add_judging_flags(parser, seeds=5, step=0.1, repeats=3)
    parser.add_argument("--out", default="checkpoints/runs/dynamo-sizes", help="runs are kept here")
    parser.add_argument("--picture", metavar="FILE", help="draw the figures here")
    return parser


def judged(size: Size, options: argparse.Namespace, console: Console) -> Judged:
    """Train what is missing, write the texts and have them judged."""
    folder = Path(options.out) / f"{size.folder}-{options.steps}-{options.heads_steps}"
    base, heads = folder / "base", folder / "heads"
    train(folder / "config", base, "base", options.steps, size, console)
    train(base / "last", heads, "dynamo", options.heads_steps, size, console)
    config, task = config_of(options), SuiteTask(folder=heads / "last")
    results = judge_texts(str(heads / "last"), config)
    rates, scores = by_seconds(results, time_texts(task, config, results["thresholds"], options.repeats))
    backbone = sum(p.numel() for p in task.model.parameters())
    return Judged(
        size=size,
        backbone=backbone,
        overhead=sum(p.numel() for p in task.token_heads.parameters()) / backbone,
        perplexity=math.exp(last_loss(heads)),
        results=results,
        rates=rates,
        scores=scores,
    )


def train(backbone: Path, out: Path, recipe: str, steps: int, size: Size, console: Console) -> None:
    """Train by one of the demo's configs; an interrupted run is resumed, and a finished one is left as it is."""
    if (out / "last").is_dir() and finished_steps(out) >= steps:
        return
    say(console, f"training {size.name}: configs/demo/{recipe}.yaml, {steps} steps, in {out}")
    if recipe == "base":
        write_config(size, backbone)
    command = [sys.executable, "train.py", "--config", f"configs/demo/{recipe}.yaml"]
    command += ["--backbone.name_or_path", str(backbone), "--output_dir", str(out), "--trainer.max_steps", str(steps)]
    command += ["--save_every_steps", "100", "--evaluation.every_steps", str(max(1, steps // 3))]
    if out.is_dir():
        command += ["--resume", "true"]
    if subprocess.run(command, check=False).returncode:
        raise ValueError(f"The training in {out} failed; its errors stand above. A repeated call goes on with it.")


def write_config(size: Size, folder: Path) -> None:
    """The demo backbone's config at another size, with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((BASE / "config.json").read_text(encoding="utf-8"))
    heads = size.width // HEAD_DIM
    config |= {"hidden_size": size.width, "intermediate_size": size.width * 8 // 3, "num_hidden_layers": size.layers}
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": HEAD_DIM}
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][: size.layers]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in TOKENIZER:
        shutil.copy(BASE / name, folder / name)


def evaluations(run: Path) -> list[dict[str, Any]]:
    lines = (
        (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if (run / "metrics.jsonl").is_file() else []
    )
    return [row for row in map(json.loads, lines) if "eval_backbone_loss" in row]


def finished_steps(run: Path) -> int:
    return max((row["step"] for row in evaluations(run)), default=0)


def last_loss(run: Path) -> float:
    return float(evaluations(run)[-1]["eval_backbone_loss"])


def table_of(found: Sequence[Judged]) -> Any:
    columns = ("parameters", "heads add", "PPL₁", "plain's score", "score, ε_b = 1", "same-quality speed-up")
    table = figures_table("DynaMo by the backbone's size", "backbone", *columns, "drafting free")
    for one in found:
        table.add_row(
            one.size.name,
            f"{one.backbone:,}",
            f"{one.overhead:.0%}",
            f"{one.perplexity:.2f}",
            f"{base_score(one.results):.2f}",
            show_rate(one.scores["means"][-1], None),
            describe(one.rates),
            describe(one.results["overall"]),
        )
    return table


def orderings(found: Sequence[Judged]) -> list[str]:
    """What figures 17 and 20 show: larger models' texts score better; sizes and speed-ups are related weakly."""
    known = [show_rate(one.results["overall"]["speed_up"], None) for one in found]
    return [
        *(f"figure 17, {compare_scores(small, large)}" for small, large in itertools.pairwise(found)),
        f"figure 20, speed-up of the same quality, drafting free, by size: {', '.join(known)} (three give no law)",
    ]


def compare_scores(small: Judged, large: Judged) -> str:
    """Whether the larger backbone's texts score better, by the differences of prompts' mean scores over all ε_b.

    Both continue the same prompts. The interval is Student's 95 % interval of the mean difference over prompts.
    """
    difference_P = prompt_scores(large) - prompt_scores(small)
    difference_P = difference_P[np.isfinite(difference_P)]
    statement = f"texts of {large.size.name} score better than those of {small.size.name}, mean of all ε_b"
    if len(difference_P) < LEAST_UNITS:
        return f"{statement}: not settled by these texts, which have scores for {len(difference_P)} prompts"
    mean = float(difference_P.mean())
    half = student(len(difference_P) - 1) * float(difference_P.std(ddof=1)) / math.sqrt(len(difference_P))
    verdict = "holds" if mean > half else "does not hold" if mean < -half else "not settled by these texts"
    interval = f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f})"
    return f"{statement}: {verdict}, {interval} over {len(difference_P)} prompts"


def prompt_scores(one: Judged) -> Figures:
    """(P,): the mean score of each prompt's texts of dynamic decoding; nan without one."""
    scores_P, scored_P = (np.sum(one.results["by_prompt"][name], axis=0) for name in ("scores", "scored"))
    return np.divide(scores_P, scored_P, out=np.full(scores_P.shape, np.nan), where=scored_P > 0)


def draw(found: Sequence[Judged], path: str) -> None:
    """Figures 3 and 17, then figure 20 by size and by overhead."""
    figure = new_figure(12, 8)
    ((rates, scores), (sizes, overheads)) = figure.subplots(2, 2)
    plot_rates(rates, {one.size.name: one.rates for one in found}, "× plain; band: 95 % (figure 3)")
    bases = {one.size.name: base_score(one.results) for one in found}
    plot_scores(scores, {one.size.name: one.scores for one in found}, bases, "× plain; dashed: plain (figure 17)")
    draw_same_quality(found, sizes, overheads)
    tidy(sizes, "speed-up of the same quality (figure 20)", "million parameters")
    tidy(overheads, "by parameter overhead", "heads over backbone, %")
    save_figure(figure, path)


def draw_same_quality(found: Sequence[Judged], sizes: Any, overheads: Any) -> None:
    """A line for each way of counting speed; a sentence in place of empty axes where no size has such a speed-up."""
    ways = {"measured": [one.rates for one in found], "drafting free": [one.results["overall"] for one in found]}
    for color, (label, lines) in zip(PALETTE, ways.items(), strict=False):
        known = [(one, x["speed_up"]) for one, x in zip(found, lines, strict=True) if x["speed_up"] is not None]
        for axes, xs in (
            (sizes, [one.backbone / 1e6 for one, _ in known]),
            (overheads, [100 * one.overhead for one, _ in known]),
        ):
            axes.plot(xs, [x for _, x in known], color=color, marker="o", label=label)
    if any(len(line.get_xdata()) for line in sizes.get_lines()):
        sizes.legend(frameon=False, fontsize=8)
        return
    for axes in (sizes, overheads):
        axes.text(0.5, 0.5, "none: the win rate falls with speed at no size", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])


if __name__ == "__main__":
    run_benchmark(main)
