"""What a checkpoint keeps beside the Trainer's own state, so that a resumed run logs what an uninterrupted one logs.

A run is seen here, and by saving, through `RunState`: what a checkpoint needs to know of it and nothing more.
"""
# K trained distribution

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainingArguments

from train.engine.engine import Engine

PROGRESS = "progress.json"


@dataclass(kw_only=True)
class Progress:
    """How far a run has come, as JSON.

    Attributes:
        losses: sums of the losses since the last log and the labels they are over, each K numbers.
        logged_loss: the Trainer's own sum of losses since the last log.
        all_losses: its sum over the run, up to the last log.
        skipped: steps of the run that were skipped.
        skipped_since_log: of them, those since the last log.
        steps_since_log: steps since the last log, skipped or not.
        metrics_bytes: length of metrics.jsonl.
        measured_accuracy: of the heads, by head and rank, as last evaluated.
        evaluation_put_off: an evaluation was due when the run had to end.
        data_pass: pass over the data.
        blocks_in_pass: blocks of that pass that all processes together have read.
        compiled: decoder layers are compiled; older checkpoints do not say, and were not.
        loss_before: of the backbone on held-out data, before the first step; older checkpoints have none.
    """

    losses: list[list[float]] | None
    logged_loss: float
    all_losses: float
    skipped: int
    skipped_since_log: int
    steps_since_log: int
    metrics_bytes: int
    measured_accuracy: list[list[float]] | None
    evaluation_put_off: bool
    data_pass: int
    blocks_in_pass: int
    compiled: bool = False
    loss_before: float | None = None


class RunState(Protocol):
    """What saving a checkpoint reads of a run.

    Attributes:
        args: the Trainer's arguments: output_dir, should_save and batch sizes are read.
        state: the Trainer's state: global_step is read.
        engine: what trains.
        keep_checkpoints: how many checkpoints stay on disk; 0 or None for all.
    """

    args: TrainingArguments
    state: Any
    engine: Engine
    keep_checkpoints: int | None

    def progress(self) -> Progress:
        """Every process calls it."""
        ...

    def weights_are_finite(self) -> bool:
        """Whether every trained weight is; every process calls it and gets the same answer."""
        ...


@dataclass
class Place:
    """Where in the data a run is: the pass over it, and batches of one process in that pass."""

    data_pass: int
    batches: int


def write_progress(run: RunState, folder: Path) -> None:
    """All processes call it; the main one writes."""
    progress = run.progress()
    if run.args.should_save:
        (folder / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def read_progress(folder: Path) -> Progress:
    content = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    known = {field.name for field in fields(Progress)}
    return Progress(**{name: value for name, value in content.items() if name in known})


def blocks_per_batch(arguments: TrainingArguments) -> int:
    return arguments.per_device_train_batch_size * arguments.world_size


def read_place(folder: Path, arguments: TrainingArguments) -> tuple[int, int]:
    """Pass and batches, counted in the present batches of the present number of processes."""
    progress = read_progress(folder)
    return progress.data_pass, progress.blocks_in_pass // blocks_per_batch(arguments)
