"""One multi-token-prediction module: two norms, a projection, a decoder layer of the backbone's class, and a norm.

DeepSeek-V3 (arXiv:2412.19437), equation 21; the names are those of transformers' `MtpLayer` (modeling_layers.py).
"""
# B text, T position, D model width

from __future__ import annotations

import copy
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.support import read_layer_type
from heads.interface.layers import draw_weights, new_layer


class ModuleConfig(Protocol):
    """What differs between architectures (heads/families/mtp.py)."""

    start: Literal["copied", "random"]
    attention: Literal["last", "full", "sliding"]
    first: Literal["embedding", "state"]
    blank_first: bool


class Module(nn.Module):
    """Module j of a model; heads/families/mtp.py has the formula."""

    def __init__(self, config: ModuleConfig, backbone: Backbone, index: int) -> None:
        super().__init__()
        width = backbone.hidden_size
        self.config = config
        self.enorm, self.hnorm = new_norm(backbone), new_norm(backbone)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = new_layer(backbone, config.start, index, like=layer_with(backbone, config.attention))
        self.post_norm = copy.deepcopy(backbone.norm)
        for module in list[Any](self.mtp_block.modules()):
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # in a cache of their own
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = False  # it would leave out the cache
        self.requires_grad_(True)
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Start the projection so that it passes the state on and ignores the embedding."""
        width = self.eh_proj.out_features
        state_half = slice(0, width) if self.config.first == "state" else slice(width, 2 * width)
        nn.init.zeros_(self.eh_proj.weight)
        nn.init.eye_(self.eh_proj.weight[:, state_half])

    def forward(
        self, backbone: Backbone, tokens_BT: Tensor, hidden_BTD: Tensor, rows_BT: Tensor, mask: Any, cache: Any
    ) -> Tensor:
        """(B, T, D): the output at rows of these positions, from x_{t+j} and m^{j-1}_t."""
        embedded_BTD = backbone.embed(tokens_BT).to(hidden_BTD.dtype)
        if self.config.blank_first:
            embedded_BTD = embedded_BTD.masked_fill((rows_BT == 0)[..., None], 0.0)
        halves = [self.enorm(embedded_BTD), self.hnorm(hidden_BTD)]
        joined_BTD = self.eh_proj(torch.cat(halves[::-1] if self.config.first == "state" else halves, dim=-1))
        output_BTD = backbone.run_layer(self.mtp_block, joined_BTD, rows_BT, mask, cache)
        normed_BTD: Tensor = self.post_norm(output_BTD)
        return normed_BTD


def layer_with(backbone: Backbone, attention: str) -> nn.Module:
    """The backbone's last layer with this kind of attention.

    Raises:
        ValueError: it has none.
    """
    if attention == "last":
        return backbone.attention_layer
    mixed = backbone.mask_style.by_layer_type
    found = [layer for layer in backbone.layers if mixed and read_layer_type(layer) == f"{attention}_attention"]
    if not found:
        raise ValueError(
            f"Modules with {attention} attention were asked for, and {backbone.name} has no such layers beside others; "
            f"give attention='last'."
        )
    return found[-1]


def new_norm(backbone: Backbone) -> nn.Module:
    norm = copy.deepcopy(backbone.norm)
    draw_weights(backbone, norm)
    return norm
