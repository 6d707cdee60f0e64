"""Open a folder of heads with its backbone and tokenizer, for commands that get only the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heads.backbone.loading import BackboneConfig, Dtype, load_backbone, load_tokenizer, resolve_dtype
from heads.backbone.model import Backbone
from heads.checkpoint.adapter import put_on_adapter
from heads.checkpoint.remote import backbone_around, find_heads, with_heads_inside
from heads.checkpoint.save_load import load
from heads.checkpoint.schema import DESCRIPTION, look_up, read_description
from heads.inside import find_inside
from heads.interface.token_heads import TokenHeads
from heads.products.packed import pack_weights, what_stops_packing
from heads.validation import build

RECORDED = ("revision", "tokenizer", "attn_implementation", "quantization")
"""Fields of `BackboneConfig` that are taken from a recipe. trust_remote_code is not: a file cannot ask for that."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A backbone, its tokenizer, and none, one or several sets of heads on it, by name."""

    model: Any
    tokenizer: Any
    source: str
    token_heads: dict[str, TokenHeads]


def open_heads(
    folders: Sequence[str | Path], backbone: str | None = None, dtype: Dtype = "auto", *, pack: bool = False
) -> Opened:
    """Load heads and the backbone that they belong to, once for all of them, on an accelerator if there is one.

    Args:
        backbone: folder or hub name, loaded as it is; None loads the one in the first folder's heads.json, with the
            revision, tokenizer, attention and quantization of the heads' training.
        pack: pack the weights of backbone and heads (heads/products/packed.py).

    Raises:
        ValueError: a folder holds no heads, the backbone is not found, heads belong to another one, or its weights
            cannot be packed.
    """
    names, folders = name_folders(folders), [with_heads_inside(Path(folder)) for folder in folders]
    for folder in folders:
        read_description(folder)  # raises on a wrong folder before minutes are spent on the backbone
    if backbone is None:
        config = recorded_backbone(folders[0], dtype)
        model = load_recorded(config, folders[0], default_device())
    else:
        config = BackboneConfig(name_or_path=backbone, dtype=dtype)
        model = load_backbone(config, default_device())
    wrapped = Backbone(model)
    token_heads = {name: load(folder, wrapped) for name, folder in zip(names, folders, strict=True)}
    opened = Opened(model=model, tokenizer=load_tokenizer(config), source=config.name_or_path, token_heads=token_heads)
    return packed(opened) if pack else opened


def open_backbone(name: str, dtype: Dtype = "auto", *, pack: bool = False) -> Opened:
    """Load a backbone as `open_heads` does, without heads on it."""
    config = BackboneConfig(name_or_path=name, dtype=dtype)
    model = load_backbone(config, default_device())
    opened = Opened(model=model, tokenizer=load_tokenizer(config), source=name, token_heads={})
    return packed(opened) if pack else opened


def packed(opened: Opened) -> Opened:
    """The same with the weights of backbone and heads packed in place.

    Raises:
        ValueError: weights of a device or dtype that cannot be packed, or no linear layer with plain weights.
    """
    if not pack_weights(opened.model):
        raise ValueError(
            f"{opened.source} has no linear layer with plain weights, so there is nothing to pack; leave it unpacked."
        )
    for token_heads in opened.token_heads.values():
        pack_weights(token_heads)
    return opened


def why_not_packed(dtype: Dtype) -> str:
    """Why weights that are loaded in this dtype here cannot be packed, known before they are; empty where they can."""
    device, resolved = default_device(), resolve_dtype(dtype, default_device())
    return what_stops_packing(torch.empty(0, dtype=None if resolved == "auto" else resolved, device=device))


def open_draft_model(name: str, dtype: Dtype = "auto") -> Any:
    """Load a draft model on the device of `open_heads`; decoding checks that it fits the backbone."""
    return load_backbone(BackboneConfig(name_or_path=name, dtype=dtype), default_device())


def find_backbone(folder: str | Path) -> str:
    """The backbone in heads.json: its recorded path, or else the folder of that name beside the heads.

    checkpoints/demo/grounded names checkpoints/demo/base; from elsewhere ../base beside the heads is found. Heads in a
    model folder belong to that model.
    """
    if (around := backbone_around(folder)) is not None:
        return str(around)
    return find_beside(read_description(folder).backbone.name, folder)


def find_beside(name: str, folder: str | Path) -> str:
    """A folder at its recorded path, or beside the folder of heads; else the name, for the hub."""
    beside = Path(folder).resolve().parent / Path(name).name
    return str(beside) if not Path(name).is_dir() and beside.is_dir() else name


