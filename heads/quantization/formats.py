"""The six microscaling (MX) formats of weights, and what their codes mean.

A block is 32 elements along the input dimension with one scale, a power of two that is stored as its exponent plus 127
(E8M0; 255 is NaN). An element is sign, exponent and mantissa, or for INT8 a whole number of sixty-fourths. With its
share of the scale an element takes 4.25, 6.25 or 8.25 bits.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5: its formats, their elements and their scales. Of
the formats with a NaN or infinities (E4M3, E5M2) only finite codes are written.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.validation import nearest

BLOCK = 32  # elements that share a scale
SCALE_BIAS = 127  # of E8M0
NAN_SCALE = 255


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format of elements.

    Attributes:
        name: as users write it.
        bits: of an element, without the scale.
        exponent_bits: 0 where elements are whole numbers of steps (INT8).
        mantissa_bits: after the leading one.
        max_code: the largest finite magnitude's code, without the sign.

    >>> [(format.name, format.largest, format.bits_per_weight) for format in FORMATS.values()][:3]
    [('mxfp4_e2m1', 6.0, 4.25), ('mxfp6_e2m3', 7.5, 6.25), ('mxfp6_e3m2', 28.0, 6.25)]
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max_code: int

    @property
    def smallest_exponent(self) -> int:
        """Of normal numbers, and of all subnormal ones."""
        return 1 - self.bias if self.exponent_bits else 0

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1 if self.exponent_bits else 0

    @property
    def largest(self) -> float:
        """The largest finite element."""
        return self.magnitude(self.max_code)

    @property
    def largest_exponent(self) -> int:
        """Of the largest power of two among the elements: what the specification calls emax."""
        return math.frexp(self.largest)[1] - 1

    @property
    def bits_per_weight(self) -> float:
        return self.bits + 8 / BLOCK

    @property
    def block_bytes(self) -> int:
        """Bytes of the elements of one block."""
        return self.bits * BLOCK // 8

    def magnitude(self, code: int) -> float:
        """The finite element that a code without its sign stands for."""
        if not self.exponent_bits:
            return code / 2**self.mantissa_bits
        field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if field:  # a normal number: the leading one is not stored
            mantissa += 1 << self.mantissa_bits
        return math.ldexp(mantissa, max(field, 1) - self.bias - self.mantissa_bits)

    def value(self, code: int) -> float:
        """The element that a code stands for; NaN and infinity where the format has them.

        >>> FORMATS["mxint8"].value(0xFF), FORMATS["mxfp4_e2m1"].value(0b1001), FORMATS["mxfp8_e4m3"].value(0x7F)
        (-0.015625, -0.5, nan)
        """
        if not self.exponent_bits:
            return self.magnitude(code - (1 << self.bits) * (code >> (self.bits - 1)))  # two's complement
        sign, code = -1.0 if code >> (self.bits - 1) else 1.0, code & ((1 << (self.bits - 1)) - 1)
        if code <= self.max_code:
            return sign * self.magnitude(code)
        return sign * math.inf if code == self.max_code + 1 and self.name == "mxfp8_e5m2" else math.nan


FORMATS = {
    format.name: format
    for format in (
        Format(name="mxfp4_e2m1", bits=4, exponent_bits=2, mantissa_bits=1, max_code=0x07),
        Format(name="mxfp6_e2m3", bits=6, exponent_bits=2, mantissa_bits=3, max_code=0x1F),
        Format(name="mxfp6_e3m2", bits=6, exponent_bits=3, mantissa_bits=2, max_code=0x1F),
        Format(name="mxfp8_e4m3", bits=8, exponent_bits=4, mantissa_bits=3, max_code=0x7E),
        Format(name="mxfp8_e5m2", bits=8, exponent_bits=5, mantissa_bits=2, max_code=0x7B),
        Format(name="mxint8", bits=8, exponent_bits=0, mantissa_bits=6, max_code=0x7F),
    )
}


def find_format(name: str) -> Format:
    """
    Raises:
        ValueError: no format has this name.

    >>> find_format("mxfp6_e2m3").block_bytes
    24
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(
            f"{name!r} is no microscaling format; allowed are {', '.join(FORMATS)}.{nearest(name, FORMATS)}"
        )
    return FORMATS[name]


@functools.cache
def element_table(format: Format, device: torch.device) -> Tensor:
    """(2 ** bits,) float32: what each code stands for; exact."""
    return torch.tensor([format.value(code) for code in range(1 << format.bits)], device=device)


@functools.cache
def scale_table(device: torch.device) -> Tensor:
    """(256,) float32: what each scale stands for; exact, the smallest one is subnormal."""
    scales = [math.ldexp(1.0, code - SCALE_BIAS) for code in range(NAN_SCALE)]
    return torch.tensor([*scales, math.nan], device=device)
