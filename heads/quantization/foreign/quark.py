"""AMD Quark's microscaling folders, read and written: MXFP6 in both element types, and MXFP4; vLLM computes on them.

`weight` holds the codes as (outputs, bytes of a row), `weight_scale` the E8M0 scales, and config.json says which tensor
is quantised how for the whole model. A folder of another program is read where weights alone are quantised; a weight
that Quark rounds to zero from below has the code of +0, ours of -0, and both read as zero.

Source: amd-quark 0.13, torch/utils/pack.py (Pack_fp4, Pack_fp6), torch/quantization/config (OCP_MXFP6E2M3Spec and its
like), and folders that its export_safetensors wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from heads.quantization.foreign.folder import left_out, only_format, read_folder, write_folder
from heads.quantization.formats import BLOCK
from heads.quantization.linear import MXLinear

DTYPES = {"mxfp4_e2m1": "fp4", "mxfp6_e2m3": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2"}
MODES = {"floor": "floor", "compressed-tensors": "even"}
"""Quark's scale_calculation_mode for each of our rules: the scales are the same, bit for bit."""

NOTHING_ELSE = ("input_tensors", "output_tensors", "bias")


def save_quark(model: Any, folder: str | Path) -> None:
    """Write a model with packed weights as Quark's export_safetensors does.

    Raises:
        ValueError: the model has no packed layers, or a format that Quark does not have.
    """
    format = only_format(model, DTYPES, "Quark")
    rule = model.hf_quantizer.quantization_config.scale_rule
    write_folder(model, folder, written, describe(format, left_out(model), rule))


def written(layer: MXLinear) -> dict[str, Tensor]:
    return {"weight": layer.packed.codes, "weight_scale": layer.packed.scales}


def describe(format: str, excluded: list[str], scale_rule: str = "floor") -> dict[str, Any]:
    """The quantization_config of config.json.

    >>> describe("mxfp6_e2m3", ["lm_head"])["global_quant_config"]["weight"]["dtype"]
    'fp6_e2m3'
    """
    weight = {
        "dtype": DTYPES[format],
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": BLOCK,
        "is_dynamic": False,
        "is_scale_quant": False,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "round_method": "half_even",
        "scale_calculation_mode": MODES[scale_rule],
        "scale_format": "e8m0",
        "scale_type": "float",
        "symmetric": None,
    }
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "algo_config": None,
        "exclude": excluded,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": {"weight": weight, **dict.fromkeys(NOTHING_ELSE), "target_device": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "softmax_quant_spec": None,
    }


def load_quark(folder: str | Path, dtype: torch.dtype | None = None) -> Any:
    """A causal LM from such a folder, its weights packed in memory too, in eval mode.

    Raises:
        ValueError: the folder has another layout, settings by layer, or quantised activations.
    """
    config = AutoConfig.from_pretrained(folder)
    fields = getattr(config, "quantization_config", None) or {}
    format = read_format(fields, folder)
    mode = fields["global_quant_config"]["weight"].get("scale_calculation_mode")
    rule = next((rule for rule, name in MODES.items() if name == mode), "floor")
    return read_folder(folder, config, format, fields.get("exclude") or [], scale_rule=rule, dtype=dtype)


def read_format(fields: dict[str, Any], folder: str | Path) -> str:
    """
    >>> read_format(describe("mxfp6_e3m2", []), "a folder")
    'mxfp6_e3m2'
    """
    everywhere = fields.get("global_quant_config") or {}
    weight = everywhere.get("weight") or {}
    found = [name for name, dtype in DTYPES.items() if dtype == weight.get("dtype")]
    blocks = (weight.get("qscheme"), weight.get("group_size"), weight.get("scale_format"))
    if fields.get("quant_method") != "quark" or not found or blocks != ("per_group", BLOCK, "e8m0"):
        raise ValueError(
            f"{folder} has quantization {fields.get('quant_method')!r} with weights as {weight.get('dtype')!r} in "
            f"groups of {weight.get('group_size')}; allowed is quark with {', '.join(DTYPES.values())} in "
            f"blocks of {BLOCK} with e8m0 scales."
        )
    by_layer = fields.get("layer_quant_config") or fields.get("layer_type_quant_config")
    if by_layer or any(everywhere.get(name) for name in NOTHING_ELSE) or fields.get("kv_cache_quant_config"):
        raise ValueError(f"{folder} quantises more than weights, or some layers otherwise; allowed are weights alone.")
    if (fields.get("export") or {}).get("weight_format") != "real_quantized":
        raise ValueError(f"{folder} holds weights that were rounded but not packed; export them as real_quantized.")
    return found[0]
