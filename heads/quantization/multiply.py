"""x · weightᵀ + bias, the weight in packed microscaling blocks: `multiply`, which chooses the fastest exact way.

| where | how |
|---|---|
| float32, bfloat16, float16 on a CPU with AVX2 | cpu.py: the codes are decoded in registers as they are multiplied |
| the same on a GPU, with Triton | gpu.py: likewise, and multiplied by tensor cores |
| float64, gradients for x, other processors | `multiply_plainly`: unpacked and multiplied by PyTorch |

Every way sums in float32 or wider and rounds to x's dtype once, so they differ by the order of sums alone; only more
rows than gpu.FUSED_ROWS are summed as PyTorch sums them on a GPU. The plain way writes the whole weight out at every
call and is slower than 16-bit weights; where it is taken for lack of a kernel, one warning says so. Where there is a
kernel, the first row on a large layer measures it beside 16-bit weights (slower.py).
"""
# N rows of x, I inputs, O outputs, P bytes of a packed row, G = I / 32 blocks of a row

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor, nn

from heads.products import kernels
from heads.quantization import cpu, gpu, slower
from heads.quantization.codec import Packed, unpack
from heads.quantization.formats import BLOCK, Format, find_format

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def multiply(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None = None) -> Tensor:
    """(N, O), in x's dtype.

    Args:
        x_NI: floating point.
        codes_OP: uint8, as `codec.pack` lays them out.
        scales_OG: uint8, E8M0.
        bias_O: added before the sum is rounded.

    Raises:
        ValueError: shapes that do not belong together.

    >>> from heads.quantization.codec import pack
    >>> from heads.quantization.formats import find_format
    >>> format = find_format("mxfp4_e2m1")
    >>> multiply(torch.ones(1, 32), *pack(torch.full((2, 32), 0.5), format), format)
    tensor([[16., 16.]])
    """
    refuse_shapes(x_NI, codes_OP, scales_OG, format)
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.headway.multiply_mx(x_NI, codes_OP, scales_OG, format.name, bias_O)
        return product
    return multiply_eagerly(x_NI, codes_OP, scales_OG, format, bias_O)


def multiply_eagerly(
    x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None
) -> Tensor:
    needs_gradient = torch.is_grad_enabled() and (x_NI.requires_grad or (bias_O is not None and bias_O.requires_grad))
    if not needs_gradient and x_NI.dtype in KERNEL_DTYPES and x_NI.numel():
        if not (reason := why_plain(x_NI.device.type)):
            if len(x_NI) == 1:
                slower.warn_once_where_slower(multiply_in_kernel, x_NI, Packed(codes_OP, scales_OG), format)
            return multiply_in_kernel(x_NI, codes_OP, scales_OG, format, bias_O)
        warn_slow(reason)
    return multiply_plainly(x_NI, codes_OP, scales_OG, format, bias_O)


def multiply_in_kernel(
    x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None = None
) -> Tensor:
    if x_NI.is_cuda:
        return gpu.multiply_fused(x_NI, codes_OP, scales_OG, format, bias_O)
    return cpu.multiply_compiled(x_NI, codes_OP, scales_OG, format, bias_O).to(x_NI.dtype)


def why_plain(device: str) -> str:
    """Why there is no kernel for a device of this type; empty where there is one.

    >>> why_plain("mps")
    'there is no kernel for mps'
    """
    if device == "cuda":
        return gpu.why_unavailable()
    return kernels.why_unavailable(cpu.SOURCE) if device == "cpu" else f"there is no kernel for {device}"


def multiply_plainly(
    x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None = None
) -> Tensor:
    """The reference: the whole weight unpacked, and PyTorch's product; gradients reach x and the bias.

    >>> from heads.quantization.codec import pack
    >>> from heads.quantization.formats import find_format
    >>> format = find_format("mxint8")
    >>> multiply_plainly(torch.ones(1, 32, dtype=torch.float64), *pack(torch.full((1, 32), 0.25), format), format)
    tensor([[8.]], dtype=torch.float64)
    """
    wide = torch.promote_types(x_NI.dtype, torch.float32)
    weight_OI = unpack(Packed(codes_OP, scales_OG), format, wide)
    return nn.functional.linear(x_NI.to(wide), weight_OI, None if bias_O is None else bias_O.to(wide)).to(x_NI.dtype)


def refuse_shapes(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format) -> None:
    """The kernels read memory by these shapes, so nothing else may reach them.

    >>> from heads.quantization.formats import find_format
    >>> packed = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)
    >>> refuse_shapes(torch.ones(1, 32), *packed, find_format("mxfp4_e2m1"))
    Traceback (most recent call last):
    ValueError: x (1, 32), codes (2, 16) in torch.uint8 and scales (3, 1) in torch.uint8 were given; for mxfp4_e2m1 \
codes are (outputs, 16) and scales (outputs, 1), both uint8 on x's device.
    """
    inputs = x_NI.shape[-1]
    groups = inputs // BLOCK
    codes_fit = codes_OP.ndim == 2 and codes_OP.shape[1] == groups * format.block_bytes
    fits = codes_fit and x_NI.ndim == 2 and inputs % BLOCK == 0 and scales_OG.shape == (codes_OP.shape[0], groups)
    if not x_NI.is_floating_point():
        raise ValueError(f"x in {x_NI.dtype} was given; allowed are floating-point numbers.")
    bytes_ = codes_OP.dtype == scales_OG.dtype == torch.uint8 and x_NI.device == codes_OP.device == scales_OG.device
    if not (fits and bytes_):
        raise ValueError(
            f"x {tuple(x_NI.shape)}, codes {tuple(codes_OP.shape)} in {codes_OP.dtype} and scales "
            f"{tuple(scales_OG.shape)} in {scales_OG.dtype} were given; for {format.name} codes are "
            f"(outputs, {groups * format.block_bytes}) and scales (outputs, {groups}), both uint8 on x's device."
        )


@functools.cache
def warn_slow(reason: str) -> None:
    warnings.warn(
        f"microscaling weights are unpacked at every product, which is slower than 16-bit weights: {reason}.",
        stacklevel=4,
    )


@torch.library.custom_op("headway::multiply_mx", mutates_args=())
def multiply_in_graphs(
    x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format_name: str, bias_O: Tensor | None
) -> Tensor:
    """`multiply` as one node of a compiled graph."""
    return multiply_eagerly(x_NI, codes_OP, scales_OG, find_format(format_name), bias_O)


@multiply_in_graphs.register_fake
def shape_in_graphs(
    x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format_name: str, bias_O: Tensor | None
) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], codes_OP.shape[0])
