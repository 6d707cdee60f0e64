"""Find layers, final norm and adapters in a model that becomes a backbone, and refuse models that cannot be one."""
# B batch, T position, V vocabulary

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.masks import FULL, SLIDING, tree_pass_error
from heads.backbone.recurrent.cache import keeps_known_states
from heads.backbone.rounding import same_numbers
from heads.extras import needs_extra
from heads.products.packed import takes_half_products


def refuse_what_cannot_roll_back(model: Any) -> None:
    """Refuse models that cannot drop rejected tokens or take the positions of a tree.

    These have recurrent states that heads/backbone/recurrent does not store for each node, no key-value cache or
    positions that can be given, or attention that counts distances in cache slots.
    """
    name = type(model).__name__
    if getattr(model, "_is_stateful", False) and not keeps_known_states(model.config.get_text_config()):
        raise ValueError(
            f"{name} keeps a recurrent state that cannot be rolled back when drafted tokens are rejected; "
            f"choose a backbone of attention layers, or a hybrid one of those in docs/decode.md."
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


def refuse_what_is_no_model(model: Any) -> None:
    """Refuse a path, a name, heads, a model without an output layer over tokens, and whatever else is no causal LM."""
    if not isinstance(model, nn.Module) or not hasattr(unwrap(model), "get_decoder"):
        given = repr(model) if isinstance(model, str | Path) else f"a {type(model).__name__}"
        raise ValueError(
            f"{given} was given in place of a model; give a causal LM of transformers, such as "
            f"AutoModelForCausalLM.from_pretrained(…) loads."
        )
    if unwrap(model).get_output_embeddings() is None:
        raise ValueError(
            f"{type(unwrap(model)).__name__} has no output layer that scores tokens; give the causal LM with it, such "
            f"as AutoModelForCausalLM.from_pretrained(…) loads."
        )


def refuse_other_embeddings(model: Any, embeddings: Any) -> None:
    """Refuse models whose inputs are not tokens of one table; Kyutai's speech to text adds up one of each codebook."""
    if not isinstance(getattr(embeddings, "weight", None), torch.Tensor):
        raise ValueError(
            f"{type(model).__name__} embeds its inputs by a {type(embeddings).__name__}, which is not one table of "
            f"tokens; give a causal LM of text."
        )


def unwrap(model: Any) -> Any:
    """The causal LM in a `PeftModel`, `PeftMixedModel` or `torch.compile`, whose `generate` theirs calls in the end.

    Raises:
        ValueError: an adapter that adds tokens of its own before the text.
    """
    model = getattr(model, "_orig_mod", model)
    if "peft" not in sys.modules:
        return model
    with needs_extra("lora", "This model has a LoRA adapter"):
        from peft import PeftMixedModel, PeftModel
    if isinstance(model, PeftMixedModel):  # adapters of several kinds, all on layers
        return getattr(model.base_model.model, "_orig_mod", model.base_model.model)
    if not isinstance(model, PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"A PeftModel with {model.active_peft_config.peft_type.value} was given, which puts vectors of its own "
            f"before every text; give a model with a LoRA or another adapter on layers, or without one."
        )
    return getattr(model.get_base_model(), "_orig_mod", model.get_base_model())


def refuse_offloaded_weights(model: Any) -> None:
    """Refuse offloaded weights: they are on the meta device between calls, and heads read some of them directly."""
    spread = getattr(model, "hf_device_map", None) or {}
    if "disk" in spread.values() or (spread and any(p.is_meta for p in model.parameters())):
        away = [name for name in spread if any(p.is_meta for p in model.get_submodule(name).parameters())]
        raise ValueError(
            f"The device_map of {type(model).__name__} offloads {', '.join(away)} to disk or host memory, where each "
            f"pass loads the weights anew; give a device_map that spreads the layers over accelerators, or one device."
        )


def refuse_other_widths(model: Any, hidden_size: int) -> None:
    """Refuse models that project hidden states to narrower embeddings (OPT-350m), which heads do not."""
    width = getattr(model.get_output_embeddings(), "in_features", hidden_size)
    if width != hidden_size:
        raise ValueError(
            f"The output layer of {type(model).__name__} reads {width} numbers a token, and its layers' states have "
            f"{hidden_size}: it projects between them, which heads do not; choose a backbone without such a projection."
        )


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Layers that peft has put an adapter around, by name; peft is imported only where the program has imported it."""
    if "peft" not in sys.modules:
        return {}
    with needs_extra("lora", "This model has a LoRA adapter"):
        from peft.tuners.tuners_utils import BaseTunerLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def read_layer_type(layer: nn.Module) -> str:
    """The attention type of a layer, full or sliding, in a model that mixes them.

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


FINAL_NORMS = (
    "norm",
    "final_layer_norm",
    "final_layernorm",
    "ln_f",
    "norm_f",
    "layer_norm",
    "layernorm",
    "embedding_norm",
)
"""Names of decoders for their final norm. Where one names another norm, `check_logits` finds wrong logits."""


def find_final_norm(decoder: nn.Module) -> nn.Module:
    for name in FINAL_NORMS:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise ValueError(f"{type(decoder).__name__} has no final norm under a known name; heads cannot project its states.")


@torch.no_grad()
def check_logits(
    model: Any,
    project: Callable[[Tensor], Sequence[Tensor]],
    by_tree: Callable[[Tensor, bool], Tensor] | None = None,
) -> None:
    """Compare logits of four tokens, as they are computed here, with the model's own.

    Args:
        project: from token ids (B, T) to logits (B, T, V), one tensor for each way of computing them.
        by_tree: from token ids to logits by a pass over a tree that holds them as one of its paths, with or without
            its mask and positions.

    Raises:
        ValueError: logits of some way differ from the model's.
    """
    embedding = model.get_input_embeddings().weight
    tokens_BT = torch.arange(4, device=embedding.device)[None] % len(embedding)
    was_training = model.training
    model.eval()
    try:
        expected = model(input_ids=tokens_BT, use_cache=False).logits
        found = project(tokens_BT)
        tree_error = None if by_tree is None else tree_pass_error(by_tree, tokens_BT, expected)
    finally:
        model.train(was_training)
    if not all(same_numbers(logits, expected) for logits in found):
        raise ValueError(
            f"{type(model).__name__} computes its logits in a way that norm, weight, bias, scale and soft cap do not "
            f"describe{added_to_output(model)}; heads on it would be trained against wrong logits, so it is refused."
        )
    if tree_error:
        raise ValueError(
            f"{type(model).__name__} does not heed the mask and the positions of a token tree: on a path of one, "
            f"{tree_error}, so decoding would not be exact; choose another backbone."
        )


def added_to_output(model: Any) -> str:
    """A hint for error messages: what a user has added between hidden states and logits; empty: nothing found."""
    output_layer = model.get_output_embeddings()
    if output_layer in adapted_layers(model).values():
        return " (its output layer has an adapter: merge it, or leave the output layer out of it)"
    if any(module._forward_hooks or module._forward_pre_hooks for module in (model, output_layer)):
        return " (a hook on the model or on its output layer may be the reason: remove it)"
    return ""


def read_hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """Each module with its hooks and its replaced forward, in a form that can be compared with a later one."""
    return [
        (module, vars(module).get("forward"), [*module._forward_pre_hooks], [*module._forward_hooks])
        for module in modules
    ]


def fastest_mode(*models: nn.Module) -> type[torch.no_grad] | type[torch.inference_mode]:
    """The fastest mode for passes without gradients: inference mode, or `torch.no_grad` where that is not safe.

    Tensors made in inference mode can never be trained on. Hooks and replaced forwards may store such tensors, and
    sharded or packed weights keep buffers between passes.
    """
    modules = [module for model in models for module in model.modules()]
    hooked = any(
        before or after or (forward and not takes_half_products(module))
        for module, forward, before, after in read_hooks(modules)
    )
    own = all(
        type(p) is nn.Parameter and not hasattr(p, "ds_id") for module in modules for p in module.parameters(False)
    )
    return torch.inference_mode if own and not hooked else torch.no_grad


def read_output_path(model: Any) -> list[Any]:
    """`read_hooks` of the model, its decoder, its embeddings and its output layer."""
    ends = (model, model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return read_hooks(module for module in ends if module is not None)
