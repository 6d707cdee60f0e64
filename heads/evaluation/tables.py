"""Show measured speeds as a table, and write them as JSON with machine, versions and command."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from heads.evaluation.lossy.other_model import log_likelihood
from heads.evaluation.methods import Method, Settings
from heads.evaluation.same_text import Float32Judge, SameText
from heads.evaluation.throughput import MethodResult, clock_of, compare, count_runs

SPEED_COLUMNS = (
    "tokens\nper\npass",
    "tokens\nper\nsecond",
    "ratio\nto\nplain",
    "95 %\nover\nprompts",
    "range\nof the\nratio",
    "4-grams\nthat\nrepeat",
)
OTHER_MODEL = "other\nmodel's ppl\nand its 95 %"
PACKAGES = ("headway", "torch", "transformers", "tokenizers")


def speed_table(results: Sequence[MethodResult], title: str) -> Table:
    """One line for each method: 95 % interval of the ratio over prompts, its range over single repeats.

    If another model scored the texts, their perplexity under it stands beside the repeated 4-grams, with its 95 %
    interval over prompts.
    """
    scored = any(result.perplexity is not None for result in results)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("method", overflow="fold")
    for column in (*SPEED_COLUMNS, *([OTHER_MODEL] if scored else [])):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same text")
    for result in results:
        table.add_row(
            result.name,
            f"{result.tokens_per_pass:.2f}",
            f"{result.tokens_per_second:.1f}",
            f"{result.ratio:.2f}",
            f"{result.interval[0]:.2f}–{result.interval[1]:.2f}",
            f"{result.ratio_low:.2f}–{result.ratio_high:.2f}",
            f"{result.repeated_4grams:.0%}",
            *([describe_perplexity(result)] if scored else []),
            result.same_text,
        )
    return table


def describe_perplexity(result: MethodResult) -> str:
    low, high = result.perplexity_interval or (math.nan, math.nan)
    return f"{result.perplexity or math.nan:.1f} ({low:.1f}–{high:.1f})"


def describe_rulings(results: Sequence[MethodResult], tokenizer: Any) -> str:
    """A line for each place where a text differs from plain generate's, and how many of them are within rounding."""
    rulings = [(result.name, ruling) for result in results for ruling in result.rulings]
    lines = [f"{name}, {ruling.describe(tokenizer)}" for name, ruling in rulings]
    excused = sum(ruling.within_rounding for _, ruling in rulings)
    plain = sum(ruling.preferred == "plain" for _, ruling in rulings)
    total = (
        f"Texts differ from plain generate's at {len(rulings)} places, {excused} of them within rounding; float32 "
        f"prefers plain's token {plain} times."
    )
    return "\n".join([*lines, total])


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Any]:
    """Show a bar on a terminal and nothing elsewhere; yields the function that advances it, by one if not told."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda by=1: progress.advance(task, by)


def measure(
    console: Console,
    model: Any,
    methods: Sequence[Method],
    settings: Settings,
    prompts: Sequence[Tensor],
    repeats: int,
    what: str = "measuring",
    float32: Float32Judge | None = None,
    other_model: Any = None,
) -> list[MethodResult]:
    """`compare` methods on a model under a progress bar.

    Args:
        float32: decides which differences are excused; None uses the model's own scores.
        other_model: a model with the same tokenizer that scores all texts; None leaves that column out.
    """
    with progress_bar(console, what, count_runs(methods, prompts, repeats)) as advance:
        return compare(
            methods,
            prompts,
            repeats=repeats,
            verdict=SameText(model=model, settings=settings, float32=float32),
            log_likelihood=None if other_model is None else partial(log_likelihood, other_model),
            clock=clock_of(model.device),
            advance=advance,
        )


def describe_machine(device: torch.device) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "system": platform.platform(),
    }


def cpu_name() -> str:
    """The kernel's name for the processor, if it has one; platform.processor() is often empty."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    return {name: version_of(name) for name in PACKAGES} | {"python": platform.python_version()}


def version_of(package: str) -> str:
    """The installed version; a package that runs from its folder alone has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def write_json(
    path: str | Path, blocks: Mapping[str, Sequence[MethodResult]], device: torch.device, **more: Any
) -> None:
    """Write results by block (of shared settings), with all that is needed to repeat them."""
    content = {
        "blocks": {name: [dataclasses.asdict(result) for result in results] for name, results in blocks.items()},
        "machine": describe_machine(device),
        "versions": versions(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **more,
    }
    write_content(path, content)


def write_content(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, and create its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
