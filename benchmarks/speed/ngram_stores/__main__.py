"""Stores of 6-grams side by side, and how ours grows: `python -m benchmarks.speed.ngram_stores`.

The corpus is the Python source of the installed packages. Each store is built and queried in its own process, on one
core: this library's, the paper's Python dictionaries, DuckDB, Polars, and the infini-gram engine. A package that is
missing here is looked for in the Python of `--python` or HEADWAY_STORES; a store without its package is left out, and a
line says so. Seconds are CPU seconds, which depend little on a busy machine. A question asks for one probability of one
n-gram order after one draft; a step of 8 drafts has 320 of them. The cost of building ours is extrapolated to 200
million tokens, the paper's corpus, by the power law of the last two points.
"""
# N tokens counted

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.shared import describe_cpu, figures_table, parser_of, run_benchmark, say, wide_console, write_figures
from benchmarks.speed.ngram_stores.corpus import corpus_file
from benchmarks.speed.ngram_stores.measure import SPARE_TOKENS
from benchmarks.speed.ngram_stores.stores import PACKAGES, STORES
from heads.evaluation.pictures import PALETTE, new_figure, save_figure, tidy
from heads.evaluation.tables import describe_machine

PAPER_TOKENS, MEMORY_TARGET = 200_000_000, 24 * 2**30
PAPER_DISK = 14e9  # bytes of the paper's dictionaries (section 4)
LIBRARIES, TIMES_AS_FAST = ("duckdb", "polars"), 2.0  # libraries that our own counting has to beat, and how clearly
MIB = 2**20
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "POLARS_MAX_THREADS", "RAYON_NUM_THREADS"), "1")
Figures = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    corpus = corpus_file(max(options.tokens, *options.curve) + SPARE_TOKENS)
    jobs = [(store, options.tokens) for store in options.stores] + [("headway", tokens) for tokens in options.curve]
    measured = [
        run_store(store, tokens, corpus, options.python)
        for store, tokens in track(jobs, "building and asking", transient=True)
    ]
    stores = dict(zip(options.stores, measured, strict=False))
    curve = [figures for figures in measured[len(options.stores) :] if figures is not None]
    say(console, f"Python files of the installed packages, n-grams of orders 1 to 6; {describe_cpu()}, one core each")
    show_stores(console, stores)
    show_curve(console, curve)
    machine = describe_machine(torch.device("cpu"))
    write_figures(options.json, {"machine": machine, "stores": stores, "curve": curve})
    if options.picture:
        draw(curve, options.picture)


