"""The products with microscaling weights on a GPU: gpu_kernel.py through Triton, where that is installed.

Up to FUSED_ROWS rows one kernel decodes and multiplies; on a layer with few outputs several programs share the inputs
of an output, and their sums are added afterwards in one order, so results are the same in every run. With more rows
PyTorch multiplies weights that are decoded for some outputs at a time.

bfloat16 is multiplied as it is: all finite elements, and their blocks' scales, are exact in it. float16 goes through
TF32, which holds both factors exactly, and float32 through products in float32. Sums are in float32.
"""
# N rows of x, I inputs, O outputs, P bytes of a packed row, G = I / 32 blocks of a row, K parts of the inputs

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from heads.quantization.codec import Packed, unpack
from heads.quantization.formats import Format

FUSED_ROWS = 128
LEAST_ROWS = 16  # of a tensor core's tile
WAVES = 4  # programs for each multiprocessor, below which inputs are shared
MOST_PARTS = 8
DECODED_AT_ONCE = 1 << 24  # weights
PRECISION = {torch.bfloat16: "bfloat16", torch.float16: "tf32", torch.float32: "ieee"}


@functools.cache
def why_unavailable() -> str:
    """Why there is no kernel for GPUs here; empty where there is one."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return "" if torch.cuda.is_available() else "PyTorch finds no GPU"


def multiply_fused(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None) -> Tensor:
    """(N, O), in x's dtype.

    Args:
        x_NI: float32, bfloat16 or float16, at least one row, on the GPU of the weights.
    """
    if x_NI.shape[0] > FUSED_ROWS:
        return many_rows(x_NI, Packed(codes_OP, scales_OG), format, bias_O)
    parts = parts_for(len(x_NI), len(codes_OP), codes_OP.shape[1], multiprocessors(x_NI.device))
    sums_NO = few_rows(x_NI, codes_OP, scales_OG, format, parts)
    return (sums_NO if bias_O is None else sums_NO + bias_O).to(x_NI.dtype)


def few_rows(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, parts: int, tile: Any = None) -> Tensor:
    """(N, O) float32; `tile` is one of gpu_kernel.TILES, or None for the fastest, which is tried out once a shape."""
    from heads.quantization import gpu_kernel

    (rows, inputs), outputs = x_NI.shape, len(codes_OP)
    partial_KNO = torch.empty(parts, rows, outputs, device=x_NI.device)
    most = LEAST_ROWS if x_NI.dtype == torch.float32 else 64  # without tensor cores more of them spill registers
    rows_at_once = min(most, max(LEAST_ROWS, 1 << (rows - 1).bit_length()))
    kernel, chosen = (gpu_kernel.tuned_product, {}) if tile is None else (gpu_kernel.product, tile.all_kwargs())

    def grid(meta: dict[str, Any]) -> tuple[int, int, int]:
        return -(-outputs // meta["outputs_at_once"]), -(-rows // rows_at_once), parts

    kernel[grid](
        x_NI.contiguous(),
        in_words(codes_OP),
        scales_OG.contiguous(),
        partial_KNO,
        rows,
        inputs,
        outputs,
        bits=format.bits,
        exponent_bits=format.exponent_bits,
        mantissa_bits=format.mantissa_bits,
        precision=PRECISION[x_NI.dtype],
        rows_at_once=rows_at_once,
        parts=parts,
        **chosen,
    )
    return partial_KNO[0] if parts == 1 else partial_KNO.sum(0)


def many_rows(x_NI: Tensor, packed: Packed, format: Format, bias_O: Tensor | None) -> Tensor:
    """PyTorch's products with decoded weights, some outputs at a time."""
    wide = torch.bfloat16 if x_NI.dtype == torch.bfloat16 else torch.float32
    step = max(1, DECODED_AT_ONCE // x_NI.shape[1])
    out_NO = x_NI.new_empty(x_NI.shape[0], len(packed.codes))
    for first in range(0, len(packed.codes), step):
        some = slice(first, first + step)
        weight_OI = unpack(Packed(packed.codes[some], packed.scales[some]), format, wide)
        bias = None if bias_O is None else bias_O[some].to(wide)
        out_NO[:, some] = nn.functional.linear(x_NI.to(wide), weight_OI, bias)
    return out_NO


def in_words(codes_OP: Tensor) -> Tensor:
    """(O, P / 4) int32, a view where the memory is aligned."""
    codes_OP = codes_OP.contiguous()
    return (codes_OP if codes_OP.data_ptr() % 4 == 0 else codes_OP.clone()).view(torch.int32)


def parts_for(rows: int, outputs: int, row_bytes: int, processors: int) -> int:
    """Programs that share the inputs of an output, so that a narrow layer occupies the whole GPU; 1, 2, 4 or 8.

    >>> parts_for(1, 1024, 768, 132), parts_for(1, 8192, 6144, 132), parts_for(64, 28672, 6144, 132)
    (4, 4, 1)
    """
    programs = -(-outputs // 32) * -(-rows // 64)
    parts = 1
    while parts < MOST_PARTS and 2 * parts * programs <= 2 * WAVES * processors and 256 * parts <= row_bytes:
        parts *= 2
    return parts


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
