"""Save a checkpoint whole or not at all: all processes write, the main one lists the files and removes older ones."""

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
    """Write a checkpoint on all processes. One that cannot be written is removed with a warning; training continues.

    The Trainer would remove old checkpoints before the new one is whole, so HeadsTrainer hides its save_total_limit.

    Args:
        write: writes everything but `progress.json` and the list of files.
        writers: methods of the run that `write` calls; each is called even if an earlier one failed.
    """
    step = run.state.global_step
    folder = Path(run.args.output_dir) / f"checkpoint-{step}"
    finite = run.weights_are_finite()
    problems = attempt(run, folder, write, writers) if finite else ["the weights are not finite."]
    if not problems and run.args.should_save:
        problems = problems_of(lambda: mark_whole(folder, {"step": step} | present_facts(run.args, run.engine)))
    if run.args.should_save:
        if problems:
            remove(folder)
            logger.warning("No checkpoint at step %d: %s Training continues.", step, " ".join(problems))
        else:
            rotate(run.args.output_dir, run.keep_checkpoints)
    PartialState().wait_for_everyone()


def attempt(run: RunState, folder: Path, write: Callable[[], None], writers: Sequence[str]) -> list[str]:
    """Write on all processes. Returns what went wrong on any of them, without repetitions."""
    if run.args.should_save and folder.exists():
        remove(folder)  # left by a run that was killed while it wrote this checkpoint
    PartialState().wait_for_everyone()
    with collected_problems(run, writers) as mine:
        mine += problems_of(write)
    if not (found := gather_object(mine)):
        found = gather_object(problems_of(lambda: write_progress(run, folder)))
    return list(dict.fromkeys(found))


def problems_of(action: Callable[[], None]) -> list[str]:
    try:
        action()
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have own errors for a full disk
        return [" ".join(str(error).split())]
    return []


@contextlib.contextmanager
def collected_problems(run: RunState, writers: Sequence[str]) -> Iterator[list[str]]:
    """Within the context, this process goes on after a failing writer, since others wait for it to gather weights.

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
