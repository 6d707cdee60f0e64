"""A run's model in shapes alone: on the meta device, where a tensor has a size and a dtype but no memory.

It is built by what a run builds it with (transformers, heads.families, TrainedModel), so that whatever a family
registers is counted and no family is known here. Weights are never read; a hub name costs its config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.auto import AutoQuantizationConfig

from heads.backbone.loading import BackboneConfig, explained, resolve_dtype
from heads.backbone.model import Backbone
from heads.checkpoint.adapter import add_adapter
from heads.checkpoint.schema import DESCRIPTION, read_description
from heads.families import create_unchosen
from heads.interface.token_heads import TokenHeads
from train.config import TrainConfig
from train.objective.model import TrainedModel

BLOCK_SCALES = 4 / 64
"""bitsandbytes keeps one float32 for 64 weights of 4 bits."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Parameters of the backbone or of the heads.

    Attributes:
        trained: how many are trained.
        frozen: how many are not.
        trained_bytes: of the trained ones, in the dtype in which they are trained.
        frozen_bytes: of the others and of buffers; quantised matrices at their quantised size.
    """

    trained: int
    frozen: int
    trained_bytes: int
    frozen_bytes: int

    @property
    def numel(self) -> int:
        return self.trained + self.frozen

    @property
    def nbytes(self) -> int:
        return self.trained_bytes + self.frozen_bytes


def build_on_meta(config: TrainConfig, device_type: str) -> TrainedModel:
    """What `train.run.build_model` builds, without memory.

    Args:
        device_type: "cuda" or "cpu": where the run is to take place; a dtype of "auto" is decided by it.
    """
    with torch.device("meta"):
        model = backbone_on_meta(trained_fields(config), device_type)
        if config.lora.rank:
            add_adapter(model, config.lora)
        backbone = Backbone(model, check_projection=False)
        return TrainedModel(
            backbone,
            heads_on_meta(config, backbone),
            trains_backbone=config.rates.base is not None,
            gradient_scale=config.rates.gradient_scale,
            label_shift=config.label_shift,
            lookahead=config.lookahead,
            attend_across_documents=config.data.attend_across_documents,
            head_decay=config.head_decay,
            loss=config.loss,
            self_distillation=config.self_distillation,
        )


def trained_fields(config: TrainConfig) -> BackboneConfig:
    """The backbone's fields, in float32 where it is trained, as `train.run.load_trainable` decides."""
    fields = config.backbone
    if config.rates.base is not None and fields.dtype == "auto" and not fields.quantization:
        return replace(fields, dtype="float32")
    return fields


def backbone_on_meta(fields: BackboneConfig, device_type: str) -> Any:
    remote: dict[str, Any] = {"trust_remote_code": fields.trust_remote_code}
    with explained(fields.name_or_path):
        shape = AutoConfig.from_pretrained(fields.name_or_path, revision=fields.revision, **remote)
        dtype = resolve_dtype(fields.dtype, device_type)
        if dtype == "auto":
            dtype = shape.get_text_config().dtype or torch.float32
        if fields.attn_implementation:
            remote["attn_implementation"] = fields.attn_implementation
        model = AutoModelForCausalLM.from_config(shape, dtype=dtype, **remote)
    if fields.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.eval()


def heads_on_meta(config: TrainConfig, backbone: Backbone) -> TokenHeads | None:
    """New heads in float32; with `init_from` and no fields of their own, in the shape of the heads that lie there."""
    if config.family is None:
        return None
    fields = config.heads
    if config.init_from is not None and not fields and (Path(config.init_from) / DESCRIPTION).is_file():
        fields = read_description(config.init_from).config
    token_heads = create_unchosen(config.family, backbone, **fields).float()
    if token_heads.draft_tokens_S is not None:
        token_heads.choose_draft_tokens(range(token_heads.num_scored))  # a plan asks how many, not which
    return token_heads


def count_backbone(model: TrainedModel, quantization: dict[str, Any] | None) -> Part:
    """The backbone's parameters; of quantised matrices what they take up once they are quantised.

    Raises:
        ValueError: a quantization whose bits are not known here.
    """
    part = count(model.model)
    if not quantization:
        return part
    saved = sum(m.weight.nbytes - quantised_bytes(m.weight, quantization) for m in quantised(model, quantization))
    return replace(part, frozen_bytes=part.frozen_bytes - saved)


def count_heads(model: TrainedModel) -> Part:
    return count(model.token_heads) if model.token_heads is not None else count(nn.Module())


def count_original(model: TrainedModel) -> Part:
    """The frozen copy that self-distillation keeps where all weights are trained; nothing with an adapter."""
    return count(model.teacher) if model.teacher is not None else count(nn.Module())


def count(module: nn.Module) -> Part:
    """Parameters and bytes of a module; what is tied counts once, buffers count as frozen bytes.

    >>> count(nn.Linear(3, 2))
    Part(trained=8, frozen=0, trained_bytes=32, frozen_bytes=0)
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen = [p for p in module.parameters() if not p.requires_grad]
    return Part(
        trained=numel(trained),
        frozen=numel(frozen),
        trained_bytes=nbytes(trained),
        frozen_bytes=nbytes(frozen) + nbytes(list(module.buffers())),
    )


def numel(tensors: list[Any]) -> int:
    return sum(t.numel() for t in tensors)


def nbytes(tensors: list[Any]) -> int:
    return sum(t.nbytes for t in tensors)


def quantised(model: TrainedModel, quantization: dict[str, Any]) -> list[nn.Linear]:
    """The linear layers that a loader quantises: all but the unembedding, an adapter's own and those that are named."""
    config = AutoQuantizationConfig.from_dict(dict(quantization))
    skipped = getattr(config, "llm_int8_skip_modules", None) or getattr(config, "modules_to_not_convert", None) or []
    unembedding = model.model.get_output_embeddings()
    return [
        module
        for name, module in model.model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not unembedding
        and "lora_" not in name
        and not any(part in name for part in skipped)
    ]


def quantised_bytes(weight: Tensor, quantization: dict[str, Any]) -> int:
    """Bytes of one matrix: its bits, and the scales of 4-bit blocks.

    >>> quantised_bytes(torch.empty(64, 64), {"load_in_4bit": True})   # 4096 half bytes and 64 scales
    2304

    Raises:
        ValueError: the bits are named in a way that is not known.
    """
    if quantization.get("load_in_4bit") or quantization.get("bits") == 4:
        return round(weight.numel() * (0.5 + BLOCK_SCALES))
    if quantization.get("load_in_8bit") or quantization.get("bits") == 8 or "fp8" in str(quantization["quant_method"]):
        return weight.numel()
    raise ValueError(
        f"backbone.quantization {quantization} names no bits that a plan could count; it knows load_in_4bit, "
        f"load_in_8bit, bits: 4 or 8, and fp8: plan without it, and expect less memory."
    )
