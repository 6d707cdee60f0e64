"""A run's model on the meta device, where a tensor has a size and a dtype but no memory.

The run's own builders make it, so this file knows no family and yet counts whatever a family registers. Weights are
never read; of a backbone on the hub only its config.json is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AutoQuantizationConfig

from heads.backbone.loading import load_backbone
from heads.backbone.model import Backbone
from heads.checkpoint.adapter import add_adapter
from heads.checkpoint.schema import DESCRIPTION, read_description
from heads.quantization.quantizer import METHOD, MXConfig
from train.config import TrainConfig
from train.loop.building import model_on, trainable_fields
from train.objective.model import TrainedModel

SCALE_BYTES = 4 / 64
"""Bytes of scales per 4-bit weight: bitsandbytes keeps one float32 for 64 weights."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a module. Buffers count as frozen bytes, tied parameters count once.

    >>> ParameterCount.of(nn.Linear(3, 2))
    ParameterCount(trained=8, frozen=0, trained_bytes=32, frozen_bytes=0)

    Attributes:
        trained: number of trained parameters.
        frozen: number of frozen parameters.
        trained_bytes: bytes of the trained parameters, in the dtype in which they are trained.
        frozen_bytes: bytes of frozen parameters and of buffers; quantised matrices at their quantised size.
    """

    trained: int = 0
    frozen: int = 0
    trained_bytes: int = 0
    frozen_bytes: int = 0

    @classmethod
    def of(cls, module: nn.Module | None) -> ParameterCount:
        if module is None:
            return cls()
        trained = [p for p in module.parameters() if p.requires_grad]
        frozen = [p for p in module.parameters() if not p.requires_grad]
        return cls(
            trained=numel(trained),
            frozen=numel(frozen),
            trained_bytes=nbytes(trained),
            frozen_bytes=nbytes(frozen) + nbytes(module.buffers()),
        )

    @property
    def numel(self) -> int:
        return self.trained + self.frozen

    @property
    def nbytes(self) -> int:
        return self.trained_bytes + self.frozen_bytes

    @property
    def moments_bytes(self) -> int:
        """AdamW's two moments, each in its weight's dtype."""
        return 2 * self.trained_bytes

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(**{name: n + getattr(other, name) for name, n in vars(self).items()})


def numel(tensors: Any) -> int:
    return sum(t.numel() for t in tensors)


def nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def build_on_meta(config: TrainConfig, device_type: str) -> TrainedModel:
    """The run's model without memory.

    Args:
        device_type: "cuda" or "cpu", where the run will take place; it decides what a dtype of "auto" is.
    """
    fields = trainable_fields(config)
    if fields.dtype == "auto" and device_type == "cpu":
        fields = replace(fields, dtype="float32")
    with torch.device("meta"):
        model = load_backbone(replace(fields, random_weights=True, quantization=None), "meta")
        if config.lora.rank:
            add_adapter(model, config.lora)
        trained = model_on(with_new_heads(config), Backbone(model, check_projection=False))
    token_heads = trained.token_heads
    if token_heads is not None and token_heads.draft_tokens_S is not None:
        token_heads.choose_draft_tokens(range(token_heads.num_scored))  # any tokens do: only their number matters
    return trained


def with_new_heads(config: TrainConfig) -> TrainConfig:
    """The config without `init_from`: new heads, with the fields of the folder's heads where the config has none."""
    heads = config.heads
    if config.init_from is not None and not heads and (Path(config.init_from) / DESCRIPTION).is_file():
        heads = read_description(config.init_from).config
    return replace(config, heads=heads, init_from=None)


def count_backbone(model: TrainedModel, quantization: dict[str, Any] | None) -> ParameterCount:
    """The backbone's parameters, with quantised matrices at their quantised size.

    Raises:
        ValueError: a quantization with an unknown number of bits.
    """
    whole = ParameterCount.of(model.model)
    if not quantization:
        return whole
    matrices = [module.weight for module in quantised_layers(model, quantization)]
    saved = nbytes(matrices) - sum(quantised_bytes(matrix, quantization) for matrix in matrices)
    return replace(whole, frozen_bytes=whole.frozen_bytes - saved)


def quantised_layers(model: TrainedModel, quantization: dict[str, Any]) -> list[nn.Linear]:
    """The linear layers that are quantised: all but the unembedding, an adapter's, and those that the config skips."""
    config = AutoQuantizationConfig.from_dict(dict(quantization))
    names = ("llm_int8_skip_modules", "modules_to_not_convert", "skip")
    skipped: list[str] = next(filter(None, (getattr(config, name, None) for name in names)), [])
    unembedding = model.model.get_output_embeddings()
    return [
        module
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not unembedding
        and not any(part in name for part in ("lora_", *skipped))
    ]


def quantised_bytes(weight: Tensor, quantization: dict[str, Any]) -> int:
    """Bytes of one quantised matrix, with the scales of its blocks.

    >>> quantised_bytes(torch.empty(64, 64), {"load_in_4bit": True})   # 4096 half bytes and 64 scales
    2304
    >>> quantised_bytes(torch.empty(64, 64), {"quant_method": "headway_mx", "format": "mxfp6_e2m3"})
    3200

    Raises:
        ValueError: the quantization names no known number of bits.
    """
    if quantization.get("quant_method") == METHOD:
        return round(weight.numel() * MXConfig(**quantization).bits_per_weight / 8)
    if quantization.get("load_in_4bit") or quantization.get("bits") == 4:
        return round(weight.numel() * (0.5 + SCALE_BYTES))
    if quantization.get("load_in_8bit") or quantization.get("bits") == 8 or "fp8" in str(quantization["quant_method"]):
        return weight.numel()
    raise ValueError(
        f"backbone.quantization {quantization} gives no number of bits that a plan knows; allowed are load_in_4bit, "
        f"load_in_8bit, bits: 4 or 8, fp8 and headway_mx. Plan without it: the run will need less memory than planned."
    )
