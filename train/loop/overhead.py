"""What the heads add to a training step of their backbone (DynaMo, table 6: 2.67 % of the training time at 6.9B).

Forward and backward of one micro-batch are timed with and without the heads, interleaved, medians; optimizer and data
are the same for both and left out. Gradients are thrown away.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from train.engine.compiling import read_clock
from train.objective.losses import weighted_loss
from train.objective.model import TrainedModel

REPEATS = 3


def measure_heads_overhead(model: TrainedModel, batch: dict[str, Tensor], *, repeats: int = REPEATS) -> float:
    """Seconds that the heads add to forward and backward, as a share of the backbone's own; 0.03 is 3 %."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats + 1):
        for with_heads in (False, True):
            found = time_step(model, batch, with_heads=with_heads)
            if repeat:  # the first one pays for allocations
                seconds[with_heads].append(found)
    return statistics.median(seconds[True]) / statistics.median(seconds[False]) - 1


def time_step(model: TrainedModel, batch: dict[str, Tensor], *, with_heads: bool) -> float:
    tokens_BT = batch["input_ids"]
    start = read_clock(tokens_BT.device)
    objectives = trained_objectives(model, batch, with_heads)
    losses = [weighted_loss([model.part(objective, tokens_BT)])[0] for objective in objectives]
    torch.stack(losses).sum().backward()
    seconds = read_clock(tokens_BT.device) - start
    model.zero_grad(set_to_none=True)
    return seconds


def trained_objectives(model: TrainedModel, batch: dict[str, Tensor], with_heads: bool) -> Iterator[Any]:
    for objective in model.objectives(
        batch["input_ids"], batch["loss_mask"], batch["document_ids"], with_backbone=True
    ):
        yield objective
        if not with_heads:
            return
