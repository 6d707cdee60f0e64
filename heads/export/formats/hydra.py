"""Hydra's own folders: `hydra_lm_head.pt` with a config.json of hydra_num_heads, hydra_num_layers and hydra_head_arch.

    head k at t reads z = [g ; E(x_{t+1}) ; … ; E(x_{t+k})], E the backbone's embedding
    first block   R z + r + SiLU(W z + b)        R, r a linear "res_connection"; W z + b is named linear
    n - 1 more    x + SiLU(W x + b)              one block that the code repeats: `[ResBlock(d)] * (n - 1)`
    logits        U x + u, with a bias
    mlp           g is the final hidden state, or transformers' hidden_states[-(o + 1)] for hidden_state_offset o
    prefix-mlp    g is a Llama layer over it and a final norm of its own (Hydra++); Dropout layers take indices too

These are `grounded` heads with `biases`, `normalize_embeddings: false` and, for prefix-mlp, `prefix_norm`. The file
holds the repeated block n - 1 times under different names, and these are read as n - 1 blocks with equal weights. Heads
with different blocks are not written, since Hydra's code would load them into one. The file's copy of the embedding
must be the backbone's.

Source: zankner/Hydra hydra/model/hydra_model.py, hydra_heads/mlp_head.py and prefix_mlp_head.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from heads.backbone.model import Backbone
from heads.export.folder import (
    create_with,
    find_tensors,
    number_of,
    read_config,
    read_tensors,
    refuse_kind,
    try_config,
    write_folder,
)
from heads.export.formats.medusa import refuse_different_blocks
from heads.export.names import Names
from heads.export.plain_logits import is_copy, refuse_other_logits
from heads.interface.token_heads import MAX_HEADS, TokenHeads
from heads.validation import validated

SUMMARY = "zankner/Hydra, grounded mlp and prefix-mlp (read and written); no server loads it"
FILE = "hydra_lm_head.pt"
ROUNDINGS = 64
"""Heads without biases are written with biases of zero, and a product that adds one may round differently."""
PREFIX = "prefix_embeding_layer"  # spelt so in its code
LAYER = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
COPIES = ("input_embed_fn.weight", f"{PREFIX}.embed_tokens.weight")
"""Copies of the backbone's embedding. The second is never used, and may be random, so only the first is compared."""


@validated
@dataclass(kw_only=True)
class Config:
    """Hydra's own folder; it has no options."""


