"""The time that heads add to a training step of their backbone, as a share of the step without them.

Forward and backward of one micro-batch are timed in turn with and without the heads, and medians are compared.
Optimizer and data loading are not timed, since they are the same for both. DynaMo's table 6 has another quantity
(2.67 % at 6.9B): the hours of the whole modified-CLM training, on 5 % of the Pile, as a share of Pythia's pre-training.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from train.engine.compiling import read_clock
from train.loop.batches import collate
from train.objective.losses import weighted_loss
from train.objective.model import TrainedModel

logger = logging.getLogger(__name__)

REPEATS = 3


def log_heads_overhead(trainer: Any) -> None:
    """If backbone and heads are trained together, measure the share and store it for the first log."""
    model: TrainedModel = trainer.model
    if model.token_heads is None or not model.trains_backbone:
        return
    if PartialState().num_processes > 1:
        logger.info("the time that the heads add to a step is measured only in runs of one process")
        return
    with torch.random.fork_rng(), trainer.compute_loss_context_manager():  # leaves the run's random numbers as they are
        batch = collate(list(itertools.islice(trainer.train_dataset, trainer.args.per_device_train_batch_size)))
        model.to(trainer.args.device).train()
        share = measure_heads_overhead(model, {name: t.to(trainer.args.device) for name, t in batch.items()})
    logger.info("the heads add %.1f %% to forward and backward of the backbone's own training step", 100 * share)
    trainer.heads_overhead = share


def measure_heads_overhead(model: TrainedModel, batch: dict[str, Tensor], *, repeats: int = REPEATS) -> float:
    """Seconds that the heads add to forward and backward, as a share of the backbone's own; 0.03 is 3 %."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(repeats + 1):
        for with_heads in (False, True):
            found = time_step(model, batch, with_heads=with_heads)
            if repeat:  # the first one includes allocations
                seconds[with_heads].append(found)
    return statistics.median(seconds[True]) / statistics.median(seconds[False]) - 1


def time_step(model: TrainedModel, batch: dict[str, Tensor], *, with_heads: bool) -> float:
    device = batch["input_ids"].device
    start = read_clock(device)
    states = model.backbone_states(batch["input_ids"], batch["loss_mask"], batch["document_ids"])
    heads = itertools.islice(model.head_rows(states, with_backbone=True), None if with_heads else 1)
    weighted_loss((model.with_targets(rows, states) for rows in heads), model.chunk_elements)[0].backward()
    seconds = read_clock(device) - start
    model.zero_grad(set_to_none=True)
    return seconds
