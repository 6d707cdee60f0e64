"""Steps whose loss or gradient is not finite are skipped on all processes and counted; too many of them end the run.

A loss that is NaN or infinite on one process makes that process's gradient NaN, and with it the norm of the reduced
gradient, which all processes compute anyway, so no further communication is needed. The norm is read once for each
optimizer step, before the optimizer changes weights or moments. Data order and schedule continue as if the step had
been taken.
"""
# B batch, T position

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainingArguments

from train.checkpoint.whole import newest_whole
from train.engine.engine import Engine
from train.loop.batches import BLOCK
from train.loop.metrics import RunningLosses

logger = logging.getLogger(__name__)

SHOWN_BLOCKS, SHOWN_TOKENS = 8, 24


def read_together(norm: Any, stop_signals: Tensor) -> tuple[bool, bool]:
    """Whether a gradient's norm is finite and whether any process received a signal, with one wait for the device.

    >>> read_together(torch.tensor(float("inf")), torch.tensor(1))
    (False, True)
    """
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2's is sharded
    norm = torch.as_tensor(0.0 if norm is None else norm, device=stop_signals.device)
    finite, flag = torch.stack([torch.isfinite(norm), stop_signals > 0]).tolist()
    return finite, flag


def poisoned(loss: Tensor) -> Tensor:
    """The loss, or NaN where it is not finite, so that its gradient is NaN (an infinite loss may have a finite one)."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, float("nan"))


class GuardedRun(Protocol):
    """The attributes of a run that the guard reads and restores.

    Attributes:
        summed_loss: () the Trainer's own sum of losses since the last log.
        running_losses: each head's losses since the last log.
    """

    args: TrainingArguments
    state: Any
    accelerator: Any
    engine: Engine
    model: nn.Module
    model_wrapped: Any
    lr_scheduler: Any
    processing_class: Any
    running_losses: RunningLosses

    @property
    def summed_loss(self) -> Tensor: ...


class StepGuard:
    """Watches the optimizer steps of one run.

    Args:
        limit: the largest number of steps that may be skipped.

    Attributes:
        skipped: steps of the run that were skipped.
        skipped_since_log: steps that were skipped since the last log.
        steps_since_log: all steps since the last log, skipped or not.
    """

    def __init__(self, run: GuardedRun, limit: int) -> None:
        self.run = run
        self.limit = limit
        self.skipped = self.skipped_since_log = self.steps_since_log = 0
        self.batches: list[tuple[Tensor, Tensor]] = []  # block numbers and tokens of each micro-batch
        self.finite: list[Tensor] = []
        self.logged_loss: Tensor | None = None

    def begin(self, batches: list[dict[str, Tensor]]) -> None:
        """Begin a step: take the block numbers out of its micro-batches."""
        self.batches = [(batch.pop(BLOCK), batch["input_ids"]) for batch in batches]
        self.finite = []
        self.logged_loss = self.run.summed_loss.clone()

    def watch(self, loss: Tensor) -> Tensor:
        self.finite.append(torch.isfinite(loss.detach()))
        return poisoned(loss)

    def close(self, finite: bool) -> None:
        """Called before the optimizer's step: allow it, or skip it.

        Raises:
            ValueError: too many steps were skipped.
        """
        self.steps_since_log += 1
        scales = self.run.accelerator.scaler is not None or (self.run.engine.is_deepspeed and self.run.args.fp16)
        if finite or (scales and self._all_losses_finite()):
            self.run.running_losses.keep_step()
            return  # float16's loss scale grows until a gradient overflows, and its scaler skips that step itself
        forget_gradients(self.run)
        self.run.running_losses.drop_step()
        assert self.logged_loss is not None
        self.run.summed_loss.copy_(self.logged_loss)
        self.skipped, self.skipped_since_log = self.skipped + 1, self.skipped_since_log + 1
        self._tell()

    def corrected(self, logs: dict[str, float]) -> dict[str, float]:
        """The log with its loss as mean over the steps that were taken, and with the number of skipped steps."""
        steps, skipped = self.steps_since_log, self.skipped_since_log
        self.steps_since_log = self.skipped_since_log = 0
        if not self.skipped:
            return logs
        rest = {name: value for name, value in logs.items() if name != "loss"}
        taken = {"loss": logs["loss"] * steps / (steps - skipped)} if skipped < steps else {}
        return taken | rest | {"skipped_steps": self.skipped}

    def _all_losses_finite(self) -> bool:
        bad = torch.stack([~flag for flag in self.finite]).sum()
        return int(self.run.accelerator.reduce(bad, reduction="sum")) == 0

    def _tell(self) -> None:
        step = self.run.state.global_step + 1
        what = f"Step {step} was skipped, its loss or gradient is not finite: {self._describe_batch()}"
        if self.skipped <= self.limit:
            if self.run.args.should_save:
                logger.warning("%s. Skipped so far: %d of at most %d.", what, self.skipped, self.limit)
            return
        last, _ = newest_whole(self.run.args.output_dir)
        newest = f"{last} is the last whole checkpoint" if last else "there is no checkpoint yet"
        raise ValueError(
            f"{what}. {self.skipped} steps were skipped and max_skipped_steps is {self.limit}; {newest}. Look at these "
            f"blocks, lower the rates or give a larger max_skipped_steps, then resume with --resume true."
        )

    def _describe_batch(self) -> str:
        """Names the blocks of micro-batches without a finite loss, from all processes, or else all of the step."""
        pairs = list(zip(self.batches, self.finite, strict=True))
        mine = [(row, bool(finite)) for batch, finite in pairs for row in self._rows(*batch)]
        gathered = gather_object(mine)
        rows = [row for row, finite in gathered if not finite] or [row for row, _ in gathered]
        numbers = ", ".join(str(number) for number, _ in rows[:SHOWN_BLOCKS])
        more = f" and {len(rows) - SHOWN_BLOCKS} more" if len(rows) > SHOWN_BLOCKS else ""
        return f"blocks {numbers}{more} of the training data, block {rows[0][0]} begins {rows[0][1]!r}"

    def _rows(self, blocks_B: Tensor, tokens_BT: Tensor) -> list[tuple[int, str]]:
        texts = [self.run.processing_class.decode(row[:SHOWN_TOKENS]) for row in tokens_BT.tolist()]
        return list(zip(blocks_B.tolist(), texts, strict=True))


def forget_gradients(run: GuardedRun) -> None:
    """Remove all gradients, so that AdamW changes neither weights nor moments.

    A float16 scaler needs no gradients for this: it skips the step because it found infinities when it unscaled them.
    DeepSpeed steps inside `accelerator.backward` and skips such a step itself. The Trainer then does not advance the
    schedule, so this function does, to agree with the other engines.

    Raises:
        ValueError: DeepSpeed has taken the step, since its config switches the check off (check_grad_overflow: false).
    """
    if run.engine.is_deepspeed:
        if run.model_wrapped.was_step_applied():
            raise ValueError(
                "A gradient is not finite, and DeepSpeed has used it; set check_grad_overflow: true in its config and "
                "resume from the last checkpoint with --resume true."
            )
        run.lr_scheduler.step()
        return
    for parameter in run.model.parameters():
        parameter.grad = None


@torch.no_grad()
def all_finite(model: nn.Module, accelerator: Any) -> bool:
    """Whether all trained weights are finite; each process checks its own shards."""
    bad = torch.zeros((), dtype=torch.long, device=accelerator.device)
    for parameter in model.parameters():
        if parameter.requires_grad:
            bad += (~torch.isfinite(local_part(parameter))).any()
    return int(accelerator.reduce(bad, reduction="sum")) == 0


def local_part(parameter: nn.Parameter) -> Tensor:
    """This process's part of a parameter, which may be empty; under ZeRO-3 of the float32 copy that is trained."""
    if hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_local_fp32_param

        return safe_get_local_fp32_param(parameter)
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
