"""Write a backbone with packed weights as a Hugging Face folder, which opens without the original.

The folder appears whole or not at all: it is written beside its place and then renamed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig

from heads.backbone.loading import BackboneConfig, Dtype, explained, load_backbone, load_tokenizer
from heads.checkpoint.backbone import sync
from heads.checkpoint.convert import refuse_existing, stored_dtype
from heads.inside import remove
from heads.quantization.formats import find_format
from heads.quantization.quantizer import METHOD

RECORD = "training.json"
"""The record that a run wrote beside the backbone. It names the held-out text, which later measurements read."""


def pack_backbone(name: str, format: str, out: str | Path, *, dtype: Dtype = "auto") -> int:
    """Pack the linear layers of a backbone into a new folder, with its tokenizer and record of training.

    Args:
        name: folder or hub name.
        format: of `heads.quantization.formats.FORMATS`.
        out: must not exist, or be empty.
        dtype: of all that is not packed; "auto" is the checkpoint's own.

    Returns:
        Bytes of the weights on the disk.

    Raises:
        ValueError: an unknown format, a folder that is not empty, a backbone that is quantised already or cannot be
            packed.
        OSError: the folder cannot be written.
    """
    find_format(format)
    out = Path(out)
    refuse_existing(out)
    refuse_quantised(name)
    config = BackboneConfig(name_or_path=name, quantization={"quant_method": METHOD, "format": format})
    config.dtype = str(stored_dtype(config, dtype)).removeprefix("torch.")  # type: ignore[assignment]
    model, tokenizer = load_backbone(config), load_tokenizer(config)
    begun = out.parent / f".{out.name}.tmp"
    remove(begun)
    try:
        write(model, tokenizer, Path(name) / RECORD, begun)
        sync(begun)
        if out.is_dir():
            out.rmdir()
        begun.rename(out)
    except (OSError, SafetensorError) as error:  # safetensors raises an error of its own on a full disk
        raise OSError(
            f"The packed backbone could not be written to {out} ({error}); free space or choose another folder."
        ) from error
    finally:
        remove(begun)
    return sum(path.stat().st_size for path in out.glob("*.safetensors"))


def write(model: Any, tokenizer: Any, record: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if record.is_file():
        shutil.copy(record, folder / RECORD)


def refuse_quantised(name: str) -> None:
    """
    Raises:
        ValueError: the backbone's config.json names a quantization.
    """
    with explained(name):
        found = getattr(AutoConfig.from_pretrained(name), "quantization_config", None)
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", found)
        raise ValueError(f"{name} is quantised already ({method}); give the backbone that it was made of.")
