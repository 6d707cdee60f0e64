"""The multi-token-prediction modules in the files of released models: read as `mtp` heads, and written back.

transformers drops these tensors when it loads a model, or looks for literal layer numbers, so they are read from the
safetensors themselves. Below is the table of names. The rest of a module is a decoder layer with the names that the
model's other layers have; experts may be stored one by one, as released, or fused, as in transformers. Weights may be
in FP8 with a scale for each block (heads/export/fp8.py).

    headway import MODEL --backbone MODEL --out HEADS                       decode, fine-tune
    headway export HEADS --to mtp --model MODEL --out NEW_MODEL             a copy of MODEL with the heads' modules
    headway export HEADS --to mtp --model MODEL --out MODEL --overwrite     MODEL itself: its modules alone are replaced

Sources: transformers `conversion_mapping.py` ("MtpModel") for DeepSeek-V3, GLM-4.5 and Mellum; vLLM `qwen3_next_mtp.py`
for the names and the state that Qwen3-Next reads; XiaomiMiMo `modeling_mimo.py` and vLLM `mimo_mtp.py` for MiMo.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.backbone.masks import FULL
from heads.backbone.model import Backbone
from heads.backbone.support import read_layer_type
from heads.export.folder import refuse_kind
from heads.export.fp8 import dequantised
from heads.export.modules import Layout, Modules, find_modules, place_of
from heads.export.names import refuse_homeless
from heads.export.shards import read_named
from heads.export.written_back import Target, compare_files, compare_logits, write_files
from heads.families import create
from heads.inside import is_foreign_link, links_out
from heads.interface.token_heads import TokenHeads
from heads.validation import validated

SUMMARY = "modules of GLM-4.5, DeepSeek-V3, MiMo, Qwen3-Next, Qwen3.5, Mellum, in the model's own folder"
STEPS = 3
"""Number of heads that are read from a model with one module, which each of them runs once; trees may be deeper."""


@validated
@dataclass(kw_only=True)
class Config:
    """A copy of the model's folder with the heads' modules in the place of its own; all other tensors stay.

    Attributes:
        model: the model's folder; by default the one that the heads' backbone was loaded from.
    """

    model: str | None = None


DEEPSEEK = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "post_norm.weight": "shared_head.norm.weight",
}
QWEN = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "post_norm.weight": "norm.weight",
}
MIMO = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "post_norm.weight": "final_layernorm.weight",
}
COPIES = {"embed_tokens.weight": "embedding", "shared_head.head.weight": "unembedding"}
STATE_FIRST = {"first": "state", "reads": "last", "blank_first": True}
LAYOUTS = (
    *(
        Layout(module=f"{root}.{{n}}.", block=f"{root}.{{n}}.", names=DEEPSEEK, copies=COPIES, after_layers=True)
        for root in ("model.layers", "model.language_model.layers")
    ),
    Layout(module="mtp.", block="mtp.layers.{n}.", names=QWEN),
    Layout(module="model.mtp_layers.{n}.", block="model.mtp_layers.{n}.", names=MIMO, options=STATE_FIRST),
)


def recognises(folder: Path) -> bool:
    try:
        return find_modules(folder, LAYOUTS) is not None
    except (ValueError, TypeError):
        return False


@torch.no_grad()
def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder without modules, tensors without a place, missing or of other sizes, or an embedding or
            unembedding that is not the backbone's.
    """
    modules = find_modules(folder, LAYOUTS)
    if modules is None:
        raise refuse_kind(folder, "mtp", "its files name no multi-token-prediction module")
    return read_modules(modules, folder, backbone)


def read_modules(modules: Modules, folder: Path, backbone: Backbone, steps: int = STEPS) -> TokenHeads:
    """
    Args:
        steps: how many heads a model with one module gets.
    """
    many = modules.count > 1
    token_heads = create(
        "mtp",
        backbone,
        num_heads=modules.count if many else steps,
        modules="per_head" if many else "one",
        attention=attention_of(modules, backbone),
        **modules.layout.options,
    )
    places, scales = check_places(modules, token_heads.state_dict(), folder), modules.read_scales()
    for name, stored in read_named({name: modules.files[name] for name in (*modules.native, *modules.copied)}):
        tensor = dequantised(name, stored, scales.get(name), modules.block)
        if name in places:
            if places[name].shape != tensor.shape:
                raise ValueError(
                    f"{folder} has {name} of shape {tuple(tensor.shape)} in place of {tuple(places[name].shape)}; "
                    f"give the backbone that these modules belong to."
                )
            places[name].copy_(tensor)
        else:
            check_copy(name, tensor, modules.copied[name], backbone)
    return token_heads


def attention_of(modules: Modules, backbone: Backbone) -> str:
    """Which of the backbone's kinds of attention its config gives to the modules.

    Raises:
        ValueError: several modules of different kinds, or a kind that the backbone's own layers do not have.
    """
    kinds = set((getattr(backbone.config, "mtp_layer_types", None) or [])[: modules.count])
    mixed = backbone.mask_style.by_layer_type
    have = {read_layer_type(layer) for layer in backbone.layers} if mixed else {FULL}
    if not kinds or kinds == {read_layer_type(backbone.attention_layer) if mixed else FULL}:
        return "last"
    if len(kinds) > 1 or not kinds <= have:
        raise ValueError(
            f"{backbone.name} gives its modules {' and '.join(sorted(kinds))}, and its layers have "
            f"{' and '.join(sorted(have))}; modules are read whose attention is that of one kind of layers."
        )
    return str(kinds.pop()).removesuffix("_attention")


