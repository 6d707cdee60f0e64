"""x · weightᵀ + bias with bfloat16 or float16 weights on a CPU that has no instructions for them: half_kernel.cpp.

There PyTorch multiplies each row by itself, so eight rows take six to seven times as long as one. The kernel reads a
weight once for all rows, as it is: nothing is laid out anew, and no weight is copied. Beyond FUSED_ROWS a product is
bound by arithmetic; there some outputs' weights at a time are widened and handed to PyTorch's float32 product.

Both ways sum in float32 and round once, as `torch.nn.functional.linear` does, so they differ by the order of sums. Up
to FUSED_ROWS a row's sums do not depend on the rows beside it. No gradient is recorded, and a tracer sees no operator:
`multiplies_here` says where that matters, and plain products serve there.
"""
# N rows of x, I inputs, O outputs; … any leading axes

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from heads.products import kernels

FUSED_ROWS = 128  # from there PyTorch's product of widened weights is as fast (8,192 × 2,048) or faster
WIDENED_AT_ONCE = 1 << 20  # weights, 4 MiB: what stays in a processor's caches
SOURCE = Path(__file__).with_name("half_kernel.cpp")
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with the kernel where it multiplies.

    >>> linear(torch.ones(2, 3), torch.full((1, 3), 0.5)).tolist()          # float32: PyTorch's product
    [[1.5], [1.5]]
    """
    if multiplies_here(x, weight_OI, bias_O):
        return multiply(x, weight_OI, bias_O)
    return nn.functional.linear(x, weight_OI, bias_O)


def multiplies_here(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Whether the kernel reads these tensors, and nothing traces or counts operators."""
    if is_in_torch_dispatch_mode() or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
        return False
    return weight_OI.dtype in DTYPES and may_replace_product(x, weight_OI, bias_O)


def may_replace_product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Whether these are dense tensors of one dtype on a CPU, with rows, and no gradient or graph is recorded.

    >>> x_NI, weight_OI = torch.ones(2, 3), torch.ones(1, 3)
    >>> may_replace_product(x_NI, weight_OI, None), may_replace_product(x_NI, weight_OI.requires_grad_(True), None)
    (True, False)
    """
    if torch.compiler.is_compiling():
        return False
    given = [x, weight_OI] + ([] if bias_O is None else [bias_O])
    if not all(type(one) in (Tensor, nn.Parameter) and one.dtype == weight_OI.dtype for one in given):
        return False  # packed and sharded weights are tensors of other types, without memory of their own
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in given)
    dense = weight_OI.is_contiguous() and all(one.device.type == "cpu" for one in given)
    return dense and not learns and bool(x.numel())


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """(…, I) to (…, O), in the dtype that all three share.

    Args:
        x: at least one row; these tensors are of a kind that `multiplies_here`.
        weight_OI: in bfloat16 or float16, contiguous, on a CPU.

    Raises:
        ValueError: shapes that do not belong together; the kernel reads memory by them.
        kernels.UnavailableError: nothing was compiled, or the processor lacks the instructions.

    >>> multiply(torch.ones(2, 3, dtype=torch.bfloat16), torch.full((1, 3), 0.5, dtype=torch.bfloat16)).tolist()
    [[1.5], [1.5]]
    """
    refuse_shapes(x, weight_OI, bias_O)
    x_NI = x.reshape(-1, x.shape[-1]).contiguous()
    bias_O = None if bias_O is None else bias_O.contiguous()
    product = few_rows if len(x_NI) <= FUSED_ROWS else many_rows
    return product(x_NI, weight_OI, bias_O).view(*x.shape[:-1], len(weight_OI))


def refuse_shapes(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    """
    >>> refuse_shapes(torch.ones(2, 4), torch.ones(1, 3), None)
    Traceback (most recent call last):
    ValueError: x (2, 4), a weight (1, 3) and no bias were given; x is (…, 3), and a bias is (1,).
    """
    bias_fits = bias_O is None or bias_O.shape == weight_OI.shape[:1]
    if weight_OI.ndim == 2 and x.shape[-1] == weight_OI.shape[1] and bias_fits:
        return
    bias = "no bias" if bias_O is None else f"a bias {tuple(bias_O.shape)}"
    raise ValueError(
        f"x {tuple(x.shape)}, a weight {tuple(weight_OI.shape)} and {bias} were given; x is "
        f"(…, {weight_OI.shape[-1]}), and a bias is ({len(weight_OI)},)."
    )


def few_rows(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    (rows, inputs), outputs = x_NI.shape, len(weight_OI)
    out_NO = x_NI.new_empty(rows, outputs)
    bias = None if bias_O is None else bias_O.data_ptr()
    entry(x_NI.dtype)(x_NI.data_ptr(), weight_OI.data_ptr(), bias, out_NO.data_ptr(), rows, inputs, outputs)
    return out_NO


def many_rows(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Without autocast, which would narrow what is widened here."""
    wide_NI, out_NO = x_NI.float(), x_NI.new_empty(len(x_NI), len(weight_OI))
    step = max(1, WIDENED_AT_ONCE // x_NI.shape[1])
    with torch.autocast("cpu", enabled=False):
        for first in range(0, len(weight_OI), step):
            some = slice(first, first + step)
            sums = wide_NI @ weight_OI[some].float().T
            out_NO[:, some] = sums if bias_O is None else sums.add_(bias_O[some])
    return out_NO


@functools.cache
def entry(dtype: torch.dtype) -> Any:
    function = getattr(kernels.load(SOURCE), f"multiply_{DTYPES[dtype]}")
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
    function.restype = None
    return function
