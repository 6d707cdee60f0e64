"""Seconds for k drafts, figure 6 of the paper: `python -m benchmarks.speed.superposed`.

k drafts of 10 tokens follow prefixes of 15, by four methods in turn: superposed decoding with and without n-grams,
nucleus sampling of k drafts one after another (the paper's comparison), and nucleus sampling of a batch of k, which is
the fair comparison: if a pass waits for its weights, a batch costs little more than one row. Ratios are medians over
prefixes and repeats. The backbone is the demo's or, with `--shape`, the demo's widened to a larger model's price.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import heads
from benchmarks.shared import (
    describe_cpu,
    figures_table,
    open_ngrams,
    parser_of,
    run_benchmark,
    say,
    wide_console,
    write_figures,
)
from benchmarks.speed.real_costs.shapes import SHAPES
from benchmarks.speed.real_costs.wide_backbone import widen_backbone
from heads.checkpoint.opening import open_heads
from heads.evaluation.pictures import PALETTE, label_ends, new_figure, save_figure, tidy
from heads.evaluation.prompts import default_prompts
from heads.evaluation.tables import describe_machine
from heads.ngrams.table import NgramTable

PREFIX, LENGTH = 15, 10
NGRAMS = "checkpoints/runs/demo-ngrams-6"
NUCLEUS = {"do_sample": True, "top_p": 0.9, "top_k": 0, "temperature": 1.0}
METHODS = ("superposed", "superposed, no n-grams", "nucleus, one after another", "nucleus, a batch of k")
PAPER = {3: 2.44, 8: 3.54}
"""How many times as fast as nucleus sampling one after another, by k (section 4.3)."""
LOOKUP_TARGET = 0.10


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Medians for one k.

    Attributes:
        milliseconds: of all k drafts of one prefix, by method.
        ratios: each method's time divided by superposed decoding's: median, least and most over prefixes and repeats.
        lookup: the share of a superposed step's time that n-gram look-ups and interpolation take.
    """

    k: int
    milliseconds: dict[str, float]
    ratios: dict[str, tuple[float, float, float]]
    lookup: float


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console, opened = wide_console(), open_heads(["checkpoints/demo/grounded"])
    ngrams, model = open_ngrams(opened, NGRAMS, order=6), opened.model
    prefixes = default_prompts(opened.source, opened.tokenizer, options.prefixes, PREFIX)
    if options.shape:
        model = widen_backbone(opened.model, SHAPES[options.shape], torch.float32)
    model.generation_config.eos_token_id = None
    cells = [measure(build_methods(model, ngrams, k), k, prefixes, options.repeats) for k in options.k]
    shape = f", widened to {options.shape}" if options.shape else ""
    say(console, f"checkpoints/demo/base{shape}; {len(prefixes)} prefixes of {PREFIX} tokens, {LENGTH} new tokens, "
        f"{options.repeats} interleaved repeats; {describe_cpu()}")  # fmt: skip
    show(console, cells)
    write_figures(options.json, {"machine": describe_machine(model.device), "cells": [asdict(cell) for cell in cells]})
    if options.picture:
        draw(cells, options.picture)


def measure(methods: dict[str, Callable[[Tensor], Any]], k: int, prefixes: Sequence[Tensor], repeats: int) -> Cell:
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    lookups: list[float] = []
    for run in methods.values():  # caches, kernels and the table's pages are warm from here on
        run(prefixes[0])
    rounds = [(r, i) for r in range(repeats) for i in range(len(prefixes))]
    for _, i in track(rounds, f"k = {k}", transient=True):
        for name, run in methods.items():
            start = time.perf_counter()
            out = run(prefixes[i])
            seconds[name].append(time.perf_counter() - start)
            if name == METHODS[0]:
                lookups.append(out.stats.seconds["draft"] / seconds[name][-1])
    base = seconds[METHODS[0]]
    return Cell(
        k=k,
        milliseconds={name: 1000 * statistics.median(found) for name, found in seconds.items()},
        ratios={name: spread([s / b for s, b in zip(found, base, strict=True)]) for name, found in seconds.items()},
        lookup=statistics.median(lookups),
    )


