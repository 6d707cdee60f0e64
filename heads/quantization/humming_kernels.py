"""`use_humming`: products with packed weights by humming-kernels on a GPU, where that package is installed.

humming-kernels (0.1.19, Apache-2.0) is what vLLM multiplies MXFP6 weights with. It reads the codes of a row as
consecutive little-endian bits and the scales as E8M0, which is our own layout, and rearranges both for its kernels; so
a layer holds its weight twice, once as it is saved and once as humming reads it. It multiplies in bfloat16 alone here:
in float16 it cuts scales below 2**-14. What it does not take (gradients, other dtypes, narrow layers, INT8 in two's
complement) is multiplied by our own kernels. No GPU has run this yet: `python -m benchmarks.gpu mx` compares both.
"""
# O outputs, I inputs, Y bytes of a block, G blocks of a row, W = 32-bit words of a row; … any leading axes

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from heads.quantization.formats import BLOCK, Format
from heads.quantization.linear import MXLinear

OUTPUTS_STEP, INPUTS_STEP = 64, 128  # what a layer's outputs and inputs are divisible by in its tiles


class HummingLinear(MXLinear):
    """A packed layer whose products in bfloat16 are humming's; saved, dequantised and trained through as before."""

    humming: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, I) to (…, O), in the dtype of x."""
        held = self.humming
        if held is None or torch.is_grad_enabled() or x.dtype != torch.bfloat16 or x.device != held.weight.device:
            return super().forward(x)
        product_NO: Tensor = held(x.reshape(-1, self.in_features).contiguous())
        return product_NO.reshape(*x.shape[:-1], self.out_features)


@functools.cache
def why_unavailable() -> str:
    """Why humming-kernels cannot multiply here; empty where it can."""
    if importlib.util.find_spec("humming") is None:
        return "humming-kernels is not installed (pip install humming-kernels)"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    return "" if torch.cuda.get_device_capability() >= (8, 0) else "the GPU has no tensor cores for bfloat16"


def use_humming(model: nn.Module) -> int:
    """Let humming-kernels multiply with the packed weights of a model, in place; returns how many layers it took.

    Args:
        model: a packed backbone or packed heads, in bfloat16 and already on its GPU.

    Raises:
        ValueError: humming-kernels or a GPU is missing, or no packed layer is one that humming takes.
    """
    if reason := why_unavailable():
        raise ValueError(f"humming-kernels cannot multiply here: {reason}; without use_humming our kernels do.")
    names = [name for name, layer in model.named_modules() if type(layer) is MXLinear and not why_not(layer)]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no packed layer for humming-kernels: they are MXFP4, MXFP6 or MXFP8, on a "
            f"GPU, with outputs divisible by {OUTPUTS_STEP} and inputs by {INPUTS_STEP}."
        )
    for name in names:
        model.set_submodule(name, with_humming(model.get_submodule(name)))
    return len(names)


def why_not(layer: MXLinear) -> str:
    """Why humming does not take a layer; empty where it does.

    >>> from heads.quantization.formats import find_format
    >>> why_not(MXLinear(128, 64, find_format("mxint8"), bias=False))
    'its elements are whole numbers'
    """
    if not layer.format.exponent_bits:
        return "its elements are whole numbers"  # two's complement; humming's have a sign and a magnitude
    if layer.out_features % OUTPUTS_STEP or layer.in_features % INPUTS_STEP:
        return f"its outputs are not divisible by {OUTPUTS_STEP}, or its inputs by {INPUTS_STEP}"
    return "" if on_gpu(layer) else "it is not on a GPU"


def on_gpu(layer: MXLinear) -> bool:
    return layer.weight.is_cuda


def with_humming(layer: Any) -> HummingLinear:
    """The layer, sharing all it holds, with humming's copy of the weight beside it."""
    made = HummingLinear.__new__(HummingLinear)
    made.__dict__ = dict(layer.__dict__)
    # Not a submodule: it is neither saved nor cast, since a cast would change its scales
    object.__setattr__(made, "humming", humming_layer(layer))
    return made


def humming_layer(layer: MXLinear) -> Any:
    """humming's own layer over the same codes and scales."""
    kind = importlib.import_module("humming.layer").HummingLayer
    with torch.cuda.device(layer.weight.device) if layer.weight.is_cuda else contextlib.nullcontext():
        made = kind(
            shape_n=layer.out_features,
            shape_k=layer.in_features,
            weight_config=weight_config(layer.format),
            has_bias=layer.bias is not None,
            torch_dtype=torch.bfloat16,
        ).to(layer.weight.device)
        made.load_from_tensors(as_humming(layer))
        made.transform()
    return made


def weight_config(format: Format) -> dict[str, Any]:
    """
    >>> from heads.quantization.formats import find_format
    >>> weight_config(find_format("mxfp6_e2m3"))
    {'dtype': 'float6e2m3', 'scale_dtype': 'float8e8m0', 'group_size': 32, 'scale_type': 'group'}
    """
    return {
        "dtype": f"float{format.bits}e{format.exponent_bits}m{format.mantissa_bits}",
        "scale_dtype": "float8e8m0",
        "group_size": BLOCK,
        "scale_type": "group",
    }


def as_humming(layer: MXLinear) -> dict[str, Tensor]:
    """Its tensors as humming loads them: the codes as (O, W) int32, the scales as (O, G) E8M0; the same bytes."""
    codes_OW = layer.packed.codes.contiguous().view(torch.int32)
    tensors = {"weight": codes_OW, "weight_scale": layer.packed.scales.view(torch.float8_e8m0fnu)}
    return tensors if layer.bias is None else tensors | {"bias": layer.bias.data.to(torch.bfloat16)}
