"""A run's plan as figures: everything that the report prints, from a config and what was stated about the machine."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from typing import Any

from heads.backbone.loading import load_tokenizer
from heads.data.standard_library import STDLIB
from train.config import TrainConfig
from train.data.packing import build_datasets
from train.objective.model import TrainedModel
from train.plan.costs import bytes_in_output_dir, count_steps, mixed_precision, stored_bytes, trainer_field
from train.plan.memory import Sizes, measure_sizes
from train.plan.shapes import ParameterCount, build_on_meta, count_backbone
from train.plan.step import trace_step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found.

    Attributes:
        backbone: its parameters.
        heads: their parameters.
        teacher: those of the frozen copy that self-distillation keeps where no adapter can be switched off.
        sizes: what memory under each engine follows from.
        gpus: processes of the run.
        blocks: blocks of training data; None where they were not counted.
        steps: updates of the run; None where only the data could say.
        step_tokens: tokens between two updates, over all processes.
        step_flops: of them, over all processes.
        written: bytes that the run writes, by what is written.
        stored_bytes: of the hidden states of all training blocks; 0 where unknown, or of no use.
    """

    backbone: ParameterCount
    heads: ParameterCount
    teacher: ParameterCount
    sizes: Sizes
    gpus: int
    blocks: int | None
    steps: int | None
    step_tokens: int
    step_flops: int
    written: dict[str, int]
    stored_bytes: int

    @property
    def stores(self) -> bool:
        """The backbone runs once over all blocks, before the first step."""
        return self.sizes.step.storing_flops > 0

    @property
    def run_flops(self) -> int | None:
        """Of all steps and of storing hidden states; None where the number of steps or of blocks is unknown."""
        if self.steps is None or (self.stores and self.blocks is None):
            return None
        return self.steps * self.step_flops + (self.blocks or 0) * self.sizes.step.storing_flops


def make_plan(config: TrainConfig, *, gpus: int = 1, device_type: str = "cuda", tokens: int | None = None) -> Plan:
    """Plan a run.

    Args:
        gpus: processes, one a GPU.
        device_type: "cuda" or "cpu", where it is to run.
        tokens: of training data; where not given, data on this machine is counted as a run would, and cached.
    """
    model = build_on_meta(config, device_type)
    backbone = count_backbone(model, config.backbone.quantization)
    heads, teacher = ParameterCount.of(model.token_heads), ParameterCount.of(model.teacher)
    blocks = count_blocks(config, model) if tokens is None else tokens // config.data.block_size
    steps = count_steps(config, blocks, gpus)
    step = trace_step(model, config, device_type)
    micro_batches = gpus * trainer_field(config, "gradient_accumulation_steps")
    batch = trainer_field(config, "per_device_train_batch_size")
    return Plan(
        backbone=backbone,
        heads=heads,
        teacher=teacher,
        sizes=measure_sizes(model, backbone + heads + teacher, step, half=mixed_precision(config) is not None),
        gpus=gpus,
        blocks=blocks,
        steps=steps,
        step_tokens=micro_batches * batch * config.data.block_size,
        step_flops=micro_batches * step.flops,
        written=bytes_in_output_dir(config, model, steps),
        stored_bytes=stored_bytes(config, model, blocks or 0),
    )


def count_blocks(config: TrainConfig, model: TrainedModel) -> int | None:
    """Blocks of the training data, packed as a run does; None for streams, and where data or tokenizer are not here."""
    if config.data.streaming or not all(is_here(source.path) for source in [*config.data.train, *config.data.eval]):
        return None
    try:
        tokenizer = load_tokenizer(config.backbone)
    except ValueError:  # a folder with a config.json alone
        return None
    vocab_size = model.backbone.vocab_size
    packed: Any = build_datasets(config.data, tokenizer, num_heads=model.num_heads, vocab_size=vocab_size)
    return len(packed.train)


def is_here(path: str) -> bool:
    """A source that is read from this machine: a file, a folder, a glob that finds some, or the standard library."""
    return path == STDLIB or bool(glob.glob(os.path.expanduser(path)))
