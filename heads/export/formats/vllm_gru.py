"""gru heads for vLLM, with the plug-in in serving/vllm_gru: its EAGLE loop runs any state as wide as the model.

    draft k    s_k = GRU(E(x), s_{k-1})      s_0: the final hidden state       logits: the target's unembedding of s_k

The loop does not tell the draft which step k it is at, so heads with a different unembedding for each k are refused.

Source: vLLM 0.32.0 v1/spec_decode/llm_base_proposer.py; transformers_utils/configs/eagle.py keeps class names that
begin with Eagle.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.backbone.model import Backbone
from heads.export.eagle_draft import STEPS
from heads.export.folder import (
    create_with,
    find_tensors,
    read_config,
    read_tensors,
    refuse_kind,
    try_config,
    write_folder,
)
from heads.export.names import Names
from heads.export.plain_logits import refuse_other_logits, refuse_scaled_embedding
from heads.export.read_eagle_draft import FILES, read_steps
from heads.interface.draft_layer import shape_like
from heads.interface.token_heads import TokenHeads
from heads.validation import validated

SUMMARY = "vLLM with the plug-in serving/vllm_gru: gru heads with a shared unembedding (read and written)"
ARCHITECTURE = "EagleHeadwayGru"
NAMES = Names({f"cell.{name}": f"cell.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")})


@validated
@dataclass(kw_only=True)
class Config:
    """The folder has no options."""


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: heads of another family, or gru heads with what vLLM's loop has no place for.
    """
    check(token_heads)
    backbone, heads = token_heads.backbone, token_heads.config
    shape = shape_like(backbone)
    fields = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": backbone.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": backbone.vocab_size,
        "max_position_embeddings": backbone.config.max_position_embeddings,
        "normalize_embeddings": heads.normalize_embeddings,  # type: ignore[attr-defined]
        "torch_dtype": str(next(token_heads.parameters()).dtype).removeprefix("torch."),
        STEPS: token_heads.num_heads,
    }
    write_folder(folder, NAMES.to_foreign(token_heads.state_dict(), "vllm-gru"), fields, "model.safetensors")


def check(token_heads: Any) -> None:
    if token_heads.family != "gru":
        raise ValueError(f"{token_heads.family} heads were given; the format vllm-gru holds gru heads.")
    wanted = {"unembedding": "shared", "hidden_offset": 0, "prefix_layers": 0, "draft_vocabulary": None}
    for name, value in wanted.items():
        if getattr(token_heads.config, name) != value:
            raise ValueError(
                f"gru heads with {name}={getattr(token_heads.config, name)!r} were given; vLLM's loop has a place for "
                f"{name}={value!r} alone: train such heads."
            )
    refuse_other_logits(token_heads.backbone, "vllm-gru")
    refuse_scaled_embedding(token_heads.backbone, "vllm-gru")


def recognises(folder: Path) -> bool:
    return try_config(folder).get("architectures") == [ARCHITECTURE]


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, tensors without a place, or of other sizes.
    """
    config = read_config(folder)
    if not recognises(folder):
        raise refuse_kind(folder, "vllm-gru", f"config.json names no {ARCHITECTURE}")
    tensors = NAMES.to_native(read_tensors(find_tensors(folder, FILES)), str(folder))
    fields: dict[str, Any] = {"num_heads": read_steps(config, folder), "unembedding": "shared"}
    fields["normalize_embeddings"] = config.get("normalize_embeddings")
    return create_with("gru", backbone, tensors, folder, **fields)
