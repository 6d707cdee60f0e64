"""Steps, time and disk space of a run: arithmetic on its config, its tensors' sizes and its data's length."""

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
from heads.validation import validated, within
from train.config import TrainConfig
from train.objective.model import TrainedModel
from train.plan.shapes import ParameterCount, nbytes

PEAK_TFLOPS = {"A100": 312, "L40S": 362, "H100": 989}
"""Dense bfloat16 peaks of common GPUs by their makers' data sheets, in 10¹² FLOP/s."""
ASSUMED_MFU = 0.4
"""Model FLOPs utilisation if the user states none: the share of the peak that training is assumed to reach."""
UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@validated
@dataclass(kw_only=True)
class Machine:
    """What the user states about the machine and the data of a run: the flags of `python -m train plan`.

    Attributes:
        gpus: number of GPUs; each gets one process
        memory: memory of one GPU, such as 80GB or 24GiB; with it, the plan warns of what will not fit
        device: where the run will take place; by default cuda, or cpu with trainer.use_cpu: true
        tokens: tokens of training data; by default data on this machine is counted
        tflops: peak of one GPU in 10^12 FLOP/s, such as 989; for the time
        mfu: share of that peak that training reaches; for the time
        tokens_per_second: measured throughput of one GPU; for the time
    """

    gpus: int = within(1, default=1)
    memory: str | None = None
    device: Literal["cuda", "cpu"] | None = None
    tokens: int | None = within(1, default=None)
    tflops: float | None = within(above=0, default=None)
    mfu: float = within(above=0, high=1, default=ASSUMED_MFU, advice="it is a share of the peak")
    tokens_per_second: float | None = within(above=0, default=None)

    def validate_memory(self) -> None:
        """Raise ValueError on a size that cannot be read."""
        _ = self.memory_bytes

    def validate_speed(self) -> None:
        """Raise ValueError on a throughput beside what it would be computed from."""
        if self.tokens_per_second is not None and (self.tflops is not None or self.mfu != ASSUMED_MFU):
            raise ValueError(
                "--tokens-per-second was given with --tflops or --mfu; a measured throughput needs neither: leave it "
                "or them out."
            )

    @property
    def memory_bytes(self) -> int | None:
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
    """A field of `trainer`, or its default in a run."""
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)} | {"save_total_limit": 2}
    return config.trainer.get(name, defaults[name])


def mixed_precision(config: TrainConfig) -> torch.dtype | None:
    return torch.bfloat16 if trainer_field(config, "bf16") else torch.float16 if trainer_field(config, "fp16") else None


def stored_dtype(config: TrainConfig, model: TrainedModel) -> torch.dtype:
    """The dtype of stored hidden states: the config's, else the backbone's."""
    name = config.hidden_states_dtype
    dtype: torch.dtype = model.backbone.dtype if name is None else getattr(torch, name)
    return dtype


def evaluates(config: TrainConfig) -> bool:
    return bool(config.data.eval or config.data.eval_fraction)


def count_steps(config: TrainConfig, blocks: int | None, gpus: int) -> int | None:
    """Updates of the run, counted as transformers' Trainer does; None if they depend on data that were not counted."""
    if (limit := trainer_field(config, "max_steps")) > 0:
        return int(limit)
    if blocks is None:
        return None
    batches = math.ceil(blocks / (trainer_field(config, "per_device_train_batch_size") * gpus))
    updates = math.ceil(batches / trainer_field(config, "gradient_accumulation_steps"))
    return math.ceil(trainer_field(config, "num_train_epochs") * max(1, updates))


def run_seconds(flops: float, tokens: float, machine: Machine) -> dict[str, float]:
    """Seconds of a run, by GPU: the one whose throughput or peak the user stated, else common ones.

    >>> run_seconds(3.6e18, 0, Machine(tflops=500, mfu=0.5))
    {'500 TFLOP/s stated': 14400.0}
    >>> run_seconds(0, 7.2e6, Machine(gpus=2, tokens_per_second=1000))
    {'1,000 tokens/s stated': 3600.0}
    """
    if (speed := machine.tokens_per_second) is not None:
        return {f"{speed:,.0f} tokens/s stated": tokens / speed / machine.gpus}
    peaks = {f"{machine.tflops:g} TFLOP/s stated": machine.tflops} if machine.tflops else PEAK_TFLOPS
    return {name: flops / (peak * 1e12 * machine.mfu * machine.gpus) for name, peak in peaks.items()}


def bytes_in_output_dir(config: TrainConfig, model: TrainedModel, steps: int | None) -> dict[str, int]:
    """Bytes that the run writes, by folder."""
    result = saved_bytes(model, getattr(torch, config.save_dtype))
    written = {"last/": result}
    if model.token_heads is not None and evaluates(config):
        written["best/"] = result
    if config.save_every_steps:
        name, count = checkpoints(config, steps)
        written[name] = count * (saved_bytes(model, torch.float32) + ParameterCount.of(model).moments_bytes)
    return written


def checkpoints(config: TrainConfig, steps: int | None) -> tuple[str, int]:
    """Name and largest number of checkpoints in output_dir: all that are written, unless a limit removes old ones."""
    limit = trainer_field(config, "save_total_limit") or 0
    if limit > 0:
        return f"{limit} checkpoint-*/ and one being written", limit + 1
    if steps is None:
        return "each checkpoint-*/: none is removed, and their number is unknown", 1
    count = max(1, math.ceil(steps / config.save_every_steps))
    return f"{count:,} checkpoint-*/: none is removed without trainer.save_total_limit", count


def saved_bytes(model: TrainedModel, dtype: torch.dtype) -> int:
    """Bytes of one folder: the heads, and a trained backbone or, in its own dtype, its adapter."""

    def in_dtype(tensors: Iterable[Tensor]) -> int:
        return sum(t.numel() for t in tensors) * dtype.itemsize

    of_heads = 0 if model.token_heads is None else in_dtype(model.token_heads.state_dict().values())
    if not model.trains_backbone:
        return of_heads
    if has_adapter(model.model):
        return of_heads + nbytes(p for name, p in model.model.named_parameters() if "lora_" in name)
    return of_heads + in_dtype(model.model.parameters())


def stored_bytes(config: TrainConfig, model: TrainedModel, blocks: int) -> int:
    """Bytes of the hidden states of all training blocks; 0 if the backbone is trained, since they would change."""
    if model.token_heads is None or model.trains_backbone:
        return 0
    row = len(model.stored_taps) * model.backbone.hidden_size * stored_dtype(config, model).itemsize
    return blocks * config.data.block_size * row
