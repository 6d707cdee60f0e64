"""Backbones that were trained together with their heads: saved beside them, loaded with them in one call.

A folder of such heads has a subfolder `backbone-…` with the whole trained backbone and its tokenizer, or with the
trained LoRA adapter. Its name, which heads.json records, is a digest of the weights, so a new save never overwrites the
backbone that the present heads.json names.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from heads.backbone.model import Backbone
from heads.checkpoint.adapter import has_adapter, read_adapter
from heads.checkpoint.schema import TrainedBackbone
from heads.inside import remove

PREFIX = "backbone-"
FINGERPRINT_TENSORS = 256
SIX_DIGITS = 1e-5  # relative error of a number that was written with six digits


def save_backbone(
    model: Any, folder: str | Path, *, dtype: torch.dtype | None = None, tokenizer: Any = None
) -> dict[str, Any]:
    """Write the changed backbone, or its adapter, into a new folder below `folder`.

    Returns:
        Its record for heads.json: the new folder's name, whether it is an adapter, a fingerprint.

    Raises:
        OSError: the disk is full or the folder cannot be written; what was saved before is untouched.
    """
    begun = Path(folder) / ".backbone.tmp"
    remove(begun)
    try:
        write_model(model, begun, dtype=dtype, tokenizer=tokenizer)
        sync(begun)
        final = Path(folder) / f"{PREFIX}{digest(begun)}"
        if final.is_symlink():
            remove(final)
        if not final.exists():
            begun.rename(final)
    except (OSError, SafetensorError) as error:  # safetensors raises an error of its own on a full disk
        raise OSError(
            f"The trained backbone could not be written to {folder} ({error}); what was saved there "
            f"before is untouched. Free space or choose another folder."
        ) from error
    finally:
        remove(begun)
    return {"folder": final.name, "adapter": has_adapter(model), "fingerprint": fingerprint_weights(model)}


def write_model(model: Any, folder: Path, *, dtype: torch.dtype | None = None, tokenizer: Any = None) -> None:
    """A Hugging Face folder of all weights in a dtype, or of the adapter in its own, and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapter(model):
        model.save_pretrained(folder)
    else:
        model.save_pretrained(folder, state_dict=in_dtype(model, dtype))
        record_dtype(folder / "config.json", dtype)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def sync(folder: Path) -> None:
    """Flush a folder to the disk before heads.json names it. A tokenizer with several templates has a subfolder."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def in_dtype(model: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The model's tensors on the CPU; tied ones are cast once, so that they stay tied and are stored once."""
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    found = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in cast:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            cast[key] = tensor.detach().to("cpu", wanted)
        found[name] = cast[key]
    return found


def record_dtype(path: Path, dtype: torch.dtype | None) -> None:
    """Record the dtype on disk in config.json, which has the model's own; "auto" loads in the recorded dtype."""
    if dtype is not None:
        config = json.loads(path.read_text(encoding="utf-8-sig")) | {"dtype": str(dtype).removeprefix("torch.")}
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def digest(folder: Path) -> str:
    """Eight hexadecimal digits from all tensor files."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:8]


@torch.no_grad()
def fingerprint_weights(model: Any) -> list[float]:
    """One entry of each of up to 256 trained tensors, in the order of their names, so that changed layers are noticed.

    For a model with an adapter these are the adapter's tensors: the others were not changed, and may be sharded.
    """
    changed = {n: t for n, t in model.state_dict().items() if not has_adapter(model) or "lora_" in n}
    tensors = [t for _, t in sorted(changed.items()) if t.is_floating_point() and t.numel()]
    step = max(1, -(-len(tensors) // FINGERPRINT_TENSORS))
    return [float(f"{t.flatten()[t.numel() // 2].item():.6g}") for t in tensors[::step]]


def check_trained_backbone(record: TrainedBackbone, backbone: Backbone, folder: str | Path) -> None:
    """Check that heads that were trained with their backbone get the trained one.

    Raises:
        ValueError: the backbone is another one.
    """
    one, other = record.fingerprint, fingerprint_weights(backbone.model)
    if len(one) != len(other) or not all(map(is_same, one, other)):
        raise ValueError(
            f"The heads in {folder} were trained together with their backbone, which lies beside them in "
            f"{record.folder}; the given backbone is another one. Load both with "
            f"heads.load_with_backbone({str(folder)!r})."
        )


def is_same(wanted: float, found: float) -> bool:
    """Whether two entries are one weight. They may differ by rounding only if the found one is a half-precision number.

    A few steps at a rate of 1e-5 move a weight by a thousandth of itself, which bfloat16's tolerance would hide.

    >>> is_same(0.1001, 0.10009765625), is_same(0.1001, 0.1)   # the first is a bfloat16
    (True, False)
    """
    value = torch.tensor(found, dtype=torch.float64)
    tolerance = SIX_DIGITS
    for dtype, rounding in ((torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        if abs(value.to(dtype).double() - value) <= SIX_DIGITS * abs(value):
            tolerance = max(tolerance, rounding)
    return abs(wanted - found) <= tolerance * max(abs(wanted), abs(found)) + 1e-7


def read_model(model: Any, folder: Path) -> None:
    """Load what `write_model` wrote, all weights or the adapter's, into a model of the same shape.

    Raises:
        FileNotFoundError: the folder holds no weights.
        RuntimeError: its tensors are not the model's.
    """
    if has_adapter(model):
        read_adapter(model, folder)
        return
    tensors = {
        name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(path).items()
    }
    if not tensors:
        raise FileNotFoundError("no model*.safetensors")
    if not set(tensors) <= set(model.state_dict()):
        tensors = by_the_model_s_names(model, tensors)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    outcome: Any = model.load_state_dict(tensors, strict=False)
    wrong = [*outcome.unexpected_keys, *(set(outcome.missing_keys) - tied)]
    if wrong:
        raise RuntimeError(f"missing or unexpected tensors {', '.join(sorted(wrong)[:3])}")
    model.tie_weights()


def by_the_model_s_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the model's own names. Files hold one tensor for each expert; the model stacks them.

    transformers converts them when it loads a model. Here they are loaded into a model on the meta device, since the
    model in training has to keep its own tensors.
    """
    with torch.device("meta"):
        like = type(model)(model.config)
    mapping = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(like))
    convert_and_load_state_dict_in_model(like, dict(tensors), mapping)
    return {name: tensor for name, tensor in like.state_dict().items() if not tensor.is_meta}