def build_methods(model: Any, ngrams: NgramTable, k: int) -> dict[str, Callable[[Tensor], Any]]:
    """The methods by name; each takes one prefix (1, T) and writes k drafts."""
    length = {"max_new_tokens": LENGTH, "pad_token_id": 0}
    superposed = {"do_sample": False, "return_dict_in_generate": True, **length}
    with_ngrams = heads.SuperposedDecoding(k=k, ngrams=ngrams)
    alone = heads.SuperposedDecoding(k=k, temperature=1.0)

    def one_after_another(prefix_1T: Tensor) -> list[Tensor]:
        return [model.generate(prefix_1T, **NUCLEUS, **length) for _ in range(k)]

    return {
        METHODS[0]: partial(model.generate, custom_generate=with_ngrams, **superposed),
        METHODS[1]: partial(model.generate, custom_generate=alone, **superposed),
        METHODS[2]: one_after_another,
        METHODS[3]: partial(model.generate, num_return_sequences=k, **NUCLEUS, **length),
    }


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest.

    >>> spread([3.0, 1.0, 2.0])
    (2.0, 1.0, 3.0)
    """
    return statistics.median(values), min(values), max(values)


def show(console: Console, cells: Sequence[Cell]) -> None:
    columns = [name.replace(", ", ",\n") + "\nms" for name in METHODS]
    table = figures_table("\nseconds for k drafts", "k", *columns, "one by one /\nsuperposed", "batch /\nsuperposed",
                          "n-grams,\nof a step")  # fmt: skip
    for cell in cells:
        ratios = (cell.ratios[name] for name in METHODS[2:])
        table.add_row(
            str(cell.k),
            *(f"{cell.milliseconds[name]:.1f}" for name in METHODS),
            *(f"{middle:.2f} ({low:.2f}–{high:.2f})" for middle, low, high in ratios),
            f"{cell.lookup:.0%}",
        )
    console.print(table)
    for cell in cells:
        if cell.k in PAPER:
            ratio = cell.ratios[METHODS[2]][0]
            verdict = "reached" if ratio >= PAPER[cell.k] else "not reached"
            say(console, f"k = {cell.k}: {ratio:.2f} × nucleus sampling one after another, {PAPER[cell.k]} in the "
                f"paper: {verdict}; {cell.ratios[METHODS[3]][0]:.2f} × a batch of {cell.k}")  # fmt: skip
    largest = max(cells, key=lambda cell: cell.k)
    verdict = "reached" if largest.lookup <= LOOKUP_TARGET else "not reached"
    say(console, f"n-grams take {largest.lookup:.1%} of a step at k = {largest.k}, target at most {LOOKUP_TARGET:.0%}: "
        f"{verdict}")  # fmt: skip


def draw(cells: Sequence[Cell], path: str) -> None:
    """Figure 6: milliseconds against k."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    ends = []
    for name, color in zip(METHODS, PALETTE, strict=False):
        points = [(cell.k, cell.milliseconds[name]) for cell in cells]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, linewidth=1.6)
        ends.append((points[-1][1], name, color))
    axes.set_ylim(0)
    label_ends(axes, cells[-1].k, ends)
    tidy(axes, f"milliseconds for k drafts of {LENGTH} tokens", "k")
    save_figure(figure, path)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.superposed", __doc__)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="drafts")
    parser.add_argument("--prefixes", type=int, default=8, help="held-out prefixes")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats")
    parser.add_argument("--shape", choices=list(SHAPES), help="widen the backbone to a larger model's price")
    parser.add_argument("--picture", metavar="FILE", help="draw figure 6 here")
    parser.add_argument("--json", metavar="FILE", help="write the figures, machine and versions here")
    return parser


if __name__ == "__main__":
    run_benchmark(main)
