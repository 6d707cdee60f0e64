"""Open a folder of heads with its backbone and tokenizer, for commands that are given nothing but the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.backbone import Backbone
from heads.checkpoint import load, read_description
from heads.interface import TokenHeads
from heads.loading import BackboneConfig, Dtype, load_backbone, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A backbone, its tokenizer, and one or several sets of heads on it, by name."""

    model: Any
    tokenizer: Any
    source: str
    token_heads: dict[str, TokenHeads]


def open_heads(folders: Sequence[str | Path], backbone: str | None = None, dtype: Dtype = "auto") -> Opened:
    """Load heads and the backbone that they belong to, once for all of them, on an accelerator if there is one.

    Args:
        backbone: folder or hub name; where it is not given, what the first folder's heads.json names.

    Raises:
        ValueError: no heads there, a backbone that is not found, or heads that belong to another one.
    """
    source = backbone or find_backbone(folders[0])
    for folder in folders:
        read_description(folder)  # before the backbone is loaded: a wrong folder is told at once
    config = BackboneConfig(name_or_path=source, dtype=dtype)
    model = load_backbone(config, "cuda" if torch.cuda.is_available() else "cpu")
    wrapped = Backbone(model)
    token_heads = {name: load(folder, wrapped) for name, folder in zip(name_folders(folders), folders, strict=True)}
    return Opened(model=model, tokenizer=load_tokenizer(config), source=source, token_heads=token_heads)


def find_backbone(folder: str | Path) -> str:
    """The backbone that heads.json names: as it stands, or beside the folder of heads if its path is not here.

    checkpoints/demo/grounded names checkpoints/demo/base; from elsewhere ../base beside the heads is found.
    """
    name = str(read_description(folder)["backbone"]["name"])
    beside = Path(folder).resolve().parent / Path(name).name
    return str(beside) if not Path(name).is_dir() and beside.is_dir() else name


def name_folders(folders: Sequence[str | Path]) -> list[str]:
    """Short and different names: as few last parts of each path as tell all apart.

    >>> name_folders(["a/medusa", "a/grounded"]), name_folders(["runs/x/last", "runs/y/last"])
    (['medusa', 'grounded'], ['x/last', 'y/last'])
    """
    parts = [Path(folder).resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise ValueError("A folder of heads was given twice; give each once.")
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different parts")
