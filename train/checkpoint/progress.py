"""What a checkpoint keeps beside the Trainer's own state, so that a resumed run logs what an uninterrupted one logs.

That is: losses summed since the last log, skipped steps, the length of metrics.jsonl, the heads' measured accuracy, the
backbone's loss before the first step, the place in a stream, and an evaluation that was put off because the run had to
end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainingArguments

if TYPE_CHECKING:
    from train.loop.trainer import HeadsTrainer

PROGRESS = "progress.json"


@dataclass
class Place:
    """Where in the data a run is: the pass over it, and batches of one process in that pass."""

    data_pass: int
    batches: int


def write_progress(trainer: HeadsTrainer, folder: Path) -> None:
    """All processes call it; the main one writes."""
    logged_loss = trainer.accelerator.reduce(trainer._tr_loss.clone(), reduction="mean").item()
    losses = trainer.running_losses.state(trainer.accelerator)
    if not trainer.args.should_save:
        return
    metrics = Path(trainer.args.output_dir) / "metrics.jsonl"
    progress = {
        "losses": losses,
        "logged_loss": logged_loss,
        "all_losses": trainer._total_loss_scalar,
        "skipped": trainer.guard.skipped,
        "skipped_since_log": trainer.guard.skipped_since_log,
        "steps_since_log": trainer.guard.steps_since_log,
        "metrics_bytes": metrics.stat().st_size if metrics.is_file() else 0,
        "measured_accuracy": None if trainer.token_heads is None else trainer.token_heads.measured_accuracy,
        "loss_before": trainer.loss_before,
        "evaluation_put_off": trainer.evaluation_put_off,
        "data_pass": trainer.place.data_pass,
        "compiled": trainer.compiled,
        "blocks_in_pass": trainer.place.batches * blocks_per_batch(trainer.args),
    }
    (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


def read_progress(folder: Path) -> dict[str, Any]:
    return json.loads((folder / PROGRESS).read_text(encoding="utf-8"))


def blocks_per_batch(arguments: TrainingArguments) -> int:
    return arguments.per_device_train_batch_size * arguments.world_size


def read_place(folder: Path, arguments: TrainingArguments) -> tuple[int, int]:
    """Pass and batches, counted in the present batches of the present number of processes."""
    progress = read_progress(folder)
    return progress["data_pass"], progress["blocks_in_pass"] // blocks_per_batch(arguments)


def restore_progress(trainer: HeadsTrainer, folder: Path) -> None:
    progress = read_progress(folder)
    trainer.running_losses.restore(progress["losses"], trainer.accelerator)
    trainer._tr_loss.fill_(progress["logged_loss"])
    trainer._total_loss_scalar = progress["all_losses"]
    trainer._globalstep_last_logged = trainer.state.global_step - progress["steps_since_log"]
    for name in ("skipped", "skipped_since_log", "steps_since_log"):
        setattr(trainer.guard, name, progress[name])
    if trainer.token_heads is not None:
        trainer.token_heads.measured_accuracy = progress["measured_accuracy"]
    trainer.loss_before = progress.get("loss_before")  # a checkpoint of an older version has none
    if progress["evaluation_put_off"]:
        trainer.evaluate()


class Continuation(TrainerCallback):
    """Puts the progress back where a resumed run begins, and ends one that was asked to stop."""

    def __init__(self, trainer: HeadsTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.resumed_from is not None:
            restore_progress(self.trainer, self.trainer.resumed_from)
        else:
            self.trainer.evaluate_before()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A scheduler waits seconds, an evaluation takes minutes: it is put off until the run goes on."""
        if self.trainer.interruption.agreed:
            self.trainer.evaluation_put_off, control.should_evaluate = control.should_evaluate, False
            control.should_save = control.should_training_stop = True
