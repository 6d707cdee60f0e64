"""What a checkpoint keeps beside the Trainer's own state, so that a resumed run logs what an uninterrupted one logs.

A run is seen here, and by saving, through `RunState`: what a checkpoint needs to know of it and nothing more.
"""
# K trained distribution

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, get_args, get_origin, get_type_hints

from transformers import TrainingArguments

from train.engine.engine import Engine

PROGRESS = "progress.json"
PASS_OVER = "remove that checkpoint and resume from the one before it."


@dataclass(kw_only=True)
class Progress:
    """How far a run has come, as JSON.

    Attributes:
        losses: for each process its sums of the losses since the last log and the labels they are over, each K numbers.
        logged_loss: for each process the Trainer's own sum of losses since the last log.
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

    losses: list[list[list[float]]]
    logged_loss: list[float]
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
    """What `write_progress` wrote.

    Raises:
        ValueError: something else.
    """
    path = folder / PROGRESS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content["logged_loss"], list):  # older checkpoints hold what all processes had together
            content["logged_loss"] = [content["logged_loss"]]
            content["losses"] = [] if content["losses"] is None else [content["losses"]]
        progress = Progress(**{field.name: content[field.name] for field in fields(Progress) if field.name in content})
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} holds no progress of a run ({error}); {PASS_OVER}") from None
    for name, hint in get_type_hints(Progress).items():
        value = getattr(progress, name)
        if not fits(value, hint) or (name == "logged_loss" and not value):
            raise ValueError(f"{path} has {name}={str(value)[:80]}, which no run wrote; {PASS_OVER}")
    return progress


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON has a type; whole numbers count from 0 and fit 8 bytes.

    >>> fits(3, int), fits(-1, int), fits(True, int), fits(1, float | None), fits([[0.5], ["x"]], list[list[float]])
    (True, False, False, True, False)
    """
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(item, get_args(hint)[0]) for item in value)
    if get_args(hint):
        return any(fits(value, member) for member in get_args(hint))
    if hint is int:
        return type(value) is int and 0 <= value < 1 << 63
    return type(value) in (int, float) if hint is float else isinstance(value, hint)


def blocks_per_batch(arguments: TrainingArguments) -> int:
    return arguments.per_device_train_batch_size * arguments.world_size


def read_place(folder: Path, arguments: TrainingArguments) -> tuple[int, int]:
    """Pass and batches, counted in the present batches of the present number of processes."""
    progress = read_progress(folder)
    return progress.data_pass, progress.blocks_in_pass // blocks_per_batch(arguments)
