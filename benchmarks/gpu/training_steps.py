"""Training steps of heads on frozen 1B and 7B shapes in bfloat16: `python -m benchmarks.gpu.training_steps`.

Milliseconds, tokens per second and memory of a plain loop over full logits, of ours, and of ours with compiled decoder
layers, with the model FLOPs of each over the GPU's peak (utilisation as PaLM's paper defines it, arXiv 2204.02311). As
in a run, uncompiled layers attend by document and compiled ones with dense masks; a block is one document.
Weights are random, since time depends on shapes alone. Steps take turns and medians count; what does not fit into the
GPU's memory or into `--minutes` is named and left out. `--tiny` tries it on a CPU, where its figures mean nothing.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.budget import Budget
from benchmarks.shared import figures_table, or_dash, parser_of, run_benchmark, say, wide_console, write_figures
from benchmarks.training.training_speed import (
    Workload,
    heads_products,
    our_step,
    reference_step,
    seconds_of,
    take_turns,
)
from heads.evaluation.tables import describe_machine, versions
from train.engine.compiling import compile_layers
from train.objective.document_attention import document_attention
from train.objective.model import TrainedModel

PEAK_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bfloat16 FLOP/s, from the makers' data sheets; the first name that stands in the GPU's counts."""
SHAPES = {
    "1b": Workload(family="grounded", unembedding="shared", vocab=128_256, width=2048, layers=16, batch=8, length=2048),
    "7b": Workload(family="grounded", unembedding="shared", vocab=32_000, width=4096, layers=32, batch=4, length=2048),
}
TINY = Workload(family="grounded", unembedding="shared", vocab=256, width=64, layers=2, batch=2, length=64)
PLAIN, OURS = "a plain loop", "ours"
HALF = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Step:
    """Medians of a step.

    Attributes:
        mfu: only on a GPU whose peak is known.
        bytes: GPU memory at the peak, of the step's own model, optimizer and activations; None on a CPU.
    """

    shape: str
    step: str
    seconds: float
    tokens: int
    flops: float
    mfu: float | None
    bytes: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.gpu.training_steps", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5, help="interleaved; medians count")
    parser.add_argument("--minutes", type=float, help="begin no shape that would last longer; it is named")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on a CPU; figures mean nothing")
    parser.add_argument("--json", metavar="FILE", help="write rows, machine and versions here")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        raise ValueError("PyTorch finds no GPU here; give --tiny to try the program on a CPU.")
    device = "cpu" if options.tiny else "cuda"
    workloads = {"tiny": TINY} if options.tiny else {name: SHAPES[name] for name in options.shapes}
    console, rows, budget = wide_console(), list[Step](), Budget(options.minutes)
    for name, workload in workloads.items():
        if budget.is_spent(size := parameters(workload)):
            say(console, f"{name} is left out: {budget.describe()}")
            continue
        with budget.one(size):
            found = measure(console, name, workload, options.rounds, device)
        show(console, workload, found)
        rows += found
        forget()
    described = describe_machine(torch.device(device))
    write_figures(options.json, {"rows": [vars(row) for row in rows], "machine": described, "versions": versions()})


def parameters(workload: Workload) -> int:
    """Of the backbone and of heads on it."""
    return sum(p.numel() for p in workload.build("meta").parameters())


