"""Turn errors with data, files and workers into one sentence, which says what to do or what to resume from."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError
from pyarrow import ArrowException

from train.checkpoint.whole import newest_whole

WORKERS_DIE = "; workers read the data, and a machine out of memory kills them: lower trainer.dataloader_num_workers"


def ignore_dead_workers() -> None:
    """Reset DataLoader's signal handler, which could raise again while the error's sentence is printed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextlib.contextmanager
def explained_reading() -> Iterator[None]:
    """Within the context, libraries' errors on reading a step's data become one sentence.

    Raises:
        OSError: that sentence.
        ValueError: raised here as it was, since it is a sentence of ours, such as that too many rows are bad.
    """
    try:
        yield
    except (ConnectionError, EOFError) as error:  # the first symptom when the other end of a pipe dies
        ignore_dead_workers()
        raise OSError("A DataLoader worker died while it sent a batch" + WORKERS_DIE) from error
    except (OSError, ValueError, ArrowException, DatasetsError) as error:
        ignore_dead_workers()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        in_worker = lines[0].startswith("Caught ")  # and the worker's traceback follows
        if isinstance(error, ValueError) and not isinstance(error, ArrowException) and not in_worker:
            raise
        problem = lines[-1].strip() if in_worker else " ".join(lines)
        raise OSError(f"The training data cannot be read ({problem}).") from error


@contextlib.contextmanager
def explained_cache() -> Iterator[None]:
    """Within the context, Arrow's error on a damaged cache file becomes a sentence that names the folder to remove.

    Raises:
        ValueError: that sentence; any other error is raised as it was.
    """
    try:
        yield
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # Arrow's own OSErrors are of no subclass and have no errno
        raise ValueError(
            f"The tokenised data stored in {datasets.config.HF_DATASETS_CACHE} is damaged ({error}); remove that "
            f"folder: the next run tokenises the data again."
        ) from error


@contextlib.contextmanager
def names_checkpoint(run_folder: str | Path) -> Iterator[None]:
    """Within the context, errors with files or processes name the checkpoint to resume from.

    Raises:
        OSError: in place of another OSError, or of the error that a DataLoader raises when one of its workers dies.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        problem = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, RuntimeError) and not problem.startswith("DataLoader worker"):
            raise
        ignore_dead_workers()
        if isinstance(error, RuntimeError):
            problem += WORKERS_DIE
        last, _ = newest_whole(run_folder)
        advice = f"{last} is whole: resume from it with --resume true" if last else "no checkpoint was saved yet"
        raise OSError(f"{problem}; {advice}.") from error
