"""x · weightᵀ + bias with bfloat16 or float16 weights on a CPU that has no instructions for them: half_kernel.cpp.

There PyTorch multiplies each row by itself, so eight rows take seven times as long as one. The kernel reads a weight
once for all rows, as it is: nothing is laid out anew, and memory stays what it was. Beyond FUSED_ROWS a product is
bound by arithmetic; there some outputs' weights at a time are widened and handed to PyTorch's float32 product.

Both ways sum in float32 and round once, as `torch.nn.functional.linear` does, so they differ by the order of sums.
"""
# N rows of x, I inputs, O outputs; … any leading axes

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.products import kernels

FUSED_ROWS = 128  # from there PyTorch's product of widened weights is faster
WIDENED_AT_ONCE = 1 << 20  # weights, 4 MiB: what stays in a processor's caches
SOURCE = Path(__file__).with_name("half_kernel.cpp")
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def multiply(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """(…, I) to (…, O), in the dtype that all three share, on a CPU.

    Args:
        x: at least one row.
        weight_OI: in bfloat16 or float16.

    Raises:
        ValueError: tensors that do not belong together; the kernel reads memory by their shapes.
        kernels.UnavailableError: nothing was compiled, or the processor lacks the instructions.

    >>> multiply(torch.ones(2, 3, dtype=torch.bfloat16), torch.full((1, 3), 0.5, dtype=torch.bfloat16)).tolist()
    [[1.5], [1.5]]
    """
    refuse_strangers(x, weight_OI, bias_O)
    x_NI = x.reshape(-1, x.shape[-1]).contiguous()
    weight_OI = weight_OI.contiguous()
    bias_O = None if bias_O is None else bias_O.contiguous()
    product = few_rows if len(x_NI) <= FUSED_ROWS else many_rows
    return product(x_NI, weight_OI, bias_O).view(*x.shape[:-1], len(weight_OI))


def refuse_strangers(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    """
    >>> refuse_strangers(torch.ones(2, 3), torch.ones(1, 3, dtype=torch.bfloat16), None)
    Traceback (most recent call last):
    ValueError: x (2, 3) in torch.float32, a weight (1, 3) in torch.bfloat16 and no bias were given; all are in \
bfloat16 or all in float16, on a CPU, x (…, 3) and a bias (1,).
    """
    given = [x, weight_OI] + ([] if bias_O is None else [bias_O])
    alike = weight_OI.dtype in DTYPES and all(one.dtype == weight_OI.dtype for one in given)
    fits = weight_OI.ndim == 2 and x.numel() and x.shape[-1] == weight_OI.shape[1]
    bias_fits = bias_O is None or bias_O.shape == weight_OI.shape[:1]
    if alike and fits and bias_fits and all(one.device.type == "cpu" for one in given):
        return
    bias = "no bias" if bias_O is None else f"a bias {tuple(bias_O.shape)} in {bias_O.dtype}"
    raise ValueError(
        f"x {tuple(x.shape)} in {x.dtype}, a weight {tuple(weight_OI.shape)} in {weight_OI.dtype} and {bias} were "
        f"given; all are in bfloat16 or all in float16, on a CPU, x (…, {weight_OI.shape[-1]}) and a bias "
        f"({len(weight_OI)},)."
    )


def few_rows(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    (rows, inputs), outputs = x_NI.shape, len(weight_OI)
    out_NO = x_NI.new_empty(rows, outputs)
    bias = None if bias_O is None else bias_O.data_ptr()
    entry(x_NI.dtype)(x_NI.data_ptr(), weight_OI.data_ptr(), bias, out_NO.data_ptr(), rows, inputs, outputs)
    return out_NO


def many_rows(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    wide_NI, out_NO = x_NI.float(), x_NI.new_empty(len(x_NI), len(weight_OI))
    step = max(1, WIDENED_AT_ONCE // x_NI.shape[1])
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
