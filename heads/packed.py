"""Weights packed for matrix products of few rows on a CPU: `heads.pack_weights(model)`.

A pass over a tree multiplies a handful of rows with every weight. PyTorch's product lays each weight out anew at every
call, which for few rows takes as long as the product. oneDNN keeps a weight in the layout of its kernels. A packed
product of four rows was 1.5 to 2.2 times as fast in bfloat16, on a processor with AVX512-BF16, and 4 to 6 times in
float32. Weights that fit into the processor's caches can lose. `python -m benchmarks.speed.real_costs` prints whole
passes both ways; measure before you pack. Products of one row are packed too, so plain generation runs on the same
kernels.

PyTorch packs weights so in compiled graphs (torch._inductor.fx_passes.mkldnn_fusion); here it is done to a model as it
is. Sums are taken in another order, so logits differ by rounding (tests/heads/backbone/test_packed.py). A packed layer
notices when its weight was replaced or edited in place and packs it anew; an edit through `.data` keeps the weight's
version and is not noticed: call `pack_weights` again after one.
"""
# R rows of a product, I inputs, O outputs; … any leading axes

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn


def pack_weights(module: nn.Module) -> int:
    """Pack the linear layers of a causal LM or of heads, in place; returns how many. Twice is as good as once.

    The memory of these weights doubles. Unembeddings are left as they are. Training goes on with the plain weights, and
    so do compiled passes.

    Args:
        module: on a CPU, in float32, or in a dtype that oneDNN has kernels for on this processor.

    Raises:
        ValueError: another device or dtype, or a PyTorch without oneDNN; nothing is packed then.

    >>> layer = nn.Linear(64, 32)
    >>> found = pack_weights(layer), layer(torch.ones(4, 64))       # four rows, packed
    >>> found[0], torch.allclose(found[1][0], layer(torch.ones(64)), atol=1e-5)
    (1, True)
    """
    find_output = getattr(module, "get_output_embeddings", None)
    unembedding = None if find_output is None else find_output()
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear and layer is not unembedding]
    for layer in layers:
        if reason := what_stops_packing(layer.weight):
            raise ValueError(f"pack_weights was given a {type(module).__name__} with {reason}.")
    for layer in layers:
        layer.forward = functools.partial(PackedProduct(layer.weight.dtype), layer)  # type: ignore[method-assign]
    return len(layers)


def is_packed(module: nn.Module) -> bool:
    """Whether `pack_weights` packed any of its linear layers.

    >>> layer = nn.Linear(64, 32)
    >>> is_packed(layer), pack_weights(layer), is_packed(layer)
    (False, 1, True)
    """
    forwards = (vars(layer).get("forward") for layer in module.modules())
    return any(isinstance(getattr(forward, "func", None), PackedProduct) for forward in forwards)


def what_stops_packing(weight_OI: Tensor) -> str:
    """Why this weight cannot be packed here; empty where it can.

    >>> what_stops_packing(torch.ones(2, 2, dtype=torch.float64))
    'weights in float64, which oneDNN does not multiply on this processor; load them in float32 or leave them unpacked'
    """
    if weight_OI.device.type != "cpu":
        return f"weights on {weight_OI.device.type}, and packing is for CPUs; leave them unpacked"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "weights that this PyTorch cannot pack, since it has no oneDNN; leave them unpacked"
    supported = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    if supported.get(weight_OI.dtype, False):
        return ""
    name = str(weight_OI.dtype).removeprefix("torch.")
    return (
        f"weights in {name}, which oneDNN does not multiply on this processor; load them in float32 or leave them "
        f"unpacked"
    )


class PackedProduct:
    """The forward of a packed `nn.Linear`: keeps the packed weight, and which weight it was made of."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.packed: Tensor | None = None
        self.made_of: tuple[weakref.ref[Tensor], int, int] | None = None

    def __deepcopy__(self, memo: Any) -> PackedProduct:
        return PackedProduct(self.dtype)  # packed tensors have no copy, and a copied layer has a weight of its own

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """(…, I) to (…, O): `nn.functional.linear`'s numbers up to rounding."""
        if not self.may_use(layer.weight, x):
            return nn.functional.linear(x, layer.weight, layer.bias)
        self.follow(layer.weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, layer.bias, "none", [], "")
        return product

    def may_use(self, weight_OI: Tensor, x: Tensor) -> bool:
        """Not where gradients are recorded or a graph is captured, without rows, or if the layer was moved or cast."""
        recorded = torch.is_grad_enabled() and (x.requires_grad or weight_OI.requires_grad)
        if recorded or torch.compiler.is_compiling() or not x.numel():
            return False
        return x.dtype == weight_OI.dtype == self.dtype and weight_OI.device.type == "cpu"

    def follow(self, weight_OI: Tensor) -> None:
        """Pack the weight where it is not the one that is packed; each edit in place counts its version up.

        Its address alone does not tell it: a freed weight's may be given to the next one.
        """
        state = weight_OI.data_ptr(), 0 if weight_OI.is_inference() else weight_OI._version
        if self.made_of is None or self.made_of[0]() is not weight_OI or self.made_of[1:] != state:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach())
            self.made_of = weakref.ref(weight_OI), *state