def names(num_layers: int, prefix: bool) -> Names:
    """The table. With a prefix layer, every block and unembedding follows a Dropout, which takes an index too."""
    first, last = ("1", ".1") if prefix else ("0", "")
    pairs = {
        "bodies.{k}.skip": "hydra_mlp.{k}." + f"{first}.res_connection",
        "bodies.{k}.first": "hydra_mlp.{k}." + f"{first}.linear",
    }
    for block in range(num_layers - 1):
        place = 2 * block + 3 if prefix else block + 1
        pairs["bodies.{k}.rest." + f"{block}.linear"] = "hydra_mlp.{k}." + f"{place}.linear"
    table = {f"{ours}.{part}": f"{theirs}.{part}" for ours, theirs in pairs.items() for part in ("weight", "bias")}
    table["unembeddings.weights.{k}"] = "hydra_lm_head.{k}" + f"{last}.weight"
    table["unembeddings.biases.{k}"] = "hydra_lm_head.{k}" + f"{last}.bias"
    if prefix:
        table |= {f"prefix.0.{name}": f"{PREFIX}.layers.0.{name}" for name in LAYER}
        table["prefix_norm.weight"] = f"{PREFIX}.norm.weight"
    return Names(table, not_read=(*COPIES, PREFIX + ".layers.{l}.self_attn.rotary_emb.inv_freq"))


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: heads of another family, or with what the format cannot say.
    """
    refuse_what_hydra_lacks(token_heads)
    ours: Any = token_heads.config
    tensors = with_zero_biases(token_heads)
    fields = {
        "hydra_num_heads": token_heads.num_heads,
        "hydra_num_layers": ours.num_hidden_layers,
        "hydra_head_arch": "prefix-mlp" if ours.prefix_layers else "mlp",
        "base_model_name_or_path": token_heads.backbone.name,
        "grounded_heads": True,
        "hidden_state_offset": ours.hidden_offset,
    }
    table = names(ours.num_hidden_layers, bool(ours.prefix_layers))
    write_folder(folder, table.to_foreign(tensors, "hydra"), fields, FILE)


def refuse_what_hydra_lacks(token_heads: TokenHeads) -> None:
    if token_heads.family != "grounded":
        raise ValueError(f"{token_heads.family} heads were given; the format hydra holds grounded heads.")
    ours: Any = token_heads.config
    refused = {
        "normalize_embeddings=True": ours.normalize_embeddings,
        f"hidden_width={ours.hidden_width}": ours.hidden_width not in (None, token_heads.backbone.hidden_size),
        "unembedding='shared'": ours.unembedding == "shared",
        "a draft vocabulary": token_heads.draft_tokens_S is not None,
        "a prefix layer without prefix_norm": ours.prefix_layers and not ours.prefix_norm,
        "hidden_offset without raw_hidden_states": ours.hidden_offset and not ours.raw_hidden_states,
    }
    if found := [what for what, given in refused.items() if given]:
        raise ValueError(f"These heads have {' and '.join(found)}, which the format hydra cannot say.")
    refuse_other_logits(token_heads.backbone, "hydra", with_bias=True)
    if ours.prefix_layers:
        refuse_other_layers(token_heads.backbone)
    refuse_different_blocks([body.rest for body in token_heads.bodies], "Hydra's own code", "num_hidden_layers=1 or 2")  # type: ignore[union-attr]


def refuse_other_layers(backbone: Backbone) -> None:
    layer = type(backbone.layers[-1]).__name__
    if layer != "LlamaDecoderLayer":
        raise ValueError(f"{backbone.name} has a {layer}; Hydra's prefix layer is a LlamaDecoderLayer.")


def with_zero_biases(token_heads: TokenHeads) -> dict[str, Tensor]:
    """The heads' tensors, with biases of zero where they have none."""
    tensors: dict[str, Tensor] = dict(token_heads.state_dict())
    for k in range(token_heads.num_heads):
        for bias, weight in (
            (f"bodies.{k}.skip.bias", f"bodies.{k}.skip.weight"),
            (f"unembeddings.biases.{k}", f"unembeddings.weights.{k}"),
        ):
            tensors.setdefault(bias, tensors[weight].new_zeros(len(tensors[weight])))
    return tensors


def recognises(folder: Path) -> bool:
    return "hydra_num_heads" in try_config(folder)


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, heads that read no tokens, another backbone's embedding, tensors without a
            place or of other sizes.
    """
    config = read_config(folder)
    if "hydra_num_heads" not in config:
        raise refuse_kind(folder, "hydra", "config.json has no hydra_num_heads")
    arch = config.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp") or config.get("grounded_heads") is not True:
        raise ValueError(
            f"{folder} has hydra_head_arch {arch!r} and grounded_heads {config.get('grounded_heads', False)}; allowed "
            f"are 'mlp' and 'prefix-mlp' with grounded_heads true."
        )
    refuse_other_logits(backbone, "hydra", with_bias=True)
    num_layers, prefix = number_of(config, "hydra_num_layers", folder, most=4), arch == "prefix-mlp"
    if prefix:
        refuse_other_layers(backbone)
    found = read_tensors(find_tensors(folder, (FILE, "hydra_lm_head.safetensors")))
    check_embedding(found, backbone, folder)
    tensors = names(num_layers, prefix).to_native(found, str(folder))
    offset = number_of({"hidden_state_offset": 0, **config}, "hidden_state_offset", folder, least=0)
    return create_with(
        "grounded",
        backbone,
        tensors,
        folder,
        num_heads=number_of(config, "hydra_num_heads", folder, most=MAX_HEADS),
        num_hidden_layers=num_layers,
        hidden_offset=offset,
        raw_hidden_states=offset > 0,
        prefix_layers=int(prefix),
        prefix_norm=prefix,
        normalize_embeddings=False,
        biases=True,
    )


def check_embedding(tensors: Mapping[str, Tensor], backbone: Backbone, folder: Path) -> None:
    """
    Raises:
        ValueError: the file's copy of the embedding is not the backbone's, up to bfloat16's rounding.
    """
    copy_VD = tensors.get(COPIES[0])
    if copy_VD is None:
        return
    if not is_copy(copy_VD, backbone.model.get_input_embeddings().weight):
        raise ValueError(
            f"{folder} holds the embedding of the model that its heads belong to, and {backbone.name} has another one; "
            f"give the backbone that they were trained on."
        )
