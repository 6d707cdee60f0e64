"""What benchmarks share: options, the console, tables, files of figures, held-out prompts and the demo's n-grams."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.stale import git
from heads.checkpoint.opening import Opened
from heads.cli.ngrams import count_ngrams_command
from heads.evaluation.prompts import default_prompts
from heads.evaluation.tables import describe_machine
from heads.ngrams.table import NgramTable
from heads.products.packed import onednn_multiplies
from train.run import explain_errors

Answer = TypeVar("Answer")

ROOT = Path(__file__).resolve().parent.parent
ON_BASE = ("medusa", "grounded", "gru", "eagle")
"""Families of the shipped heads on the demo backbone: a table that compares families has a row for each."""
OWN_BACKBONE = ("dynamo",)
"""Families whose shipped heads have a backbone of their own."""
WIDTH = 132
NGRAMS = "checkpoints/runs/demo-ngrams"


def shipped(*families: str) -> list[str]:
    """Folders of shipped heads.

    >>> shipped("medusa", "eagle")
    ['checkpoints/demo/medusa', 'checkpoints/demo/eagle']
    """
    return [f"checkpoints/demo/{family}" for family in families]


def parser_of(module: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m <module>`: the docstring's first line describes it, and help shows defaults."""
    lines = (text or "").splitlines()
    formatter = argparse.ArgumentDefaultsHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {module}", description=lines[0], formatter_class=formatter)


def add_decoding_flags(parser: argparse.ArgumentParser, *, prompts: int, new_tokens: int, repeats: int) -> None:
    """Add --prompts, --new-tokens and --repeats, with these defaults."""
    parser.add_argument("--prompts", type=int, default=prompts, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=new_tokens, help="new tokens for each")
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved repeats")


def add_file_flags(parser: argparse.ArgumentParser, *, picture: str | None = None) -> None:
    """Add --json, and with `picture`, which says what is drawn, --picture."""
    parser.add_argument("--json", metavar="FILE", help="write rows, machine, versions and command here")
    if picture is not None:
        parser.add_argument("--picture", metavar="FILE", help=f"draw {picture} here, as PNG")


def parse_with_defaults_of(
    flag: str, defaults: Mapping[str, Any], parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse with these defaults if the flag is given; options on the command line still override them.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("--quick", action="store_true"), parser.add_argument("--tokens", type=int, default=128)
    >>> [parse_with_defaults_of("quick", {"tokens": 32}, parser, given.split()).tokens for given in ("", "--quick")]
    [128, 32]
    """
    if getattr(parser.parse_args(arguments), flag):
        parser.set_defaults(**defaults)
    return parser.parse_args(arguments)


def run_benchmark(main: Callable[[], Any]) -> None:
    """Run a benchmark; an error that a user can cause is printed as one sentence."""
    transformers.logging.disable_progress_bar()  # benchmarks show their own
    explain_errors(main)


def wide_console() -> Console:
    """The terminal's own width; `WIDTH` columns where there is no terminal, as in a file."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def say(console: Console, text: str) -> None:
    """Print without colours and added line breaks, so that a file gets the same text as a terminal."""
    console.print(text, highlight=False, soft_wrap=True)


def describe_cpu() -> str:
    """The processor, its widest vector instructions and the threads of this process.

    A processor's name alone does not say whether it multiplies bfloat16 itself, on which figures in bfloat16 depend.
    """
    machine = describe_machine(torch.device("cpu"))
    instructions = torch.backends.cpu.get_cpu_capability()
    if os.environ.get("ATEN_CPU_CAPABILITY"):
        instructions += " at most, by ATEN_CPU_CAPABILITY"
    if onednn_multiplies(torch.bfloat16):
        instructions += " with bfloat16"
    return f"{machine['cpu']}, {instructions}, {machine['threads']} threads"


def describe_state() -> str:
    """The day and the commit, for figures on a page: "2026-11-24, commit abc1234"."""
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {(git('rev-parse', '--short', 'HEAD') or 'unknown')}"


def figures_table(title: str | None, *columns: str, left: int = 1, look: box.Box = box.SIMPLE_HEAD) -> Table:
    """A table whose first `left` columns name the row; the others are figures, aligned on the right."""
    table = Table(title=title, title_justify="left", box=look, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i < left)
    return table


def or_dash(value: float | None, form: str = ".3f") -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def with_spread(values: Sequence[float], form: str) -> str:
    """The mean, with the standard deviation where there are several values.

    >>> with_spread([1.5], "{:.2f}"), with_spread([1.0, 3.0], "{:.1f}")
    ('1.50', '2.0±1.4')
    """
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean}±{form.format(statistics.stdev(values))}"


def ratio_cell(measured: Any, method: str, *, digits: int = 0) -> str:
    """Plain generation's speed, or another method's ratio to it with its interval, for a page.

    Args:
        measured: has `tokens_per_second`, `ratio` and `interval`.
    """
    if method == "plain":
        return f"{measured.tokens_per_second:.{digits}f}&nbsp;tokens/s"
    return f"{measured.ratio:.2f}&nbsp;({measured.interval[0]:.2f}–{measured.interval[1]:.2f})"


def write_figures(path: str | Path | None, content: Any) -> None:
    """Write figures as JSON where a path was given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_block(file: Path, markers: tuple[str, str], block: str) -> None:
    """Put a generated block into a page, between its markers.

    Raises:
        ValueError: the page has lost one of them.
    """
    before, _, rest = file.read_text(encoding="utf-8").partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not end:
        raise ValueError(f"{file} has lost the markers {markers[0]} and {markers[1]}; put them back.")
    file.write_text(f"{before}{markers[0]}\n{block}{end}{after}", encoding="utf-8")


def held_out(opened: Opened, count: int, length: int = 64) -> list[Tensor]:
    """Prompts (1, T) from the backbone's held-out texts, on its device."""
    found = default_prompts(opened.source, opened.tokenizer, count, length)
    return [prompt_1T.to(opened.model.device) for prompt_1T in found]


def open_ngrams(opened: Opened, folder: str = NGRAMS, order: int = 3) -> NgramTable:
    """The n-gram table of the demo corpus, which is counted if it does not exist."""
    if not Path(folder).is_dir():
        heldout = str(Path(opened.source) / "training.json")
        count_ngrams_command(
            tokenizer=opened.source, data=["python-stdlib"], out=Path(folder), heldout_list=heldout, order=order
        )
    return NgramTable.open(folder, opened.tokenizer)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The value at x by linear interpolation among points (x, value); None outside of them.

    >>> interpolate([(2.0, 0.3), (1.0, 0.5)], 1.5), interpolate([(1.0, 0.5), (2.0, 0.3)], 2.5)
    (0.4, None)
    """
    for (left, low), (right, high) in itertools.pairwise(sorted(points)):
        if left <= x <= right and right > left:
            return low + (high - low) * (x - left) / (right - left)
    return None


def in_own_process(target: Callable[..., Answer], *arguments: Any) -> Answer:
    """What `target` returns in a new process, which ends with it: a process's peak of memory never falls.

    Raises:
        concurrent.futures.process.BrokenProcessPool: the process ended without an answer, as where memory ran out.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(target, *arguments).result()
