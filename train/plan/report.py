"""A plan as tables for people."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from train.plan.costs import ASSUMED_MFU, Machine, run_seconds
from train.plan.fit import HEADROOM
from train.plan.live_tensors import FROZEN, GRADIENTS, TRAINED, TRANSIENT
from train.plan.memory import COMMUNICATION, GATHERED, OPTIMIZER, Launch, Memory, memory_of, total
from train.plan.plan import Plan

ALWAYS_SHOWN = (FROZEN, TRAINED, GRADIENTS, OPTIMIZER)
PURPOSES = (*ALWAYS_SHOWN, GATHERED, COMMUNICATION, *TRANSIENT)
UNKNOWN = "unknown: data or tokenizer are not on this machine, or data are streamed; give their size with --tokens"


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_header = any(columns)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left")
    return table


def parameter_table(plan: Plan) -> Table:
    table = new_table("Parameters", "", "trained", "frozen", "bytes")
    counts = {"backbone": plan.backbone, "heads": plan.heads}
    if plan.teacher.numel:
        counts["teacher (a frozen copy)"] = plan.teacher
    for name, count in counts.items():
        table.add_row(name, f"{count.trained:,}", f"{count.frozen:,}", decimal(count.nbytes))
    return table


def memory_tables(plan: Plan, launches: tuple[Launch, ...], memory: int | None, console: Console) -> list[Table]:
    """Tensors on the device at the peak of a step, by launch file: one table, or as few as fit into the console."""
    found = [(launch.name, memory_of(launch, plan.sizes, plan.gpus)) for launch in launches]
    unit, scale = ("GB", 1e9) if max(m.peak for _, m in found) >= 1e9 else ("MB", 1e6)
    for count in range(len(found), 0, -1):
        parts = [dict(found[start : start + count]) for start in range(0, len(found), count)]
        tables = [memory_table(plan, part, scale, memory) for part in parts]
        if all(natural_width(table, console) <= console.width for table in tables):
            break
    processes = "1 process" if plan.gpus == 1 else f"{plan.gpus} processes (single: 1)"
    tables[0].title = f"Tensors of one process at the peak of a step, {unit}; {processes}"
    if memory is not None:
        tables[-1].caption = f"{HEADROOM:.0%} of the memory is left for the GPU's runtime and for fragmentation."
    return tables


def natural_width(table: Table, console: Console) -> int:
    """Columns of a table in which no cell is broken."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def memory_table(plan: Plan, found: dict[str, Memory], scale: float, memory: int | None) -> Table:
    """Some launch files side by side; at the peak of a training step not every gradient may exist yet."""
    table = new_table("", "", *(name.replace("_", "\n") for name in found))

    def add(name: str, sizes: list[int]) -> None:
        table.add_row(name, *(f"{size / scale:.2f}" for size in sizes))

    for purpose in PURPOSES:
        sizes = [m.training.get(purpose, 0) for m in found.values()]
        if any(sizes) or purpose in ALWAYS_SHOWN:
            add(purpose, sizes)
    table.add_section()
    add("a training step", [total(m.training) for m in found.values()])
    add("an evaluation", [m.evaluating for m in found.values()])
    if plan.stores_hidden_states:
        add("storing hidden states", [m.storing for m in found.values()])
    add("host memory", [m.host for m in found.values()])
    if memory is not None:
        fits = (m.peak <= memory * (1 - HEADROOM) for m in found.values())
        table.add_row(f"fits in {decimal(memory)}", *("yes" if it_does else "NO" for it_does in fits))
    return table


def run_table(plan: Plan, machine: Machine) -> Table:
    table = new_table("The run", "", "")

    def add(name: str, value: int | None, form: str = ",") -> None:
        table.add_row(name, UNKNOWN if value is None else format(value, form))

    add("training blocks", plan.blocks)
    add("steps", plan.steps)
    add("tokens of a step", plan.step_tokens)
    add("FLOPs of a step", plan.step_flops, ".3g")
    if plan.stores_hidden_states:
        add("FLOPs of storing the hidden states of a block", plan.sizes.step.storing_flops, ".3g")
    if plan.steps is None:
        return table
    add("FLOPs of the run", plan.run_flops, ".3g")
    if plan.run_flops is None and not machine.tokens_per_second:
        return table
    for name, found in run_seconds(plan.run_flops or 0, plan.steps * plan.step_tokens, machine).items():
        table.add_row(f"time on {plan.gpus} x {name}", duration(found))
    if not machine.tokens_per_second:
        table.caption = f"at {machine.mfu:.0%} of the peak{' (assumed)' * (machine.mfu == ASSUMED_MFU)}"
    return table


def duration(seconds: float) -> str:
    """
    >>> [duration(value) for value in (0.0731, 45.2, 720.0, 12_345.0, 1e6)]
    ['0.073 s', '45 s', '12 min', '3.4 h', '11.6 days']
    """
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86_400:.1f} days"


def disk_table(plan: Plan) -> Table:
    table = new_table("Disk", "", "")
    for name, count in plan.written.items():
        table.add_row(name, decimal(count))
    if plan.stores_hidden_states:
        stored = decimal(plan.stored_bytes) if plan.stored_bytes else UNKNOWN
        table.add_row("hidden states of all training blocks, in $HF_DATASETS_CACHE", stored)
    elif plan.stored_bytes:
        table.add_row("hidden states of all training blocks, if cached", decimal(plan.stored_bytes))
    return table
