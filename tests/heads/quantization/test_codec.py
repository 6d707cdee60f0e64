"""Packed microscaling blocks against slow references, and against the packages that write them."""

import bisect
import functools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.quantization.codec import Packed, pack, split_bytes, unpack
from heads.quantization.formats import FORMATS, Format, element_table, find_format

ALL = list(FORMATS.values())
NAMES = list(FORMATS)


def hard_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    """(40, 128): normal rows, large and tiny ones, zeros, subnormals, exact ties, and maxima near a rounding border."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(40, 128, generator=generator)
    weight[8:16] *= torch.logspace(-36, 36, 8)[:, None]
    weight[16] = 0
    weight[17, :32] = 0
    weight[18] = 2.0**-140 * torch.arange(128)
    weight[19] = torch.arange(128) / 16 - 4
    weight[20:28, ::32] = torch.tensor([7.49, 7.5, 7.74, 7.75, 7.76, 5.99, 6.99, 7.0])[:, None]
    weight[28:30] = weight[28:30].sign() * 3.0e38
    weight[30] = -0.0
    return weight.to(dtype)


def slow_pack(row: list[float], format: Format) -> tuple[int, list[Fraction]]:
    """One block by the specification's section 6.3, in exact fractions: the scale's code and the elements."""
    values = [Fraction(value) for value in row]
    largest = max(map(abs, values))
    if not largest:
        return 0, [Fraction(0)] * len(row)
    exponent = math.frexp(float(largest))[1] - 1 - format.largest_exponent
    exponent = min(max(exponent, -127), 127)
    elements = all_elements(format)
    return exponent + 127, [nearest_element(value / Fraction(2) ** exponent, elements) for value in values]


@functools.cache
def all_elements(format: Format) -> list[Fraction]:
    """In order, each once; of INT8 the symmetric range."""
    codes = [code for code in range(1 << format.bits) if format.exponent_bits or code != 1 << (format.bits - 1)]
    return sorted({Fraction(format.value(code)) for code in codes if math.isfinite(format.value(code))})


def nearest_element(value: Fraction, elements: list[Fraction]) -> Fraction:
    """Of the two beside it; ties go to the element whose index is even, counted from zero in the middle."""
    above, middle = bisect.bisect_left(elements, value), len(elements) // 2
    near = range(max(above - 1, 0), min(above + 1, len(elements)))
    return elements[min(near, key=lambda index: (abs(elements[index] - value), (index - middle) % 2))]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize("format", ALL, ids=NAMES)
def test_packing_is_the_specification_s_in_exact_fractions(format: Format) -> None:
    weight = hard_weight()[12:31, :32]
    packed = pack(weight, format)
    decoded = unpack(packed, format)
    for row, scale, got in zip(weight.tolist(), packed.scales[:, 0].tolist(), decoded.tolist(), strict=True):
        slow_scale, elements = slow_pack(row, format)
        assert scale == slow_scale
        assert [Fraction(value) for value in got] == [element * Fraction(2) ** (scale - 127) for element in elements]


@pytest.mark.parametrize("format", ALL, ids=NAMES)
def test_what_was_unpacked_packs_to_the_same_bytes(format: Format) -> None:
    packed = pack(hard_weight(), format)
    again = pack(unpack(packed, format), format)
    finite = packed.scales.repeat_interleave(format.block_bytes, 1) > 0
    assert torch.equal(again.codes[finite], packed.codes[finite])


@pytest.mark.parametrize("format", ALL, ids=NAMES)
def test_bits_of_a_weight_in_memory(format: Format) -> None:
    packed = pack(torch.randn(64, 256), format)
    assert packed.codes.dtype == packed.scales.dtype == torch.uint8
    bits = 8 * (packed.codes.nbytes + packed.scales.nbytes) / (64 * 256)
    assert bits == format.bits_per_weight == {4: 4.25, 6: 6.25, 8: 8.25}[format.bits]


def test_six_bits_save_61_percent_of_sixteen() -> None:
    weight = torch.randn(64, 256).bfloat16()
    packed = pack(weight, find_format("mxfp6_e2m3"))
    assert 1 - (packed.codes.nbytes + packed.scales.nbytes) / weight.nbytes == pytest.approx(0.609, abs=0.001)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2"])
def test_eight_bit_elements_are_torch_s(name: str) -> None:
    dtype = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}[name]
    codes = torch.arange(256).to(torch.uint8).reshape(8, 32)
    ours = unpack(Packed(codes, torch.full((8, 1), 127, dtype=torch.uint8)), find_format(name))
    assert torch.equal(ours.nan_to_num(7e9), codes.view(dtype).float().nan_to_num(7e9))


def test_nan_scale_makes_its_block_nan_alone() -> None:
    packed = Packed(torch.ones(1, 64, dtype=torch.uint8), torch.tensor([[255, 127]], dtype=torch.uint8))
    decoded = unpack(packed, find_format("mxint8"))
    assert decoded[0, :32].isnan().all()
    assert (decoded[0, 32:] == 1 / 64).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_pack_as_their_float32_numbers_do(dtype: torch.dtype) -> None:
    weight = hard_weight()[:8].to(dtype)
    for format in ALL:
        for ours, theirs in zip(pack(weight, format), pack(weight.float(), format), strict=True):
            assert torch.equal(ours, theirs)


def test_large_weights_are_packed_in_parts_with_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(hard_weight(), find_format("mxfp6_e3m2"))
    monkeypatch.setattr("heads.quantization.codec.ELEMENTS_AT_ONCE", 300)
    parts = pack(hard_weight(), find_format("mxfp6_e3m2"))
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales, parts.scales)


CT = {"mxfp4_e2m1": "MXFP4A16", "mxfp6_e2m3": "MXFP6A16", "mxfp8_e4m3": "MXFP8A16"}


def compressed_tensors_state(weight: Tensor, name: str) -> dict[str, Any]:
    """What compressed-tensors stores for this weight, with the scales that its observers choose."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme: QuantizationScheme = preset_name_to_scheme(CT[name], ["Linear"])
    blocks = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    layout = {"mxfp4_e2m1": "mxfp4-pack-quantized", "mxfp6_e2m3": "mxfp6-pack-quantized"}.get(name, "mxfp8-quantized")
    compressor = BaseCompressor.get_value_from_registry(layout)
    return compressor.compress({"weight": weight, "weight_scale": scale.to(weight.dtype)}, scheme)