def recorded_backbone(folder: str | Path, dtype: Dtype) -> BackboneConfig:
    """How to load the backbone as in the heads' training. No file can ask to run code beside its weights.

    Raises:
        ValueError: a field of the recipe has another type than a run writes.
    """
    recorded, where = recorded_fields(folder), "recipe.config.backbone"
    fields = {name: recorded[name] for name in RECORDED if name in recorded}
    try:
        values = {"name_or_path": find_backbone(folder), **fields}
        config = build(BackboneConfig, values, of=where, prefix=f"{where}.")
    except ValueError as error:
        raise ValueError(f"In {Path(folder) / DESCRIPTION}, {error} Correct the file or name a backbone.") from None
    config.dtype = dtype
    if backbone_around(folder) is not None:  # with its own tokenizer, and in no other revision
        config.revision = config.tokenizer = None
    elif config.tokenizer is not None:
        config.tokenizer = find_beside(config.tokenizer, folder)
    elif (trained := read_description(folder).trained_backbone) is not None:
        beside = find_inside(folder, trained.folder)
        config.tokenizer = str(beside) if (beside / "tokenizer_config.json").is_file() else None
    return config


def recorded_fields(folder: str | Path) -> dict[str, Any]:
    """recipe.config.backbone of heads.json; empty if it was not recorded."""
    fields = look_up(read_description(folder).recipe, "config", "backbone")
    return fields if isinstance(fields, dict) else {}


def load_with_backbone(
    folder: str | Path,
    *,
    dtype: Dtype = "auto",
    device: torch.device | str | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> tuple[Any, TokenHeads]:
    """The backbone and its heads, from a folder of heads, or from the hub as in `heads.load`.

    If the backbone was trained with the heads, it is the trained one beside them (or the pretrained one with the
    trained LoRA adapter); else the one in heads.json.

    Args:
        dtype: dtype of backbone and heads; "auto" is the checkpoint's on an accelerator and float32 on a CPU. An
            adapter stays in float32, as it was trained.
        device: None is an accelerator if there is one.
        revision, cache_dir: of the heads on the hub; a backbone that was not trained with them has its own revision.

    Returns:
        (model, token heads), in eval mode.

    Raises:
        ValueError: the folder holds no heads, damaged ones, or the backbone is not found.
    """
    folder = find_heads(folder, revision=revision, cache_dir=cache_dir, with_backbone=True)
    model = load_recorded(recorded_backbone(folder, dtype), folder, device or default_device())
    return model, load(folder, model)


def load_recorded(config: BackboneConfig, folder: str | Path, device: torch.device | str) -> Any:
    """The backbone, changed as it was trained with the heads.

    If it needs remote code, which only runs if the user asks for it, the error says how to load it.
    """
    trained = read_description(folder).trained_backbone
    try:
        if trained is None or backbone_around(folder) is not None:
            return load_backbone(config, device)
        beside = find_trained(folder, trained.folder)
        if not trained.adapter:
            return load_backbone(replace(config, name_or_path=str(beside), revision=None), device)
        model = load_backbone(config, device)
        put_on_adapter(model, beside)
        return model.eval()
    except ValueError as error:
        if recorded_fields(folder).get("trust_remote_code") is not True:
            raise
        raise ValueError(
            f"{error} The heads were trained with trust_remote_code: if you trust that code, load the backbone in "
            f"Python with BackboneConfig(name_or_path={config.name_or_path!r}, trust_remote_code=True)."
        ) from error


def find_trained(folder: str | Path, name: str) -> Path:
    beside = find_inside(folder, name)
    for file in beside.iterdir() if beside.is_dir() else ():
        find_inside(beside, file.name)
    if not beside.is_dir():
        raise ValueError(
            f"{folder} does not hold {name}, the backbone that was trained with its heads; copy the whole folder."
        )
    return beside


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def name_folders(folders: Sequence[str | Path]) -> list[str]:
    """The shortest ends of the paths that differ from each other.

    >>> name_folders(["a/medusa", "a/grounded"]), name_folders(["runs/x/last", "runs/y/last"])
    (['medusa', 'grounded'], ['x/last', 'y/last'])
    """
    parts = [named_as_on_the_hub(Path(folder).resolve().parts) for folder in folders]
    if len(set(parts)) < len(parts):
        raise ValueError("A folder of heads was given twice; give each once.")
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different parts")


def named_as_on_the_hub(parts: tuple[str, ...]) -> tuple[str, ...]:
    """
    >>> named_as_on_the_hub(("cache", "models--org--name", "snapshots", "0a1b"))
    ('cache', 'org', 'name')
    """
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return (*parts[:-3], *parts[-3].split("--", 2)[1:])
    return parts
