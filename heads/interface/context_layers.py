"""Decoder layers that heads own and run over the context, as DynaMo's heads and Hydra++'s prefix layer do.

They read the text of a slot and nothing that was drafted behind it, so they run inside each pass over all its slots,
like further layers of the backbone: under its masks and positions, and with keys and values in its cache, which one
commit plan compacts.

decoder ─ tap ──┬ stack 0 ─ StackTap(index=0)      a stack is layers one after another; each layer of each stack has an
                ├ stack 1 ─ StackTap(index=1)      index of its own in the cache, behind those of the backbone's layers
                └ stack 2 ─ StackTap(index=2)

So what a draft reads is there as soon as its path is accepted (heads/backbone/state.py, `Backbone.run_stacks`).
"""
# B batch, T position, D model width

from __future__ import annotations

import copy

import torch
from accelerate.hooks import remove_hook_from_module
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from heads.backbone.masks import causal
from heads.backbone.model import Backbone

RESIDUAL_WRITERS = frozenset(
    ("o_proj", "out_proj", "c_proj", "dense", "wo", "down_proj", "dense_4h_to_h", "fc_out", "fc2", "w2")
)
"""What the last linear layer of an attention or MLP block is called in Hugging Face's models."""


def new_layer(backbone: Backbone, start: str, slot: int) -> nn.Module:
    """A decoder layer like the backbone's last, random or copied, that caches behind the backbone's layers.

    Args:
        slot: which of the heads' layers it is, from 0.
    """
    layer = without_adapter(in_slot(backbone, copy.deepcopy(backbone.layers[-1]), slot)).requires_grad_(True)
    if start == "random":
        layer.apply(backbone.model._init_weights)
    return layer


@torch.no_grad()
def identity_layer(backbone: Backbone, slot: int) -> nn.Module:
    """A random layer that begins as the identity: what its blocks write to the residual stream is zero at first.

    Raises:
        ValueError: a class of layers that is not the identity then.
    """
    layer = new_layer(backbone, "random", slot)
    for name, parameter in layer.named_parameters():
        if not RESIDUAL_WRITERS.isdisjoint(part.removesuffix("_bias") for part in name.split(".")):
            parameter.zero_()
    parameter = next(layer.parameters())
    if not parameter.is_meta and not is_identity(backbone, layer, parameter):
        raise ValueError(
            f"A {type(layer).__name__} does not become the identity by zeroing {', '.join(sorted(RESIDUAL_WRITERS))}, "
            f"so heads behind one would not start as the backbone; give prefix_layers=0."
        )
    return layer


def is_identity(backbone: Backbone, layer: nn.Module, like: torch.Tensor) -> bool:
    """On two tokens."""
    hidden_BTD = torch.linspace(-1, 1, 2 * backbone.hidden_size, dtype=like.dtype, device=like.device).view(1, 2, -1)
    positions_BT = torch.arange(2, device=like.device)[None]
    may_attend_BTT = causal(torch.ones_like(positions_BT, dtype=torch.bool))
    mask = backbone.mask_style.finish(may_attend_BTT, positions_BT, positions_BT, like.dtype)
    return torch.equal(backbone.run_layer(layer, hidden_BTD, positions_BT, mask), hidden_BTD)


def without_adapter(layer: nn.Module) -> nn.Module:
    """The layer with the backbone's LoRA, if it has one, merged into its weights: heads train all of their own."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            layer.set_submodule(name, module.get_base_layer())
    return layer


def in_slot(backbone: Backbone, layer: nn.Module, slot: int) -> nn.Module:
    """The layer, writing keys and values to the backbone's cache, `slot` places behind the backbone's own layers."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = backbone.num_layers + slot
    # A device_map's hooks, copied along, would move tensors to where the backbone's own layer is.
    return remove_hook_from_module(layer, recurse=True)


def refuse_quantised_layers(backbone: Backbone, what: str) -> None:
    """Raise ValueError where no trained copy can be made of the last layer."""
    if not all(p.is_floating_point() for p in backbone.layers[-1].parameters()):
        raise ValueError(
            f"The last layer of {backbone.name} is quantised, and {what} of its kind; load the backbone without "
            f"quantization."
        )
