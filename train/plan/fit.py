"""What does not fit, in one sentence each, and what would: another engine, more GPUs, other settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import datasets
from rich.filesize import decimal

from train.config import TrainConfig
from train.plan.costs import trainer_field
from train.plan.memory import Launch, fewest_processes, memory_of
from train.plan.plan import Plan

HEADROOM = 0.1
"""Share of the memory that is left for what is no tensor: the driver's context, workspaces, fragmentation."""
SMALLER_OUTPUT = "give another folder, or keep fewer checkpoints with trainer.save_total_limit"
SMALLER_STATES = "point HF_DATASETS_CACHE to a larger disk, or set hidden_states_dtype to bfloat16"


def warnings(plan: Plan, config: TrainConfig, launches: tuple[Launch, ...], memory: int | None) -> list[str]:
    """Sentences about GPUs and disks that are too small; none where everything fits or no memory was stated."""
    return ([] if memory is None else memory_warnings(plan, config, launches, memory)) + disk_warnings(plan, config)


def memory_warnings(plan: Plan, config: TrainConfig, launches: tuple[Launch, ...], memory: int) -> list[str]:
    room = memory * (1 - HEADROOM)
    peaks = {launch.name: memory_of(launch, plan.sizes, plan.gpus).peak for launch in launches}
    too_much = [
        f"{name} does not fit: {decimal(peak)} of tensors in each process, "
        f"{decimal(int(room))} of {decimal(memory)} can be used."
        for name, peak in peaks.items()
        if peak > room
    ]
    fits = [name for name, peak in peaks.items() if peak <= room]
    return [*too_much, advice(plan, config, launches, room, fits)] if too_much else []


def advice(plan: Plan, config: TrainConfig, launches: tuple[Launch, ...], room: float, fits: list[str]) -> str:
    """One sentence: the engines that fit, or the fewest GPUs with which one would, or what to change in the config."""
    if fits:
        gpus = "this GPU" if plan.gpus == 1 else f"these {plan.gpus} GPUs"
        return f"On {gpus} {', '.join(fits)} would fit: see launch/{fits[0]}.yaml."
    counts = [(fewest_processes(launch, plan.sizes, room), launch.name) for launch in launches]
    possible = [(count, name) for count, name in counts if count is not None]
    changes = ", or ".join(remedies(plan, config, room))
    if possible:
        count, name = min(possible, key=lambda found: found[0])
        return f"The fewest GPUs with which it would fit are {count}, with {name}; to need less, {changes}."
    return f"No engine makes it fit on any number of GPUs, since activations are not shared out: {changes}."


def remedies(plan: Plan, config: TrainConfig, room: float) -> list[str]:
    """What in the config would take less memory."""
    batch, trains_backbone = trainer_field(config, "per_device_train_batch_size"), plan.backbone.trained > 0
    possible = {
        "leave out cache_hidden_states, whose pass has the whole model in each process": plan.sizes.storing_peak > room,
        f"lower trainer.per_device_train_batch_size (now {batch}) and accumulate more": batch > 1,
        "set backbone.gradient_checkpointing: true": trains_backbone and not config.backbone.gradient_checkpointing,
        "train the backbone through lora.rank": trains_backbone and not config.lora.rank,
        "load the frozen backbone with backbone.quantization": not (trains_backbone or config.backbone.quantization),
        f"shorten data.block_size (now {config.data.block_size})": True,
    }
    return [change for change, helps in possible.items() if helps]


def disk_warnings(plan: Plan, config: TrainConfig) -> list[str]:
    """A sentence for each disk that is too small for all that the run writes to it."""
    cache = str(datasets.config.HF_DATASETS_CACHE)
    writes = [(config.output_dir, f"output_dir {config.output_dir}", sum(plan.written.values()), SMALLER_OUTPUT)]
    if plan.stores:
        writes.append((cache, f"hidden states in {cache}", plan.stored_bytes, SMALLER_STATES))
    disks: dict[int, list[tuple[str, str, int, str]]] = {}
    for write in writes:
        disks.setdefault(existing(write[0]).stat().st_dev, []).append(write)
    sentences = []
    for on_disk in disks.values():
        folders, names, sizes, changes = zip(*on_disk, strict=True)
        needed, free = sum(sizes), shutil.disk_usage(existing(folders[0])).free
        if needed > free:
            sentences.append(
                f"{decimal(needed)} are to be written into {' and '.join(names)}, and the disk has {decimal(free)} "
                f"free: {', or '.join(changes)}."
            )
    return sentences


def existing(folder: str) -> Path:
    """The folder, or the nearest above it that is there."""
    path = Path(folder).resolve()
    return next(p for p in (path, *path.parents) if p.exists())
