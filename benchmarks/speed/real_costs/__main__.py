"""What heads gain at a larger model's price: `python -m benchmarks.speed.real_costs`.

A pass of the small demo backbone takes longer with every node, while a large model's waits for its weights and takes
nearly as long for 16 nodes as for one. So the demo backbone is padded with zeros to the shapes of models with 0.16 to
7 billion weights: it writes the same text and accepts the same drafts, in the milliseconds of the larger shape.

Timed are passes over 1 to 64 nodes; and plain generate, heads alone, lookup without heads, heads with lookup, and
transformers' assistant_model, greedily with a repetition penalty and, with --sampled, at temperature 1. On a GPU, or
with --compile, plain generate and heads alone are compiled too. Every row (a shape, a dtype, a batch size) is stored in
--out, so an interrupted call goes on, and a call for more rows measures only those; --report prints what is stored.
With --minutes the smallest batches of all shapes come first, each row is printed when it is measured and again at the
end, and rows that are left out are named.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.shared import (
    ON_BASE,
    OWN_BACKBONE,
    describe_cpu,
    parse_with_defaults_of,
    parser_of,
    run_benchmark,
    say,
    wide_console,
    write_block,
)
from benchmarks.speed.real_costs.cells import (
    MethodSpeed,
    PassTimes,
    Speeds,
    measure_passes,
    measure_speeds,
)
from benchmarks.speed.real_costs.methods import DRAFT, why_not_compiled
from benchmarks.speed.real_costs.report import markdown, passes_table, show, speeds_table
from benchmarks.speed.real_costs.shapes import SHAPES, what_stops
from benchmarks.speed.real_costs.widened import Widened, open_widened
from benchmarks.stored_rows import StoredRow, load_or_measure
from heads.checkpoint.opening import default_device
from heads.evaluation.methods import GreedySettings, SampledSettings, Settings
from heads.evaluation.tables import describe_machine, versions

PENALTY = 1.1
TIES = "Tie: the two best logits lie within the dtype's rounding."
OWN_PLAIN = "plain, {}'s own backbone"
PENALISED, SAMPLED = f"repetition penalty {PENALTY}", "sampled, temperature 1"
README = Path("README.md")
MARKERS = (
    "<!-- real costs: written by `python -m benchmarks.speed.real_costs --readme`, never by hand -->",
    "<!-- /real costs -->",
)
QUICK: dict[str, Any] = {"shapes": ["0.16B"], "dtypes": ["float32"], "batches": [1], "groups": 2, "new_tokens": 16}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_with_defaults_of("quick", QUICK, build_parser(), arguments)
    console = wide_console()
    say(
        console,
        f"{describe_cpu()}, {options.groups} groups of prompts, {options.new_tokens} new tokens, "
        f"{described_rounds(options.repeats)} for each group, end tokens unheeded",
    )
    rows = list(wanted(options))
    if not options.report:
        measure_all(rows, Budget(options.minutes), say=lambda text: say(console, text))
    found = [content for row in rows if (content := row.stored.read()) is not None]
    passes = [PassTimes(**content) for content in found if "milliseconds" in content]
    speeds = [Speeds(**content) for content in found if "lines" in content]
    show(console, passes, speeds)
    made = f"made by {' and '.join(sorted({row.stored.made() for row in rows if row.stored.read()}))}"
    say(console, f"rows were {made}")
    if options.readme:
        how = (
            f"{options.groups} held-out prompts, {options.new_tokens} new tokens, {described_rounds(options.repeats)}, "
            f"in brackets the ratio's 95 % interval over prompts. "
            f"{TIES} {describe_cpu()}; {made}.\n"
        )
        write_block(README, MARKERS, f"{markdown(speeds)}\n{how}")


def described_rounds(repeats: int) -> str:
    """In words, how often each method decodes each group of prompts.

    >>> described_rounds(3)
    'medians of 3 interleaved rounds of all methods'
    """
    return (
        "one round of all methods in turn"
        if repeats == 1
        else f"medians of {repeats} interleaved rounds of all methods"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.real_costs", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.16B", "0.83B"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1], help="rows decoded together")
    parser.add_argument("--groups", type=int, default=6, help="groups of so many held-out prompts as a batch has rows")
    parser.add_argument("--new-tokens", type=int, default=32, help="for each prompt")
    parser.add_argument("--repeats", type=int, default=1, help="of all methods in turn for each group; medians count")
    parser.add_argument("--rounds", type=int, default=5, help="of passes, interleaved; medians count")
    parser.add_argument("--minutes", type=float, help="begin no row that would last longer; what is left out is named")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="measure plain generate and heads alone compiled too",
    )
    parser.add_argument("--sampled", action="store_true", help="measure single texts at temperature 1 too")
    parser.add_argument("--no-tuned", action="store_true", help="leave out the trees that are tuned for each shape")
    parser.add_argument("--out", default="checkpoints/runs/real_costs", help="folder of finished rows")
    parser.add_argument("--report", action="store_true", help="print what is stored and measure nothing")
    parser.add_argument("--readme", action="store_true", help="write the rows of batch 1 into README.md")
    parser.add_argument("--quick", action="store_true", help=f"a share of all this: {QUICK}")
    return parser


@dataclass(frozen=True, kw_only=True)
class WantedRow:
    """One requested row: passes if `batch` is 0, otherwise methods at that batch size."""

    stored: StoredRow
    shape: str
    dtype: str
    batch: int
    sampled: bool
    options: argparse.Namespace


def wanted(options: argparse.Namespace) -> Iterator[WantedRow]:
    """Rows in the order in which they are measured: one shape in one dtype after another.

    Beside its settings a row depends on the machine, its processor's instructions and the version of torch.
    """
    machine = describe_machine(torch.device(default_device()))
    common = {"machine": machine, "processor": describe_cpu(), "torch": versions()["torch"]}
    for shape in options.shapes:
        for dtype in options.dtypes:
            sampled = [(1, True)] if options.sampled else []
            for batch, at_random in [(0, False), *((batch, False) for batch in options.batches), *sampled]:
                asked: dict[str, Any] = {"rounds": options.rounds}
                if batch:
                    asked = {name: getattr(options, name) for name in ("groups", "new_tokens", "no_tuned")}
                    asked["families"] = [*ON_BASE, *OWN_BACKBONE]
                    asked |= {"compile": True} if options.compile else {}
                    asked |= {"own_plain": True}  # rows before it lack the plain line of a backbone of one's own
                    asked |= {"repeats": options.repeats} if options.repeats > 1 else {}
                    asked |= {"assistant_model": DRAFT} if batch == 1 else {}
                    asked |= {"temperature": 1.0} if at_random else {}
                settings = {**common, **asked, "shape": shape, "dtype": dtype, "batch": batch}
                name = f"{shape}-{dtype}-" + ("sampled" if at_random else f"batch{batch}" if batch else "passes")
                stored = StoredRow(folder=Path(options.out), name=name, settings=settings)
                yield WantedRow(
                    stored=stored, shape=shape, dtype=dtype, batch=batch, sampled=at_random, options=options
                )


def measure_all(rows: Sequence[WantedRow], budget: Budget, say: Callable[[str], None]) -> None:
    """Measure what is not stored yet: small batches of every shape first, and passes, which heads do not need, last.

    Rows are expected to take time in proportion to the parameters of their shapes.
    """
    for row in sorted(rows, key=lambda row: row.batch or math.inf):
        if row.stored.read() is not None:
            continue
        size = SHAPES[row.shape].parameters()
        if budget.is_spent(size):
            say(f"{row.stored.name} is left out: {budget.describe()}")
            continue
        with budget.one(size):
            measure(row, say)
        if budget.minutes is not None:
            show_row(row)


def show_row(row: WantedRow) -> None:
    """Print what was measured at once, since a program with a time limit may be stopped before it prints all rows."""
    if (content := row.stored.read()) is not None:
        wide_console().print(speeds_table(Speeds(**content)) if row.batch else passes_table([PassTimes(**content)]))


def measure(row: WantedRow, say: Callable[[str], None]) -> None:
    """Measure a row that is not stored yet; if it does not fit this machine's memory, say so and leave it out."""
    shape, dtype = SHAPES[row.shape], getattr(torch, row.dtype)
    gc.collect()  # the last row's weights go before the next ones come
    if reason := what_stops(shape, dtype, torch.device(default_device())):
        say(f"{row.stored.name} is left out: {reason}")
        return

    def opened(families: Sequence[str]) -> Widened:
        return open_widened(families, shape, dtype)

    if not row.batch:
        load_or_measure(
            row.stored,
            PassTimes,
            lambda _: PassTimes(
                shape=row.shape, dtype=row.dtype, milliseconds=measure_passes(opened(("medusa",)), row.options.rounds)
            ),
        )
        return
    settings: Settings = GreedySettings(new_tokens=row.options.new_tokens, repetition_penalty=PENALTY)
    if row.sampled:
        settings = SampledSettings(new_tokens=row.options.new_tokens)
    load_or_measure(row.stored, Speeds, lambda _: measure_methods(row, settings, opened, say))


