"""The GPU's kernel: on a GPU, or slowly in Triton's interpreter where there is Triton and no GPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from heads.quantization import gpu
from heads.quantization.codec import Packed, pack, unpack
from heads.quantization.formats import FORMATS, find_format

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU; TRITON_INTERPRET=1 runs these in Triton's interpreter", allow_module_level=True)

from heads.quantization.gpu_kernel import TILES  # noqa: E402

pytestmark = [pytest.mark.cuda] if DEVICE == "cuda" else []

TILE_IDS = [f"{tile.kwargs['outputs_at_once']}x{tile.kwargs['inputs_at_once']}" for tile in TILES]
OUTPUTS, INPUTS = 19, 288  # neither fills a tile


def every_code(format) -> Packed:
    """All codes that are finite, at many places of a block, over scales from 2**-17 to 2**14."""
    codes = torch.arange(1 << format.bits)[
        [format.value(code) == format.value(code) for code in range(1 << format.bits)]
    ]
    values = torch.tensor([format.value(int(code)) for code in codes]).nan_to_num(0, 0, 0)
    weight_OI = values.roll(3).repeat(OUTPUTS * INPUTS // len(values) + 1)[: OUTPUTS * INPUTS].reshape(OUTPUTS, INPUTS)
    scales = torch.arange(OUTPUTS * INPUTS // 32).remainder(32).add(110).reshape(OUTPUTS, -1).to(torch.uint8)
    return Packed(pack(weight_OI, format).codes.to(DEVICE), scales.to(DEVICE))


@pytest.mark.parametrize("tile", TILES, ids=TILE_IDS)
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_each_code_is_decoded_at_its_place(format, tile):
    """Rows of the identity pick single weights, so nothing is rounded: bit-equal, however many programs share sums."""
    packed = every_code(format)
    eye_II = torch.eye(INPUTS, device=DEVICE)[:70]
    weight_OI = unpack(packed, format)
    for parts in (1, 4):
        assert torch.equal(gpu.few_rows(eye_II, *packed, format, parts, tile).T, weight_OI[:, :70])
    last_II = torch.eye(INPUTS, device=DEVICE)[-9:]
    assert torch.equal(gpu.few_rows(last_II, *packed, format, 2, tile).T, weight_OI[:, -9:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 70])
def test_products_are_the_unpacked_weight_s(dtype, rows, monkeypatch):
    """Both factors are exact in every dtype, so sums err as float32's, by at most I · 2**-24 of their magnitudes."""
    if DEVICE == "cpu":  # the interpreter has no products in bfloat16 (NumPy has none)
        monkeypatch.setitem(gpu.PRECISION, torch.bfloat16, "ieee")
    format = find_format("mxfp6_e2m3")
    packed, generator = every_code(format), torch.Generator().manual_seed(rows)
    x_NI = torch.randn(rows, INPUTS, generator=generator).to(DEVICE, dtype)
    weight_OI = unpack(packed, format, torch.float64)
    found_NO = gpu.few_rows(x_NI, *packed, format, 2, TILES[1])
    allowed_NO = x_NI.double().abs() @ weight_OI.abs().T * INPUTS * 2**-24
    assert ((found_NO - x_NI.double() @ weight_OI.T).abs() <= allowed_NO).all()


@pytest.mark.parametrize(
    ("name", "code", "scale"),
    [
        ("mxfp4_e2m1", 0x22, 255),
        ("mxfp8_e4m3", 0x7F, 127),
        ("mxfp8_e4m3", 0xFF, 127),
        ("mxfp8_e5m2", 0x7D, 127),
        ("mxfp8_e5m2", 0x7C, 127),
        ("mxfp8_e5m2", 0xFC, 127),
        ("mxint8", 0x80, 0),
        ("mxfp4_e2m1", 0x22, 0),
        ("mxfp6_e3m2", 0x41, 250),
    ],
)
def test_special_elements_and_the_ends_of_scales(name, code, scale):
    format = find_format(name)
    codes = torch.full((2, format.block_bytes), code, dtype=torch.uint8, device=DEVICE)
    packed = Packed(codes, torch.full((2, 1), scale, dtype=torch.uint8, device=DEVICE))
    x_NI = torch.ones(1, 32, device=DEVICE)
    found_NO, wanted_NO = gpu.few_rows(x_NI, *packed, format, 1, TILES[1]), unpack(packed, format).sum(1)[None]
    torch.testing.assert_close(found_NO, wanted_NO, rtol=2**-20, atol=0, equal_nan=True)


def test_codes_that_are_not_aligned_are_copied():
    format = find_format("mxfp6_e3m2")
    packed = every_code(format)
    shifted = torch.cat([packed.codes.new_zeros(1), packed.codes.flatten()])[1:].view_as(packed.codes)
    x_NI = torch.ones(2, INPUTS, device=DEVICE)
    assert torch.equal(
        gpu.few_rows(x_NI, shifted, packed.scales, format, 1, TILES[0]),
        gpu.few_rows(x_NI, *packed, format, 1, TILES[0]),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_are_multiplied_with_decoded_weights(dtype, monkeypatch):
    monkeypatch.setattr(gpu, "DECODED_AT_ONCE", 7 * INPUTS)  # 19 outputs in three parts
    format = find_format("mxfp4_e2m1")
    scale = 2.0**-7 if dtype == torch.float16 else 1.0  # of x, so that no output is beyond float16
    packed, bias_O = every_code(format), torch.arange(float(OUTPUTS), device=DEVICE)
    x_NI = torch.randn(150, INPUTS, generator=torch.Generator().manual_seed(0)).mul(scale).to(DEVICE, dtype)
    exact_NO = x_NI.double() @ unpack(packed, format, torch.float64).T + bias_O
    found_NO = gpu.many_rows(x_NI, packed, format, bias_O)
    assert found_NO.dtype == dtype
    torch.testing.assert_close(found_NO.double(), exact_NO, rtol=2**-6, atol=1e-3 * float(exact_NO.abs().max()))


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 64, 200])
def test_products_on_a_gpu_take_the_kernel(rows):
    from heads.quantization.multiply import multiply, multiply_plainly

    format = find_format("mxfp6_e2m3")
    packed = Packed(*(part.cuda() for part in pack(torch.randn(512, 1024), format)))
    x_NI = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    assert gpu.why_unavailable() == ""
    torch.testing.assert_close(
        multiply(x_NI, *packed, format), multiply_plainly(x_NI, *packed, format), rtol=2**-7, atol=1e-2
    )
