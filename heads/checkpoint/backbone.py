"""Backbones that were trained together with their heads: saved beside them, loaded with them in one call.

A folder of such heads holds a further folder `backbone-…`: the whole changed backbone with its tokenizer, or the LoRA
adapter that was trained. heads.json names it and holds a fingerprint of the changed weights. The name is made from the
weights, so a new save never writes over the backbone that the heads.json in place still names.

An adapter is float32 wherever the backbone has fewer bits: trained, saved and loaded. Its products are taken in float32
and added in the backbone's dtype.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, set_peft_model_state_dict
from peft.functional import cast_adapter_dtype
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.validation import validated, within

PREFIX, ADAPTER = "backbone-", "adapter_model.safetensors"
FINGERPRINT_TENSORS = 256
SIX_DIGITS = 1e-5  # of a number that was written with six


@validated
@dataclass(kw_only=True)
class LoraSettings:
    """A LoRA adapter on the backbone, through peft.

    Attributes:
        rank: of the added products; 0 for no adapter.
        alpha: the product is scaled by alpha / rank, above 0; the rank where it is not given.
        dropout: on the adapter's input, 0 up to 1.
        targets: names of the linear layers that get one, each of which must be there; peft's choice for the
            architecture where it is not given. The unembedding cannot have one.
    """

    rank: int = within(0, default=0, advice="0 stands for no adapter")
    alpha: float | None = within(above=0, default=None, advice="at 0 the adapter would change nothing")
    dropout: float = within(0, below=1, default=0.0)
    targets: list[str] | None = None

    def validate_rank(self) -> None:
        if self.rank == 0 and (self.alpha, self.dropout, self.targets) != (None, 0.0, None):
            raise ValueError("lora.alpha, dropout or targets were given without lora.rank; give a rank of 1 and more.")


def add_adapter(model: Any, settings: LoraSettings) -> None:
    """Put a new adapter into a model, in place and in float32; it changes nothing until it is trained.

    Raises:
        ValueError: peft knows no targets for this architecture, or one that is named does not exist, or is the
            unembedding.
    """
    check_targets(model, settings.targets or [])
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=settings.targets,
    )
    try:
        model.add_adapter(config)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        name = type(model).__name__
        raise ValueError(f"No LoRA adapter could be put into {name} ({first}); name lora.targets.") from error
    keep_adapter_in_float32(model)


def check_targets(model: Any, targets: list[str]) -> None:
    """peft takes a list of which one name is right, and leaves the others out without a word.

    Raises:
        ValueError: a name that no module ends in, or the unembedding's.
    """
    modules = dict(model.named_modules())
    for target in targets:
        named = [module for name, module in modules.items() if f".{name}".endswith(f".{target}")]
        if not named:
            raise ValueError(
                f"lora.targets has {target!r}, which names no layer of {type(model).__name__}; allowed are "
                f"{', '.join(layers_with_matrices(model))}."
            )
        if model.get_output_embeddings() in named:
            raise ValueError(
                f"lora.targets has {target!r}, the unembedding of {type(model).__name__}, whose weight the losses read "
                f"without an adapter, which would never learn; leave it out: {', '.join(layers_with_matrices(model))} "
                f"can have one."
            )


def layers_with_matrices(model: Any) -> list[str]:
    """The last parts of the names of all layers that multiply with a matrix, the unembedding left out."""
    unembedding = model.get_output_embeddings()
    matrices = {n for n, m in model.named_modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2}
    return sorted({n.rpartition(".")[2] for n in matrices if model.get_submodule(n) is not unembedding})


def put_on_adapter(model: Any, folder: Path) -> None:
    """Load an adapter into a model, unrounded; how the model's own weights are named in its files stays as it was.

    transformers leaves the adapter's names there, under which a model whose adapter was merged would be saved.
    """
    before = vars(model).get("_weight_conversions")
    model.load_adapter(str(folder))
    vars(model).pop("_weight_conversions", None)
    if before is not None:
        model._weight_conversions = before
    keep_adapter_in_float32(model)
    read_model(model, folder)  # transformers has rounded it to the backbone's dtype


def keep_adapter_in_float32(model: Any) -> None:
    """A step of 1e-4 on an entry of 0.03 is less than what bfloat16 keeps of it, and would be lost.

    peft does it for its own wrapper alone. What has more bits already is left as it is.
    """
    for name in model.peft_config:
        cast_adapter_dtype(model, name)


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The weights under a LoRA adapter, for a moment; nothing changes where there is none.

    peft's own switch also sets `requires_grad` of the adapter off and on, which engines that wrap parameters have
    read before.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was_off in zip(layers, before, strict=True):
            layer._disable_adapters = was_off


def has_adapter(model: Any) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def save_backbone(
    model: Any, folder: str | Path, *, dtype: torch.dtype | None = None, tokenizer: Any = None
) -> dict[str, Any]:
    """Write the changed backbone, or its adapter, into a new folder below `folder`.

    Returns:
        What heads.json says about it: the new folder's name, whether it is an adapter, a fingerprint.

    Raises:
        OSError: the disk is full or the folder cannot be written; what was saved before is untouched.
    """
    begun = Path(folder) / ".backbone.tmp"
    shutil.rmtree(begun, ignore_errors=True)
    try:
        write_model(model, begun, dtype=dtype, tokenizer=tokenizer)
        sync(begun)
        final = Path(folder) / f"{PREFIX}{digest(begun)}"
        if not final.exists():
            begun.rename(final)
    except (OSError, SafetensorError) as error:  # safetensors tells of a full disk by an error of its own
        raise OSError(
            f"The trained backbone could not be written to {folder} ({error}); what was saved there "
            f"before is untouched. Free space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(begun, ignore_errors=True)
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
    """To the disk, before anything names it."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def in_dtype(model: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The model's tensors on the CPU; what is tied is cast once, so that it is seen to be tied and stored once."""
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
    """Let config.json name the dtype on disk: the model's own stands there, and "auto" loads in what it names."""
    if dtype is not None:
        config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
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
    """One entry of up to 256 tensors spread over what is trained, in the order of their names: changed layers show.

    Of a model with an adapter the adapter's: the rest was not changed, and may be split over processes.
    """
    changed = {n: t for n, t in model.state_dict().items() if not has_adapter(model) or "lora_" in n}
    tensors = [t for _, t in sorted(changed.items()) if t.is_floating_point() and t.numel()]
    step = max(1, -(-len(tensors) // FINGERPRINT_TENSORS))
    return [float(f"{t.flatten()[t.numel() // 2].item():.6g}") for t in tensors[::step]]


def check_trained_backbone(record: Any, backbone: Backbone, folder: str | Path) -> None:
    """Heads that were trained with their backbone belong to the changed one.

    Raises:
        ValueError: another one was given.
    """
    one, other = record["fingerprint"], fingerprint_weights(backbone.model)
    if len(one) != len(other) or not all(map(is_same, one, other)):
        raise ValueError(
            f"The heads in {folder} were trained together with their backbone, which lies beside them in "
            f"{record['folder']}; the given backbone is another one. Load both with "
            f"heads.load_with_backbone({str(folder)!r})."
        )


def is_same(wanted: float, found: float) -> bool:
    """One weight, perhaps rounded on its way through a half-precision dtype; only then may it differ by that rounding.

    A few steps at a rate of 1e-5 move a weight by a thousandth of itself, which bfloat16's rounding would hide.

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
    """Put what `write_model` wrote, all weights or the adapter's, into a model of the same shape.

    Raises:
        FileNotFoundError: the folder holds none.
        RuntimeError: its tensors are not the model's.
    """
    if has_adapter(model):
        outcome: Any = set_peft_model_state_dict(model, load_file(folder / ADAPTER))
        if outcome.unexpected_keys:
            raise RuntimeError(f"unexpected tensors {', '.join(outcome.unexpected_keys[:3])}")
        return
    tensors = {
        name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(path).items()
    }
    if not tensors:
        raise FileNotFoundError("no model*.safetensors")
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    outcome = model.load_state_dict(tensors, strict=False)
    wrong = [*outcome.unexpected_keys, *(set(outcome.missing_keys) - tied)]
    if wrong:
        raise RuntimeError(f"missing or unexpected tensors {', '.join(sorted(wrong)[:3])}")
    model.tie_weights()
