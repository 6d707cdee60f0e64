"""The plan as tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from train.plan.costs import ASSUMED_MFU, Throughput, hours
from train.plan.fit import HEADROOM, size
from train.plan.live_tensors import FROZEN, GRADIENTS, TRAINED, TRANSIENT
from train.plan.memory import COMMUNICATION, GATHERED, OPTIMIZER, Engine, memory_of
from train.plan.plan import Plan

PARTS = (FROZEN, TRAINED, GRADIENTS, OPTIMIZER, GATHERED, COMMUNICATION, *TRANSIENT)
UNKNOWN = "unknown: the data is not on this machine, or streamed; state its size with --tokens"


def show(plan: Plan, engines: tuple[Engine, ...], stated: Throughput, memory: int | None, console: Console) -> None:
    console.print(parameter_table(plan))
    console.print(memory_table(plan, engines, memory))
    console.print(run_table(plan, stated))
    console.print(disk_table(plan))


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_header = any(columns)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def parameter_table(plan: Plan) -> Table:
    table = new_table("Parameters", "", "trained", "frozen", "bytes")
    parts = {"backbone": plan.backbone, "heads": plan.heads, "the original backbone, a copy": plan.original}
    for name, part in parts.items():
        if not part.numel and part is plan.original:
            continue
        table.add_row(name, f"{part.trained:,}", f"{part.frozen:,}", size(part.nbytes))
    return table


def memory_table(plan: Plan, engines: tuple[Engine, ...], memory: int | None) -> Table:
    """Tensors on the device at the peak of a training step; gradients that are not there yet do not count."""
    found = {engine.name: memory_of(engine, plan.sizes, plan.gpus) for engine in engines}
    unit, scale = ("GB", 1e9) if max(m.peak for m in found.values()) >= 1e9 else ("MB", 1e6)
    processes = "1 process" if plan.gpus == 1 else f"{plan.gpus} processes (single: 1)"
    title = f"Tensors of one process at the peak of a step, {unit}; {processes}"
    table = new_table(title, "", *(name.replace("_", "\n") for name in found))
    for part in PARTS:
        sizes = [m.training.get(part, 0) for m in found.values()]
        if any(sizes) or part in PARTS[:4]:
            table.add_row(part, *(f"{n / scale:.2f}" for n in sizes))
    table.add_section()
    for name, sizes in (
        ("a training step", [sum(m.training.values()) for m in found.values()]),
        ("an evaluation", [m.evaluating for m in found.values()]),
        ("storing hidden states", [m.storing for m in found.values()]),
        ("host memory", [m.host for m in found.values()]),
    ):
        if plan.stores or not name.startswith("storing"):
            table.add_row(name, *(f"{n / scale:.2f}" for n in sizes))
    if memory is not None:
        room = memory * (1 - HEADROOM)
        table.add_row(f"fits in {size(memory)}", *("yes" if m.peak <= room else "NO" for m in found.values()))
        table.caption = f"{HEADROOM:.0%} of the memory is left for what is no tensor; a GPU's runtime takes some."
    return table


def run_table(plan: Plan, stated: Throughput) -> Table:
    table = new_table("The run", "", "")
    table.add_row("training blocks", f"{plan.blocks:,}" if plan.blocks is not None else UNKNOWN)
    table.add_row("steps", f"{plan.steps:,}" if plan.steps is not None else UNKNOWN)
    table.add_row("tokens of a step", f"{plan.step_tokens:,}")
    table.add_row("FLOPs of a step", f"{plan.step_flops:.3g}")
    if plan.stores:
        table.add_row("FLOPs of storing the hidden states of a block", f"{plan.storing_flops:.3g}")
    if plan.steps is None:
        return table
    tokens, flops = plan.steps * plan.step_tokens, plan.run_flops
    table.add_row("FLOPs of the run", f"{flops:.3g}" if flops is not None else UNKNOWN)
    if flops is None and not stated.tokens_per_second:
        return table
    assumed = "" if stated.tokens_per_second else f", {stated.mfu:.0%} of the peak reached"
    assumed += " (assumed)" if assumed and stated.mfu == ASSUMED_MFU else ""
    for name, found in hours(flops or 0, tokens, plan.gpus, stated).items():
        table.add_row(f"hours on {plan.gpus} x {name}", f"{found:.3g}{assumed}")
    return table


def disk_table(plan: Plan) -> Table:
    table = new_table("Disk", "", "")
    for name, count in plan.written.items():
        table.add_row(name, size(count))
    if plan.stores:
        stored = size(plan.cached_states) if plan.cached_states else UNKNOWN
        table.add_row("hidden states of all training blocks, in $HF_DATASETS_CACHE", stored)
    elif plan.cached_states:
        table.add_row("hidden states of all training blocks, if cached", size(plan.cached_states))
    return table
