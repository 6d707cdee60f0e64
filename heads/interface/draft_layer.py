"""A Llama-style decoder layer of the heads' own, which attends to committed rows and to the rows of a node's own path.

    context    committed rows, computed from the backbone's true states; all nodes of a text share them
    own        rows of the path that leads to a node, computed from the layer's own output

It is plain PyTorch and the same whatever the backbone is, since servers load such a layer as Llama's: RMS norms, SiLU,
grouped key-value heads, rotary embeddings (EAGLE, Li et al. 2024; EAGLE-3, Li et al. 2025, section 3.1). Names of
parameters are those of EAGLE-3's checkpoints.
"""
# B text, W node of a text (in training a position), S context slot, k row of an own path, H query head,
# G key-value head, R query heads a key-value head, E head width, D model width, M node of all texts

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.backbone.masks import FULL
from heads.backbone.model import Backbone
from heads.backbone.rope import MOVING

SCORES_AT_A_TIME = 2**24
"""Attention scores that are stored for backward; of more, parts are computed again there."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """Committed rows of B texts.

    Attributes:
        keys, values: (B, G, S, E).
        may_attend_BWS: which of them each query sees; W is 1 where all nodes of a text see the same.
    """

    keys_BGSE: Tensor
    values_BGSE: Tensor
    may_attend_BWS: Tensor


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The numbers of a Llama layer, under the names that Hugging Face's configs have for them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads} and "
                f"head_dim={self.head_dim} were given; allowed are a multiple of the key-value heads, and an even "
                f"head_dim."
            )


def shape_like(backbone: Backbone, **given: Any) -> LayerShape:
    """The backbone's own numbers, except where others are given; 4 · width where its MLP has no plain width."""
    config, width = backbone.config, backbone.hidden_size
    found = {name: value for name, value in given.items() if value is not None}
    heads = found.get("num_attention_heads") or config.num_attention_heads
    defaults = {
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or width // heads,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
    }
    if "num_attention_heads" in found:  # the backbone's numbers go with its own heads
        defaults |= {"num_key_value_heads": heads, "head_dim": width // heads}
    return LayerShape(hidden_size=width, **(defaults | found))


def rope_parameters_of(backbone: Backbone, theta: float | None) -> dict[str, Any]:
    """`rope_parameters` of a Llama config like the backbone's: of whole heads, and of a kind that never moves.

    Args:
        theta: a base of their own, with the default kind of RoPE; None: the backbone's.
    """
    found = dict(getattr(backbone.config, "rope_parameters", None) or {})
    found = dict(found.get(FULL, found))
    if theta is not None or found.get("rope_type", "default") in (*MOVING, "default"):
        return {"rope_type": "default", "rope_theta": float(theta or found.get("rope_theta", 10000.0))}
    found.pop("partial_rotary_factor", None)
    return found


class Rope:
    """Rotary embeddings of Llama's kind. No module: a cast of the heads must not round the frequencies."""

    def __init__(self, shape: LayerShape, parameters: dict[str, Any], max_positions: int) -> None:
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=parameters,
        )
        with torch.device("cpu"):  # numbers, also where the heads are on the meta device
            rotary = LlamaRotaryEmbedding(config)
        self.scale = float(rotary.attention_scaling)
        self.frequencies = {torch.device("cpu"): rotary.inv_freq.detach().clone()}

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """(…, heads, E) at positions (…)."""
        if x.device not in self.frequencies:
            self.frequencies[x.device] = self.frequencies[torch.device("cpu")].to(x.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        half = positions[..., None, None].to(wide) * self.frequencies[x.device].to(wide)
        angles = torch.cat([half, half], dim=-1)
        left, right = x.chunk(2, dim=-1)
        turned = torch.cat([-right, left], dim=-1)
        return x * (angles.cos() * self.scale).to(x.dtype) + turned * (angles.sin() * self.scale).to(x.dtype)


class Attention(nn.Module):
    """Projections without biases, and `attend` between them.

    Args:
        input_width: 2 · D where embedding and hidden state are read side by side (EAGLE-3), else D.
    """

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.shape = shape
        query, key_value = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(input_width, query, bias=False)
        self.k_proj = nn.Linear(input_width, key_value, bias=False)
        self.v_proj = nn.Linear(input_width, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def rows(self, inputs: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values (…, G, E) of inputs (…, I) at positions (…)."""
        key_value = (self.shape.num_key_value_heads, self.shape.head_dim)
        keys, values = (proj(inputs).unflatten(-1, key_value) for proj in (self.k_proj, self.v_proj))
        return rope.rotate(keys, positions), values

    def forward(
        self,
        inputs_BWI: Tensor,
        positions_BW: Tensor,
        rope: Rope,
        context: Context,
        own: tuple[Tensor, Tensor],
    ) -> Tensor:
        """(B, W, D): what each node reads from the context and from its own rows (B, W, k, G, E)."""
        queries = self.q_proj(inputs_BWI).unflatten(-1, (self.shape.num_attention_heads, self.shape.head_dim))
        read = attend(rope.rotate(queries, positions_BW), context, *own)
        return self.o_proj(read.flatten(2))


class MLP(nn.Module):
    """down(SiLU(gate x) · up x)"""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_D: Tensor) -> Tensor:
        y_D: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x_D)) * self.up_proj(x_D))
        return y_D


def attend(queries_BWHE: Tensor, context: Context, own_keys_BWkGE: Tensor, own_values_BWkGE: Tensor) -> Tensor:
    """(B, W, H, E): softmax attention over the context and each query's own rows together.

    Long texts are read in parts, whose scores backward computes again, so that memory does not grow with their square.
    """
    batch, nodes, heads, _ = queries_BWHE.shape
    slots = context.keys_BGSE.shape[2] + own_keys_BWkGE.shape[2]
    part = max(64, SCORES_AT_A_TIME // max(1, batch * heads * slots))
    if nodes <= part:
        return attend_at_once(queries_BWHE, context, own_keys_BWkGE, own_values_BWkGE)
    split = [x.split(part, dim=1) for x in (queries_BWHE, own_keys_BWkGE, own_values_BWkGE)]
    seen = context.may_attend_BWS.expand(batch, nodes, -1).split(part, dim=1)
    found = []
    for queries, keys, values, may_attend in zip(*split, seen, strict=True):
        of_part = Context(keys_BGSE=context.keys_BGSE, values_BGSE=context.values_BGSE, may_attend_BWS=may_attend)
        found.append(checkpoint(attend_at_once, queries, of_part, keys, values, use_reentrant=False))
    return torch.cat(found, dim=1)


def attend_at_once(queries_BWHE: Tensor, context: Context, own_keys_BWkGE: Tensor, own_values_BWkGE: Tensor) -> Tensor:
    kv_heads, slots, width = context.keys_BGSE.shape[1:]
    queries_BWGRE = queries_BWHE.unflatten(2, (kv_heads, -1)) / math.sqrt(width)
    of_context = torch.einsum("bwgre,bgse->bgrws", queries_BWGRE, context.keys_BGSE)
    of_context = of_context.masked_fill(~context.may_attend_BWS[:, None, None], -torch.inf)
    of_own = torch.einsum("bwgre,bwkge->bgrwk", queries_BWGRE, own_keys_BWkGE)
    scores = torch.cat([of_context, of_own], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide).to(own_values_BWkGE.dtype)
    read = torch.einsum("bgrws,bgse->bwgre", weights[..., :slots], context.values_BGSE)
    read = read + torch.einsum("bgrwk,bwkge->bwgre", weights[..., slots:], own_values_BWkGE)
    return read.flatten(2, 3)


def by_text(nodes_M: Tensor, num_texts: int) -> bool:
    """Whether nodes of texts `nodes_M` come text by text, equally many each; compiled graphs do not ask.

    >>> by_text(torch.tensor([0, 0, 1, 1]), 2), by_text(torch.tensor([1, 0, 0, 0]), 2)
    (True, False)
    """
    if num_texts == 1:
        return True
    if torch.compiler.is_compiling() or len(nodes_M) % num_texts:
        return False
    each = len(nodes_M) // num_texts
    return torch.equal(nodes_M, torch.arange(num_texts, device=nodes_M.device).repeat_interleave(each))