def measure(console: Console, name: str, workload: Workload, rounds: int, device: str) -> list[Step]:
    """The steps that the GPU's memory holds, timed in turn; the others are named."""
    try:
        steps = build(workload, device)
    except torch.OutOfMemoryError:
        say(console, f"{name} is left out: the GPU's memory does not hold its weights twice")
        return []
    ours, _ = steps[OURS]
    with document_attention(ours, compiled=False, autocast=HALF) as attention, torch.autocast(device, HALF):
        say(console, f"{name}, {OURS}: attention {attention}")
        peaks = {step: peak_memory(model, run, device) for step, (model, run) in steps.items()}
        for step, peak in peaks.items():
            if peak is None:
                say(console, f"{name}, {step} is left out: the GPU's memory does not hold it")
        runs = {step: run for step, (_, run) in steps.items() if peaks[step] is not None}
        times = take_turns(runs, rounds, device)
    model, _ = steps[PLAIN]
    flops, most = model_flops(workload, model), peak_flops(device)
    return [
        Step(
            shape=name,
            step=step,
            seconds=(taken := statistics.median(times[step])),
            tokens=workload.tokens,
            flops=flops,
            mfu=flops / taken / most if most else None,
            bytes=peaks[step] if device == "cuda" else None,
        )
        for step in runs
    ]


def build(workload: Workload, device: str) -> Mapping[str, tuple[TrainedModel, Callable[[], None]]]:
    """Each step by its name, with its model; the first two share one."""
    eager, compiled = (workload.build(device, HALF) for _ in range(2))
    compile_layers(compiled)
    batch = workload.data(device)
    return {
        PLAIN: (eager, reference_step(eager, batch)),
        OURS: (eager, our_step(eager, batch)),
        f"{OURS}, decoder layers compiled": (compiled, our_step(compiled, batch)),
    }


def peak_memory(model: TrainedModel, step: Callable[[], Any], device: str) -> float | None:
    """Bytes at the peak of two steps, the first of which makes the optimizer's moments and may compile.

    What other models and optimizers hold is subtracted: all that was allocated before but the step's own model. 0 on a
    CPU, None where the GPU's memory is too small.
    """
    others = 0
    if device == "cuda":
        others = torch.cuda.memory_allocated() - sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(2):
            seconds_of(step, device)
    except torch.OutOfMemoryError:
        fits = False
    else:
        fits = True
    if not fits:  # behind the handler, whose error holds the step's tensors
        model.zero_grad(set_to_none=True)
        forget()
        return None
    return float(torch.cuda.max_memory_allocated() - others) if device == "cuda" else 0.0


def forget() -> None:
    """Return what nothing refers to, compiled graphs included, to the GPU."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def model_flops(workload: Workload, model: TrainedModel) -> float:
    """FLOPs of a step: the backbone's forward and the heads' unavoidable products; recomputation is not counted.

    The forward has 2 for each parameter and token, and those of attention: queries × keys, then × values.
    """
    decoder = sum(p.numel() for p in model.backbone.layers.parameters())
    attention = workload.layers * workload.width * workload.length  # two products, causal: half of all pairs
    return 2 * workload.tokens * (decoder + attention) + heads_products(workload, model)


def peak_flops(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return next((flops for kind, flops in PEAK_FLOPS.items() if kind in name), None)


def show(console: Console, workload: Workload, rows: Sequence[Step]) -> None:
    if not rows:
        return
    title = (
        f"{workload.name}, a {rows[0].shape} shape in bfloat16, {workload.batch} × {workload.length:,} tokens a step; "
        "peak memory: of the row's own model, optimizer and activations"
    )
    if any(row.bytes is not None and row.mfu is None for row in rows):
        title += f"; utilisation needs the GPU's peak, which is known of {', '.join(PEAK_FLOPS)}"
    names = ("ms a step", "tokens per second", "of the plain loop", "model TFLOP/s", "utilisation", "peak memory")
    table = figures_table(title, "step", *names)
    plain = next((row.seconds for row in rows if row.step == PLAIN), None)
    for row in rows:
        table.add_row(
            row.step,
            f"{1000 * row.seconds:,.0f}",
            f"{row.tokens / row.seconds:,.0f}",
            or_dash(plain and plain / row.seconds, ".2f"),
            f"{row.flops / row.seconds / 1e12:,.1f}",
            or_dash(row.mfu, ".0%"),
            "–" if row.bytes is None else f"{row.bytes / 2**30:.1f} GiB",
        )
    console.print(table)


if __name__ == "__main__":
    run_benchmark(main)
