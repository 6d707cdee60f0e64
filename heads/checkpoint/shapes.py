"""Check that a file's tensors fit the heads that heads.json describes, by their shapes, before heads take memory.

A file of 50 KB may say `hidden_width: 3000000`. So the heads are first built on the meta device, on a copy of the
backbone there, and compared with the header of the safetensors file.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.checkpoint.schema import DESCRIPTION, TENSORS, HeadsDescription
from heads.families import build_config, family_module
from heads.quantization.packed_heads import put_packed_heads

SHOWN = 8  # problems in one sentence


def check_fit(description: HeadsDescription, backbone: Backbone, folder: str | Path) -> None:
    """
    Raises:
        ValueError: tensors missing, extra or misshapen, by name; a file that is damaged; a config that cannot be built.
    """
    found = read_shapes(Path(folder) / TENSORS)
    config = build_config(description.family, **description.config)
    with torch.device("meta"):
        on_meta = Backbone(without_memory(backbone.model), check_projection=False)
        wanted = family_module(description.family).Heads(config, on_meta)
    put_packed_heads(wanted, description.packed_layers or {})
    check_shapes(found, wanted.state_dict(), folder)


def read_shapes(path: Path) -> dict[str, Sequence[int]]:
    """The shapes of a file's tensors, from its header.

    Raises:
        ValueError: no such file, or a damaged one.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; the folder holds a description of heads without their tensors.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or cut short at {path.stat().st_size} bytes ({error}); copy or save the heads again."
        ) from None


def without_memory(model: Any) -> Any:
    """A copy of a model with its parameters and buffers on the meta device; their numbers are never copied.

    >>> copied = without_memory(nn.Linear(3, 2))
    >>> copied.weight.shape, copied.weight.is_meta
    (torch.Size([2, 3]), True)
    """
    tensors = (*model.parameters(), *model.buffers())
    copied = copy.deepcopy(model, {id(tensor): on_meta(tensor) for tensor in tensors})
    vars(copied).pop("hf_device_map", None)  # which would say that the weights were offloaded
    return copied


def on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def check_shapes(found: Mapping[str, Sequence[int]], wanted: Mapping[str, Tensor], folder: str | Path) -> None:
    """
    Raises:
        ValueError: tensors missing, extra or misshapen, by name.
    """
    problems = [f"missing {name}" for name in sorted(set(wanted) - set(found))]
    problems += [f"extra {name}" for name in sorted(set(found) - set(wanted))]
    problems += [
        f"{name} has shape {tuple(found[name])} in place of {tuple(wanted[name].shape)}"
        for name in sorted(set(found) & set(wanted))
        if tuple(found[name]) != tuple(wanted[name].shape)
    ]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(
            f"The tensors in {folder} do not fit the heads that {DESCRIPTION} describes: "
            f"{'; '.join(problems[:SHOWN])}{more}."
        )
