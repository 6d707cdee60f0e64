"""compressed-tensors' microscaling layouts, read and written byte for byte: what llm-compressor and vLLM exchange.

`mxfp4-pack-quantized`, `mxfp6-pack-quantized` (E2M3) and `mxfp8-quantized` (E4M3): codes as (outputs, bytes of a row)
and E8M0 scales, and in config.json a group of linear layers with weights alone. A folder of another program is read
where its groups say just that; activations that are quantised as well are refused, since here they are not.

Source: compressed-tensors 0.20, compressors/mxfp4, mxfp6 and mxfp8, and the presets MXFP4A16, MXFP6A16 and MXFP8A16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from heads.quantization.foreign.folder import left_out, only_format, read_folder, write_folder
from heads.quantization.formats import BLOCK, FORMATS, find_format
from heads.quantization.linear import MXLinear

LAYOUTS = {
    "mxfp4_e2m1": "mxfp4-pack-quantized",
    "mxfp6_e2m3": "mxfp6-pack-quantized",
    "mxfp8_e4m3": "mxfp8-quantized",
}


def save_compressed_tensors(model: Any, folder: str | Path) -> None:
    """Write a model with packed weights as compressed-tensors does.

    Raises:
        ValueError: the model has no packed layers, or a format that compressed-tensors does not have.
    """
    format = only_format(model, LAYOUTS, "compressed-tensors")
    write_folder(model, folder, written, describe(format, left_out(model)))


def written(layer: MXLinear) -> dict[str, Tensor]:
    """The tensors of one layer, by the names that compressed-tensors gives them."""
    codes = layer.packed.codes
    named = {"weight": codes.view(torch.float8_e4m3fn)} if layer.format.bits == 8 else {"weight_packed": codes}
    return {**named, "weight_scale": layer.packed.scales}


def describe(format: str, ignored: list[str]) -> dict[str, Any]:
    """The quantization_config of config.json.

    >>> describe("mxfp6_e2m3", ["lm_head"])["config_groups"]["group_0"]["weights"]["num_bits"]
    6
    """
    weights = {
        "num_bits": find_format(format).bits,
        "type": "float",
        "symmetric": True,
        "group_size": BLOCK,
        "strategy": "group",
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUTS[format],
        "quantization_status": "compressed",
        "ignore": ignored,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": LAYOUTS[format]}},
    }


def load_compressed_tensors(folder: str | Path, dtype: torch.dtype | None = None) -> Any:
    """A causal LM from such a folder, its weights packed in memory too, in eval mode.

    Raises:
        ValueError: the folder has another layout, several groups of layers, or quantised activations.
    """
    config = AutoConfig.from_pretrained(folder)
    fields = getattr(config, "quantization_config", None) or {}
    format = read_format(fields, folder)
    return read_folder(folder, config, format, fields.get("ignore") or [], dtype=dtype)


def read_format(fields: dict[str, Any], folder: str | Path) -> str:
    """
    >>> read_format(describe("mxfp4_e2m1", []), "a folder")
    'mxfp4_e2m1'
    """
    found = [name for name, layout in LAYOUTS.items() if layout == fields.get("format")]
    groups = list((fields.get("config_groups") or {}).values())
    if fields.get("quant_method") != "compressed-tensors" or not found or len(groups) != 1:
        raise ValueError(
            f"{folder} has quantization {fields.get('quant_method')!r} in format {fields.get('format')!r} with "
            f"{len(groups)} groups; allowed are compressed-tensors in {', '.join(LAYOUTS.values())} with one group."
        )
    if groups[0].get("input_activations") or groups[0].get("targets") != ["Linear"]:
        raise ValueError(
            f"{folder} quantises activations or layers other than all linear ones; allowed are weights alone."
        )
    size, bits = groups[0]["weights"].get("group_size"), groups[0]["weights"].get("num_bits")
    if (size, bits) != (BLOCK, FORMATS[found[0]].bits):
        raise ValueError(f"{folder} has blocks of {size} with {bits} bits; allowed are blocks of {BLOCK}.")
    return found[0]
