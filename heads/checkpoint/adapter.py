"""A LoRA adapter on the backbone, through peft, which is imported only if there is one.

On a backbone of fewer bits an adapter is trained, saved and loaded in float32. Its products are computed in float32 and
added in the backbone's dtype.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from heads.backbone.support import adapted_layers
from heads.extras import needs_extra
from heads.inside import find_inside
from heads.interface.layers import MAX_RANK, RANK_ADVICE
from heads.quantization.adapters import packed_layers_adapted
from heads.validation import validated, within

TENSORS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
CHOSEN = {"r", "lora_alpha", "lora_dropout", "target_modules"}
"""Settings that `add_adapter` chooses; all others are peft's defaults."""
RECORDED = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}
RECORDED |= {"fan_in_fan_out"}  # of GPT-2's layers
"""Settings that peft records without effect on the adapter."""


@validated
@dataclass(kw_only=True)
class LoraSettings:
    """A LoRA adapter on the backbone, through peft.

    Attributes:
        rank: rank of the added products; 0 is no adapter.
        alpha: the product is scaled by alpha / rank, above 0; null is the rank.
        dropout: dropout on the adapter's input, 0 up to 1.
        targets: names of the linear layers that get an adapter, all of which must exist; null is peft's choice for the
            architecture. The unembedding cannot have one.
    """

    rank: int = within(0, MAX_RANK, default=0, advice=f"0 stands for no adapter; {RANK_ADVICE}")
    alpha: float | None = within(above=0, default=None, advice="at 0 the adapter would change nothing")
    dropout: float = within(0, below=1, default=0.0)
    targets: list[str] | None = None

    def validate_rank(self) -> None:
        if self.rank == 0 and (self.alpha, self.dropout, self.targets) != (None, 0.0, None):
            raise ValueError("lora.alpha, dropout or targets were given without lora.rank; give a rank of 1 and more.")


def add_adapter(model: Any, settings: LoraSettings) -> None:
    """Put a new adapter into a model, in place and in float32; it changes nothing until it is trained.

    Raises:
        ValueError: peft knows no targets for this architecture, or a named one does not exist or is the unembedding.
    """
    with needs_extra("lora", f"lora.rank={settings.rank} was given"):
        from peft import LoraConfig
    check_targets(model, settings.targets or [])
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=settings.targets,
    )
    try:
        with packed_layers_adapted(config):
            model.add_adapter(config)
    except ValueError as error:
        first = str(error).strip().splitlines()[0]
        name = type(model).__name__
        raise ValueError(f"No LoRA adapter could be put into {name} ({first}); name lora.targets.") from error
    keep_adapter_in_float32(model)


def check_targets(model: Any, targets: list[str]) -> None:
    """Check every target, since peft silently ignores wrong names if one is right.

    Raises:
        ValueError: no module's name ends in a target, or it is the unembedding.
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
                f"lora.targets has {target!r}, the unembedding of {type(model).__name__}; the losses read its weight "
                f"without an adapter, which would learn nothing; allowed are "
                f"{', '.join(layers_with_matrices(model))}."
            )


def layers_with_matrices(model: Any) -> list[str]:
    """Short names of all layers that have a weight matrix, except the unembedding."""
    unembedding = model.get_output_embeddings()
    matrices = {n for n, m in model.named_modules() if getattr(getattr(m, "weight", None), "ndim", 0) == 2}
    return sorted({n.rpartition(".")[2] for n in matrices if model.get_submodule(n) is not unembedding})


def put_on_adapter(model: Any, folder: Path) -> None:
    """Load an adapter into a model, in float32, and keep the model's own mapping of weight names.

    transformers would leave the adapter's mapping, with which a merged model would be saved under wrong names.
    """
    with needs_extra("lora", f"{folder} holds a LoRA adapter"):
        from peft import LoraConfig
    before = vars(model).get("_weight_conversions")
    check_adapter(folder)
    with packed_layers_adapted(LoraConfig.from_pretrained(str(folder))) as config:
        model.load_adapter(str(folder), peft_config=config)
    vars(model).pop("_weight_conversions", None)
    if before is not None:
        model._weight_conversions = before
    keep_adapter_in_float32(model)
    read_adapter(model, folder)  # transformers has rounded it to the backbone's dtype


def check_adapter(folder: Path) -> None:
    """Compare an adapter's settings with its tensors before peft builds one, since a file could ask for any rank.

    Raises:
        ValueError: no adapter, a damaged one, or one that `add_adapter` does not make.
    """
    with needs_extra("lora", f"{folder} holds a LoRA adapter"):
        from peft import LoraConfig
    wrong = f"{folder} holds no adapter that was trained with heads"
    try:
        settings = json.loads(find_inside(folder, SETTINGS).read_text(encoding="utf-8-sig"))
        defaults = json.loads(json.dumps(LoraConfig().to_dict(), default=str))  # type: ignore[no-untyped-call]
        odd = [name for name in set(settings) & set(defaults) - CHOSEN - RECORDED if settings[name] != defaults[name]]
        rank, targets = settings["r"], settings["target_modules"]
        with safe_open(find_inside(folder, TENSORS), framework="pt") as file:
            ranks = {file.get_slice(name).get_shape()[0] for name in file.keys() if "lora_A" in name}  # noqa: SIM118
    except (OSError, ValueError, TypeError, LookupError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{wrong} ({error}); copy the whole folder again.") from None
    odd += [] if isinstance(targets, list) else ["target_modules"]  # peft takes patterns too
    if odd:
        raise ValueError(
            f"{wrong}: {SETTINGS} sets {', '.join(sorted(odd))}, which no run does; use the run's own file."
        )
    if ranks != {rank}:
        found = ", ".join(map(str, sorted(ranks)[:4])) or "none"
        raise ValueError(f"{wrong}: {SETTINGS} has rank {rank!r} and {TENSORS} {found}; copy both again.")


def keep_adapter_in_float32(model: Any) -> None:
    """Cast the adapter to float32, which peft does only for its own wrapper; float64 adapters are not changed.

    bfloat16 would lose a step of 1e-4 on an entry of 0.03.
    """
    with needs_extra("lora", "This model has a LoRA adapter"):
        from peft.functional import cast_adapter_dtype
    for name in model.peft_config:
        cast_adapter_dtype(model, name)


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within the context, the model runs without its LoRA adapter, if it has one.

    peft's own switch also toggles `requires_grad`, which engines that wrap parameters have already read.
    """
    layers = list(adapted_layers(model).values())
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


def read_adapter(model: Any, folder: Path) -> None:
    """Load an adapter's tensors into a model that has an adapter of the same shape.

    Raises:
        FileNotFoundError: the folder holds no adapter.
        RuntimeError: its tensors are not the adapter's.
    """
    with needs_extra("lora", f"{folder} holds a LoRA adapter"):
        from peft import set_peft_model_state_dict
    outcome: Any = set_peft_model_state_dict(model, load_file(folder / TENSORS))
    if outcome.unexpected_keys:
        raise RuntimeError(f"unexpected tensors {', '.join(outcome.unexpected_keys[:3])}")
