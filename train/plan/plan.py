"""The figures of a plan: everything that the report prints, computed from a config and the user's statements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heads.backbone.loading import load_tokenizer
from heads.data.sources import is_here
from train.config import TrainConfig
from train.data.packing import build_datasets
from train.objective.model import TrainedModel
from train.plan.costs import bytes_in_output_dir, count_steps, mixed_precision, stored_bytes, trainer_field
from train.plan.memory import Sizes, measure_sizes
from train.plan.shapes import ParameterCount, build_on_meta, count_backbone
from train.plan.step import trace_step


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs.

    Attributes:
        backbone: parameters of the backbone.
        heads: parameters of the heads.
        teacher: parameters of the frozen copy that self-distillation keeps where no adapter can be switched off.
        sizes: the sizes from which memory under each engine is computed.
        gpus: number of processes.
        blocks: blocks of training data; None where they were not counted.
        steps: updates of the run; None where it depends on data that were not counted.
        step_tokens: tokens of one update, over all processes.
        step_flops: FLOPs of one update, over all processes.
        written: bytes that the run writes, by folder.
        stored_bytes: bytes of the hidden states of all training blocks; 0 where unknown or never stored.
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
    def stores_hidden_states(self) -> bool:
        """Whether the backbone runs once over all blocks before the first step."""
        return self.sizes.step.storing_flops > 0

    @property
    def run_flops(self) -> int | None:
        """FLOPs of all steps and of storing hidden states; None where the number of steps or blocks is unknown."""
        if self.steps is None or (self.stores_hidden_states and self.blocks is None):
            return None
        return self.steps * self.step_flops + (self.blocks or 0) * self.sizes.step.storing_flops


def make_plan(config: TrainConfig, *, gpus: int = 1, device_type: str = "cuda", tokens: int | None = None) -> Plan:
    """Plan a run.

    Args:
        gpus: number of GPUs, with one process each.
        device_type: "cuda" or "cpu", where the run will take place.
        tokens: tokens of training data; None tokenises and counts the data on this machine, as a run does.
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
    """Blocks of the training data, packed as a run does; None for streams, or if data or tokenizer are not local."""
    if config.data.streaming or not all(is_here(source.path) for source in [*config.data.train, *config.data.eval]):
        return None
    try:
        tokenizer = load_tokenizer(config.backbone)
    except ValueError:  # a folder with a config.json alone
        return None
    vocab_size = model.backbone.vocab_size
    packed: Any = build_datasets(config.data, tokenizer, num_heads=model.num_heads, vocab_size=vocab_size)
    return len(packed.train)
