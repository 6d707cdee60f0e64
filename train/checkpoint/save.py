"""Save a checkpoint whole or not at all: written by all processes, listed by the main one, then older ones removed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors import SafetensorError

from train.checkpoint.progress import RunState, write_progress
from train.checkpoint.resume import present_facts
from train.checkpoint.whole import mark_whole, remove, rotate

logger = logging.getLogger(__name__)


def save_whole(run: RunState, write: Callable[[], None], *, writers: Sequence[str]) -> None:
    """Write a checkpoint on all processes; one that cannot be written is removed and warned of, and training continues.

    The Trainer would remove old checkpoints before the new one is whole: HeadsTrainer takes its save_total_limit away.

    Args:
        write: writes all but `progress.json` and the list of files.
        writers: methods of the run that `write` calls; each is called even where one before it failed.
    """
    step = run.state.global_step
    folder = Path(run.args.output_dir) / f"checkpoint-{step}"
    if not run.weights_are_finite():
        problems = ["the weights are not finite, no longer worth keeping."]
    else:
        problems = attempt(run, folder, write, writers)
    if not problems and run.args.should_save:
        problems = problems_of(lambda: mark_whole(folder, {"step": step} | present_facts(run.args, run.engine)))
    if run.args.should_save:
        if problems:
            remove(folder)
            logger.warning("No checkpoint at step %d: %s Training goes on.", step, " ".join(problems))
        else:
            rotate(run.args.output_dir, run.keep_checkpoints)
    PartialState().wait_for_everyone()


def attempt(run: RunState, folder: Path, write: Callable[[], None], writers: Sequence[str]) -> list[str]:
    """Write on all processes; what went wrong on any of them, each kind once."""
    if run.args.should_save and folder.exists():
        remove(folder)  # of a run that was killed here
    PartialState().wait_for_everyone()
    with collected_problems(run, writers) as mine:
        mine += problems_of(write)
    if not (found := gather_object(mine)):
        found = gather_object(problems_of(lambda: write_progress(run, folder)))
    return list(dict.fromkeys(found))


def problems_of(action: Callable[[], None]) -> list[str]:
    try:
        action()
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors report a full disk by their own
        return [" ".join(str(error).split())]
    return []


@contextlib.contextmanager
def collected_problems(run: RunState, writers: Sequence[str]) -> Iterator[list[str]]:
    """Every writer runs though one before it failed: gathering takes every process, and the others would wait for it.

    Yields:
        What went wrong on this process.
    """
    problems: list[str] = []

    def tolerant(writer: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **kwargs: problems.extend(problems_of(lambda: writer(*args, **kwargs)))

    for name in writers:
        setattr(run, name, tolerant(getattr(run, name)))
    try:
        yield problems
    finally:
        for name in writers:
            delattr(run, name)
