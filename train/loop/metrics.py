"""Sum a run's losses between logs, and with `report_to: [jsonl]` write each log as one line of metrics.jsonl.

A resumed run drops the lines after its checkpoint, so its file is that of a run that never stopped. A line that cannot
be written (a full disk) is written with the next one, and training continues.
"""
# M logged sum, named by TrainedModel.loss_names; P process

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class JsonLines(TrainerCallback):
    """
    Args:
        path: the file.
        resumes_at: the file's length in bytes when the resumed checkpoint was saved; None starts a new file.
    """

    def __init__(self, path: Path, *, resumes_at: int | None = None) -> None:
        self.path = path
        self.resumes_at = resumes_at
        self.waiting = b""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.resumes_at is None:
            self.path.unlink(missing_ok=True)  # a new run in an old folder starts a new record
        elif self.length > self.resumes_at:
            os.truncate(self.path, self.resumes_at)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            line = {"step": state.global_step} | {name: finite_or_none(value) for name, value in logs.items()}
            self.waiting += json.dumps(line).encode() + b"\n"
            self.write()

    @property
    def length(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def write(self) -> None:
        """Append the waiting lines, all of them or none."""
        if not self.path.parent.is_dir():
            logger.warning("%s was removed during the run and is made again.", self.path.parent)
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
    """None for NaN and infinities, which JSON does not have.

    >>> finite_or_none(float("nan")), finite_or_none(2)
    (None, 2)
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunningLosses:
    """The logged sums since the last log; those of a skipped step are dropped.

    Sums stay on the device, so that adding does not synchronise with it.

    >>> losses = RunningLosses()
    >>> losses.add(torch.tensor([6.0]), torch.tensor([3.0])); losses.keep_step()
    >>> losses.add(torch.tensor([float("nan")]), torch.tensor([3.0])); losses.drop_step()
    >>> losses.taken
    (tensor([6.]), tensor([3.]))
    """

    def __init__(self) -> None:
        self.taken: tuple[Tensor, Tensor] | None = None  # losses of this process, labels of all processes
        self.step: tuple[Tensor, Tensor] | None = None

    def add(self, sums_M: Tensor, counts_M: Tensor) -> None:
        self.step = joined(self.step, (sums_M, counts_M))

    def keep_step(self) -> None:
        self.taken, self.step = joined(self.taken, self.step), None

    def drop_step(self) -> None:
        self.step = None

    def take_means(self, accelerator: Any) -> list[float] | None:
        """Return the mean of each logged sum and reset the sums; None where no step was taken."""
        if self.taken is None:
            return None
        (sums_M, counts_M), self.taken = self.taken, None
        summed_M = accelerator.reduce(sums_M.clone(), reduction="sum")
        return (summed_M / counts_M.clamp(min=1)).tolist()

    def state(self) -> list[list[float]] | None:
        """The sums and labels of this process for a checkpoint; JSON preserves float32 exactly."""
        return None if self.taken is None else [part.tolist() for part in self.taken]

    def restore(self, states: list[list[list[float]]], process: int, processes: int, device: Any = None) -> None:
        """Restore this process's own sums, so that a resumed run adds in the order of one that never stopped.

        Where the number of processes has changed, the first process takes the sums of all.

        Args:
            states: `state` of every process; empty where nothing was summed since the last log.
        """
        if not states:
            return
        sums_PM = torch.tensor([sums for sums, _ in states], device=device)
        counts_M = torch.tensor(states[0][1], device=device)  # each process has the counts of all
        own_M = sums_PM[process] if len(states) == processes else sums_PM.sum(dim=0) * (process == 0)
        self.taken = (own_M, counts_M)


def joined(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    if one is None or other is None:
        return one or other
    return one[0] + other[0], one[1] + other[1]
