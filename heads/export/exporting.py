"""Export heads to a foreign folder, and import them; an export appears only after it was read back and compared."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from heads.backbone.model import Backbone
from heads.export.drafted_logits import ROWS, largest_difference, largest_logit
from heads.export.formats import format_module, reads, recognise, writes
from heads.export.replacing import check_place
from heads.interface.token_heads import TokenHeads
from heads.quantization.packed_heads import refuse_packed_heads
from heads.validation import build


def export_heads(
    token_heads: TokenHeads, format: str, folder: str | Path, *, overwrite: bool = False, **options: Any
) -> str:
    """Write heads as a foreign format, read them back, compare, and only then put the folder in its place.

    Args:
        format: one of `heads.export.formats.formats()`.
        folder: a new folder.
        overwrite: replace an earlier export of that name once the new one is whole. With the format mtp and the model
            itself as `folder`, the model's own modules are replaced.
        options: fields of the format's Config.

    Returns:
        A sentence that says what was compared.

    Raises:
        ValueError: an unknown format or option, heads that the format cannot hold, a folder that exists, or logits that
            differ after reading back.
    """
    module, folder = format_module(format), Path(folder)
    if not writes(format):
        raise ValueError(f"The format {format} is only read; headway export --list shows the others.")
    if hasattr(module, "convert"):
        raise ValueError(f"The format {format} is made of a folder: save the heads, then headway export --to {format}.")
    refuse_packed_heads(token_heads, f"Exporting as {format}")
    config = build(module.Config, options, of=f"format {format}")
    if overwrite and hasattr(module, "write_in_place"):
        said = module.write_in_place(token_heads, folder, config)
        if said is not None:
            return str(said)
    check_place(folder, [token_heads.backbone.name, options.get("model")], overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as place:
        written = Path(place) / "folder"
        written.mkdir()
        module.write(token_heads, written, config)
        said = check_written(module, token_heads, written, config)
        if folder.exists():
            shutil.rmtree(folder)
        written.rename(folder)
    return said


def check_written(module: Any, token_heads: TokenHeads, folder: Path, config: Any) -> str:
    if hasattr(module, "compare"):
        return str(module.compare(token_heads, folder, config))
    again = module.read(folder, token_heads.backbone)
    difference, roundings = largest_difference(token_heads, again), getattr(module, "ROUNDINGS", 0)
    allowed = roundings * torch.finfo(next(token_heads.parameters()).dtype).eps * largest_logit(token_heads)
    if not difference <= allowed:
        raise ValueError(
            f"What was read back drafts other logits, by up to {difference:.2g}; nothing was written. This is a defect "
            f"of the format's file, please report it."
        )
    how = "bit for bit" if difference == 0 else f"up to {difference:.1g}, the rounding of added zeros,"
    return f"read back: {token_heads.num_heads} heads, the same logits {how} on {ROWS} random texts"


def import_heads(folder: str | Path, model: Any, format: str | None = None) -> TokenHeads:
    """Read heads from a foreign folder, on a causal LM, in eval mode; `heads.save` writes them as a native folder.

    Args:
        model: the backbone that they were trained on, or a `Backbone` that wraps it.
        format: by default the one that the folder is recognised as.

    Raises:
        ValueError: a folder of another kind or of several, tensors without a place or of other sizes, pickles with
            code, names that lead out of the folder.
    """
    backbone = model if isinstance(model, Backbone) else Backbone(model)
    name = format or recognise(folder)
    if not reads(name):
        raise ValueError(f"The format {name} is only written; headway import --list shows the others.")
    token_heads: TokenHeads = format_module(name).read(Path(folder), backbone)
    return token_heads.to(device=backbone.heads_device, dtype=backbone.dtype).eval()
