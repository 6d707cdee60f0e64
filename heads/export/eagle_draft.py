"""Write what all folders of EAGLE drafts share: a Llama layer and a draft vocabulary.

Our names are EAGLE-3's own (`midlayer.…`); released folders also say `layers.0.…`. A draft vocabulary is written as
`d2t`, the target's id minus the draft's, and `t2d`, which marks the target's ids.

Source: SafeAILab/EAGLE eagle/model/cnets.py.
"""
# S scored token, V vocabulary, D model width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.backbone.projection import unpacked
from heads.export.names import Names
from heads.export.plain_logits import refuse_other_logits, refuse_scaled_embedding
from heads.interface.token_heads import TokenHeads

STEPS = "num_unrolled_steps"
"""Our own key of config.json for K, the number of heads; servers ignore it (read_eagle_draft.py has the default)."""
LAYER = (
    "input_layernorm",
    "hidden_norm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def names(layer: str) -> Names:
    """The table of names for folders that name the layer so.

    >>> names("layers.0").foreign("midlayer.mlp.up_proj.weight")
    'layers.0.mlp.up_proj.weight'
    """
    return Names(
        {
            "fc.weight": "fc.weight",
            "fc_norm.{i}.weight": "fc_norm.{i}.weight",
            **{f"midlayer.{part}.weight": f"{layer}.{part}.weight" for part in LAYER},
            "norm.weight": "norm.weight",
            "lm_head.weight": "lm_head.weight",
        }
    )


def check_eagle(token_heads: TokenHeads, format: str, version: int) -> None:
    """
    Raises:
        ValueError: heads of another family or version, or logits that the backbone's class scales or caps.
    """
    found = f"{token_heads.family} heads"
    if token_heads.family == "eagle":
        found += f" with version={token_heads.config.version}"  # type: ignore[attr-defined]
    if found != f"eagle heads with version={version}":
        raise ValueError(f"{found} were given; the format {format} holds eagle heads with version={version}.")
    refuse_other_logits(token_heads.backbone, format)
    refuse_scaled_embedding(token_heads.backbone, format)


def draft_tensors(token_heads: TokenHeads, format: str, layer: str) -> dict[str, Tensor]:
    """Tensors by their foreign names. Drafts of version 3 include the unembedding, even where it is the backbone's."""
    tensors = dict(token_heads.state_dict())
    tokens_S = tensors.pop("draft_tokens_S", None)
    found = names(layer).to_foreign(tensors, format)
    if "norm.weight" in found:
        found["lm_head.weight"] = unpacked(token_heads.projection(1).weight)
    if tokens_S is not None:
        found["d2t"] = tokens_S - torch.arange(len(tokens_S), device=tokens_S.device)
        found["t2d"] = torch.zeros(token_heads.backbone.vocab_size, dtype=torch.bool).index_fill(
            0, tokens_S.cpu(), True
        )
    return found


def layer_config(token_heads: Any) -> dict[str, Any]:
    """The layer as a Llama config; `rope_theta` stands beside `rope_parameters` for older programs."""
    shape, backbone = token_heads.shape, token_heads.backbone
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": token_heads.rope_parameters.get("rope_theta", 10000.0),
        "rope_parameters": token_heads.rope_parameters,
        "max_position_embeddings": backbone.config.max_position_embeddings,
        "vocab_size": backbone.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(next(token_heads.parameters()).dtype).removeprefix("torch."),
    }
