"""The demo's backbone and heads: as they are, widened to a shape, and widened with packed weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.shared import shipped
from benchmarks.speed.real_costs.shapes import WideShape, free_bytes
from benchmarks.speed.real_costs.wide_backbone import widen_backbone
from benchmarks.speed.real_costs.wide_heads import widen_heads
from heads.backbone.model import Backbone
from heads.checkpoint.opening import Opened, open_heads
from heads.interface.token_heads import TokenHeads
from heads.products.packed import onednn_multiplies, pack_weights, what_stops_packing


@dataclass(frozen=True, kw_only=True)
class Widened:
    """The demo's backbone and heads, as they are and widened; end tokens end no text on either."""

    narrow: Opened
    model: Any
    token_heads: dict[str, TokenHeads]


def open_widened(families: Sequence[str], shape: WideShape, dtype: torch.dtype) -> Widened:
    """Open families on one backbone, and widen them."""
    narrow = open_heads(shipped(*families))
    narrow.model.generation_config.eos_token_id = None
    backbone = Backbone(widen_backbone(narrow.model, shape, dtype))
    wide = {name: widen_heads(one, backbone) for name, one in narrow.token_heads.items()}
    return Widened(narrow=narrow, model=backbone.model, token_heads=wide)


def packed_twin(widened: Widened) -> Widened | None:
    """The backbone with packed weights; None without kernels for the dtype, or memory for the copy."""
    weight_VD = widened.model.lm_head.weight
    copied = sum(one.nbytes for one in widened.model.parameters()) if onednn_multiplies(weight_VD.dtype) else 0
    if what_stops_packing(weight_VD) or free_bytes(widened.model.device) < copied:
        return None
    model = copy.deepcopy(widened.model, {id(p): p for p in widened.model.parameters()})
    pack_weights(model)
    backbone = Backbone(model)
    token_heads = {name: widen_heads(one, backbone) for name, one in widened.narrow.token_heads.items()}
    for one in token_heads.values():
        pack_weights(one)
    return Widened(narrow=widened.narrow, model=model, token_heads=token_heads)
