"""What goes wrong with the data, as a sentence that says what to do or what to resume from."""

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
    """The run ends already; DataLoader's handler would raise at any moment, the error's own sentence included."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextlib.contextmanager
def explained_reading() -> Iterator[None]:
    """While data is read for a step: what cannot be read ends in a sentence.

    Raises:
        OSError: in place of what the libraries raise.
    """
    try:
        yield
    except (ConnectionError, EOFError) as error:  # what is seen first when the other end of a pipe dies
        ignore_dead_workers()
        raise OSError("A DataLoader worker died while it sent a batch" + WORKERS_DIE) from error
    except (OSError, ValueError, ArrowException, DatasetsError) as error:
        ignore_dead_workers()
        lines = str(error).strip().splitlines() or [type(error).__name__]
        in_worker = lines[0].startswith("Caught ")  # and the worker's traceback follows
        if isinstance(error, ValueError) and not isinstance(error, ArrowException) and not in_worker:
            raise  # a sentence already, such as too many bad rows
        problem = lines[-1].strip() if in_worker else " ".join(lines)
        raise OSError(f"The training data cannot be read ({problem}).") from error


@contextlib.contextmanager
def explained_cache() -> Iterator[None]:
    """While stored data is opened: a cache file that was cut short.

    Raises:
        ValueError: names the folder to remove.
    """
    try:
        yield
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # Arrow's own is a bare OSError
        raise ValueError(
            f"The tokenised data stored in {datasets.config.HF_DATASETS_CACHE} is damaged ({error}); remove that "
            f"folder, it is made again from the data."
        ) from error


@contextlib.contextmanager
def names_checkpoint(run_folder: str | Path) -> Iterator[None]:
    """While the run trains: an error with files or processes says what to resume from.

    Raises:
        OSError: in place of one, and of what a DataLoader raises, at any moment, when one of its workers dies.
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
        advice = f"{last} is whole: go on from it with --resume true" if last else "no checkpoint was saved yet"
        raise OSError(f"{problem}; {advice}.") from error