def check_places(modules: Modules, state: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """`place_of` each foreign tensor.

    Raises:
        ValueError: a tensor without a place in the heads, or a part of the heads that no tensor fills.
    """
    found = {name: place_of(state, native) for name, native in modules.native.items()}
    refuse_homeless([name for name, place in found.items() if place is None], f"in mtp heads read from {folder}")
    places = {name: place for name, place in found.items() if place is not None}
    wanted, filled = (sum(x.numel() for x in tensors) for tensors in (state.values(), places.values()))
    if wanted != filled:
        whole = set(modules.native.values())
        missing = [name for name in state if name not in whole and not name.endswith(("gate_up_proj", "down_proj"))]
        raise ValueError(
            f"The modules in {folder} fill {filled:,} of {wanted:,} numbers of mtp heads on this backbone; missing are "
            f"{', '.join(missing[:6]) or 'experts'}."
        )
    return places


def check_copy(name: str, tensor: Tensor, kind: str, backbone: Backbone) -> None:
    """
    Raises:
        ValueError: a module with an embedding or unembedding of its own, which the heads share with the backbone.
    """
    shared = backbone.projection.weight if kind == "unembedding" else backbone.model.get_input_embeddings().weight
    if tensor.shape != shared.shape or not torch.equal(tensor.to(shared), shared):
        raise ValueError(
            f"{name} is not the backbone's {kind}, which mtp heads share; give the backbone of the same folder."
        )


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: other heads, a model without modules, or of another layout or number of them.
    """
    source, _, _ = target = open_target(token_heads, config)
    foreign = [path for path in links_out(source) if is_foreign_link(path)]
    if foreign:
        raise ValueError(f"{foreign[0]} is a link that leads out of the model's folder; put a copy in its place.")
    shutil.copytree(source, folder, dirs_exist_ok=True)
    write_files(token_heads, target, folder)


def write_in_place(token_heads: TokenHeads, folder: Path, config: Config) -> str | None:
    """If `folder` is the model itself, replace its files that hold modules, each in one step; otherwise return None.

    All are written beside the model and compared first. After an interruption between two files, the same command
    completes the work; no file is ever partly written.

    Raises:
        ValueError: as `write`, or files that are links, which others read too.
    """
    source, modules, _ = target = open_target(token_heads, config)
    if source.resolve() != folder.resolve():
        return None
    if links := [path for path in {*modules.files.values(), folder} if path.is_symlink()]:
        raise ValueError(
            f"{links[0]} is a link, as in the cache of the hub, and what it leads to would change for all who read it; "
            f"give another folder by --out."
        )
    with tempfile.TemporaryDirectory(dir=source.resolve().parent, prefix=f".{source.resolve().name}.") as place:
        write_files(token_heads, target, Path(place))
        said = compare(token_heads, Path(place), config)
        for path in sorted(Path(place).iterdir()):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            path.replace(source / path.name)
    return said


def open_target(token_heads: TokenHeads, config: Config) -> Target:
    source = Path(config.model or token_heads.backbone.name)
    if token_heads.family != "mtp":
        raise ValueError(f"{token_heads.family} heads were given; the format mtp holds mtp heads.")
    if token_heads.draft_tokens_S is not None:
        raise ValueError("Heads with a draft vocabulary were given; the format mtp scores every token.")
    if not source.is_dir():
        raise ValueError(f"The heads' backbone is {source}, which is no folder; give --model with the model's folder.")
    modules = find_modules(source, LAYOUTS)
    if modules is None:
        raise ValueError(f"{source} holds no modules that could be replaced; give the model that they were read from.")
    given: Any = token_heads.config
    wanted = {"first": "embedding", "reads": "final", "blank_first": False} | dict(modules.layout.options)
    wanted["attention"] = attention_of(modules, token_heads.backbone)
    other = {key: getattr(given, key) for key, value in wanted.items() if getattr(given, key) != value}
    if other:
        raise ValueError(f"Heads with {other} were given; the modules of {source} have {wanted}.")
    return source, modules, check_places(modules, token_heads.state_dict(), source)


@torch.no_grad()
def compare(token_heads: TokenHeads, folder: Path, config: Config) -> str:
    """Check that what was written holds the heads' numbers in the files' dtypes, and every other tensor as it was.

    It is also read back as mtp heads, and their logits are compared.

    Raises:
        ValueError: a tensor or a logit differs.
    """
    source, modules, _ = target = open_target(token_heads, config)
    said = compare_files(token_heads, target, folder)
    written = {name: folder / path.relative_to(source) for name, path in modules.files.items()}
    files = {name: path if path.exists() else modules.files[name] for name, path in written.items()}
    again = read_modules(replace(modules, files=files), folder, token_heads.backbone, token_heads.num_heads)
    again.to(next(token_heads.parameters())).eval()
    return f"{said}; {compare_logits(token_heads, again, target)}"
