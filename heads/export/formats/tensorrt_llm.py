"""Medusa heads for TensorRT-LLM up to 1.2: the folder that `convert_checkpoint.py --medusa_model_dir` reads.

It prefers `medusa_lm_head.pt` and builds every block, so blocks may differ. It has an unembedding for each head, so a
shared one is written several times. Its blocks use the backbone's `hidden_act`, and Medusa's use SiLU, so backbones
with another activation are refused. The engine rounds to its own dtype and decodes only greedily. Later versions have
no Medusa.

Source: tensorrt_llm/models/medusa/{weight,model}.py, examples/medusa/convert_checkpoint.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from heads.backbone.model import Backbone
from heads.export.folder import write_folder
from heads.export.formats import medusa
from heads.interface.token_heads import TokenHeads
from heads.validation import validated

SUMMARY = "TensorRT-LLM up to 1.2 (convert_checkpoint.py --medusa_model_dir); written only"
FORMAT, FILE = "tensorrt-llm", "medusa_lm_head.pt"


@validated
@dataclass(kw_only=True)
class Config:
    """The folder of --medusa_model_dir; it has no options."""


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: heads of another family, or with what the format cannot say; a backbone with another activation.
    """
    activation = getattr(token_heads.backbone.config, "hidden_act", None)
    if activation != "silu":
        raise ValueError(
            f"{token_heads.backbone.name} has hidden_act {activation!r}, which TensorRT-LLM would put into Medusa's "
            f"blocks too; the format {FORMAT} is written for backbones with 'silu'."
        )
    tensors = medusa.medusa_tensors(token_heads, FORMAT)
    fields = medusa.medusa_fields(token_heads)
    fields.pop("version", None)
    for k in range(token_heads.num_heads):
        tensors.setdefault(f"{k}.{fields['medusa_num_layers']}.weight", token_heads.backbone.projection.weight)
    write_folder(folder, tensors, fields, FILE)


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """As Medusa's own folder, to compare what was written; `headway import` reads it under that name."""
    return medusa.read(folder, backbone)
