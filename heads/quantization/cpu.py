"""The compiled products with microscaling weights on a CPU: cpu_kernel.cpp, built once by this machine's compiler.

Up to FUSED_ROWS rows are multiplied as the codes are decoded. More rows are bound by arithmetic: there some outputs'
weights at a time are decoded and handed to PyTorch's product.
"""
# N rows of x, I inputs, O outputs, P bytes of a packed row, G = I / 32 blocks of a row

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.products import kernels
from heads.quantization.formats import Format

FUSED_ROWS = 16  # from there PyTorch's product of decoded weights is faster (python -m benchmarks.speed.mx)
DECODED_AT_ONCE = 1 << 20  # weights, 4 MiB: what stays in a processor's caches
SOURCE = Path(__file__).with_name("cpu_kernel.cpp")


def multiply_compiled(
    x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None
) -> Tensor:
    """(N, O) float32.

    Args:
        x_NI: float32 or narrower, on a CPU.

    Raises:
        kernels.UnavailableError: nothing was compiled, or the processor lacks the instructions.
    """
    kernels.load(SOURCE)  # before anything is allocated
    x_NI = x_NI.to(torch.float32).contiguous()
    bias_O = None if bias_O is None else bias_O.to(torch.float32).contiguous()
    codes_OP, scales_OG = codes_OP.contiguous(), scales_OG.contiguous()
    product = few_rows if x_NI.shape[0] <= FUSED_ROWS else many_rows
    return product(x_NI, codes_OP, scales_OG, format, bias_O)


def few_rows(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None) -> Tensor:
    rows, inputs = x_NI.shape
    out_NO = torch.empty(rows, codes_OP.shape[0])
    bias = None if bias_O is None else bias_O.data_ptr()
    entry("few_rows", format)(
        x_NI.data_ptr(), codes_OP.data_ptr(), scales_OG.data_ptr(), bias, out_NO.data_ptr(), rows, inputs, len(codes_OP)
    )
    return out_NO


def many_rows(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None) -> Tensor:
    """PyTorch's product with decoded weights; both factors in the order that decoding leaves."""
    rows, inputs = x_NI.shape
    ordered_NI = torch.empty_like(x_NI)
    entry("reorder", format)(x_NI.data_ptr(), ordered_NI.data_ptr(), rows, inputs)
    out_NO = torch.empty(rows, len(codes_OP))
    step = max(1, DECODED_AT_ONCE // inputs)
    weight_OI = torch.empty(min(step, len(codes_OP)), inputs)
    for first in range(0, len(codes_OP), step):
        codes, scales = codes_OP[first : first + step], scales_OG[first : first + step]
        entry("decode", format)(codes.data_ptr(), scales.data_ptr(), weight_OI.data_ptr(), inputs, len(codes))
        torch.mm(ordered_NI, weight_OI[: len(codes)].T, out=out_NO[:, first : first + step])
    return out_NO if bias_O is None else out_NO.add_(bias_O)


@functools.cache
def entry(name: str, format: Format) -> Any:
    function = getattr(kernels.load(SOURCE), f"mx_{name}_{format.name}")
    pointers, sizes = {"few_rows": (5, 3), "reorder": (2, 2), "decode": (3, 2)}[name]
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes
    function.restype = None
    return function
