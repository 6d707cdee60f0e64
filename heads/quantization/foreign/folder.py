"""What other programs' folders share: a model's tensors with the codes of its packed layers, and config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from heads.inside import find_inside
from heads.quantization.codec import Packed
from heads.quantization.linear import MXLinear, in_blocks
from heads.quantization.quantizer import MXConfig, linear_layers

INDEX = "model.safetensors.index.json"


def only_format(model: Any, allowed: Mapping[str, str], program: str) -> str:
    """The one format of a model's packed layers.

    Raises:
        ValueError: the model has no packed layers, several formats, or one that the program does not have.
    """
    formats = {module.format.name for module in model.modules() if isinstance(module, MXLinear)}
    if len(formats) != 1 or not formats <= set(allowed):
        raise ValueError(
            f"A model with weights in {', '.join(sorted(formats)) or 'no microscaling format'} was given; "
            f"{program} has {', '.join(allowed)}."
        )
    return formats.pop()


def write_folder(
    model: Any, folder: str | Path, tensors_of: Callable[[MXLinear], dict[str, Tensor]], quantization: dict[str, Any]
) -> None:
    """Write tensors and config.json.

    Args:
        tensors_of: the tensors of one packed layer, by the program's names.
        quantization: its quantization_config.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MXLinear)}
    tensors = {key: tensor for key, tensor in model.state_dict().items() if key.rpartition(".")[0] not in layers}
    for prefix, layer in layers.items():
        tensors |= {f"{prefix}.{key}": tensor for key, tensor in tensors_of(layer).items()}
        if layer.bias is not None:
            tensors[f"{prefix}.bias"] = layer.bias.detach()
    Path(folder).mkdir(parents=True, exist_ok=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    save_torch_state_dict({key: tensor for key, tensor in tensors.items() if key not in tied}, folder)
    fields = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    fields |= {"quantization_config": quantization, "architectures": [type(model).__name__]}
    (Path(folder) / "config.json").write_text(json.dumps(fields, indent=2, default=str) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)


def read_folder(
    folder: str | Path,
    config: Any,
    format: str,
    skip: list[str],
    *,
    scale_rule: str = "floor",
    dtype: torch.dtype | None = None,
) -> Any:
    """A causal LM whose weights stay packed in memory, in eval mode.

    Args:
        config: the folder's, whose quantization_config is replaced.
        skip: names of modules that are not packed.
        scale_rule: by which the weights were packed, for the record.
    """
    tensors = {key: tensor for path in weight_files(Path(folder)) for key, tensor in load_file(path).items()}
    config.quantization_config = MXConfig(format, scale_rule=scale_rule, skip=skip).to_dict()
    packed = {key.removesuffix("_scale") for key in tensors if key.endswith(".weight_scale")}
    for weight in packed:
        codes = tensors.pop(f"{weight}_packed", None)
        codes = tensors[weight].view(torch.uint8) if codes is None else codes
        tensors[weight] = in_blocks(Packed(codes, tensors[f"{weight}_scale"]))
    options = {} if dtype is None else {"dtype": dtype}
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class.from_pretrained(None, config=config, state_dict=tensors, **options).eval()


def left_out(model: Any) -> list[str]:
    """Names of the linear layers that are not packed, as such programs list them."""
    return [name for name, _ in linear_layers(model)]


def weight_files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        return [folder / "model.safetensors"]
    names = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    return [find_inside(folder, name) for name in sorted(set(names))]
