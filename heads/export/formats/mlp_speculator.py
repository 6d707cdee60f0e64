"""IBM's MLPSpeculator folders: `speculator.…` tensors and a config.json of model_type mlp_speculator.

They are `mlp_speculator` heads (heads/families/mlp_speculator.py has the mathematics). With tie_weights all heads share
one embedding, norm and unembedding, and all but the first share one transition. Some folders repeat shared tensors
under each name; the copies are compared and read once.

TGI loads folders with tie_weights alone (its class for others multiplies a list of embeddings and fails), with and
without scale_input; so for TGI give heads with `tie_weights: true`. IBM's own code (fms-extras) loads all.

Source: fms_extras/models/speculator.py and hf/modeling_mlp_speculator.py, text_generation_server/layers/mlp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.backbone.model import Backbone
from heads.export.folder import (
    SAFETENSORS,
    create_with,
    find_tensors,
    number_of,
    read_config,
    read_tensors,
    refuse_kind,
    try_config,
    write_folder,
)
from heads.export.names import Names
from heads.export.plain_logits import refuse_other_logits
from heads.interface.token_heads import MAX_HEADS, TokenHeads
from heads.validation import validated

SUMMARY = "IBM fms-extras; TGI 3 (with tie_weights)"
FORMAT, FILE = "mlp-speculator", "model.safetensors"
NAMES = Names(
    {
        "embeddings.{k}": "speculator.emb.{k}.weight",
        "transitions.{k}": "speculator.proj.{k}.weight",
        "norms.{k}.weight": "speculator.ln.{k}.weight",
        "norms.{k}.bias": "speculator.ln.{k}.bias",
        "unembeddings.{k}": "speculator.head.{k}.weight",
    }
)
CANDIDATES = 5
"""Candidates of each pass, and of the first head, in IBM's own trees; each later head has one less."""


@validated
@dataclass(kw_only=True)
class Config:
    """IBM's folder; it has no options."""


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: heads of another family, or with what the format cannot say.
    """
    if token_heads.family != "mlp_speculator":
        raise ValueError(f"{token_heads.family} heads were given; the format {FORMAT} holds mlp_speculator heads.")
    if token_heads.draft_tokens_S is not None:
        raise ValueError(f"Heads with a draft vocabulary were given; the format {FORMAT} scores every token.")
    refuse_other_logits(token_heads.backbone, FORMAT, with_bias=True)
    ours: Any = token_heads.config
    tensors = NAMES.to_foreign(token_heads.state_dict(), FORMAT)
    fields = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "base_model_name_or_path": token_heads.backbone.name,
        "vocab_size": len(tensors["speculator.head.0.weight"]),
        "emb_dim": token_heads.backbone.hidden_size,
        "inner_dim": ours.inner_width or token_heads.backbone.hidden_size,
        "n_predict": token_heads.num_heads,
        "n_candidates": CANDIDATES,
        "top_k_tokens_per_head": [max(1, CANDIDATES - i) for i in range(token_heads.num_heads)],
        "tie_weights": ours.tie_weights,
        "scale_input": ours.scale_input,
        "torch_dtype": str(next(token_heads.parameters()).dtype).removeprefix("torch."),
    }
    write_folder(folder, tensors, fields, FILE)


def recognises(folder: Path) -> bool:
    return try_config(folder).get("model_type") == "mlp_speculator"


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, another backbone's sizes, tied tensors that differ, tensors without a
            place or of other sizes.
    """
    config = read_config(folder)
    if not recognises(folder):
        raise refuse_kind(folder, FORMAT, "config.json has no model_type mlp_speculator")
    refuse_other_logits(backbone, FORMAT, with_bias=True)
    width = number_of(config, "emb_dim", folder)
    if width != backbone.hidden_size:
        raise ValueError(f"{folder} has emb_dim {width}; {backbone.name} has a hidden size of {backbone.hidden_size}.")
    flags = {key: config.get(key, False) for key in ("tie_weights", "scale_input")}
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{folder} has {key} {value!r}; allowed are true and false.")
    tensors = read_tensors(find_tensors(folder, (*SAFETENSORS, "pytorch_model.bin", "pytorch_model.bin.index.json")))
    tensors = NAMES.to_native(tensors, str(folder))
    if flags["tie_weights"]:
        tensors = untied(tensors, folder)
    return create_with(
        "mlp_speculator",
        backbone,
        tensors,
        folder,
        num_heads=number_of(config, "n_predict", folder, most=MAX_HEADS),
        inner_width=number_of(config, "inner_dim", folder, least=0, most=1 << 17) or None,
        **flags,
    )


def untied(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Each shared tensor once, under the first of its names.

    Raises:
        ValueError: two copies of a shared tensor differ.
    """
    kept: dict[str, Tensor] = {}
    for name in sorted(tensors):
        kind, k, *rest = name.split(".")
        first = ".".join([kind, str(min(int(k), 1 if kind == "transitions" else 0)), *rest])
        if first in tensors and not torch.equal(tensors[first], tensors[name]):
            raise ValueError(f"{folder} has tie_weights, and its tensors {first} and {name} (our names) differ.")
        kept.setdefault(first, tensors[name])
    return kept
