"""What does not fit, in one sentence each, and what would: another engine, more GPUs, other settings."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import datasets

from train.config import TrainConfig
from train.plan.costs import field
from train.plan.memory import Engine, fewest_processes, memory_of
from train.plan.plan import Plan

HEADROOM = 0.1
"""Share of the memory that is left for what is no tensor: the driver's context, workspaces, fragmentation."""
SMALLER_OUTPUT = "give another folder, or keep fewer checkpoints with trainer.save_total_limit"
SMALLER_STATES = "point HF_DATASETS_CACHE to a larger disk, or set hidden_states_dtype to bfloat16"
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Write(NamedTuple):
    """What a run writes into one folder.

    Attributes:
        folder: the one that is there: itself, or the nearest above it.
        needed: bytes.
        remedy: what would need less.
    """

    name: str
    folder: Path
    needed: int
    remedy: str


def parse_bytes(text: str) -> int:
    """Bytes from a number with a unit.

    >>> parse_bytes("80GB"), parse_bytes("24 GiB"), parse_bytes("80e9")
    (80000000000, 25769803776, 80000000000)

    Raises:
        ValueError: no number, or an unknown unit.
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = float(found.group(1)) * UNITS[found.group(2)] if found else 0.0
    except (ValueError, KeyError):
        size = 0.0
    if size < 1:
        raise ValueError(f"--memory {text!r} was given; give a size with its unit, such as 80GB, 24GiB or 80e9.")
    return int(size)


def size(count: float) -> str:
    """Bytes in words, in powers of ten.

    >>> size(21_500_000_000), size(3_400_000), size(12)
    ('21.5 GB', '3.4 MB', '12 B')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def warnings(plan: Plan, config: TrainConfig, engines: tuple[Engine, ...], memory: int | None) -> list[str]:
    """Sentences about GPUs and disks that are too small; none where everything fits or no memory was stated."""
    return ([] if memory is None else memory_warnings(plan, config, engines, memory)) + disk_warnings(plan, config)


def memory_warnings(plan: Plan, config: TrainConfig, engines: tuple[Engine, ...], memory: int) -> list[str]:
    room = memory * (1 - HEADROOM)
    needs = {engine.name: memory_of(engine, plan.sizes, plan.gpus).peak for engine in engines}
    wrong = [
        f"{name} does not fit: {size(need)} of tensors in each process, {size(room)} of {size(memory)} can be used."
        for name, need in needs.items()
        if need > room
    ]
    return [*wrong, advice(plan, config, engines, room, needs)] if wrong else []


def advice(plan: Plan, config: TrainConfig, engines: tuple[Engine, ...], room: float, needs: dict[str, int]) -> str:
    """One sentence: the engines that fit, or the fewest GPUs with which one would, or what to change in the config."""
    fits = [name for name, need in needs.items() if need <= room]
    if fits:
        gpus = "this GPU" if plan.gpus == 1 else f"these {plan.gpus} GPUs"
        return f"On {gpus} {', '.join(fits)} would fit: see launch/{fits[0]}.yaml."
    counts = {engine.name: fewest_processes(engine, plan.sizes, room) for engine in engines}
    possible = {name: count for name, count in counts.items() if count is not None}
    changes = ", or ".join(remedies(plan, config, room))
    if possible:
        name = min(possible, key=lambda name: possible[name])
        return f"The fewest GPUs with which it would fit are {possible[name]}, with {name}; to need less, {changes}."
    return f"No engine makes it fit on any number of GPUs, since activations are not shared out: {changes}."


def remedies(plan: Plan, config: TrainConfig, room: float) -> list[str]:
    """What in the config would take less memory."""
    batch = field(config, "per_device_train_batch_size")
    found = []
    if plan.sizes.storing_peak > room:
        found.append("leave out cache_hidden_states, whose pass has the whole model in each process")
    if batch > 1:
        found.append(f"lower trainer.per_device_train_batch_size (now {batch}) and accumulate more")
    trains_backbone = plan.backbone.trained > 0
    if trains_backbone and not config.backbone.gradient_checkpointing:
        found.append("set backbone.gradient_checkpointing: true")
    if trains_backbone and not config.lora.rank:
        found.append("train the backbone through lora.rank")
    if not trains_backbone and not config.backbone.quantization:
        found.append("load the frozen backbone with backbone.quantization")
    return [*found, f"shorten data.block_size (now {config.data.block_size})"]


def disk_warnings(plan: Plan, config: TrainConfig) -> list[str]:
    """A sentence for each disk that is too small for all that the run writes to it."""
    output = sum(plan.written.values())
    writes = [Write(f"output_dir {config.output_dir}", existing(config.output_dir), output, SMALLER_OUTPUT)]
    if plan.stores:
        cache = str(datasets.config.HF_DATASETS_CACHE)
        writes.append(Write(f"hidden states in {cache}", existing(cache), plan.cached_states, SMALLER_STATES))
    disks: dict[int, list[Write]] = {}
    for write in writes:
        disks.setdefault(write.folder.stat().st_dev, []).append(write)
    return [sentence for writes in disks.values() for sentence in warn_of_disk(writes)]


def warn_of_disk(writes: list[Write]) -> list[str]:
    needed, free = sum(write.needed for write in writes), shutil.disk_usage(writes[0].folder).free
    if needed <= free:
        return []
    names, remedy = " and ".join(write.name for write in writes), ", or ".join(write.remedy for write in writes)
    need = "needs" if writes[0].name.startswith("output_dir") and len(writes) == 1 else "need"
    return [f"{names} {need} {size(needed)} and the disk has {size(free)} free: {remedy}."]


def existing(folder: str) -> Path:
    """The folder, or the nearest above it that is there."""
    path = Path(folder).resolve()
    return next(p for p in (path, *path.parents) if p.exists())
