"""A step whose loss or gradient is not finite is skipped on all processes, counted, and after too many ends the run.

A loss that is NaN or infinite on one process poisons that process's gradient, so that the reduced gradient's norm,
which all processes compute, tells all of them without a message of its own. It is read once an optimizer step, before
the optimizer: weights and moments stay as they were. Data order and schedule go on as if the step had been taken.
"""
# B batch, T position

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from train.checkpoint.whole import newest_whole
from train.data.numbered_blocks import BLOCK

if TYPE_CHECKING:
    from train.loop.trainer import HeadsTrainer

logger = logging.getLogger(__name__)

SHOWN_BLOCKS, SHOWN_TOKENS = 8, 24


def read_together(norm: Any, asked: Tensor) -> tuple[bool, bool]:
    """Whether a gradient's norm is finite and whether a flag is set, with one wait for the device.

    >>> read_together(torch.tensor(float("inf")), torch.tensor(1))
    (False, True)
    """
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2's is sharded
    norm = torch.as_tensor(0.0 if norm is None else norm, device=asked.device)
    finite, flag = torch.stack([torch.isfinite(norm), asked > 0]).tolist()
    return finite, flag


def poisoned(loss: Tensor) -> Tensor:
    """The loss; where it is not finite, one whose gradient is NaN: that of an infinite cross-entropy may be finite."""
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, float("nan"))


class StepGuard:
    """Watches the optimizer steps of one trainer.

    Attributes:
        skipped: steps of the run that were skipped.
        skipped_since_log: of them, those since the last log.
        steps_since_log: skipped or not.
    """

    def __init__(self, trainer: HeadsTrainer) -> None:
        self.trainer = trainer
        self.limit = trainer.config.max_skipped_steps
        self.skipped = self.skipped_since_log = self.steps_since_log = 0
        self.batches: list[tuple[Tensor, Tensor]] = []  # block numbers and tokens of each micro-batch
        self.finite: list[Tensor] = []
        self.logged_loss: Tensor | None = None

    def begin(self, batches: list[dict[str, Tensor]]) -> None:
        """Take the block numbers out of the step's micro-batches."""
        self.batches = [(batch.pop(BLOCK), batch["input_ids"]) for batch in batches]
        self.finite = []
        self.logged_loss = self.trainer._tr_loss.clone()

    def watch(self, loss: Tensor) -> Tensor:
        self.finite.append(torch.isfinite(loss.detach()))
        return poisoned(loss)

    def close(self, finite: bool) -> None:
        """Before the optimizer's step: let it be taken, or skip it.

        Raises:
            ValueError: too many steps were skipped.
        """
        trainer = self.trainer
        self.steps_since_log += 1
        scales = trainer.accelerator.scaler is not None or (trainer.engine.is_deepspeed and trainer.args.fp16)
        if finite or (scales and self._all_losses_finite()):
            trainer.running_losses.keep_step()
            return  # float16's loss scale grows until a gradient overflows; its scaler skips that step itself
        forget_gradients(trainer)
        trainer.running_losses.drop_step()
        assert self.logged_loss is not None
        trainer._tr_loss.copy_(self.logged_loss)
        self.skipped, self.skipped_since_log = self.skipped + 1, self.skipped_since_log + 1
        self._tell()

    def corrected(self, logs: dict[str, float]) -> dict[str, float]:
        """A log whose loss is the mean over the steps that were taken, and which says how many were skipped so far."""
        steps, skipped = self.steps_since_log, self.skipped_since_log
        self.steps_since_log = self.skipped_since_log = 0
        if not self.skipped:
            return logs
        rest = {name: value for name, value in logs.items() if name != "loss"}
        taken = {"loss": logs["loss"] * steps / (steps - skipped)} if skipped < steps else {}
        return taken | rest | {"skipped_steps": self.skipped}

    def _all_losses_finite(self) -> bool:
        bad = torch.stack([~flag for flag in self.finite]).sum()
        return int(self.trainer.accelerator.reduce(bad, reduction="sum")) == 0

    def _tell(self) -> None:
        step = self.trainer.state.global_step + 1
        what = f"Step {step} was skipped, its loss or gradient is not finite: {self._describe_batch()}"
        if self.skipped <= self.limit:
            if self.trainer.args.should_save:
                logger.warning("%s. Skipped so far: %d of at most %d.", what, self.skipped, self.limit)
            return
        last, _ = newest_whole(self.trainer.args.output_dir)
        kept = f"{last} is the last whole checkpoint" if last else "there is no checkpoint yet"
        raise ValueError(
            f"{what}. {self.skipped} steps were skipped and max_skipped_steps is {self.limit}; {kept}. Look at these "
            f"blocks, lower the rates or give a larger max_skipped_steps, then go on with --resume true."
        )

    def _describe_batch(self) -> str:
        """The blocks of the micro-batches whose loss is not finite, of all processes; of the whole step if none is."""
        pairs = list(zip(self.batches, self.finite, strict=True))
        mine = [(row, bool(finite)) for batch, finite in pairs for row in self._rows(*batch)]
        gathered = gather_object(mine)
        rows = [row for row, finite in gathered if not finite] or [row for row, _ in gathered]
        numbers = ", ".join(str(number) for number, _ in rows[:SHOWN_BLOCKS])
        more = f" and {len(rows) - SHOWN_BLOCKS} more" if len(rows) > SHOWN_BLOCKS else ""
        return f"blocks {numbers}{more} of the training data, block {rows[0][0]} begins {rows[0][1]!r}"

    def _rows(self, blocks_B: Tensor, tokens_BT: Tensor) -> list[tuple[int, str]]:
        texts = [self.trainer.processing_class.decode(row[:SHOWN_TOKENS]) for row in tokens_BT.tolist()]
        return list(zip(blocks_B.tolist(), texts, strict=True))


def forget_gradients(trainer: HeadsTrainer) -> None:
    """Without gradients AdamW changes neither weights nor moments. (A scaler skips by what it found when it unscaled.)

    DeepSpeed steps inside `accelerator.backward` and skips such a step by itself; the Trainer then leaves the schedule
    where it is, which goes on under the other engines.

    Raises:
        ValueError: DeepSpeed has taken the step, since its config says not to look (check_grad_overflow: false).
    """
    if trainer.engine.is_deepspeed:
        if trainer.model_wrapped.was_step_applied():
            raise ValueError(
                "A gradient is not finite, and DeepSpeed has used it; set check_grad_overflow: true in its config and "
                "go on from the last checkpoint with --resume true."
            )
        trainer.lr_scheduler.step()
        return
    for parameter in trainer.model.parameters():
        parameter.grad = None


@torch.no_grad()
def weights_are_finite(trainer: HeadsTrainer) -> bool:
    """Every trained weight, on every process: a sharded one is judged where its shards lie, ZeRO-3's excepted."""
    bad = torch.zeros((), dtype=torch.long, device=trainer.args.device)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            bad += (~torch.isfinite(local)).any()
    return int(trainer.accelerator.reduce(bad, reduction="sum")) == 0
