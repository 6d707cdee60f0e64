"""A Llama padded with zeros to a larger shape: the same function at the larger shape's cost.

          d     D - d                   The residual stream is c·x in its first d units and zero behind, c = √(D/d). Its
       ┌──────┬────────┐                mean square is then what it was, so that every norm, and the heads' scaling of
     d │  W   │ random │ what reads     embeddings, keep their eps: they return c times as much, and norm weights are
       ├──────┼────────┤ the stream     divided by c. What writes to the stream (embedding, o_proj, down_proj) is
 D - d │ zero │ random │                multiplied by c; the unembedding is not, and so no longer tied.
       └──────┴────────┘

Columns that are multiplied only by zeros hold random numbers, so that products cost what dense weights cost. Added
attention heads and units have zero inputs and outputs. Added layers write zeros and come before the original ones, so
that the last layers are those that heads tap. In float32 only the order of sums differs.
"""
# D wide and d narrow model width, V vocabulary, O outputs and I inputs of a matrix, B blocks of inputs, G groups of
# outputs or inputs, H a group's units

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.speed.real_costs.shapes import WideShape

STD = 0.02
"""Standard deviation of the random numbers, as of a Llama's initial weights."""


def stream_scale(narrow: int, wide: int) -> float:
    """c, by which the residual stream grows.

    >>> stream_scale(192, 768)
    2.0
    """
    return math.sqrt(wide / narrow)


def place(wide_OGI: Tensor, narrow_OGI: Tensor, *, scale: float = 1.0, live: int | None = None) -> None:
    """Write a matrix into the front of a wider one, whose inputs stand in G groups.

    Args:
        wide_OGI: a view of the wider matrix, which is filled.
        scale: factor on the narrow matrix.
        live: how many inputs of each group may be other than zero; by default the narrow matrix's.

    >>> wide = torch.empty(2, 2, 3)
    >>> place(wide, torch.ones(1, 1, 2), scale=5.0)
    >>> wide[:, 0, :2]                           # behind the output stand zeros; all else is random
    tensor([[5., 5.],
            [0., 0.]])
    """
    outputs, groups, inputs = narrow_OGI.shape
    wide_OGI.normal_(std=STD)
    wide_OGI[:, :groups, : inputs if live is None else live] = 0
    wide_OGI[:outputs, :groups, :inputs] = narrow_OGI * scale


def place_matrix(wide_OI: Tensor, narrow_OI: Tensor, *, scale: float = 1.0) -> None:
    """The same for a matrix whose inputs are one group."""
    place(wide_OI[:, None], narrow_OI[:, None], scale=scale)


def place_vector(wide_D: Tensor, narrow_D: Tensor, *, scale: float = 1.0) -> None:
    """Write a norm's weight or a bias into the front of a wider vector, followed by zeros."""
    wide_D.zero_()
    wide_D[: len(narrow_D)] = narrow_D * scale


@torch.no_grad()
def widen_backbone(model: Any, shape: WideShape, dtype: torch.dtype) -> Any:
    """The model in a larger shape; it has as many key-value heads as attention heads.

    Args:
        model: a Llama without biases, best in float32, which rounds its scaled numbers least.

    Raises:
        ValueError: a shape that is smaller than the model's somewhere.
    """
    config = wide_config(model.config, shape)
    with model.device:  # where billions of random numbers are drawn
        wide = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    scale = stream_scale(model.config.hidden_size, shape.hidden)
    first = shape.layers - len(model.model.layers)
    for layer in wide.model.layers[:first]:
        write_nothing(layer)
    for layer, narrow in zip(wide.model.layers[first:], model.model.layers, strict=True):
        widen_layer(layer, narrow, scale, shape.key_value_heads)
    narrow_VD = model.get_input_embeddings().weight
    embedding_VD = wide.get_input_embeddings().weight.zero_()
    embedding_VD[:, : narrow_VD.shape[1]] = narrow_VD * scale
    place_matrix(wide.get_output_embeddings().weight, model.get_output_embeddings().weight)
    place_vector(wide.model.norm.weight, model.model.norm.weight, scale=1 / scale)
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.requires_grad_(False)


def wide_config(narrow: Any, shape: WideShape) -> Any:
    """The narrow config with the shape's sizes; the heads' width, and so all rotary angles, stays."""
    sizes = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_key_value_heads": shape.key_value_heads,
    }
    for name, size in sizes.items():
        if size < getattr(narrow, name):
            raise ValueError(f"{shape.name} has {name} {size}; a model of {getattr(narrow, name)} cannot be widened.")
    config = copy.deepcopy(narrow)
    for name, size in {**sizes, "num_attention_heads": shape.hidden // narrow.head_dim}.items():
        setattr(config, name, size)
    config.tie_word_embeddings = False
    return config


def widen_layer(wide: nn.Module, narrow: nn.Module, scale: float, groups: int, *, blocks: int = 1) -> None:
    """Fill a decoder layer, whose attention heads stand in `groups` groups with one key-value head each.

    Args:
        blocks: how many vectors of the model's width are concatenated to the attention's input.
    """
    ours: Any = wide
    theirs: Any = narrow
    widen_attention(ours.self_attn, theirs.self_attn, scale, groups, blocks)
    for name in ("gate_proj", "up_proj"):
        place_matrix(getattr(ours.mlp, name).weight, getattr(theirs.mlp, name).weight)
    place_matrix(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight, scale=scale)
    for name in ("input_layernorm", "post_attention_layernorm"):
        place_vector(getattr(ours, name).weight, getattr(theirs, name).weight, scale=1 / scale)


def widen_attention(wide: Any, narrow: Any, scale: float, groups: int, blocks: int) -> None:
    """Make head j of the narrow attention the first head of group j; the others have zero queries.

    A head with zero queries averages its group's values, so its columns of o_proj are zero.
    """
    for name in ("k_proj", "v_proj"):
        place(*(getattr(attention, name).weight.unflatten(1, (blocks, -1)) for attention in (wide, narrow)))
    wide_OBI, narrow_OBI = (attention.q_proj.weight.unflatten(1, (blocks, -1)) for attention in (wide, narrow))
    heads = len(narrow_OBI) // narrow.head_dim
    place(wide_OBI, torch.zeros_like(narrow_OBI))
    first_GHBI = wide_OBI.unflatten(0, (groups, -1))[:heads, : narrow.head_dim]
    first_GHBI[..., : narrow_OBI.shape[2]] = narrow_OBI.unflatten(0, (heads, -1))
    wide_OGI, narrow_OGI = (
        attention.o_proj.weight.unflatten(1, (count, -1)) for attention, count in ((wide, groups), (narrow, heads))
    )
    place(wide_OGI, narrow_OGI, scale=scale, live=wide_OGI.shape[-1])


def write_nothing(layer: nn.Module) -> None:
    """A layer of random weights whose two output matrices are zero."""
    ours: Any = layer
    ours.self_attn.o_proj.weight.zero_()
    ours.mlp.down_proj.weight.zero_()
