"""Products with microscaling weights beside bfloat16 and float32 ones: `python -m benchmarks.speed.mx`.

For square layers of width 1k to 8k and 1 to 64 rows of x, all timed in turn: milliseconds, bytes of the weight that one
product reads, the bandwidth that follows, and the ratio to bfloat16 and float32. Products take turns with so many
weights that no cache holds them all, as in a model. The limit is the machine's bandwidth, measured between the products
by summing as many bytes; if the product of fewest rows in float32 was faster, it is that one's. The whole takes about 5
minutes on 2 threads; --quick 1. Whole texts: benchmarks/speed/real_costs/microscaling.py.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.shared import (
    describe_cpu,
    figures_table,
    parse_with_defaults_of,
    parser_of,
    run_benchmark,
    say,
    wide_console,
    write_figures,
)
from heads.evaluation.pictures import new_figure, save_figure, tidy
from heads.evaluation.throughput import clock_of
from heads.quantization.formats import BLOCK, FORMATS, Format, find_format
from heads.quantization.multiply import multiply
from heads.tuning.timing import interleaved_medians

WIDTHS, ROWS = (1024, 2048, 4096, 8192), (1, 8, 16, 64)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
BANDWIDTH = "bandwidth"
AIM_FROM, AIM = 4096, 0.5
"""The target: on layers at least so wide, one row in MXFP4 and MXFP6 gains this share of the ratio of bytes."""
AIMED = ("mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2")
QUICK: dict[str, Any] = {"widths": [1024, 4096], "formats": ["mxfp4_e2m1", "mxfp6_e2m3"], "rounds": 5}


@dataclass(frozen=True, kw_only=True)
class Product:
    """One width, number of rows and kind of weight; `read` is in bytes, `limit` in bytes a second."""

    width: int
    rows: int
    kind: str
    seconds: float
    read: int
    limit: float
    times_bfloat16: float
    times_float32: float

    @property
    def bandwidth(self) -> float:
        return self.read / self.seconds


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_with_defaults_of("quick", QUICK, build_parser(), arguments)
    console = wide_console()
    say(console, f"{describe_cpu()}; x in {options.activations}; medians of {options.rounds} interleaved rounds")
    found: list[Product] = []
    for width in options.widths:
        found += measure(width, options)
        show(console, [one for one in found if one.width == width])
    describe_aim(console, found)
    write_figures(options.json, [asdict(one) for one in found])
    if options.picture:
        draw(found, options.picture)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.mx", __doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), help="inputs and outputs of a layer")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="rows of x")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--activations", choices=list(DTYPES), default="float32", help="x for microscaling weights")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved; medians count")
    parser.add_argument("--rotate", type=int, default=256, help="MiB of weights of each kind that take turns")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--picture", help="PNG file of the ratios to bfloat16")
    parser.add_argument("--quick", action="store_true", help=f"a share of all this: {QUICK}")
    return parser


def measure(width: int, options: argparse.Namespace) -> Iterator[Product]:
    clock, least = clock_of(torch.device("cpu")), options.rotate << 20
    kinds: dict[str, Kind] = {name: Kind.dense(width, dtype, least) for name, dtype in DTYPES.items()}
    for name in options.formats:
        kinds[name] = Kind.packed(width, find_format(name), least, DTYPES[options.activations])
    tasks: dict[tuple[str, int], Callable[[], float]] = {(BANDWIDTH, 0): bandwidth_task(least, clock)}
    for rows, (name, kind) in itertools.product(options.rows, kinds.items()):
        tasks[name, rows] = kind.task(rows, clock)
    seconds = interleaved_medians(tasks, options.rounds)
    read = least / seconds[BANDWIDTH, 0], kinds["float32"].read / seconds["float32", min(options.rows)]
    for rows, (name, kind) in itertools.product(options.rows, kinds.items()):
        yield Product(
            width=width,
            rows=rows,
            kind=name,
            seconds=seconds[name, rows],
            read=kind.read,
            limit=max(read),
            times_bfloat16=seconds["bfloat16", rows] / seconds[name, rows],
            times_float32=seconds["float32", rows] / seconds[name, rows],
        )


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Several weights of one kind, used in turn; `run` multiplies x with one of them."""

    weights: list[Any]
    run: Callable[[Tensor, Any], Tensor]
    dtype: torch.dtype
    width: int
    read: int

    @classmethod
    def dense(cls, width: int, dtype: torch.dtype, least: int) -> Kind:
        read = width * width * dtype.itemsize
        weight_OI = torch.randn(width, width, dtype=dtype)
        weights = [weight_OI.clone() for _ in range(turns(least, read))]
        return cls(weights=weights, run=nn.functional.linear, dtype=dtype, width=width, read=read)

    @classmethod
    def packed(cls, width: int, format: Format, least: int, dtype: torch.dtype) -> Kind:
        """Weights of random codes, since a code's value does not change what it costs."""
        groups = width // BLOCK
        codes_OP = torch.randint(64, (width, groups * format.block_bytes), dtype=torch.uint8)
        scales_OG = torch.full((width, groups), 120, dtype=torch.uint8)
        read = codes_OP.nbytes + scales_OG.nbytes
        weights = [(codes_OP.clone(), scales_OG.clone()) for _ in range(turns(least, read))]

        def run(x_NI: Tensor, weight: Any) -> Tensor:
            codes_OP, scales_OG = weight
            return multiply(x_NI, codes_OP, scales_OG, format)

        return cls(weights=weights, run=run, dtype=dtype, width=width, read=read)

    def task(self, rows: int, clock: Callable[[], float]) -> Callable[[], float]:
        """Seconds of one product: the median over a few, each with another weight."""
        x_NI = torch.randn(rows, self.width, dtype=self.dtype)
        weights = itertools.cycle(self.weights)
        products = min(len(self.weights), max(2, (1 << 25) // (self.width**2)))

        def measured() -> float:
            seconds = []
            for weight in itertools.islice(weights, products):
                start = clock()
                self.run(x_NI, weight)
                seconds.append(clock() - start)
            return statistics.median(seconds)

        return measured


def turns(least: int, read: int) -> int:
    return max(2, -(-least // read))


def bandwidth_task(size: int, clock: Callable[[], float]) -> Callable[[], float]:
    """Seconds to read so many bytes once, by summing them as float32 numbers."""
    numbers = torch.ones(size // 4)

    def measured() -> float:
        start = clock()
        numbers.sum()
        return clock() - start

    return measured


def show(console: Console, found: Sequence[Product]) -> None:
    width, limit = found[0].width, found[0].limit / 1e9
    columns = ("rows", "weights", "ms", "MiB read", "GB/s", "of the limit", "× bfloat16", "× float32")
    table = figures_table(f"{width:,} × {width:,}; this machine reads {limit:.1f} GB/s", *columns, left=2)
    for one in found:
        table.add_row(
            str(one.rows),
            one.kind,
            f"{1000 * one.seconds:.2f}",
            f"{one.read / 2**20:.1f}",
            f"{one.bandwidth / 1e9:.1f}",
            f"{one.bandwidth / one.limit:.0%}",
            f"{one.times_bfloat16:.2f}",
            f"{one.times_float32:.2f}",
        )
    console.print(table)


def describe_aim(console: Console, found: Sequence[Product]) -> None:
    """Print whether one row meets the target, and where packed weights are slower than bfloat16 ones."""
    for one in found:
        if one.rows == 1 and one.width >= AIM_FROM and one.kind in AIMED:
            bytes_ = 2 * one.width**2 / one.read
            verdict = "holds" if one.times_bfloat16 >= AIM * bytes_ else "does not hold"
            say(
                console,
                f"one row, {one.width:,} wide, {one.kind}: {one.times_bfloat16:.2f} × bfloat16 of {bytes_:.2f} × fewer "
                f"bytes; at least half of that, {AIM * bytes_:.2f}: {verdict}",
            )
    for one in found:
        if one.kind not in DTYPES and one.times_bfloat16 < 1:
            say(
                console,
                f"slower than bfloat16: {one.kind}, {one.width:,} wide, {one.rows} rows: {one.times_bfloat16:.2f}",
            )


def draw(found: Sequence[Product], path: str) -> None:
    """For each number of rows a panel: the ratio to bfloat16 by a layer's width."""
    rows = sorted({one.rows for one in found})
    figure = new_figure(3.2 * len(rows), 3.2)
    panels = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0]
    for axes, count in zip(panels, rows, strict=True):
        for kind in dict.fromkeys(one.kind for one in found if one.kind != "bfloat16"):
            points = [(one.width, one.times_bfloat16) for one in found if (one.kind, one.rows) == (kind, count)]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=kind)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        tidy(axes, f"{count} row{'s' * (count > 1)}", "width of the layer")
    panels[0].set_ylabel("speed, × bfloat16")
    panels[-1].legend(fontsize=7)
    save_figure(figure, path)


if __name__ == "__main__":
    run_benchmark(main)