def run_store(store: str, tokens: int, corpus: Path, python: str) -> Figures | None:
    """One store's figures; None if its package is missing."""
    here = next((found for found in (sys.executable, python) if has_packages(found, store)), None)
    if here is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [here, "-m", "benchmarks.speed.ngram_stores.stores", store, str(corpus), str(tokens), folder]
        done = subprocess.run(command, check=False, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"The store {store} ended with an error: {done.stderr.strip().splitlines()[-1]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def has_packages(python: str, store: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(any(u.find_spec(p) is None for p in {first_names(store)}))"
    try:
        return subprocess.run([python, "-c", code], check=False, env=environment(), capture_output=True).returncode == 0
    except FileNotFoundError:
        raise ValueError(f"--python {python} is no program; give the path of a Python interpreter.") from None


def first_names(store: str) -> list[str]:
    return [package.partition(".")[0] for package in PACKAGES[store]]


def environment() -> dict[str, str]:
    return {**os.environ, **THREADS, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}


def show_stores(console: Console, stores: dict[str, Figures | None]) -> None:
    tokens = max((found["tokens"] for found in stores.values() if found), default=0)
    table = figures_table(f"\n{tokens:,} tokens", "store", "built in,\nprocessor s", "of them\nMiB memory", "MiB disk",
                          "MiB disk\nwhile building", "ms for a step's\n320 questions", "questions/s")  # fmt: skip
    for store, found in stores.items():
        if found is None:
            continue
        asked = ("–", "–")
        if "step_ms" in found:
            asked = (f"{found['step_ms']:.2f}", f"{found['questions_per_second']:,.0f}")
        sizes = (f"{found[name] / MIB:,.0f}" for name in ("memory", "disk", "largest_disk"))
        table.add_row(store, f"{found['cpu_seconds']:.1f}", *sizes, *asked)
    console.print(table)
    for store in (store for store, found in stores.items() if found is None):
        say(console, f"{store}: its package is not installed here; give --python the path of a Python that has it.")
    ours = stores.get("headway")
    for store, found in stores.items():
        if ours and found and found is not ours:
            say(console, compare(store, found, ours))
    for store in LIBRARIES:
        if ours and (found := stores.get(store)):
            say(console, verdict(store, found, ours))


def verdict(store: str, found: Figures, ours: Figures) -> str:
    """A sentence on whether our own counting is at least `TIMES_AS_FAST` as fast as a library's.

    >>> verdict("duckdb", {"cpu_seconds": 3.0}, {"cpu_seconds": 2.0})
    'counting at least twice as fast as duckdb: does not hold (1.50 ×)'
    """
    ratio = found["cpu_seconds"] / ours["cpu_seconds"]
    holds = "holds" if ratio >= TIMES_AS_FAST else "does not hold"
    return f"counting at least twice as fast as {store}: {holds} ({ratio:.2f} ×)"


def compare(store: str, found: Figures, ours: Figures) -> str:
    """A sentence with another store's costs as multiples of ours, and whether its answers are ours.

    >>> ours = {"cpu_seconds": 2.0, "disk": 10, "step_ms": 0.5, "seen": 7, "total": 3.0}
    >>> compare("slow", {"cpu_seconds": 5.0, "disk": 5, "step_ms": 1.0, "seen": 7, "total": 3.0}, ours)
    'slow: 2.50 × our building, 0.50 × our disk, 2.00 × our step; the same answers'
    """
    text = f"{store}: {found['cpu_seconds'] / ours['cpu_seconds']:.2f} × our building, "
    text += f"{found['disk'] / ours['disk']:.2f} × our disk"
    if "step_ms" not in found:
        return text
    text += f", {found['step_ms'] / ours['step_ms']:.2f} × our step"
    if found["seen"] != ours["seen"]:
        return text + f"; OTHER ANSWERS: {found['seen']} n-grams seen, ours {ours['seen']}"
    if math.isclose(found["total"], ours["total"], rel_tol=1e-9):
        return text + "; the same answers"
    # infini-gram divides by all occurrences of the prefix, those at a document's end included
    return text + f"; the same n-grams seen, probabilities' sum {found['total']:.2f}, ours {ours['total']:.2f}"


def show_curve(console: Console, curve: Sequence[Figures]) -> None:
    table = figures_table("\nour table as the corpus grows", "tokens", "built in,\nprocessor s", "MiB memory",
                          "MiB disk", "MiB disk\nwhile building", "bytes a token", "ms for a step")  # fmt: skip
    for found in curve:
        sizes = (f"{found[name] / MIB:,.0f}" for name in ("memory", "disk", "largest_disk"))
        each = f"{found['disk'] / found['tokens']:.1f}"
        table.add_row(f"{found['tokens']:,}", f"{found['cpu_seconds']:.1f}", *sizes, each, f"{found['step_ms']:.2f}")
    console.print(table)
    if len(curve) < 2:
        return
    at = {name: extrapolate(curve, name, PAPER_TOKENS) for name in ("cpu_seconds", "memory", "disk", "largest_disk")}
    at_most = curve[-1]["memory"] * PAPER_TOKENS / curve[-1]["tokens"]
    verdict = "reached" if at_most <= MEMORY_TARGET else "not reached"
    say(
        console,
        f"continued to {PAPER_TOKENS:,} tokens: {at['cpu_seconds'] / 60:.1f} minutes of one core, "
        f"{at['memory'] / 2**30:.1f} GiB of memory (in proportion to the tokens, "
        f"which is too much: {at_most / 2**30:.1f}; at most 24: {verdict}), {at['disk'] / 1e9:.1f} GB of disk (the "
        f"paper's: {PAPER_DISK / 1e9:.0f}), {at['largest_disk'] / 1e9:.1f} GB while building",
    )


def extrapolate(curve: Sequence[Figures], name: str, tokens: float) -> float:
    """A figure at more tokens, by the power law through the last two points.

    >>> extrapolate([{"tokens": 1, "disk": 3.0}, {"tokens": 2, "disk": 6.0}], "disk", 8)
    24.0
    """
    first, last = curve[-2:]
    power = math.log(last[name] / first[name]) / math.log(last["tokens"] / first["tokens"])
    return float(last[name] * (tokens / last["tokens"]) ** power)


def draw(curve: Sequence[Figures], path: str) -> None:
    """Seconds, memory and disk of building against tokens, continued to the paper's corpus."""
    figure = new_figure(9, 3.2)
    panels = (("cpu_seconds", "processor seconds", 1.0), ("memory", "GiB memory", 2.0**30), ("disk", "GB disk", 1e9))
    for axes, (name, label, unit) in zip(figure.subplots(1, 3), panels, strict=True):
        points = [(found["tokens"] / 1e6, found[name] / unit) for found in curve]
        beyond = (PAPER_TOKENS / 1e6, extrapolate(curve, name, PAPER_TOKENS) / unit)
        axes.loglog(*zip(*points, strict=True), color=PALETTE[0], marker="o", markersize=4)
        axes.loglog(*zip(points[-1], beyond, strict=True), color=PALETTE[0], linestyle=":", marker="o", markersize=4)
        tidy(axes, label, "million tokens")
    save_figure(figure, path)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.ngram_stores", __doc__)
    parser.add_argument("--tokens", type=int, default=5_000_000, help="tokens that every store counts")
    curve = [2_500_000, 5_000_000, 10_000_000, 20_000_000]
    parser.add_argument("--curve", type=int, nargs="+", default=curve, help="tokens that ours counts as well")
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES), help="what is compared")
    python = os.environ.get("HEADWAY_STORES", sys.executable)
    parser.add_argument("--python", default=python, help="a Python that has the packages missing here")
    parser.add_argument("--picture", metavar="FILE", help="draw the curve here")
    parser.add_argument("--json", metavar="FILE", help="write the figures, machine and versions here")
    return parser


if __name__ == "__main__":
    run_benchmark(main)
