"""Medusa heads as one folder that TGI, LoRAX and vLLM 0.31 and 0.32 load alike.

The tensors have Medusa's original names, which all three read; config.json has what each looks for:

    TGI, LoRAX     medusa_num_heads, medusa_num_layers, base_model_name_or_path; no `architectures` (TGI then takes the
                   folder for a model), `version` a number in a string (LoRAX)
    vLLM           model_type "medusa", hidden_size, vocab_size; medusa_fc_bias true, since blocks otherwise lose their
                   biases without a warning. It renames every key with "num" and "heads" to num_heads, and with "num"
                   and "layers" to num_hidden_layers, so no other key may have such a name

If heads share the backbone's unembedding, TGI and LoRAX use the backbone's own when `{k}.1.weight` is missing, which
they support for one block only; vLLM reads it from `lm_heads.0.weight` (original_lm_head true), which the others
ignore. The blocks of a head may differ, since these programs build each one. vLLM's own names are read too.

Source: text_generation_server/layers/medusa.py, lorax_server/adapters/medusa.py, vllm/model_executor/models/medusa.py
and vllm/transformers_utils/configs/medusa.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from heads.backbone.model import Backbone
from heads.export.folder import (
    SAFETENSORS,
    find_tensors,
    number_of,
    read_config,
    read_tensors,
    refuse_kind,
    try_config,
    write_folder,
)
from heads.export.formats.medusa import from_original, has_own, medusa_fields, medusa_tensors
from heads.export.names import Names
from heads.export.plain_logits import is_copy
from heads.interface.token_heads import MAX_HEADS, TokenHeads
from heads.validation import validated

SUMMARY = "TGI 3, LoRAX, vLLM 0.31 and 0.32 (method medusa): one folder for all"
FORMAT, FILE = "medusa-servers", "medusa_lm_head.safetensors"
SHARED = "lm_heads.0.weight"
"""vLLM's name of the one unembedding of all heads."""
OURS_TO_VLLM = {
    "num_heads": ("num_heads", "medusa_num_heads"),
    "num_blocks": ("num_hidden_layers", "medusa_num_layers"),
}


@validated
@dataclass(kw_only=True)
class Config:
    """One folder for TGI, LoRAX and vLLM 0.31 and 0.32; it has no options."""


def vllm_names(num_blocks: int) -> Names:
    """Medusa's original names and vLLM's, which its own folders have."""
    return Names(
        {
            "{k}.{l}.linear.weight": "blocks.{k}.layers.{l}.weight",
            "{k}.{l}.linear.bias": "blocks.{k}.layers.{l}.bias",
            "{k}." + f"{num_blocks}.weight": "lm_heads.{k}.weight",
        }
    )


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: heads of another family, or with what these servers cannot say; shared unembeddings behind several
            blocks.
    """
    tensors, own = medusa_tensors(token_heads, FORMAT), has_own(token_heads)
    num_blocks = token_heads.config.num_blocks  # type: ignore[attr-defined]
    if not own:
        if num_blocks > 1:
            raise ValueError(
                f"These heads share the backbone's unembedding behind {num_blocks} blocks; TGI and LoRAX allow one "
                f"block then: give heads with num_blocks=1 or unembedding='own'."
            )
        tensors[SHARED] = token_heads.backbone.projection.weight
    weight_VD = token_heads.backbone.projection.weight
    fields = {
        "model_type": "medusa",
        "hidden_size": token_heads.backbone.hidden_size,
        "vocab_size": len(weight_VD),
        "truncated_vocab_size": None,
        "medusa_fc_bias": True,
        "original_lm_head": not own,
        "logit_scale": 1.0,
        "torch_dtype": str(next(token_heads.parameters()).dtype).removeprefix("torch."),
    }
    write_folder(folder, tensors, medusa_fields(token_heads) | fields, FILE)


def recognises(folder: Path) -> bool:
    return try_config(folder).get("model_type") == "medusa"


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, a truncated vocabulary, an unembedding that is not the backbone's, tensors
            without a place or of other sizes.
    """
    config = read_config(folder)
    if config.get("model_type") != "medusa":
        raise refuse_kind(folder, FORMAT, "config.json has no model_type medusa")
    for key, only in (("truncated_vocab_size", (None, config.get("vocab_size"))), ("logit_scale", (None, 1, 1.0))):
        if config.get(key) not in only:
            raise ValueError(f"{folder} has {key} {config[key]!r}, which is not read; allowed is {only[-1]}.")
    num_heads, num_blocks = (
        number_of(config, next((key for key in keys if key in config), keys[0]), folder, most=most)
        for keys, most in ((OURS_TO_VLLM["num_heads"], MAX_HEADS), (OURS_TO_VLLM["num_blocks"], 8))
    )
    found = read_tensors(find_tensors(folder, (FILE, *SAFETENSORS)))
    found = {name.removeprefix("medusa_heads."): tensor for name, tensor in found.items()}
    if config.get("original_lm_head"):
        check_shared(found, backbone, folder)
    if any(name.startswith("blocks.") for name in found):
        found = vllm_names(num_blocks).to_native(found, str(folder))
    if not config.get("medusa_fc_bias"):
        found = without_bias(found, folder)
    return from_original(found, num_blocks, backbone, folder, counted=num_heads)


def check_shared(tensors: dict[str, Tensor], backbone: Backbone, folder: Path) -> None:
    """Take the one unembedding out of the tensors.

    Raises:
        ValueError: it is missing, or not the backbone's.
    """
    given = [name for name in (SHARED, "lm_head.weight") if name in tensors]
    weight_VD = tensors.pop(given[0]).float() if given else None
    backbones_VD = backbone.projection.weight.detach().float().cpu()
    if weight_VD is None or not is_copy(weight_VD, backbones_VD):
        raise ValueError(
            f"{folder} says that all heads share the unembedding {SHARED}, which is not that of {backbone.name}; give "
            f"the backbone that they were trained on."
        )


def without_bias(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Add biases of zero, as vLLM runs blocks if medusa_fc_bias is not set.

    Raises:
        ValueError: the file has biases, which vLLM would drop.
    """
    if any(name.endswith(".linear.bias") for name in tensors):
        raise ValueError(f"{folder} has biases and no medusa_fc_bias: vLLM drops them; write medusa_fc_bias true.")
    zeros = {
        name.removesuffix("weight") + "bias": tensor.new_zeros(len(tensor))
        for name, tensor in tensors.items()
        if name.endswith(".linear.weight")
    }
    return tensors | zeros
