"""Replace the modules in a model's files by trained ones; every other tensor stays as it was.

A module's tensor keeps its file's dtype. One in FP8 gets new codes and scales, or keeps its bytes if the heads still
hold what was read (heads/export/fp8.py). Files without a trained tensor are not written.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.export.drafted_logits import ROWS, largest_difference
from heads.export.fp8 import dequantised, near, quantised, unchanged
from heads.export.modules import Modules
from heads.export.shards import find_shards, open_shard, read_named
from heads.interface.token_heads import TokenHeads

Target = tuple[Path, Modules, dict[str, Tensor]]
"""A model's folder, its modules, and for each of their tensors the view of the heads' tensors (`place_of`)."""


def write_files(token_heads: TokenHeads, target: Target, folder: Path) -> None:
    """Write the files that hold tensors of the heads; other tensors in them stay the model's."""
    source, modules, places = target
    own = trained_names(token_heads, modules)
    scales = modules.read_scales()
    of_scales = {scale: weight for weight, scale in modules.scales.items() if weight in own}
    for path in sorted({modules.files[name] for name in (*own, *of_scales)}):
        with open_shard(path) as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in own & set(tensors):
            tensors[name] = stored_as(name, tensors[name], places[name], scales.get(name), modules.block)[0]
        for scale in set(of_scales) & set(tensors):
            name = of_scales[scale]
            (before,) = (tensor for _, tensor in read_named({name: modules.files[name]}))
            tensors[scale] = stored_as(name, before, places[name], tensors[scale], modules.block)[1]
        written = folder / path.relative_to(source)
        written.unlink(missing_ok=True)  # a link in the source stays what it is
        save_file(tensors, written, metadata=metadata)
        shutil.copymode(path, written)


def trained_names(token_heads: TokenHeads, modules: Modules) -> set[str]:
    """Foreign names of the tensors that are replaced: all but buffers, which are never trained."""
    buffers = {name for name, _ in token_heads.named_buffers()}
    return {name for name, native in modules.native.items() if native not in buffers}


def stored_as(
    name: str, before: Tensor, place: Tensor, scales: Tensor | None, block: tuple[int, int]
) -> tuple[Tensor, Any]:
    """A trained tensor as the file stores it, and its scales, if any; both as before if it has not changed."""
    if scales is None:
        return place.detach().to(before.dtype).cpu().contiguous().clone(), None
    if unchanged(dequantised(name, before, scales, block), place):
        return before, scales
    return quantised(place, block, scales.dtype)


def compare_files(token_heads: TokenHeads, target: Target, folder: Path) -> str:
    """
    Raises:
        ValueError: tensors in `folder` are not what `write_files` should have written; the sentence names them.
    """
    source, modules, places = target
    before, after = find_shards(source), {name: folder / path.name for name, path in find_shards(source).items()}
    own = trained_names(token_heads, modules)
    scales = modules.read_scales()
    rewritten = {before[name] for name in (*own, *(modules.scales[name] for name in own & set(scales)))}
    checked = {name: path for name, path in before.items() if path in rewritten}
    again = dict(read_named({name: after[name] for name in checked}))
    of_scales = {scale: weight for weight, scale in modules.scales.items() if weight in own}
    wrong = []
    for name, old in read_named(checked):
        if name in own and name in scales:
            right = near(places[name], again[name], again[modules.scales[name]], modules.block)
        elif name in of_scales:
            right = again[name].dtype == old.dtype
        else:
            wanted = places[name].detach().cpu().to(old.dtype) if name in own else old
            right = same(again[name], wanted)
        wrong += [] if right else [name]
    if wrong:
        raise ValueError(
            f"What was read back differs in {', '.join(wrong[:6])}; nothing was written. This is a defect of the "
            f"format's file, please report it."
        )
    return (
        f"read back: {len(own)} tensors of {modules.count} module(s) are the heads', "
        f"{len(before) - len(own) - len(of_scales)} as before"
        + (f"; {len(of_scales)} of them in FP8, up to its rounding" if of_scales else "")
    )


def compare_logits(token_heads: TokenHeads, again: TokenHeads, target: Target) -> str:
    """
    Args:
        again: heads that were read from what was written.

    Raises:
        ValueError: they draft other logits than the heads, and rounding to the files' dtypes does not explain it.
    """
    moved = largest_difference(token_heads, again)
    if moved and largest_difference_as_stored(token_heads, again, target) != 0:
        raise ValueError(
            f"What was read back drafts other logits, by up to {moved:.2g}, which the dtypes of {target[0]} do not "
            f"explain; nothing was written. This is a defect of the format's file, please report it."
        )
    how = "bit for bit" if moved == 0 else f"up to {moved:.1g}, the rounding of the model's files,"
    return f"the same logits {how} on {ROWS} random texts"


@torch.no_grad()
def largest_difference_as_stored(token_heads: TokenHeads, again: TokenHeads, target: Target) -> float:
    """The largest difference of logits while the heads' numbers are rounded as the model's files store them."""
    _, modules, places = target
    kept, scales = {name: place.clone() for name, place in places.items()}, modules.read_scales()
    try:
        for name, before in read_named({name: modules.files[name] for name in places}):
            stored, scale = stored_as(name, before, places[name], scales.get(name), modules.block)
            places[name].copy_(dequantised(name, stored, scale, modules.block))
        return largest_difference(token_heads, again)
    finally:
        for name, place in places.items():
            place.copy_(kept[name])


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, so that NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
