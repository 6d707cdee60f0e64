"""What goes wrong with the data while training, as a sentence that says what to go on from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from datasets.exceptions import DatasetsError
from pyarrow import ArrowException

from train.whole_checkpoint import newest_whole


@contextlib.contextmanager
def explained_data_errors(run_folder: str | Path) -> Iterator[None]:
    """While it is open, unreadable files and workers that die end in one sentence.

    Raises:
        OSError: in place of what was raised; other errors pass.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        problem = describe_data_error(error)
        if problem is None:
            raise
        last, _ = newest_whole(run_folder)
        kept = f"{last} is whole: go on from it with --resume true" if last else "no checkpoint was saved yet"
        raise OSError(f"{problem} {kept}.") from error


def describe_data_error(error: Exception) -> str | None:
    """A sentence on an error that came from reading; None for another one.

    >>> describe_data_error(OSError("[Errno 5] Input/output error: 'a.jsonl'"))
    "The training data cannot be read ([Errno 5] Input/output error: 'a.jsonl');"
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, RuntimeError) and lines[0].startswith("DataLoader worker"):
        return (
            f"{lines[0]} It reads the training data, and a machine out of memory kills such processes: lower "
            f"trainer.dataloader_num_workers, or look into the system log;"
        )
    if lines[0].startswith("Caught ") and "in DataLoader worker" in lines[0]:  # the rest is the worker's traceback
        return f"The training data cannot be read ({lines[-1].strip()});"
    if isinstance(error, ArrowException | DatasetsError | OSError):
        return f"The training data cannot be read ({' '.join(str(error).split())});"
    return None
