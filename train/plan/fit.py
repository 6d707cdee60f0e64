"""Warn of what does not fit, in one sentence each, and say what would: another engine, more GPUs, other settings."""

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
"""Share of the memory that is left free of tensors: for the driver's context, workspaces and fragmentation."""
SMALLER_OUTPUT = "give another folder, or keep fewer checkpoints with trainer.save_total_limit"
SMALLER_STATES = "point HF_DATASETS_CACHE to a larger disk, or set hidden_states_dtype to bfloat16"


def warnings(plan: Plan, config: TrainConfig, launches: tuple[Launch, ...], memory: int | None) -> list[str]:
    """Sentences about GPUs and disks that are too small; without a stated `memory`, about disks alone."""
    return ([] if memory is None else memory_warnings(plan, config, launches, memory)) + disk_warnings(plan, config)


def memory_warnings(plan: Plan, config: TrainConfig, launches: tuple[Launch, ...], memory: int) -> list[str]:
    usable = memory * (1 - HEADROOM)
    peaks = {launch.name: memory_of(launch, plan.sizes, plan.gpus).peak for launch in launches}
    too_much = [
        f"{name} does not fit: {decimal(peak)} of tensors in each process, "
        f"{decimal(int(usable))} of {decimal(memory)} can be used."
        for name, peak in peaks.items()
        if peak > usable
    ]
    fits = [name for name, peak in peaks.items() if peak <= usable]
    return [*too_much, advice(plan, config, launches, usable, fits)] if too_much else []


def advice(plan: Plan, config: TrainConfig, launches: tuple[Launch, ...], usable: float, fits: list[str]) -> str:
    """One sentence: the engines that fit, or the fewest GPUs with which one would, or what to change in the config."""
    if fits:
        gpus = "this GPU" if plan.gpus == 1 else f"these {plan.gpus} GPUs"
        return f"On {gpus} {', '.join(fits)} would fit: see launch/{fits[0]}.yaml."
    counts = [(fewest_processes(launch, plan.sizes, usable), launch.name) for launch in launches]
    possible = [(count, name) for count, name in counts if count is not None]
    changes = ", or ".join(remedies(plan, config, usable))
    if possible:
        count, name = min(possible, key=lambda found: found[0])
        return f"The fewest GPUs with which it would fit are {count}, with {name}; to need less, {changes}."
    return f"No engine makes it fit on any number of GPUs, since activations are not sharded: {changes}."


def remedies(plan: Plan, config: TrainConfig, usable: float) -> list[str]:
    """Changes of the config that would save memory."""
    batch, trains_backbone = trainer_field(config, "per_device_train_batch_size"), plan.backbone.trained > 0
    possible = {
        "leave out cache_hidden_states, which needs the whole model in each process": plan.sizes.storing_peak > usable,
        f"lower trainer.per_device_train_batch_size (now {batch}) and accumulate more": batch > 1,
        "set backbone.gradient_checkpointing: true": trains_backbone and not config.backbone.gradient_checkpointing,
        "train the backbone through lora.rank": trains_backbone and not config.lora.rank,
        "load the frozen backbone with backbone.quantization": not (trains_backbone or config.backbone.quantization),
        f"shorten data.block_size (now {config.data.block_size})": True,
    }
    return [change for change, helps in possible.items() if helps]


def disk_warnings(plan: Plan, config: TrainConfig) -> list[str]:
    """A sentence for each disk that is too small for what the run writes to it."""
    cache = str(datasets.config.HF_DATASETS_CACHE)
    writes = [(config.output_dir, f"output_dir {config.output_dir}", sum(plan.written.values()), SMALLER_OUTPUT)]
    if plan.stores_hidden_states:
        writes.append((cache, f"hidden states in {cache}", plan.stored_bytes, SMALLER_STATES))
    disks: dict[int, list[tuple[str, str, int, str]]] = {}
    for write in writes:
        disks.setdefault(nearest_existing(write[0]).stat().st_dev, []).append(write)
    sentences = []
    for on_disk in disks.values():
        folders, names, sizes, changes = zip(*on_disk, strict=True)
        needed, free = sum(sizes), shutil.disk_usage(nearest_existing(folders[0])).free
        if needed > free:
            sentences.append(
                f"The run writes {decimal(needed)} into {' and '.join(names)}, and the disk has {decimal(free)} free: "
                f"{', or '.join(changes)}."
            )
    return sentences


def nearest_existing(folder: str) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = Path(folder).resolve()
    return next(p for p in (path, *path.parents) if p.exists())
