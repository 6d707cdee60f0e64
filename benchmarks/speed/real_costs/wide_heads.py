"""Heads of each family on a widened backbone: the same drafts at the larger shape's cost.

The inputs of heads' matrices are vectors of the backbone's width, one after another: the final state f, which the
widened backbone's norm returns unchanged with zeros behind it, and embeddings, which are c times as large there. So the
columns of each vector are padded separately, and those of embeddings are divided by c (wide_backbone.py).
"""
# V vocabulary, D wide and d narrow model width, O outputs and I inputs of a matrix, D and d among them

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.speed.real_costs.wide_backbone import place, place_matrix, place_vector, stream_scale, widen_layer
from heads.backbone.model import Backbone
from heads.families import create
from heads.interface.token_heads import TokenHeads

GATES = 3  # of a GRU cell: reset, update, new


@torch.no_grad()
def widen_heads(token_heads: TokenHeads, backbone: Backbone) -> TokenHeads:
    """The heads on the widened form of their backbone, in its dtype.

    Raises:
        ValueError: a family, or a field of its config, that nothing here widens.
    """
    config = dict(vars(token_heads.config))
    refuse_what_is_not_widened(token_heads.family, config)
    if token_heads.family == "eagle":  # further layers stand before the narrow ones
        further = backbone.num_layers - token_heads.backbone.num_layers
        taps: Any = token_heads.tap_layers
        config["taps"] = [n + further for n in taps]
    wide = create(token_heads.family, backbone, **config)
    scale = stream_scale(token_heads.backbone.hidden_size, backbone.hidden_size)
    WIDEN[token_heads.family](wide, token_heads, scale)
    wide.measured_accuracy = token_heads.measured_accuracy
    return wide.requires_grad_(False).eval()


def refuse_what_is_not_widened(family: str, config: dict[str, Any]) -> None:
    """Refuse fields of a config that the shipped heads do not use, since nothing here widens what they add."""
    if family not in WIDEN:
        raise ValueError(f"{family} heads cannot be widened; allowed are {', '.join(WIDEN)}.")
    plain = dict.fromkeys(("hidden_width", "draft_vocabulary", "lora_rank", "taps", "rope_theta"))
    plain |= {"prefix_layers": 0, "hidden_offset": 0, "fc_norm": False, "norm_output": False, "version": 3}
    plain |= {"norm_before_residual": False}
    for name, value in plain.items():
        if config.get(name, value) != value:
            raise ValueError(f"{family} heads with {name}={config[name]} cannot be widened; allowed is {value}.")


def widen_unembeddings(wide: Any, narrow: Any) -> None:
    """Widen the heads' own unembeddings; a shared one is the backbone's."""
    for wide_VD, narrow_VD in zip(wide.unembeddings.weights, narrow.unembeddings.weights, strict=True):
        place_matrix(wide_VD, narrow_VD)


def widen_residual(wide: Any, narrow: Any) -> None:
    """x + SiLU(W x + b)."""
    place_matrix(wide.linear.weight, narrow.linear.weight)
    place_vector(wide.linear.bias, narrow.linear.bias)


def widen_medusa(wide: Any, narrow: Any, scale: float) -> None:
    for ours, theirs in zip(wide.bodies, narrow.bodies, strict=True):
        for block, given in zip(ours, theirs, strict=True):
            widen_residual(block, given)
    widen_unembeddings(wide, narrow)


def widen_grounded(wide: Any, narrow: Any, scale: float) -> None:
    """[f ; E_1 ; … ; E_k]: k + 1 blocks of inputs."""
    for k, (ours, theirs) in enumerate(zip(wide.bodies, narrow.bodies, strict=True), start=1):
        factors = torch.tensor([1.0, *[1 / scale] * k])[:, None]
        for name in ("skip", "first"):
            wide_OI, narrow_OI = getattr(ours, name).weight, getattr(theirs, name).weight
            place(wide_OI.unflatten(1, (k + 1, -1)), narrow_OI.float().unflatten(1, (k + 1, -1)) * factors)
        place_vector(ours.first.bias, theirs.first.bias)
        for block, given in zip(ours.rest, theirs.rest, strict=True):
            widen_residual(block, given)
    widen_unembeddings(wide, narrow)


def widen_gru(wide: Any, narrow: Any, scale: float) -> None:
    """Pad each gate separately. An added unit starts at 0, and its candidate state is tanh(0), so it stays 0."""
    for name, own in narrow.cell.named_parameters():
        for ours, theirs in zip(getattr(wide.cell, name).chunk(GATES), own.chunk(GATES), strict=True):
            if name.startswith("bias"):
                place_vector(ours, theirs)
            else:
                place_matrix(ours, theirs, scale=1 / scale if name == "weight_ih" else 1.0)
    widen_unembeddings(wide, narrow)


def widen_dynamo(wide: Any, narrow: Any, scale: float) -> None:
    """Decoder layers like the backbone's."""
    groups = wide.backbone.config.num_key_value_heads
    for ours, theirs in zip(wide.layers, narrow.layers, strict=True):
        for layer, given in zip(ours, theirs, strict=True):
            widen_layer(layer, given, scale, groups)
    for wide_VD, narrow_VD in zip(wide.unembeddings, narrow.unembeddings, strict=True):
        place_matrix(wide_VD, narrow_VD)


def widen_eagle(wide: Any, narrow: Any, scale: float) -> None:
    """Widen fc, which reads several states and writes one, and the layer, which reads that and an embedding."""
    blocks = len(narrow.tap_layers)
    place(wide.fc.weight.unflatten(1, (blocks, -1)), narrow.fc.weight.unflatten(1, (blocks, -1)))
    widen_layer(wide.midlayer, narrow.midlayer, scale, wide.shape.num_key_value_heads, blocks=2)
    place_vector(wide.midlayer.hidden_norm.weight, narrow.midlayer.hidden_norm.weight, scale=1 / scale)
    place_vector(wide.norm.weight, narrow.norm.weight, scale=1 / scale)
    place_matrix(wide.lm_head.weight, narrow.lm_head.weight)


WIDEN: dict[str, Callable[[Any, Any, float], None]] = {
    "medusa": widen_medusa,
    "grounded": widen_grounded,
    "gru": widen_gru,
    "eagle": widen_eagle,
    "dynamo": widen_dynamo,
}
