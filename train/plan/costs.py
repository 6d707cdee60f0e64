"""Steps, hours and disk of a run: arithmetic on its config, the sizes of its tensors and the length of its data."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainingArguments

from heads.checkpoint.adapter import has_adapter
from train.config import TrainConfig
from train.objective.model import TrainedModel
from train.plan.shapes import ParameterCount, nbytes

PEAK_TFLOPS = {"A100": 312, "L40S": 362, "H100": 989}
"""Dense bfloat16 products per second of common GPUs, as their makers state them, in 10¹² FLOP/s."""
ASSUMED_MFU = 0.4
"""Share of that peak which training reaches, where none is stated: an assumption."""
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the user states about the machine and the data of a run: the flags of `python -m train plan`.

    Attributes:
        gpus: processes that the run is shared over, one a GPU
        memory: memory of one GPU, such as 80GB or 24GiB; with it, the plan warns of what will not fit
        device: where it is to run; cuda, or cpu with trainer.use_cpu: true
        tokens: tokens of training data; else data on this machine is counted
        tflops: peak of one GPU in 10^12 FLOP/s, such as 989; for the hours
        mfu: share of that peak which is reached, for the hours
        tokens_per_second: throughput of one GPU where it is known; for the hours
    """

    gpus: int = 1
    memory: str | None = None
    device: Literal["cuda", "cpu"] | None = None
    tokens: int | None = None
    tflops: float | None = None
    mfu: float = ASSUMED_MFU
    tokens_per_second: float | None = None

    def check(self) -> None:
        """Raise ValueError on a number that no machine has."""
        for name in ("gpus", "tokens"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"--{name} {count} was given; give a whole number of 1 and more.")
        for name in ("tflops", "tokens_per_second"):
            if (speed := getattr(self, name)) is not None and not 0 < speed < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} {speed} was given; give a number above 0.")
        if not 0 < self.mfu <= 1:
            raise ValueError(
                f"--mfu {self.mfu} was given; it is a share of the peak: give a number above 0 and up to 1."
            )

    @property
    def room(self) -> int | None:
        """Bytes of one GPU's memory."""
        return None if self.memory is None else parse_bytes(self.memory)


def parse_bytes(text: str) -> int:
    """Bytes from a number with a unit.

    >>> parse_bytes("80GB"), parse_bytes("24 GiB"), parse_bytes("80e9")
    (80000000000, 25769803776, 80000000000)

    Raises:
        ValueError: no number, or an unknown unit.
    """
    found = re.fullmatch(r"\s*(\d*\.?\d+(?:e\d+)?)\s*([a-z]*)\s*", text.lower())
    size = float(found[1]) * UNITS.get(found[2], 0) if found else 0
    if size < 1:
        raise ValueError(f"--memory {text!r} was given; give a size with its unit, such as 80GB, 24GiB or 80e9.")
    return int(size)


def trainer_field(config: TrainConfig, name: str) -> Any:
    """A field of `trainer`, or the default that a run has for it."""
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)} | {"save_total_limit": 2}
    return config.trainer.get(name, defaults[name])


def mixed_precision(config: TrainConfig) -> torch.dtype | None:
    return torch.bfloat16 if trainer_field(config, "bf16") else torch.float16 if trainer_field(config, "fp16") else None


def stored_dtype(config: TrainConfig, model: TrainedModel) -> torch.dtype:
    """In which hidden states are stored: the config's, or the backbone's."""
    name = config.hidden_states_dtype
    dtype: torch.dtype = model.backbone.dtype if name is None else getattr(torch, name)
    return dtype


def evaluates(config: TrainConfig) -> bool:
    return bool(config.data.eval or config.data.eval_fraction)


def count_steps(config: TrainConfig, blocks: int | None, gpus: int) -> int | None:
    """Updates of the run, counted as transformers' Trainer does; None where only the data could say."""
    if (limit := trainer_field(config, "max_steps")) > 0:
        return int(limit)
    if blocks is None:
        return None
    batches = math.ceil(blocks / (trainer_field(config, "per_device_train_batch_size") * gpus))
    updates = math.ceil(batches / trainer_field(config, "gradient_accumulation_steps"))
    return math.ceil(trainer_field(config, "num_train_epochs") * max(1, updates))


def hours(flops: float, tokens: float, machine: Machine) -> dict[str, float]:
    """Hours by the GPU they are for: one whose throughput or peak is stated, or common ones.

    >>> hours(3.6e18, 0, Machine(tflops=500, mfu=0.5))
    {'500 TFLOP/s stated': 4.0}
    >>> hours(0, 7.2e6, Machine(gpus=2, tokens_per_second=1000))
    {'1,000 tokens/s stated': 1.0}
    """
    if (speed := machine.tokens_per_second) is not None:
        return {f"{speed:,.0f} tokens/s stated": tokens / speed / machine.gpus / 3600}
    peaks = {f"{machine.tflops:g} TFLOP/s stated": machine.tflops} if machine.tflops else PEAK_TFLOPS
    return {name: flops / (peak * 1e12 * machine.mfu * machine.gpus) / 3600 for name, peak in peaks.items()}


def bytes_in_output_dir(config: TrainConfig, model: TrainedModel, steps: int | None) -> dict[str, int]:
    """Bytes that the run writes, by what is written."""
    result = saved_bytes(model, getattr(torch, config.save_dtype))
    written = {"last/": result}
    if model.token_heads is not None and evaluates(config):
        written["best/"] = result
    if config.save_every_steps:
        name, count = checkpoints(config, steps)
        written[name] = count * (saved_bytes(model, torch.float32) + ParameterCount.of(model).moments_bytes)
    return written


def checkpoints(config: TrainConfig, steps: int | None) -> tuple[str, int]:
    """The largest number in output_dir; without a limit all that are written, that of the last step included."""
    limit = trainer_field(config, "save_total_limit") or 0
    if limit > 0:
        return f"{limit} checkpoint-*/ and one on its way", limit + 1
    if steps is None:
        return "each checkpoint-*/: none is removed, and their number is unknown", 1
    count = max(1, math.ceil(steps / config.save_every_steps))
    return f"{count:,} checkpoint-*/: none is removed without trainer.save_total_limit", count


def saved_bytes(model: TrainedModel, dtype: torch.dtype) -> int:
    """One folder: the heads, and the backbone where it is trained (its adapter alone, in its own dtype)."""

    def in_dtype(tensors: Iterable[Tensor]) -> int:
        return sum(t.numel() for t in tensors) * dtype.itemsize

    of_heads = 0 if model.token_heads is None else in_dtype(model.token_heads.state_dict().values())
    if not model.trains_backbone:
        return of_heads
    if has_adapter(model.model):
        return of_heads + nbytes(p for name, p in model.model.named_parameters() if "lora_" in name)
    return of_heads + in_dtype(model.model.parameters())


def stored_bytes(config: TrainConfig, model: TrainedModel, blocks: int) -> int:
    """The hidden states of all training blocks; 0 where the backbone is trained and none could stay."""
    if model.token_heads is None or model.trains_backbone:
        return 0
    row = len(model.stored_taps) * model.backbone.hidden_size * stored_dtype(config, model).itemsize
    return blocks * config.data.block_size * row
