"""Medusa's own folders: `medusa_lm_head.safetensors` or `.pt` with a config.json that counts heads and layers.

Version 1 (the axolotl trainer, and what was released for Vicuna) has an unembedding for each head; version 2 (the
legacy trainer) shares the backbone's. A head is n residual blocks x + SiLU(W x + b). The original code repeats one
block n times (`[ResBlock(d)] * n`), so its files hold the same block n times, which is read as n blocks with equal
weights. It would load different blocks into that one, so heads with different blocks are not written.

The released config.json of Vicuna counts 2 heads beside a file of 5, so heads are counted in the file. Medusa-2 saves
heads inside a whole model, as `medusa_head.…`; the other tensors there are the backbone's.

Source: FasterDecoding/Medusa medusa/model/medusa_model.py and medusa_model_legacy.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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

logger = logging.getLogger(__name__)

SUMMARY = "FasterDecoding/Medusa, versions 1 and 2 (read and written)"
FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
WHOLE = (*SAFETENSORS, "pytorch_model.bin", "pytorch_model.bin.index.json")
FIRST_BLOCK = re.compile(r"^(\d+)\.0\.linear\.")
PREFIX = "medusa_head."
"""Precedes each name where heads were saved with their model (Medusa-2)."""


@validated
@dataclass(kw_only=True)
class Config:
    """Medusa's own folder; the version follows the heads: `unembedding: own` is 1, `shared` is 2.

    Attributes:
        file: "safetensors", or "pt" for programs that look for medusa_lm_head.pt.
    """

    file: Literal["safetensors", "pt"] = "safetensors"


def names(num_blocks: int) -> Names:
    """The table of names; only version 1 has the last entry."""
    return Names(
        {
            "bodies.{k}.{l}.linear.weight": "{k}.{l}.linear.weight",
            "bodies.{k}.{l}.linear.bias": "{k}.{l}.linear.bias",
            "unembeddings.weights.{k}": "{k}." + f"{num_blocks}.weight",
        }
    )


def write(token_heads: TokenHeads, folder: Path, config: Config) -> None:
    """
    Raises:
        ValueError: heads of another family, or with what the format cannot say: a draft vocabulary, biases of
            unembeddings, logits that the backbone's class scales or caps.
    """
    tensors = medusa_tensors(token_heads, "medusa")
    refuse_different_blocks(token_heads.bodies, "Medusa's own code", "--to medusa-servers")
    write_folder(folder, tensors, medusa_fields(token_heads), f"medusa_lm_head.{config.file}")


def medusa_fields(token_heads: TokenHeads) -> dict[str, Any]:
    """Fields of config.json that every program reads; version 2 is for heads without unembeddings of their own."""
    fields = {
        "medusa_num_heads": token_heads.num_heads,
        "medusa_num_layers": token_heads.config.num_blocks,  # type: ignore[attr-defined]
        "base_model_name_or_path": token_heads.backbone.name,
    }
    return fields if has_own(token_heads) else {**fields, "version": "2"}


def has_own(token_heads: TokenHeads) -> bool:
    """Whether each head has an unembedding of its own."""
    return any(name.startswith("unembeddings") for name in token_heads.state_dict())


def refuse_different_blocks(bodies: Any, program: str, instead: str) -> None:
    """
    Args:
        bodies: the repeated blocks of each head.

    Raises:
        ValueError: heads whose blocks differ, for a program that runs one block for all of them.
    """
    for body in bodies:
        pairs = [pair for block in body for pair in zip(body[0].parameters(), block.parameters(), strict=True)]
        if not all(torch.equal(one, other) for one, other in pairs):
            raise ValueError(
                f"{program} repeats one block, and these heads have {len(body)} different ones; give heads with one "
                f"block, or {instead}."
            )


def medusa_tensors(token_heads: TokenHeads, format: str) -> dict[str, Any]:
    """The tensors of medusa heads by their original names."""
    if token_heads.family != "medusa":
        raise ValueError(f"{token_heads.family} heads were given; the format {format} holds medusa heads.")
    refuse_other_logits(token_heads.backbone, format)
    if token_heads.draft_tokens_S is not None:
        raise ValueError(f"Heads with a draft vocabulary were given; the format {format} scores every token.")
    return names(token_heads.config.num_blocks).to_foreign(token_heads.state_dict(), format)  # type: ignore[attr-defined]


def recognises(folder: Path) -> bool:
    config = try_config(folder)
    return "medusa_num_heads" in config and config.get("model_type") != "medusa"


def read(folder: Path, backbone: Backbone) -> TokenHeads:
    """
    Raises:
        ValueError: a folder of another kind, tensors without a place, or of other sizes.
    """
    config = read_config(folder)
    if "medusa_num_heads" not in config:
        raise refuse_kind(folder, "medusa", "config.json has no medusa_num_heads")
    number_of(config, "medusa_num_heads", folder, most=MAX_HEADS)
    num_blocks = number_of(config, "medusa_num_layers", folder, most=8)
    path = find_tensors(folder, (*FILES, *WHOLE))
    found = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in read_tensors(path).items()
        if path.name in FILES or name.startswith(PREFIX)
    }
    return from_original(found, num_blocks, backbone, folder, counted=config["medusa_num_heads"])


def with_repeated_blocks(found: Mapping[str, Tensor], num_blocks: int) -> dict[str, Tensor]:
    """Add a repeated block's further names, since safetensors files have a shared tensor under its first name only.

    If the file has any further block, nothing is added.
    """
    first = {name: tensor for name, tensor in found.items() if FIRST_BLOCK.match(name)}
    further = {f"{name.split('.')[0]}.{b}" for name in first for b in range(1, num_blocks)}
    if any(name.startswith(f"{block}.") for name in found for block in further):
        return dict(found)
    repeated = {
        FIRST_BLOCK.sub(rf"\g<1>.{b}.linear.", name): tensor
        for name, tensor in first.items()
        for b in range(1, num_blocks)
    }
    return {**found, **repeated}


def from_original(
    found: Mapping[str, Tensor], num_blocks: int, backbone: Backbone, folder: Path, *, counted: int
) -> TokenHeads:
    """Heads from tensors by their original names.

    Args:
        counted: number of heads by config.json; if the file holds more, all are read, with a warning.
    """
    refuse_other_logits(backbone, "medusa")
    tensors = names(num_blocks).to_native(with_repeated_blocks(found, num_blocks), str(folder))
    num_heads = max([counted, *(int(name.split(".")[0]) + 1 for name in found)])
    if num_heads > counted:
        logger.warning("%s counts %d heads and its file holds %d: all of them are read.", folder, counted, num_heads)
    own = any(name.startswith("unembeddings") for name in tensors)
    unembedding = "own" if own else "shared"
    fields = {"num_heads": num_heads, "num_blocks": num_blocks, "unembedding": unembedding}
    return create_with("medusa", backbone, tensors, folder, **fields)
