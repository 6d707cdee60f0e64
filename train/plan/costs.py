"""Steps, hours and disk of a run: arithmetic on its config, the sizes of its tensors and the length of its data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from heads.checkpoint.adapter import has_adapter
from heads.interface.token_heads import TokenHeads
from train.config import TrainConfig
from train.objective.model import TrainedModel
from train.plan.shapes import nbytes, numel

PEAK_TFLOPS = {"A100": 312, "L40S": 362, "H100": 989}
"""Dense bfloat16 products per second of common GPUs, as their makers state them, in 10¹² FLOP/s."""
ASSUMED_MFU = 0.4
"""Share of that peak which training reaches, where none is stated: an assumption."""

Disk = dict[str, int]
"""Bytes by what is written."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """What was stated about the speed of one GPU; None where nothing was.

    Attributes:
        tflops: its peak, in 10¹² FLOP/s.
        mfu: the share of the peak that is reached.
        tokens_per_second: measured, in place of both.
    """

    tflops: float | None = None
    mfu: float = ASSUMED_MFU
    tokens_per_second: float | None = None


def field(config: TrainConfig, name: str) -> Any:
    """A field of `trainer`, or the default that a run has for it."""
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)} | {"save_total_limit": 2}
    return config.trainer.get(name, defaults[name])


def blocks_per_step(config: TrainConfig, gpus: int) -> int:
    """Blocks between two updates, over all processes."""
    return int(field(config, "per_device_train_batch_size") * field(config, "gradient_accumulation_steps") * gpus)


def count_steps(config: TrainConfig, blocks: int | None, gpus: int) -> int | None:
    """Updates of the run, counted as transformers' Trainer does; None where only the data could say."""
    if (limit := field(config, "max_steps")) > 0:
        return int(limit)
    if blocks is None:
        return None
    accumulated = field(config, "gradient_accumulation_steps")
    batches = math.ceil(blocks / (field(config, "per_device_train_batch_size") * gpus))
    return math.ceil(field(config, "num_train_epochs") * max(1, math.ceil(batches / accumulated)))


def hours(flops: float, tokens: float, gpus: int, stated: Throughput) -> dict[str, float]:
    """Hours by the GPU they are for.

    >>> hours(3.6e18, 0, 1, Throughput(tflops=500, mfu=0.5))
    {'500 TFLOP/s stated': 4.0}
    >>> hours(0, 7.2e6, 2, Throughput(tokens_per_second=1000))
    {'1,000 tokens/s stated': 1.0}
    """
    if stated.tokens_per_second:
        return {f"{stated.tokens_per_second:,.0f} tokens/s stated": tokens / stated.tokens_per_second / gpus / 3600}
    peaks = {f"{stated.tflops:g} TFLOP/s stated": stated.tflops} if stated.tflops else PEAK_TFLOPS
    return {name: flops / (peak * 1e12 * stated.mfu * gpus) / 3600 for name, peak in peaks.items()}


def disk(config: TrainConfig, model: TrainedModel, blocks: int | None, steps: int | None = None) -> tuple[Disk, int]:
    """Bytes that the run writes into output_dir, and bytes of cached hidden states (0 where not known or not fixed)."""
    save_dtype = getattr(torch, config.save_dtype)
    result = saved(model, save_dtype)
    written = {"last/": result}
    if model.token_heads is not None and evaluates(config):
        written["best/"] = result
    if config.save_every_steps:
        name, count = checkpoints(config, steps)
        written[name] = count * (saved(model, torch.float32) + optimizer_bytes(model))
    return written, cached_states(config, model, blocks or 0)


def checkpoints(config: TrainConfig, steps: int | None) -> tuple[str, int]:
    """How many lie in output_dir at the most; without a limit all that are written, one at the last step among them."""
    kept = field(config, "save_total_limit") or 0
    if kept > 0:
        return f"{kept} checkpoint-*/ and one on its way", kept + 1
    if steps is None:
        return "each checkpoint-*/: all are kept, and how many is unknown", 1
    count = max(1, math.ceil(steps / config.save_every_steps))
    return f"{count:,} checkpoint-*/: all are kept, no trainer.save_total_limit", count


def saved(model: TrainedModel, dtype: torch.dtype) -> int:
    """Bytes of one folder: the heads, and the backbone where it is trained (its adapter alone, in its own dtype)."""
    size = 0 if model.token_heads is None else in_dtype(list(model.token_heads.state_dict().values()), dtype)
    if not model.trains_backbone:
        return size
    if has_adapter(model.model):
        return size + nbytes([p for name, p in model.model.named_parameters() if "lora_" in name])
    return size + in_dtype(list(model.model.parameters()), dtype)


def in_dtype(tensors: list[Any], dtype: torch.dtype) -> int:
    return numel(tensors) * dtype.itemsize


def optimizer_bytes(model: TrainedModel) -> int:
    """AdamW's two moments, each in its weight's dtype."""
    return 2 * nbytes([p for p in model.parameters() if p.requires_grad])


def cached_states(config: TrainConfig, model: TrainedModel, blocks: int) -> int:
    """The taps of all training blocks as they are stored; a backbone that is trained has none that stay."""
    heads: TokenHeads | None = model.token_heads
    if heads is None or model.trains_backbone:
        return 0
    row = len(model.stored_taps) * model.backbone.hidden_size * stored_dtype(config, model).itemsize
    return blocks * config.data.block_size * row


def stored_dtype(config: TrainConfig, model: TrainedModel) -> torch.dtype:
    """In which hidden states are stored: the config's, or the backbone's."""
    name = config.hidden_states_dtype
    dtype: torch.dtype = model.backbone.dtype if name is None else getattr(torch, name)
    return dtype


def evaluates(config: TrainConfig) -> bool:
    return bool(config.data.eval or config.data.eval_fraction)