def measure_methods(
    row: WantedRow, settings: Settings, opened: Callable[[Sequence[str]], Widened], say: Callable[[str], None]
) -> Speeds:
    """Measure all families; one with its own backbone is compared with that backbone's plain generate."""
    lines: list[MethodSpeed] = []
    for families in (ON_BASE, OWN_BACKBONE):
        lines += measure_families(families, opened(families), row, settings, say)
        gc.collect()  # before the next backbone comes: two of 7 billion weights do not fit where one does
    decoding = SAMPLED if row.sampled else PENALISED
    return Speeds(shape=row.shape, dtype=row.dtype, batch=row.batch, decoding=decoding, lines=lines)


def measure_families(
    families: Sequence[str], widened: Widened, row: WantedRow, settings: Settings, say: Callable[[str], None]
) -> list[MethodSpeed]:
    """Measure the families of one backbone, which nothing holds when this returns."""
    options = row.options
    if reason := options.compile and families == ON_BASE and why_not_compiled(widened):
        say(f"{row.stored.name}: compiled methods are left out: {reason}")
    found = measure_speeds(
        widened,
        settings,
        row.batch,
        options.groups,
        repeats=options.repeats,
        tuned=not options.no_tuned,
        compile=options.compile and not reason,
    )
    return found if families == ON_BASE else [replace(found[0], method=OWN_PLAIN.format(*families)), *found[1:]]


if __name__ == "__main__":
    run_benchmark(main)
