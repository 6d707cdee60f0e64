"""Find layers, final norm and adapters in a model that is wrapped as a backbone, and refuse models that cannot be one.

tests/heads/backbone/test_backbone.py asks the same of each architecture that was tried.
"""
# B batch, T position

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.masks import FULL, SLIDING
from heads.extras import needs_extra


def refuse_what_cannot_roll_back(model: Any) -> None:
    """Recurrent and hybrid caches keep a running state, which rejected tokens have already changed."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state that cannot be rolled back when drafted tokens are rejected; "
            f"choose a backbone whose layers are all attention layers."
        )
    accepted = inspect.signature(model.get_decoder().forward).parameters
    if model.config.is_encoder_decoder or not {"past_key_values", "position_ids", "attention_mask"} <= set(accepted):
        raise ValueError(
            f"{name} is not a decoder-only model with a key-value cache and positions that can be given; "
            f"choose an AutoModelForCausalLM whose decoder takes attention_mask, position_ids and past_key_values."
        )
    config = model.config.get_text_config()
    if getattr(config, "alibi", False) or "local" in (getattr(config, "attention_layers", None) or []):
        raise ValueError(
            f"{name} counts distances in cache slots (alibi or local attention), which are no positions in a tree; "
            f"choose a backbone with position ids and full or sliding attention."
        )


def refuse_offloaded_weights(model: Any) -> None:
    """Weights that a device_map keeps elsewhere are on the meta device between calls, and heads read some directly."""
    spread = getattr(model, "hf_device_map", None) or {}
    if "disk" in spread.values() or (spread and any(p.is_meta for p in model.parameters())):
        away = [name for name in spread if any(p.is_meta for p in model.get_submodule(name).parameters())]
        raise ValueError(
            f"The device_map of {type(model).__name__} offloads {', '.join(away)} to disk or host memory, where each "
            f"pass loads the weights anew; give a device_map that spreads the layers over accelerators, or one device."
        )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers that peft has put an adapter around, by name; peft is not imported where nobody has."""
    if "peft" not in sys.modules:
        return {}
    with needs_extra("lora", "This model has a LoRA adapter"):
        from peft.tuners.tuners_utils import BaseTunerLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def read_layer_type(layer: nn.Module) -> str:
    """Full or sliding, of a layer in a model that mixes them; layers or their attention modules say it.

    Raises:
        ValueError: nothing in the layer says which of the model's masks it takes.
    """
    for module in layer.modules():
        for name in ("layer_type", "attention_type"):
            if (layer_type := getattr(module, name, None)) in (FULL, SLIDING):
                return str(layer_type)
    for module in layer.modules():
        if hasattr(module, "sliding_window"):
            return FULL if module.sliding_window is None else SLIDING
    raise ValueError(
        f"{type(layer).__name__} does not say whether it has full or sliding attention, so it cannot be run on its own."
    )


def find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) >= num_layers:
            return child
    raise ValueError(f"{type(decoder).__name__} has no list of {num_layers} decoder layers that heads could tap.")


def find_final_norm(decoder: nn.Module) -> nn.Module:
    for name in ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f"):
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise ValueError(f"{type(decoder).__name__} has no final norm under a known name; heads cannot project its states.")


@torch.no_grad()
def check_logits(model: Any, project: Callable[[Tensor], Tensor]) -> None:
    """Compare logits of four tokens through the projection record with the model's own.

    Args:
        project: token ids (B, T) to logits (B, T, V): the decoder, then the record on its last layer's output.

    Raises:
        ValueError: they differ.
    """
    embedding = model.get_input_embeddings().weight
    tokens_BT = torch.arange(4, device=embedding.device)[None] % len(embedding)
    was_training = model.training
    model.eval()
    try:
        expected = model(input_ids=tokens_BT, use_cache=False).logits.float()
        found = project(tokens_BT).float()
    finally:
        model.train(was_training)
    # The same operations in the same dtype: rounding differs only by kernel choice.
    tolerance = 20 * torch.finfo(embedding.dtype).eps * expected.abs().max().clamp(min=1.0)
    if expected.shape != found.shape or not bool(((expected - found).abs() <= tolerance).all()):
        raise ValueError(
            f"{type(model).__name__} computes its logits in a way that norm, weight, bias, scale and soft cap do not "
            f"describe; heads on it would be trained against wrong logits, so it is refused."
        )
