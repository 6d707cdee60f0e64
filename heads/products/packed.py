"""Weights packed for matrix products of few rows on a CPU: `heads.pack_weights(model)`.

A pass over a tree multiplies a handful of rows with every weight. There are two ways to make that cost little more than
one row, by the dtype and the processor.

- Where oneDNN multiplies the dtype (float32; bfloat16 with instructions for it), it keeps a weight in the layout of its
  kernels. PyTorch's product lays each weight out anew at every call, which for few rows takes as long as the product.
  A packed product of four rows was 1.5 to 2.2 times as fast in bfloat16, on a processor with AVX512-BF16, and 4 to 6
  times in float32. Weights that fit into the processor's caches can lose.
- 16-bit weights on a processor without such instructions, which PyTorch multiplies row by row: our own kernel
  (half.py) reads the weight once for all rows. Eight rows take a quarter to a third of the time.

`python -m benchmarks.speed.real_costs` prints whole passes both ways; measure before you pack. Products of one row are
packed too, so plain generation runs on the same kernels.

PyTorch packs weights for oneDNN in compiled graphs (torch._inductor.fx_passes.mkldnn_fusion); here it is done to a
model as it is. Sums are taken in another order, so logits differ by rounding (tests/heads/products/test_packed.py). A
layer that oneDNN packed notices when its weight was replaced or edited in place and packs it anew; an edit through
`.data` keeps the weight's version and is not noticed: call `pack_weights` again after one.
"""
# R rows of a product, I inputs, O outputs; … any leading axes

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from heads.products import half, kernels


def pack_weights(module: nn.Module) -> int:
    """Pack the linear layers of a causal LM or of heads, in place; returns how many. A second call changes nothing.

    For oneDNN the memory of these weights doubles, and unembeddings are left as they are. The kernel for 16-bit weights
    copies none and takes unembeddings too, also those of heads on the model (Projection.by_kernel). Training goes on
    with the plain weights, and so do compiled passes.

    Args:
        module: on a CPU, in float32, bfloat16 or float16.

    Raises:
        ValueError: another device or dtype, or neither oneDNN nor a compiler for it; nothing is packed then.

    >>> layer = nn.Linear(64, 32)
    >>> found = pack_weights(layer), layer(torch.ones(4, 64))       # four rows, packed
    >>> found[0], torch.allclose(found[1][0], layer(torch.ones(64)), atol=1e-5)
    (1, True)
    """
    find_output = getattr(module, "get_output_embeddings", None)
    unembedding = None if find_output is None else find_output()
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear]
    if unembedding in layers and (layers == [unembedding] or onednn_multiplies(unembedding.weight.dtype)):
        layers.remove(unembedding)
    for layer in layers:
        if reason := what_stops_packing(layer.weight):
            raise ValueError(f"pack_weights was given a {type(module).__name__} with {reason}.")
    for layer in layers:
        layer.forward = functools.partial(product_of(layer.weight.dtype), layer)  # type: ignore[method-assign]
    return len(layers)


def takes_half_products(layer: nn.Module | None) -> bool:
    """Whether a layer was packed for the kernel that reads 16-bit weights as they are, and keeps nothing.

    >>> takes_half_products(nn.Linear(4, 4))
    False
    """
    return layer is not None and isinstance(product_in(layer), HalfProduct)


def product_of(dtype: torch.dtype) -> PackedProduct:
    return LaidOutProduct(dtype) if onednn_multiplies(dtype) else HalfProduct()


def is_packed(module: nn.Module) -> bool:
    """Whether `pack_weights` packed any of its linear layers.

    >>> layer = nn.Linear(64, 32)
    >>> is_packed(layer), pack_weights(layer), is_packed(layer)
    (False, 1, True)
    """
    return any(product_in(layer) for layer in module.modules())


def product_in(layer: nn.Module) -> PackedProduct | None:
    """What `pack_weights` put in place of this layer's forward, if it packed it."""
    forward = vars(layer).get("forward")
    product = forward.func if isinstance(forward, functools.partial) else None
    return product if isinstance(product, PackedProduct) else None


def is_multiplied_row_by_row(module: nn.Module) -> bool:
    """Whether a product with any of its linear layers costs as much for each row as for one, and packing mends that.

    >>> is_multiplied_row_by_row(nn.Linear(4, 4))                       # float32
    False
    """
    plain = (layer for layer in module.modules() if type(layer) is nn.Linear and product_in(layer) is None)
    return any(
        layer.weight.dtype in half.DTYPES
        and not onednn_multiplies(layer.weight.dtype)
        and not what_stops_packing(layer.weight)
        for layer in plain
    )


def what_stops_packing(weight_OI: Tensor) -> str:
    """Why this weight cannot be packed here; empty where it can.

    >>> what_stops_packing(torch.ones(2, 2, dtype=torch.float64))
    'weights in float64, and only float32, bfloat16 and float16 can be packed; load them in float32 or leave them \
unpacked'
    """
    if type(weight_OI) not in (Tensor, nn.Parameter):
        return f"weights of type {type(weight_OI).__name__}, which are quantised or sharded; leave them as they are"
    if weight_OI.device.type != "cpu":
        return f"weights on {weight_OI.device.type}, and packing is for CPUs; leave them unpacked"
    if onednn_multiplies(weight_OI.dtype):
        return ""
    name, why = str(weight_OI.dtype).removeprefix("torch."), "and only float32, bfloat16 and float16 can be packed"
    if weight_OI.dtype in half.DTYPES:
        if not (reason := kernels.why_unavailable(half.SOURCE)):
            return ""
        why = f"which oneDNN does not multiply on this processor, nor does our own kernel ({reason})"
    elif weight_OI.dtype == torch.float32:
        return "weights that this PyTorch cannot pack, since it has no oneDNN; leave them unpacked"
    return f"weights in {name}, {why}; load them in float32 or leave them unpacked"


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has kernels for packed weights of this dtype on this processor; it packs a copy of them.

    >>> onednn_multiplies(torch.float64)
    False
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class PackedProduct:
    """The forward of a packed `nn.Linear`, which takes plain products where packed ones do not serve."""

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """(…, I) to (…, O): `nn.functional.linear`'s numbers up to rounding."""
        raise NotImplementedError


class HalfProduct(PackedProduct):
    """16-bit weights on a processor without instructions for them: half.py reads the layer's own weight."""

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return half.linear(x, layer.weight, layer.bias)


class LaidOutProduct(PackedProduct):
    """oneDNN's: keeps the weight in the layout of its kernels, and which weight that was made of."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.packed: Tensor | None = None
        self.made_of: tuple[weakref.ref[Tensor], int, int] | None = None

    def __deepcopy__(self, memo: Any) -> LaidOutProduct:
        return LaidOutProduct(self.dtype)  # packed tensors have no copy, and a copied layer has a weight of its own

    def __call__(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if x.dtype != self.dtype or not half.may_replace_product(x, layer.weight, layer.bias):
            return nn.functional.linear(x, layer.weight, layer.bias)
        self.follow(layer.weight)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, layer.bias, "none", [], "")
        return product

    def follow(self, weight_OI: Tensor) -> None:
        """Pack the weight where it is not the one that is packed; each edit in place counts its version up.

        Its address alone does not tell it: a freed weight's may be given to the next one.
        """
        state = weight_OI.data_ptr(), 0 if weight_OI.is_inference() else weight_OI._version
        if self.made_of is None or self.made_of[0]() is not weight_OI or self.made_of[1:] != state:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach())
            self.made_of = weakref.ref(weight_OI), *state
