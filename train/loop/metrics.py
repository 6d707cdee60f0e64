"""`report_to: [jsonl]`: every log as one line of metrics.jsonl.

The file of a run that was resumed reads as that of a run that never stopped: lines after the checkpoint are dropped. A
line that cannot be written (a full disk) waits for the next one; training goes on.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class JsonLines(TrainerCallback):
    """
    Args:
        path: of the file.
        goes_on_at: its length when the checkpoint that the run goes on from was saved; None starts a new file.
    """

    def __init__(self, path: Path, *, goes_on_at: int | None = None) -> None:
        self.path = path
        self.goes_on_at = goes_on_at
        self.waiting = b""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.goes_on_at is None:
            self.path.unlink(missing_ok=True)  # a new run in an old folder starts a new record
        elif self.length > self.goes_on_at:
            os.truncate(self.path, self.goes_on_at)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            line = {"step": state.global_step} | {name: finite_or_none(value) for name, value in logs.items()}
            self.waiting += json.dumps(line).encode() + b"\n"
            self.write()

    @property
    def length(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def write(self) -> None:
        """What waits, as a whole or not at all."""
        if not self.path.parent.is_dir():
            logger.warning("%s was removed while the run goes on; it is made again.", self.path.parent)
        before = self.length
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(self.waiting)
            self.waiting = b""
        except OSError as error:
            if self.length > before:
                os.truncate(self.path, before)
            logger.warning("%s was not written (%s); its lines wait for the next log.", self.path, error.strerror)


def finite_or_none(value: Any) -> Any:
    """JSON has no NaN.

    >>> finite_or_none(float("nan")), finite_or_none(2)
    (None, 2)
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value
