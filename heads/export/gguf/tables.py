"""Names and numbers of a backbone and of an eagle draft in GGUF.

In a Llama's queries and keys llama.cpp rotates the pairs (0, 1), (2, 3) …, and transformers (0, n/2), (1, n/2 + 1) …,
so the rows of these two matrices are reordered. Qwen3 is rotated as in transformers.

Source: llama.cpp conversion/llama.py, src/llama-arch.cpp, src/models/{llama,qwen3,eagle3}.cpp.
"""
# O output rows of a matrix, I its inputs

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from heads.export.names import Names

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen3": "qwen3"}
"""llama.cpp's name of each model_type that is written."""

PAIRED = ("llama", "eagle3")
"""Architectures whose queries and keys are rotated in pairs of neighbours."""

BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BACKBONE = Names(
    {
        "model.embed_tokens.weight": "token_embd.weight",
        **{f"model.layers.{{l}}.{ours}.weight": f"blk.{{l}}.{theirs}.weight" for ours, theirs in BLOCK.items()},
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
)
DRAFT = Names(
    {
        "fc.weight": "fc.weight",
        **{f"midlayer.{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in BLOCK.items()},
        "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
)


def paired(matrix_OI: Tensor, num_heads: int) -> Tensor:
    """Reorder each head's rows so that the two that are rotated together are neighbours.

    >>> import torch
    >>> paired(torch.arange(8.0)[:, None], 2).flatten().tolist()
    [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]
    """
    halves = matrix_OI.reshape(num_heads, 2, -1, *matrix_OI.shape[1:])
    return halves.transpose(1, 2).reshape(matrix_OI.shape)


def halved(matrix_OI: Tensor, num_heads: int) -> Tensor:
    """The inverse of `paired`.

    >>> import torch
    >>> halved(paired(torch.arange(8.0)[:, None], 2), 2).flatten().tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    pairs = matrix_OI.reshape(num_heads, -1, 2, *matrix_OI.shape[1:])
    return pairs.transpose(1, 2).reshape(matrix_OI.shape)


def rotated(
    tensors: Mapping[str, Tensor], heads: int, key_value_heads: int, *, back: bool = False
) -> dict[str, Tensor]:
    """The tensors, by their names in GGUF, with queries and keys `paired` or, with `back`, `halved`."""
    numbers = {"attn_q.weight": heads, "attn_k.weight": key_value_heads}
    move = halved if back else paired
    return {
        name: move(tensor, numbers[kind]) if (kind := ".".join(name.split(".")[-2:])) in numbers else tensor
        for name, tensor in tensors.items()
    }


def layer_numbers(config: Any, layers: int, context: int) -> dict[str, Any]:
    """The metadata that both files have, by keys without the architecture's name.

    Args:
        config: a Llama-like config, or a draft's LayerShape.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "block_count": layers,
        "context_length": context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": head_dim,
    }


def rope_base(parameters: Mapping[str, Any], what: str) -> float:
    """
    Raises:
        ValueError: rotary embeddings other than the default kind.
    """
    if parameters.get("rope_type", "default") != "default":
        raise ValueError(
            f"{what} has rotary embeddings of the kind {parameters['rope_type']!r}; the format gguf is written for the "
            f"default kind."
        )
    return float(parameters.get("rope_theta", 10000.0))
