"""Products with microscaling weights on a GPU: `python -m benchmarks.gpu.microscaling`.

For square layers and 1 to 64 rows of x in bfloat16: microseconds with bfloat16 weights, with packed ones, and with
humming-kernels' MXFP6, as vLLM computes it, where that is installed. A CUDA graph has one product with each of so many
weights that no cache holds them all, so launching costs nothing. All kinds take turns; times are medians. The targets
for MXFP6 are 1.6 × the speed of bfloat16 at one row, at least 1 / 1.1 of it at 64 rows, and 0.9 × humming's at 1 to 16
rows. `--tiny` runs on a CPU, to show that the program works.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.budget import Budget
from benchmarks.shared import figures_table, parser_of, run_benchmark, say, wide_console, write_figures
from heads.evaluation.tables import describe_machine
from heads.evaluation.throughput import clock_of
from heads.quantization.codec import pack
from heads.quantization.formats import find_format
from heads.quantization.humming_kernels import humming_layer, why_unavailable
from heads.quantization.linear import MXLinear
from heads.quantization.multiply import multiply
from heads.tuning.timing import interleaved_medians

DENSE, HUMMING, AIMED = "bfloat16", "humming mxfp6_e2m3", "mxfp6_e2m3"
HELD = 256 << 20  # bytes of weights of each kind that take turns: more than the caches of GPUs
Run = Callable[[Tensor, Any], Tensor]
Times = dict[tuple[int, int, str], float]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.gpu.microscaling", __doc__)
    parser.add_argument("--widths", nargs="+", type=int, default=[2048, 4096, 8192], help="inputs and outputs")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 64], help="rows of x")
    parser.add_argument("--formats", nargs="+", default=["mxfp6_e2m3", "mxfp4_e2m1"], help="of packed weights")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved; medians count")
    parser.add_argument(
        "--minutes", type=float, help="begin no width that would last longer; what is left out is named"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny layers on a CPU; figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="file for all figures")
    options = parser.parse_args(arguments)
    device = torch.device("cpu" if options.tiny else "cuda")
    if options.tiny:
        options.widths, options.rounds = [64], 2
    elif not torch.cuda.is_available():
        raise ValueError("PyTorch finds no GPU here; give --tiny to try the program on a CPU.")
    console = wide_console()
    found: Times = {}
    say(console, f"{describe_machine(device)}; x in bfloat16; medians of {options.rounds} interleaved rounds")
    budget = Budget(options.minutes)
    for width in options.widths:
        if budget.is_spent():
            say(console, f"layers of {width} are left out: {budget.describe()}")
            continue
        with budget.one():
            found |= measure(console, width, options, device)
        show(console, width, found)
    describe_aims(console, found)
    write_figures(options.json, [{"width": w, "rows": n, "weights": k, "seconds": s} for (w, n, k), s in found.items()])


def measure(console: Console, width: int, options: Any, device: torch.device) -> Times:
    kinds = {DENSE: dense(width, device)} | {name: packed(width, name, device) for name in options.formats}
    if device.type == "cuda" and not why_unavailable():
        try:
            kinds[HUMMING] = humming(width, device)
        except Exception as error:  # another package's, on hardware it may not know: its row is left out, and said
            say(console, f"humming-kernels was left out: {type(error).__name__}: {error}")
    tasks: dict[tuple[int, int, str], Callable[[], float]] = {}
    for rows, (name, (weights, run)) in itertools.product(options.rows, kinds.items()):
        x_NI = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        tasks[width, rows, name] = task(x_NI, weights, run)
    return interleaved_medians(tasks, options.rounds)


def dense(width: int, device: torch.device) -> tuple[list[Any], Run]:
    count = turns(device, 2 * width * width)
    return [torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(count)], nn.functional.linear


def packed(width: int, name: str, device: torch.device) -> tuple[list[Any], Run]:
    format = find_format(name)
    one = pack(torch.randn(width, width, device=device), format)
    weights = [
        (one.codes.clone(), one.scales.clone())
        for _ in range(turns(device, int(width * width * format.bits_per_weight / 8)))
    ]

    def run(x_NI: Tensor, weight: Any) -> Tensor:
        codes_OP, scales_OG = weight
        return multiply(x_NI, codes_OP, scales_OG, format)

    return weights, run


def humming(width: int, device: torch.device) -> tuple[list[Any], Run]:
    """humming-kernels' layers over our own codes and scales, as `use_humming` makes them."""
    layer = MXLinear(width, width, find_format(AIMED), bias=False, device=device)
    layer.weight.random_()
    layer.weight_scale.fill_(120)
    count = turns(device, layer.weight.nbytes + layer.weight_scale.nbytes)
    return [humming_layer(layer) for _ in range(count)], lambda x_NI, layer: layer(x_NI)


def turns(device: torch.device, size: int) -> int:
    return max(2, min(64, -(-HELD // size))) if device.type == "cuda" else 2


def task(x_NI: Tensor, weights: Sequence[Any], run: Run) -> Callable[[], float]:
    """A function that returns the seconds of one product, from a replay of a graph with a product for each weight."""

    def all_of_them() -> None:
        for weight in weights:
            run(x_NI, weight)

    clock = clock_of(x_NI.device)
    with torch.inference_mode():
        all_of_them()  # compiled and tuned before it is captured
        replay = all_of_them if x_NI.device.type == "cpu" else captured(all_of_them)

    def measured() -> float:
        start = clock()
        with torch.inference_mode():
            replay()
        return (clock() - start) / len(weights)

    return measured


def captured(run: Callable[[], None]) -> Callable[[], None]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def show(console: Console, width: int, found: Times) -> None:
    table = figures_table(f"{width:,} × {width:,}", "rows", "weights", "µs", "× bfloat16", "× humming", left=2)
    for (_, rows, kind), seconds in ((key, value) for key, value in found.items() if key[0] == width):
        other = found.get((width, rows, HUMMING))
        table.add_row(
            str(rows),
            kind,
            f"{1e6 * seconds:.1f}",
            f"{found[width, rows, DENSE] / seconds:.2f}",
            "–" if other is None else f"{other / seconds:.2f}",
        )
    console.print(table)


def describe_aims(console: Console, found: Times) -> None:
    for width, rows, kind in found:
        if kind != AIMED:
            continue
        ratio = found[width, rows, DENSE] / found[width, rows, kind]
        if rows in (1, 64):
            aim = 1.6 if rows == 1 else 1 / 1.1
            say(console, f"{width:,} wide, {rows} rows: {ratio:.2f} × bfloat16, aim {aim:.2f}: {verdict(ratio, aim)}")
        if rows <= 16 and (other := found.get((width, rows, HUMMING))) is not None:
            ratio = other / found[width, rows, kind]
            say(console, f"{width:,} wide, {rows} rows: {ratio:.2f} × humming, aim 0.90: {verdict(ratio, 0.9)}")
    if not any(kind == HUMMING for _, _, kind in found):
        say(console, f"humming-kernels is not measured, so its aim is open: {why_unavailable() or 'see above'}.")


def verdict(found: float, aim: float) -> str:
    return "holds" if found >= aim else "does not hold"


if __name__ == "__main__":
    run_benchmark(main)
