"""Measured speeds as a table for people and as JSON for programs, with the machine, the versions and the command."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from heads.evaluation.float32_judge import Float32Judge
from heads.evaluation.methods import Method, Request
from heads.evaluation.throughput import Row, SameText, clock_of, compare, count_runs

PACKAGES = ("headway", "torch", "transformers", "tokenizers")


def speed_table(rows: Sequence[Row], title: str) -> Table:
    """One line a method. The ratio's range is that of single repeats."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold")
    for column in ("tokens\nper pass", "tokens\nper s", "ratio\nto plain", "its range\n", "repeated\n4-grams"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same text")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens_per_pass:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio:.2f}",
            f"{row.ratio_low:.2f}–{row.ratio_high:.2f}",
            f"{row.repeated_4grams:.0%}",
            row.same_text,
        )
    return table


@contextmanager
def progress_bar(console: Console, what: str, total: int) -> Iterator[Any]:
    """A bar on a terminal, nothing elsewhere; yields the function that advances it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def measure(
    console: Console,
    model: Any,
    methods: Sequence[Method],
    request: Request,
    prompts: Sequence[Tensor],
    repeats: int,
    what: str = "measuring",
    float32: Float32Judge | None = None,
) -> list[Row]:
    """`compare` on a model, under a progress bar; a float32 judge rules on what differs."""
    with progress_bar(console, what, count_runs(methods, prompts, repeats)) as advance:
        return compare(
            methods,
            prompts,
            repeats=repeats,
            verdict=SameText(model=model, request=request, float32=float32),
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
    """As the kernel names it where it does; platform.processor() is often empty."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return found | {"python": platform.python_version()}


def write_json(path: str | Path, blocks: Mapping[str, Sequence[Row]], device: torch.device, **more: Any) -> None:
    """Rows by block (what was asked for), and all that is needed to measure them again."""
    content = {
        "blocks": {name: [dataclasses.asdict(row) for row in rows] for name, rows in blocks.items()},
        "machine": describe_machine(device),
        "versions": versions(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        **more,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
