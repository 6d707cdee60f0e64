"""Save a checkpoint whole or not at all: written by all processes, listed by the main one, then older ones removed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import gather_object
from safetensors import SafetensorError

from train.checkpoint.progress import write_progress
from train.checkpoint.resume import present_facts
from train.checkpoint.whole import mark_whole, remove, rotate
from train.loop.step_guard import weights_are_finite

if TYPE_CHECKING:
    from train.loop.trainer import HeadsTrainer

logger = logging.getLogger(__name__)

PARTS = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


def save_whole(trainer: HeadsTrainer, write: Callable[[], None]) -> None:
    """Run `write` on all processes; what cannot be written is removed and told, and training goes on.

    The Trainer would remove old checkpoints before the new one is whole: HeadsTrainer takes its save_total_limit away.
    """
    step = trainer.state.global_step
    folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    if not weights_are_finite(trainer):
        problems = ["the weights are not finite, no longer worth keeping."]
    else:
        problems = attempt(trainer, folder, write)
    if not problems and trainer.args.should_save:
        problems = problems_of(lambda: mark_whole(folder, {"step": step} | present_facts(trainer.args, trainer.engine)))
    if trainer.args.should_save:
        if problems:
            remove(folder)
            logger.warning("No checkpoint at step %d: %s Training goes on.", step, " ".join(problems))
        else:
            rotate(trainer.args.output_dir, trainer.keep_checkpoints)
    trainer.accelerator.wait_for_everyone()


def attempt(trainer: HeadsTrainer, folder: Path, write: Callable[[], None]) -> list[str]:
    """Write on all processes; what went wrong on any of them, each kind once."""
    if trainer.args.should_save and folder.exists():
        remove(folder)  # of a run that was killed here
    trainer.accelerator.wait_for_everyone()
    with going_on(trainer) as mine:
        mine += problems_of(write)
    if not (found := gather_object(mine)):
        found = gather_object(problems_of(lambda: write_progress(trainer, folder)))
    return list(dict.fromkeys(found))


def problems_of(action: Callable[[], None]) -> list[str]:
    try:
        action()
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors tell of a full disk by their own
        return [" ".join(str(error).split())]
    return []


@contextlib.contextmanager
def going_on(trainer: HeadsTrainer) -> Iterator[list[str]]:
    """Each part is begun though one before failed: gathering takes every process, and the others would wait for one.

    Yields:
        What went wrong on this process.
    """
    problems: list[str] = []

    def tolerant(part: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: problems.extend(problems_of(lambda: part(*args, **kwargs)))

    for name in PARTS:
        setattr(trainer, name, tolerant(getattr(trainer, name)))
    try:
        yield problems
    finally:
        for name in PARTS:
            delattr(trainer, name)
