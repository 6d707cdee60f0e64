"""Weights to packed microscaling blocks and back: `pack` and `unpack`, the plain reference of every faster path.

A row of the packed codes is one row of the weight, its blocks in order, nothing between them. With 8 bits an element is
a byte; with 4 two elements are one, the first in the low half; with 6 four elements are three bytes, the first in the
lowest six bits (as compressed-tensors and Quark lay them out). A block is 32, 16 or 24 bytes.

A block's scale follows the OCP Microscaling specification v1.0, section 6.3 (`floor`): the exponent of its largest
magnitude, less that of the format's largest power of two. An element above the format's largest then becomes that
largest. compressed-tensors' rule (`compressed-tensors`, and Quark's `even`) doubles the scale where the maximum would
round past the largest element. Elements are rounded to the nearest, ties to even. A block of zeros has scale code 0;
the smallest scale is 2**-127, the largest 2**127.
"""
# O outputs (rows), I inputs, G = I / 32 blocks of a row, E = 32 elements of a block, P bytes of a packed row

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from heads.quantization.formats import BLOCK, NAN_SCALE, SCALE_BIAS, Format, element_table, scale_table

SCALE_RULES = ("floor", "compressed-tensors")
# Mantissa bits that compressed-tensors (Quark, for mxfp6_e3m2) rounds a block's maximum to before it takes the exponent
ROUNDED_TO = {"mxfp4_e2m1": 1, "mxfp6_e2m3": 3, "mxfp6_e3m2": 2, "mxfp8_e4m3": 1}
ELEMENTS_AT_ONCE = 1 << 22  # so that a large weight needs little memory beside it


class Packed(NamedTuple):
    """A weight in blocks.

    Attributes:
        codes: (O, P) uint8.
        scales: (O, G) uint8, E8M0.
    """

    codes: Tensor
    scales: Tensor


