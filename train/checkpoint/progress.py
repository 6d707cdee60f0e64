"""What a checkpoint stores beside the Trainer's own state, so that a resumed run logs what an uninterrupted one logs.

Saving reads a run through the protocol `RunState` and does not import the Trainer.
"""
# M logged sum, named by TrainedModel.loss_names

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
        losses: for each process, the M sums of losses since the last log and the M numbers of labels in them.
        logged_loss: for each process, the Trainer's own sum of losses since the last log.
        all_losses: the Trainer's sum of losses over the run, up to the last log.
        skipped: steps of the run that were skipped.
        skipped_since_log: steps that were skipped since the last log.
        steps_since_log: steps since the last log, skipped or not.
        metrics_bytes: length of metrics.jsonl.
        measured_accuracy: accuracy of the heads in the last evaluation, by head and rank.
        evaluation_put_off: an evaluation was due when the run was interrupted.
        data_pass: which pass over the data, from 0.
        blocks_in_pass: blocks that all processes together have read in that pass.
        compiled: whether decoder layers are compiled; in older checkpoints they are not.
        loss_before: the backbone's loss on held-out data before the first step; older checkpoints have none.
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
        args: the Trainer's arguments, of which output_dir, should_save and batch sizes are read.
        state: the Trainer's state, of which global_step is read.
        engine: the engine that trains.
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
        """Whether every trained weight is finite; every process calls it and gets the same answer."""
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
    """Read what `write_progress` wrote.

    Raises:
        ValueError: the file is missing or was not written by a run.
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
    """Whether a JSON value has a type; integers must lie between 0 and 2⁶³.

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
    """The pass over the data and the batches read in it, in batches of the present size and number of processes."""
    progress = read_progress(folder)
    return progress.data_pass, progress.blocks_in_pass // blocks_per_batch(arguments)
