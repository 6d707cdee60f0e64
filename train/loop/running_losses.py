"""The objectives' losses since the last log, step by step, so that a skipped step leaves no trace in them."""
# K trained objective

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RunningLosses:
    """Sums on the device, without waiting for it.

    >>> losses = RunningLosses()
    >>> losses.add(torch.tensor([6.0]), torch.tensor([3.0])); losses.keep_step()
    >>> losses.add(torch.tensor([float("nan")]), torch.tensor([3.0])); losses.drop_step()
    >>> losses.kept
    (tensor([6.]), tensor([3.]))
    """

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None  # cross-entropies of this process, labels of all processes
        self.step: tuple[Tensor, Tensor] | None = None

    def add(self, sums_K: Tensor, counts_K: Tensor) -> None:
        self.step = joined(self.step, (sums_K, counts_K))

    def keep_step(self) -> None:
        self.kept, self.step = joined(self.kept, self.step), None

    def drop_step(self) -> None:
        self.step = None

    def over_processes(self, accelerator: Any) -> tuple[Tensor, Tensor] | None:
        if self.kept is None:
            return None
        sums_K, counts_K = self.kept
        return accelerator.reduce(sums_K.clone(), reduction="sum"), counts_K

    def take_means(self, accelerator: Any) -> list[float] | None:
        """The mean of each objective, and a new start; None where no step was kept."""
        found, self.kept = self.over_processes(accelerator), None
        return None if found is None else (found[0] / found[1].clamp(min=1)).tolist()

    def state(self, accelerator: Any) -> list[list[float]] | None:
        """For a checkpoint; float32 comes back from JSON as it was."""
        found = self.over_processes(accelerator)
        return None if found is None else [part.tolist() for part in found]

    def restore(self, state: list[list[float]] | None, accelerator: Any) -> None:
        """The sum goes to the main process: it was reduced, and will be again."""
        if state is not None:
            sums_K, counts_K = (torch.tensor(part, device=accelerator.device) for part in state)
            self.kept = (sums_K * accelerator.is_main_process, counts_K)


def joined(one: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    if one is None or other is None:
        return one or other
    return one[0] + other[0], one[1] + other[1]