@pytest.mark.parametrize("name", CT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bytes_as_compressed_tensors(name: str, dtype: torch.dtype) -> None:
    pytest.importorskip("compressed_tensors")
    rows = [*range(8), 9, 10, 11, 12, 13, 14, 19, *range(20, 28)]  # zeros are undefined there: log2(0)
    weight = hard_weight(dtype)[rows]
    stored = compressed_tensors_state(weight, name)
    packed = pack(weight, find_format(name), "compressed-tensors")
    assert torch.equal(stored["weight_scale"], packed.scales)
    codes = stored.get("weight_packed", stored.get("weight"))
    assert torch.equal(codes.view(torch.uint8), packed.codes)


TORCHAO = {
    "mxfp4_e2m1": "float4_e2m1fn_x2",
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp8_e4m3": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
}


@pytest.mark.parametrize("name", TORCHAO)
def test_the_same_numbers_as_torchao(name: str) -> None:
    """Where torchao is installed; elsewhere the next test holds what it wrote.

    Blocks with scale code 0 are left out: torchao divides them by 2**-126 instead of 2**-127, as a comment in it says.
    """
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    elements = TORCHAO[name] if name.startswith("mxfp6") else getattr(torch, TORCHAO[name])
    weight = hard_weight()
    theirs = mx.MXTensor.to_mx(weight, elements, block_size=32)
    packed = pack(weight, find_format(name))
    assert torch.equal(theirs.scale.view(torch.uint8).reshape(packed.scales.shape), packed.scales)
    kept = packed.scales.repeat_interleave(32, 1) > 0
    theirs, ours = theirs.dequantize(torch.float32), unpack(packed, find_format(name))
    assert torch.equal(bits_of(theirs[kept]), bits_of(ours[kept]))


# What torchao 0.18 wrote for 0.1 · (0, 1, … 31): the scale, and one byte an element (with 4 bits, two)
RECORDED = {
    "mxfp4_e2m1": (126, "00112232434454555566666666777777"),
    "mxfp6_e2m3": (126, "0002030506080a0b0d0e10111212131415161617181819191a1a1a1b1b1c1c1c"),
    "mxfp6_e3m2": (124, "000a0e11121415161617181819191a1a1a1b1b1c1c1c1c1d1d1d1d1d1e1e1e1e"),
    "mxfp8_e4m3": (120, "00555d6265686a6b6d6e70717272737475767677787879797a7a7a7b7b7c7c7c"),
    "mxfp8_e5m2": (113, "00666a6d6e70717272737474757576767677777878787879797979797a7a7a7a"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_codes_that_torchao_wrote(name: str) -> None:
    packed = pack((0.1 * torch.arange(32.0)).reshape(1, 32), find_format(name))
    codes = split_bytes(packed.codes, 6) if name.startswith("mxfp6") else packed.codes
    assert (packed.scales.item(), bytes(codes[0].tolist()).hex()) == RECORDED[name]


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(4, 40), "divisible by 32"),
        (torch.ones(32), "matrices"),
        (torch.ones(0, 32), "matrices"),
        (torch.ones(4, 32, dtype=torch.int8), "floating-point"),
        (torch.full((4, 32), math.nan), "finite"),
        (torch.full((4, 32), math.inf), "finite"),
    ],
)
def test_what_cannot_be_packed_is_refused(weight: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pack(weight, find_format("mxint8"))


def test_rules_and_formats_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'mxfp6_e2m3'"):
        find_format("mxfp6_e2m")
    with pytest.raises(ValueError, match="allowed are floor, compressed-tensors"):
        pack(torch.ones(4, 32), find_format("mxint8"), "ceil")
    with pytest.raises(ValueError, match="it is defined for mxfp4_e2m1"):
        pack(torch.ones(4, 32), find_format("mxfp8_e5m2"), "compressed-tensors")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_weight_is_exact_in_bfloat16_and_tf32(format):
    """What the GPU's kernel relies on: elements have at most eight bits, and a scale moves the exponent alone."""
    values = element_table(format, torch.device("cpu")).nan_to_num(0, 0, 0)
    weights = values[:, None] * torch.ldexp(torch.ones(200), torch.arange(-100, 100))
    exact = weights[:, 10:-20]  # within the exponents of float32, which both share
    assert torch.equal(exact.bfloat16().float(), exact)
    assert not (exact.view(torch.int32) & 0x1FFF).any()  # TF32 keeps the first ten bits after the point
