"""The Triton kernel of `gpu.py`: packed blocks are decoded in registers and multiplied by tensor cores.

Codes are read as 32-bit words. Three words hold sixteen elements of six bits, one holds eight of four or four of eight.
A floating-point element becomes a float32 by moving its bits: sign to the top, exponent and mantissa against float32's,
which leaves it 2 ** (bias - 127) times too small and subnormal where the element is; one exact product mends that, and
one with the block's scale follows. The weight is then exact in float32, as `codec.unpack` has it.

Where this file is imported under TRITON_INTERPRET=1 the kernel runs on a CPU, slowly: so tests compare it.
"""
# N rows of x, I inputs, O outputs, W words of a packed row, G = I / 32 blocks of a row, K parts of the inputs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def split_word(word, bits: tl.constexpr):
    """(…, W) to (…, 4 W): four codes of so many bits from each word, the lowest first."""
    mask: tl.constexpr = (1 << bits) - 1
    even = tl.join(word & mask, (word >> (2 * bits)) & mask)
    odd = tl.join((word >> bits) & mask, (word >> (3 * bits)) & mask)
    return tl.join(even, odd).reshape(word.shape[0], word.shape[1] * 4)


@triton.jit
def read_codes(codes, row, first, inputs, wide: tl.constexpr, bits: tl.constexpr):
    """(O, wide) int32: the codes of `wide` inputs from `first` on, 0 beyond the last; `row` (O, 1) counts words."""
    if bits == 6:
        triple = tl.arange(0, wide // 16)[None, :]
        at = codes + row + first // 16 * 3 + triple * 3
        inside = (first + triple * 16 < inputs) & (row >= 0)
        a, b, c = tl.load(at, inside, 0), tl.load(at + 1, inside, 0), tl.load(at + 2, inside, 0)
        second, third = ((a >> 24) & 0xFF) | (b << 8), ((b >> 16) & 0xFFFF) | (c << 16)
        words = tl.join(tl.join(a, third), tl.join(second, c >> 8)).reshape(row.shape[0], wide // 4)
        found = split_word(words, 6)
    elif bits == 4:
        word = tl.arange(0, wide // 8)[None, :]
        inside = (first + word * 8 < inputs) & (row >= 0)
        a = tl.load(codes + row + first // 8 + word, inside, 0)
        found = split_word(tl.join(a, a >> 16).reshape(row.shape[0], wide // 4), 4)
    else:
        word = tl.arange(0, wide // 4)[None, :]
        inside = (first + word * 4 < inputs) & (row >= 0)
        found = split_word(tl.load(codes + row + first // 4 + word, inside, 0), 8)
    return found


@triton.jit
def decode(code, bits: tl.constexpr, exponent_bits: tl.constexpr, mantissa_bits: tl.constexpr):
    """float32: the elements of codes."""
    if exponent_bits == 0:
        element = ((code << 24) >> 24).to(tl.float32) * (1.0 / (1 << mantissa_bits))
    else:
        magnitude = code & ((1 << (bits - 1)) - 1)
        moved = ((code >> (bits - 1)) << 31) | (magnitude << (23 - mantissa_bits))
        element = moved.to(tl.float32, bitcast=True) * (2.0 ** (128 - (1 << (exponent_bits - 1))))  # 127 - bias
    if exponent_bits == 4:  # E4M3 has no infinities, and one NaN
        element = tl.where(magnitude == 0x7F, float("nan"), element)
    if exponent_bits == 5:
        special = tl.where(magnitude == 0x7C, float("inf"), float("nan"))
        element = tl.where(magnitude >= 0x7C, tl.where(code > 0x7F, -special, special), element)
    return element


@triton.jit
def read_weight(
    codes,
    scales,
    output,
    first,
    inputs,
    outputs,
    wide: tl.constexpr,
    bits: tl.constexpr,
    exponent_bits: tl.constexpr,
    mantissa_bits: tl.constexpr,
):
    """(O, wide) float32: the weights of these outputs, `wide` inputs from `first` on; 0 beyond the last."""
    known = output[:, None] < outputs
    row = tl.where(known, output[:, None].to(tl.int64) * (inputs // 32 * bits), -1)
    elements = decode(read_codes(codes, row, first, inputs, wide, bits), bits, exponent_bits, mantissa_bits)
    block = first // 32 + tl.arange(0, wide // 32)[None, :]
    at = scales + output[:, None].to(tl.int64) * (inputs // 32) + block
    code = tl.load(at, known & (block < inputs // 32), 127).to(tl.int32)
    moved = tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    scale = tl.where(code == 255, float("nan"), moved)
    blocks = elements.reshape(output.shape[0], wide // 32, 32) * scale[:, :, None]
    return blocks.reshape(output.shape[0], wide)


@triton.jit
def product(
    x,
    codes,
    scales,
    partial,
    rows,
    inputs,
    outputs,
    bits: tl.constexpr,
    exponent_bits: tl.constexpr,
    mantissa_bits: tl.constexpr,
    precision: tl.constexpr,
    rows_at_once: tl.constexpr,
    parts: tl.constexpr,
    outputs_at_once: tl.constexpr,
    inputs_at_once: tl.constexpr,
):
    """partial (K, N, O) float32: x (N, I) times the weight, each part over its share of the inputs."""
    output = tl.program_id(0) * outputs_at_once + tl.arange(0, outputs_at_once)
    row = tl.program_id(1) * rows_at_once + tl.arange(0, rows_at_once)
    part = tl.program_id(2)
    sums = tl.zeros((rows_at_once, outputs_at_once), tl.float32)
    for first in range(part * inputs_at_once, inputs, parts * inputs_at_once):
        weight = read_weight(
            codes, scales, output, first, inputs, outputs, inputs_at_once, bits, exponent_bits, mantissa_bits
        )
        column = first + tl.arange(0, inputs_at_once)
        inside = (row[:, None] < rows) & (column[None, :] < inputs)
        some = tl.load(x + row[:, None].to(tl.int64) * inputs + column[None, :], inside, 0)
        if precision == "bfloat16":  # exact: elements have at most 7 bits
            sums = tl.dot(some, tl.trans(weight.to(tl.bfloat16)), sums)
        else:
            sums = tl.dot(some.to(tl.float32), tl.trans(weight), sums, input_precision=precision)
    at = partial + (part * rows + row[:, None]).to(tl.int64) * outputs + output[None, :]
    tl.store(at, sums, (row[:, None] < rows) & (output[None, :] < outputs))


TILES: list[Any] = [
    triton.Config({"outputs_at_once": 16, "inputs_at_once": 256}, num_warps=4, num_stages=4),
    triton.Config({"outputs_at_once": 32, "inputs_at_once": 128}, num_warps=4, num_stages=4),
    triton.Config({"outputs_at_once": 64, "inputs_at_once": 128}, num_warps=4, num_stages=3),
    triton.Config({"outputs_at_once": 128, "inputs_at_once": 64}, num_warps=8, num_stages=3),
]
SHAPE = ["inputs", "outputs", "rows_at_once", "parts", "bits", "exponent_bits", "precision"]
tuned_product: Any = triton.autotune(TILES, SHAPE)(product)
