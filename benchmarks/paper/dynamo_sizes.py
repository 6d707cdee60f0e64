"""DynaMo against the backbone's size (figures 17 and 20): `python -m benchmarks.paper.dynamo_sizes`.

Three backbones of the demo's architecture are trained from random weights by `configs/demo/base.yaml`, then each with
DynaMo heads by `configs/demo/dynamo.yaml`, on equal data with equal steps and rates. Their texts are judged as in
benchmarks/paper/dynamo_sentences.py. Figure 17 shows the texts' scores against the speed-up for each size. Figure 20
shows the same-quality speed-up, by measured seconds and by tokens per pass, against the backbone's size and against the
parameters that heads add.

Runs, texts and answers are stored, so a repeated call goes on where it was stopped, even within a training.
"""
# E value of ε_b, N pair of a prompt and a seed

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.paper.dynamo_sentences import (
    PAPERS_OWN,
    Bench,
    Figures,
    Point,
    add_judging_flags,
    crossing_of,
    describe_same_quality,
    open_judge,
    thresholds,
)
from benchmarks.shared import describe_cpu, figures_table, open_ngrams, parser_of, run_benchmark, say, wide_console
from heads.checkpoint.opening import open_heads
from heads.evaluation.pictures import PALETTE, new_figure, save_figure, tidy

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


SIZES = (Size(width=96, layers=4), Size(width=128, layers=6), Size(width=192, layers=8))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One size with the figures of each ε_b."""

    size: Size
    backbone: int
    overhead: float
    perplexity: float
    points: Sequence[Point]
    plain_score: float
    drafted: int


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    open_ngrams(open_heads([DEMO]))  # the demo's table, which serves all sizes: one tokenizer, one corpus
    found = [judged(size, options, console) for size in SIZES]
    say(
        console,
        f"\n{options.steps} steps of the backbone, {options.heads_steps} with heads; {options.prompts} prompts × "
        f"{options.seeds} seeds, {options.tokens} new tokens, judge: {options.judge}; {describe_cpu()}",
    )
    console.print(table_of(found))
    for line in orderings(found):
        say(console, line)
    draw(found, options.picture or str(Path(options.out) / "sizes.png"))


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.dynamo_sizes", __doc__)
    parser.add_argument("--steps", type=int, default=600, help="steps of each backbone, of 16 blocks of 256 tokens")
    parser.add_argument("--heads-steps", type=int, default=300, help="steps with heads, of 8 blocks")
    add_judging_flags(parser, seeds=5, step=0.1)
    parser.add_argument("--out", default="checkpoints/runs/dynamo-sizes", help="runs are kept here")
    parser.add_argument("--picture", metavar="FILE", help="draw the figures here")
    return parser


def judged(size: Size, options: argparse.Namespace, console: Console) -> Judged:
    """Train what is missing, write the texts and have them judged."""
    folder = Path(options.out) / f"{size.folder}-{options.steps}-{options.heads_steps}"
    base, heads = folder / "base", folder / "heads"
    train(folder / "config", base, "base", options.steps, size, console)
    train(base / "last", heads, "dynamo", options.heads_steps, size, console)
    opened = open_heads([str(heads / "last")])
    opened.model.generation_config.eos_token_id = None
    options.heads = str(heads / "last")
    bench = Bench(opened, options, open_judge(options, opened))
    (token_heads,) = opened.token_heads.values()
    return Judged(
        size=size,
        backbone=sum(p.numel() for p in opened.model.parameters()),
        overhead=sum(p.numel() for p in token_heads.parameters()) / sum(p.numel() for p in opened.model.parameters()),
        perplexity=math.exp(last_loss(heads)),
        points=[bench.point(threshold, PAPERS_OWN) for threshold in thresholds(options.step)],
        plain_score=float(np.nanmean(bench.plain_scores)),
        drafted=1 + token_heads.num_heads,
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


def crossing(one: Judged, speed: Callable[[Point], Figures]) -> float | None:
    """Figure 20's same-quality speed-up, at most the number of tokens that a pass can emit."""
    found = crossing_of(one.points, speed)
    return None if found is None else min(found, float(one.drafted))


def table_of(found: Sequence[Judged]) -> Any:
    columns = (
        "parameters",
        "heads add",
        "PPL₁",
        "plain's score",
        "score, ε_b = 1",
        "same-quality speed-up",
        "drafting free",
    )
    table = figures_table("DynaMo by the backbone's size", "backbone", *columns)
    for one in found:
        table.add_row(
            one.size.name,
            f"{one.backbone:,}",
            f"{one.overhead:.0%}",
            f"{one.perplexity:.2f}",
            f"{one.plain_score:.2f}",
            f"{np.nanmean(one.points[-1].score_N):.2f}",
            describe_same_quality(one.points, lambda point: point.speed_N),
            describe_same_quality(one.points, lambda point: point.passes_N),
        )
    return table


def orderings(found: Sequence[Judged]) -> list[str]:
    """What figures 17 and 20 show: larger models' texts score better at every speed-up; sizes and speed-ups are related
    weakly."""
    better = all(
        np.nanmean(large.score_N) > np.nanmean(small.score_N)
        for one, other in itertools.pairwise(found)
        for small, large in zip(one.points, other.points, strict=True)
    )
    speed_ups = [crossing(one, lambda point: point.passes_N) for one in found]
    known = [f"{x:.2f}" if x is not None else "none" for x in speed_ups]
    return [
        f"figure 17, larger models' texts score better at every ε_b: {'holds' if better else 'does not hold here'}",
        f"figure 20, speed-up of the same quality, drafting free, by size: {', '.join(known)} (three give no law)",
    ]


def draw(found: Sequence[Judged], path: str) -> None:
    """Figure 17, then figure 20 by size and by overhead."""
    figure = new_figure(12, 3.8)
    scores, sizes, overheads = figure.subplots(1, 3)
    for color, one in zip(PALETTE, found, strict=False):
        speeds = [float(point.speed_N.mean()) for point in one.points]
        scores.plot(speeds, [np.nanmean(p.score_N) for p in one.points], color=color, marker="o", label=one.size.name)
        scores.axhline(one.plain_score, color=color, linestyle="--", linewidth=1)
    scores.legend(frameon=False, fontsize=8)
    tidy(scores, "score by size (figure 17)", "× plain; dashed: plain's score")
    for color, (label, speed) in zip(
        PALETTE, {"measured": lambda p: p.speed_N, "drafting free": lambda p: p.passes_N}.items(), strict=False
    ):
        known = [(one, x) for one in found if (x := crossing(one, speed)) is not None]
        for axes, place in ((sizes, lambda one: one.backbone / 1e6), (overheads, lambda one: 100 * one.overhead)):
            axes.plot([place(one) for one, _ in known], [x for _, x in known], color=color, marker="o", label=label)
    sizes.legend(frameon=False, fontsize=8)
    tidy(sizes, "speed-up of the same quality (figure 20)", "million parameters")
    tidy(overheads, "by parameter overhead", "heads over backbone, %")
    save_figure(figure, path)


if __name__ == "__main__":
    run_benchmark(main)
