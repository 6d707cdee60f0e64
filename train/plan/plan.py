"""A run's plan as figures: everything that the report prints, from a config and what was stated about the machine."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heads.backbone.loading import load_tokenizer
from heads.data.standard_library import STDLIB
from train.config import TrainConfig
from train.data.packing import build_datasets
from train.engine.sharding import find_units
from train.objective.model import TrainedModel
from train.plan.costs import Disk, blocks_per_step, count_steps, disk, evaluates, field, stored_dtype
from train.plan.memory import Sizes
from train.plan.shapes import Part, build_on_meta, count, count_backbone, count_heads, count_original
from train.plan.step import Step, StepShape, trace_step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found.

    Attributes:
        backbone: its parameters.
        heads: their parameters.
        original: of the frozen copy that self-distillation keeps.
        sizes: what memory under each engine follows from.
        gpus: processes of the run.
        blocks: blocks of training data; None where they were not counted.
        steps: updates of the run; None where only the data could say.
        step_tokens: tokens between two updates, over all processes.
        step_flops: of them, over all processes.
        storing_flops: of the one pass over a block that stores its hidden states; 0 where they are not stored.
        written: bytes that the run writes, by folder.
        cached_states: bytes of the hidden states of all training blocks; 0 where unknown, or of no use.
    """

    backbone: Part
    heads: Part
    original: Part
    sizes: Sizes
    gpus: int
    blocks: int | None
    steps: int | None
    step_tokens: int
    step_flops: int
    storing_flops: int
    written: Disk
    cached_states: int

    @property
    def stores(self) -> bool:
        """The backbone runs once over all blocks, before the first step."""
        return self.storing_flops > 0

    @property
    def run_flops(self) -> int | None:
        """Of all steps and of storing hidden states; None where the number of steps or of blocks is unknown."""
        if self.steps is None or (self.stores and self.blocks is None):
            return None
        return self.steps * self.step_flops + (self.blocks or 0) * self.storing_flops


def make_plan(config: TrainConfig, *, gpus: int = 1, device_type: str = "cuda", tokens: int | None = None) -> Plan:
    """Plan a run.

    Args:
        gpus: processes, one a GPU.
        device_type: "cuda" or "cpu", where it is to run.
        tokens: of training data; where not given, data on this machine is counted as a run would, and cached.
    """
    model = build_on_meta(config, device_type)
    backbone, token_heads = count_backbone(model, config.backbone.quantization), count_heads(model)
    original = count_original(model)
    blocks = count_blocks(config, model) if tokens is None else tokens // config.data.block_size
    steps = count_steps(config, blocks, gpus)
    written, cached = disk(config, model, blocks, steps)
    stored = stored_dtype(config, model) if config.cache_hidden_states else None
    step = trace_step(model, step_shape(config, device_type, stored))
    micro_batches = blocks_per_step(config, gpus) // field(config, "per_device_train_batch_size")
    return Plan(
        backbone=backbone,
        heads=token_heads,
        original=original,
        sizes=measure_sizes(model, (backbone, token_heads, original), step, half=mixed_precision(config) is not None),
        gpus=gpus,
        blocks=blocks,
        steps=steps,
        step_tokens=blocks_per_step(config, gpus) * config.data.block_size,
        step_flops=micro_batches * step.flops,
        storing_flops=step.storing_flops,
        written=written,
        cached_states=cached,
    )


def step_shape(config: TrainConfig, device_type: str, stored: torch.dtype | None) -> StepShape:
    return StepShape(
        batch=field(config, "per_device_train_batch_size"),
        eval_batch=field(config, "per_device_eval_batch_size") if evaluates(config) else 0,
        block_size=config.data.block_size,
        accumulates=field(config, "gradient_accumulation_steps") > 1,
        autocast=mixed_precision(config),
        device_type=device_type,
        stored=stored,
        micro_batches=field(config, "gradient_accumulation_steps"),
    )


def mixed_precision(config: TrainConfig) -> torch.dtype | None:
    return torch.bfloat16 if field(config, "bf16") else torch.float16 if field(config, "fp16") else None


def count_blocks(config: TrainConfig, model: TrainedModel) -> int | None:
    """Blocks of the training data, packed as a run packs them; None for streams and for data that is not here."""
    if config.data.streaming or not all(is_here(source.path) for source in [*config.data.train, *config.data.eval]):
        return None
    tokenizer = load_tokenizer(config.backbone)
    vocab_size = model.backbone.vocab_size
    packed: Any = build_datasets(config.data, tokenizer, num_heads=model.num_heads, vocab_size=vocab_size)
    return len(packed.train)


def is_here(path: str) -> bool:
    """A source that is read from this machine: a file, a folder, a glob that finds some, or the standard library."""
    return path == STDLIB or bool(glob.glob(os.path.expanduser(path)))


def measure_sizes(model: TrainedModel, parts: Sequence[Part], step: Step, *, half: bool) -> Sizes:
    """Of backbone, heads and what else is kept, `parts`."""
    units = [count(unit) for unit in find_units(model)]
    largest = max(units, key=lambda part: part.numel)
    trained_numel, trained_bytes = (sum(getattr(part, name) for part in parts) for name in ("trained", "trained_bytes"))
    numel = sum(part.numel for part in parts)
    return Sizes(
        frozen=sum(part.frozen_bytes for part in parts),
        trained=trained_bytes,
        moments=2 * trained_bytes,
        numel=numel,
        trained_numel=trained_numel,
        root=numel - sum(part.numel for part in units),
        unit=largest.numel,
        root_trained=trained_numel - sum(part.trained for part in units),
        unit_trained=max(part.trained for part in units),
        half=half,
        training=step.training,
        evaluating=step.evaluating,
        storing=step.storing,
    )