def pack(weight_OI: Tensor, format: Format, scale_rule: str = "floor") -> Packed:
    """The weight in blocks of 32 along its inputs.

    Args:
        weight_OI: (O, I) floating point, finite, I divisible by 32.
        scale_rule: "floor", or "compressed-tensors" for four and six bits and mxfp8_e4m3.

    Raises:
        ValueError: another shape, a weight that is not finite, or a scale rule that the format does not have.

    >>> from heads.quantization.formats import find_format
    >>> packed = pack(torch.linspace(-6, 6, 64).reshape(2, 32), find_format("mxfp4_e2m1"))
    >>> packed.codes.shape, packed.scales.tolist()
    (torch.Size([2, 16]), [[127], [127]])
    """
    refuse_weight(weight_OI)
    refuse_rule(format, scale_rule)
    rows = max(1, ELEMENTS_AT_ONCE // weight_OI.shape[1])
    parts = [pack_rows(part_OI, format, scale_rule) for part_OI in torch.split(weight_OI.detach(), rows)]
    return Packed(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def unpack(packed: Packed, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """(O, I): what the codes stand for, exact in float32; a block whose scale is NaN is NaN.

    >>> from heads.quantization.formats import find_format
    >>> unpack(Packed(torch.full((1, 16), 0x72, dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8)),
    ...        find_format("mxfp4_e2m1"))[0, :4]
    tensor([ 2., 12.,  2., 12.])
    """
    elements_OI = element_table(format, packed.codes.device)[split_bytes(packed.codes, format.bits).int()]
    scales_OG = scale_table(packed.scales.device)[packed.scales.int()]
    return (torch.unflatten(elements_OI, -1, (-1, BLOCK)) * scales_OG[..., None]).flatten(-2).to(dtype)


def refuse_weight(weight_OI: Tensor) -> None:
    """
    >>> refuse_weight(torch.ones(4, 40))
    Traceback (most recent call last):
    ValueError: a weight of shape (4, 40) was given; microscaling takes matrices whose inputs (the last dimension) are \
divisible by 32, so leave this layer out (skip).
    """
    if weight_OI.ndim != 2 or not weight_OI.numel() or weight_OI.shape[1] % BLOCK:
        raise ValueError(
            f"a weight of shape {tuple(weight_OI.shape)} was given; microscaling takes matrices whose inputs (the last "
            f"dimension) are divisible by {BLOCK}, so leave this layer out (skip)."
        )
    if not weight_OI.is_floating_point():
        raise ValueError(f"a weight in {weight_OI.dtype} was given; microscaling takes floating-point weights.")
    if not torch.isfinite(weight_OI).all():
        raise ValueError(
            "a weight that is not finite everywhere was given; microscaling takes finite weights, so repair the "
            "checkpoint or leave this layer out (skip)."
        )


def refuse_rule(format: Format, scale_rule: str) -> None:
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"scale_rule={scale_rule!r} was given; allowed are {', '.join(SCALE_RULES)}.")
    if scale_rule == "compressed-tensors" and format.name not in ROUNDED_TO:
        raise ValueError(
            f"scale_rule='compressed-tensors' was given with {format.name}; it is defined for "
            f"{', '.join(ROUNDED_TO)}, so use 'floor'."
        )


def pack_rows(weight_OI: Tensor, format: Format, scale_rule: str) -> Packed:
    wide = torch.float64 if weight_OI.dtype == torch.float64 else torch.float32
    blocks_OGE = torch.unflatten(weight_OI.to(wide), -1, (-1, BLOCK))
    exponent_OG = shared_exponents(blocks_OGE.abs().amax(-1), format, scale_rule)
    codes_OI = encode(scale_down(blocks_OGE, exponent_OG), format).flatten(-2)
    return Packed(join_bytes(codes_OI, format.bits), (exponent_OG + SCALE_BIAS).to(torch.uint8))


def shared_exponents(largest_OG: Tensor, format: Format, scale_rule: str) -> Tensor:
    """(O, G) int32: the exponent of each block's scale."""
    mantissa_OG, exponent_OG = torch.frexp(largest_OG)  # largest = mantissa · 2 ** exponent, mantissa in [0.5, 1)
    exponent_OG = exponent_OG - 1 - format.largest_exponent
    if scale_rule == "compressed-tensors":  # rounded, ties up
        exponent_OG = exponent_OG + (mantissa_OG >= 1 - 2.0 ** -(ROUNDED_TO[format.name] + 2))
    exponent_OG = torch.where(largest_OG > 0, exponent_OG, -SCALE_BIAS)
    return exponent_OG.clamp(-SCALE_BIAS, NAN_SCALE - 1 - SCALE_BIAS)


def scale_down(blocks_OGE: Tensor, exponent_OG: Tensor) -> Tensor:
    """The blocks over their scales. Exact, since a power of two is taken in two steps that neither overflow."""
    half_OG = exponent_OG // 2
    return torch.ldexp(torch.ldexp(blocks_OGE, -half_OG[..., None]), (half_OG - exponent_OG)[..., None])


def encode(scaled: Tensor, format: Format) -> Tensor:
    """uint8, of the same shape: the code of the nearest element, ties to even, above the largest the largest."""
    if not format.exponent_bits:  # -128 is left out, as section 5.3.4 allows: the elements are symmetric
        steps = (scaled * 2**format.mantissa_bits).round().clamp(-format.max_code, format.max_code)
        return steps.to(torch.int8).view(torch.uint8)
    magnitude = scaled.abs()
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=format.smallest_exponent)
    steps = torch.ldexp(magnitude, format.mantissa_bits - exponent).round().int()  # of the last mantissa bit
    code = ((exponent - format.smallest_exponent) << format.mantissa_bits) + steps  # a carry reaches the next exponent
    code = torch.where(steps > 0, code, 0).clamp(max=format.max_code)
    return (code | (torch.signbit(scaled).int() << (format.bits - 1))).to(torch.uint8)


def join_bytes(codes_OI: Tensor, bits: int) -> Tensor:
    """(O, P) uint8: codes end to end, the first in the lowest bits.

    >>> join_bytes(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8), 6)   # 4 · 2**18 + 3 · 2**12 + 2 · 2**6 + 1
    tensor([[129,  48,  16]], dtype=torch.uint8)
    """
    if bits == 8:
        return codes_OI.contiguous()
    if bits == 4:
        return codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4
    a, b, c, d = torch.unflatten(codes_OI, -1, (-1, 4)).unbind(-1)  # a byte's bits beyond the eighth fall away
    return torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], dim=-1).flatten(-2)


def split_bytes(packed_OP: Tensor, bits: int) -> Tensor:
    """(O, I) uint8: `join_bytes` undone.

    >>> split_bytes(torch.tensor([[129, 48, 16]], dtype=torch.uint8), 6)
    tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    """
    if bits == 8:
        return packed_OP
    if bits == 4:
        return torch.stack([packed_OP & 0x0F, packed_OP >> 4], dim=-1).flatten(-2)
    a, b, c = torch.unflatten(packed_OP, -1, (-1, 3)).unbind(-1)
    codes = [a & 0x3F, a >> 6 | (b & 0x0F) << 2, b >> 4 | (c & 0x03) << 4, c >> 2]
    return torch.stack(codes, dim=-1).flatten(-2)
