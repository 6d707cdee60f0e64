"""A Llama-style decoder layer of the heads' own: its shape, rotary embeddings, projections and two blocks.

It is plain PyTorch and the same for every backbone, since servers load such a layer as Llama's: RMS norms, SiLU,
grouped key-value heads, rotary embeddings (EAGLE, Li et al. 2024; EAGLE-3, Li et al. 2025, section 3.1). Names of
parameters are those of EAGLE-3's checkpoints.
"""
# B text, W node of a text (in training a position), k row of an own path, G key-value head, E head width,
# D model width, I input width of the attention

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from heads.backbone.masks import FULL
from heads.backbone.model import Backbone
from heads.backbone.rope import MOVING
from heads.interface.draft_attention import Context, attend


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
    """The backbone's own numbers, except where others are given; an MLP of 4 · width where its config names none."""
    config, width = backbone.config, backbone.hidden_size
    found = {name: value for name, value in given.items() if value is not None}
    heads = found.get("num_attention_heads") or config.num_attention_heads
    defaults = {
        "intermediate_size": of_all_layers(config, "intermediate_size") or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": of_all_layers(config, "num_key_value_heads") or heads,
        "head_dim": of_all_layers(config, "head_dim") or width // heads,
        "rms_norm_eps": of_all_layers(config, "rms_norm_eps") or 1e-6,
    }
    if "num_attention_heads" in found:  # the backbone's key-value heads and head width fit its own number of heads only
        defaults |= {"num_key_value_heads": heads, "head_dim": width // heads}
    return LayerShape(hidden_size=width, **(defaults | found))


def of_all_layers(config: Any, name: str) -> Any:
    """A config's value; None where it has none, or one for each kind of layer, as Gemma 4 has head widths.

    Reading the latter from the whole config is transformers' AmbiguousGlobalPerLayerAttributeError, a RuntimeError.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def rope_parameters_of(backbone: Backbone, theta: float | None) -> dict[str, Any]:
    """`rope_parameters` of a Llama config like the backbone's, but for whole heads and independent of text length.

    Args:
        theta: base of RoPE of the default kind; None: as the backbone has it.
    """
    found = dict(getattr(backbone.config, "rope_parameters", None) or {})
    found = dict(found.get(FULL, found))
    if theta is not None or found.get("rope_type", "default") in (*MOVING, "default"):
        return {"rope_type": "default", "rope_theta": float(theta or found.get("rope_theta", 10000.0))}
    found.pop("partial_rotary_factor", None)
    return found


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The rotation of queries and keys at some positions: cos and sin (…, 1, E)."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(…, heads, E), rotated."""
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-right, left], dim=-1) * self.sin


class Rope:
    """Rotary embeddings of Llama's kind. This is no module, so that a cast of the heads does not round frequencies."""

    def __init__(self, shape: LayerShape, parameters: dict[str, Any], max_positions: int) -> None:
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_attention_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=parameters,
        )
        with torch.device("cpu"):  # real numbers even when the heads are built on the meta device
            rotary = LlamaRotaryEmbedding(config)
        self.scale = float(rotary.attention_scaling)
        self.frequencies = {torch.device("cpu"): rotary.inv_freq.detach().clone()}

    def at(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """The rotation (…, 1, E) at positions (…), the same for all attention heads."""
        if positions.device not in self.frequencies:
            self.frequencies[positions.device] = self.frequencies[torch.device("cpu")].to(positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        half = positions[..., None, None].to(wide) * self.frequencies[positions.device].to(wide)
        angles = torch.cat([half, half], dim=-1)
        return Turn(cos=(angles.cos() * self.scale).to(dtype), sin=(angles.sin() * self.scale).to(dtype))


class Attention(nn.Module):
    """Projections without biases, and `attend` between them.

    Args:
        input_width: 2 · D where embedding and hidden state are read side by side (EAGLE-3), else D.
    """

    def __init__(self, shape: LayerShape, input_width: int) -> None:
        super().__init__()
        self.shape, self.head_dim = shape, shape.head_dim
        query, key_value = (n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads))
        self.q_proj = nn.Linear(input_width, query, bias=False)
        self.k_proj = nn.Linear(input_width, key_value, bias=False)
        self.v_proj = nn.Linear(input_width, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden_size, bias=False)

    def rows(self, inputs: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Keys and values (…, G, E) of inputs (…, I) at the positions of `turn`."""
        key_value = (self.shape.num_key_value_heads, self.shape.head_dim)
        keys, values = (proj(inputs).unflatten(-1, key_value) for proj in (self.k_proj, self.v_proj))
        return turn(keys), values

    def forward(self, inputs_BWI: Tensor, turn: Turn, context: Context, own: tuple[Tensor, Tensor]) -> Tensor:
        """(B, W, D): what each node reads from the context and from its own rows (B, W, k, G, E)."""
        queries = self.q_proj(inputs_BWI).unflatten(-1, (self.shape.num_attention_heads, self.shape.head_dim))
        read: Tensor = self.o_proj(attend(turn(queries), context, *own).flatten(2))
        return read


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


class MidLayer(nn.Module):
    """The decoder layer.

    Args:
        joins: the attention reads [N_e(embedding) ; N_h(hidden)], as EAGLE-3 does; False: the hidden state as it is.
        norm_before_residual: the residual stream starts at N_h(hidden) in place of the hidden state.
    """

    def __init__(self, shape: LayerShape, *, joins: bool, norm_before_residual: bool = False) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.joins, self.norm_before_residual = joins, norm_before_residual
        if joins:
            self.input_layernorm = nn.RMSNorm(width, eps=eps)
            self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.self_attn = Attention(shape, 2 * width if joins else width)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.mlp = MLP(shape)

    @torch.no_grad()
    def start(self, std: float) -> None:
        """Random weights of this deviation; what is written to the residual stream is zero at first."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def join(self, embedded_D: Tensor, hidden_D: Tensor) -> tuple[Tensor, Tensor]:
        """(…, I) the attention's input, and (…, D) where the residual stream starts."""
        if not self.joins:
            return hidden_D, hidden_D
        normed_D = self.hidden_norm(hidden_D)
        inputs_I = torch.cat([self.input_layernorm(embedded_D), normed_D], dim=-1)
        return inputs_I, normed_D if self.norm_before_residual else hidden_D

    def finish(self, residual_D: Tensor, read_D: Tensor) -> Tensor:
        """(…, D): the layer's output from what its attention read."""
        hidden_D = residual_D + read_D
        output_D: Tensor = hidden_D + self.mlp(self.post_attention_layernorm(hidden_D))
        return output_D


def rms_weight(backbone: Backbone, norm: nn.RMSNorm) -> Tensor | None:
    """(D,): the weight that makes an RMS norm equal to the backbone's final norm; None where no weight does."""
    weight_D = getattr(backbone.norm, "weight", None)
    if weight_D is None or weight_D.is_meta or norm.weight.is_meta or getattr(backbone.norm, "bias", None) is not None:
        return None
    ones_D = torch.ones_like(weight_D)
    for candidate_D in (weight_D, weight_D + 1):  # Gemma's norms multiply with 1 + weight
        if torch.allclose(backbone.norm(ones_D[None])[0], candidate_D, rtol=1e-2, atol=1e-3):
            return candidate_D.to(norm.weight.device, norm.weight.dtype)
    return None
