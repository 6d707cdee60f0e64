"""Products with packed weights: every way equals the unpacked weight's product in float64, up to float32's sums."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from heads.products import kernels
from heads.quantization import cpu
from heads.quantization import multiply as multiplying
from heads.quantization.codec import Packed, pack, unpack
from heads.quantization.formats import FORMATS, find_format
from heads.quantization.multiply import multiply, multiply_plainly

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, cpu.FUSED_ROWS, cpu.FUSED_ROWS + 1)
why = kernels.why_unavailable(cpu.SOURCE)
compiled = pytest.mark.skipif(bool(why), reason=why or "there is a kernel")


def tolerance(x_NI: Tensor, packed: Packed, format) -> Tensor:
    """Float32 sums of I products in any order err by at most I · 2**-24 of the sum of magnitudes, to first order."""
    magnitudes_NO = x_NI.double().abs() @ unpack(packed, format, torch.float64).abs().T
    return magnitudes_NO * x_NI.shape[1] * 2**-24 + 1e-37


def every_code(format) -> Packed:
    """All finite codes at all places of a block, over scales from 2**-17 to 2**14."""
    codes_OI = (
        torch.arange(1 << format.bits).roll(3).repeat(70 * 96 // (1 << format.bits) + 1)[: 70 * 96].reshape(70, 96)
    )
    values_OI = (
        torch.tensor([format.value(int(code)) for code in codes_OI.flatten()]).nan_to_num(0, 0, 0).reshape(70, 96)
    )
    packed = pack(values_OI, format)
    return Packed(packed.codes, torch.arange(70 * 3).remainder(32).add(110).reshape(70, 3).to(torch.uint8))


@compiled
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_kernels_equal_the_plain_product(format):
    packed = every_code(format)
    generator = torch.Generator().manual_seed(0)
    bias_O = torch.randn(70, generator=generator)
    for rows in ROWS:
        x_NI = torch.randn(rows, 96, generator=generator)
        exact_NO = multiply_plainly(x_NI.double(), *packed, format, bias_O)
        found_NO = cpu.multiply_compiled(x_NI, *packed, format, bias_O)
        assert ((found_NO - exact_NO).abs() <= tolerance(x_NI, packed, format) + bias_O.abs() * 2**-23).all()


@compiled
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_each_code_is_decoded_at_its_place(format):
    """Rows of the identity pick single weights, so nothing is rounded: bit-equal, in both ways of the kernel."""
    packed = every_code(format)
    eye_II = torch.eye(96)
    weight_OI = unpack(packed, format)
    assert torch.equal(cpu.multiply_compiled(eye_II, *packed, format, None).T, weight_OI)
    parts = [cpu.multiply_compiled(part, *packed, format, None) for part in eye_II.split(5)]
    assert torch.equal(torch.cat(parts).T, weight_OI)


@compiled
def test_scales_at_their_ends_and_nan():
    format = find_format("mxfp4_e2m1")
    codes = torch.full((4, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[0], [1], [250], [255]], dtype=torch.uint8)
    x_NI = torch.full((3, 32), 2.0**-10)
    for found_NO in (
        cpu.multiply_compiled(x_NI, codes, scales, format, None),
        multiply_plainly(x_NI, codes, scales, format),
    ):
        assert found_NO[0, :3].tolist() == [2.0**-132, 2.0**-131, 2.0**118]
        assert found_NO[:, 3].isnan().all()
    e4m3 = find_format("mxfp8_e4m3")
    codes = torch.full((2, 32), 0x7F, dtype=torch.uint8)
    assert cpu.multiply_compiled(x_NI, codes, scales[:2], e4m3, None).isnan().all()


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_are_rounded_once(dtype):
    format = find_format("mxfp6_e2m3")
    packed = pack(torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), format)
    x_NI = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    found_NO = multiply(x_NI, *packed, format)
    assert found_NO.dtype == dtype
    assert torch.equal(found_NO, cpu.multiply_compiled(x_NI.float(), *packed, format, None).to(dtype))


def test_float64_and_gradients_take_the_plain_product():
    format = find_format("mxint8")
    weight_OI = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    packed = pack(weight_OI, format)
    x_NI = torch.randn(2, 32, dtype=torch.float64, requires_grad=True)
    out_NO = multiply(x_NI, *packed, format)
    out_NO.sum().backward()
    assert out_NO.dtype == torch.float64
    assert torch.equal(x_NI.grad, unpack(packed, format, torch.float64).sum(0).expand(2, -1))


def test_no_rows_and_no_outputs():
    format = find_format("mxfp4_e2m1")
    packed = pack(torch.ones(3, 32), format)
    assert multiply(torch.ones(0, 32), *packed, format).shape == (0, 3)
    assert multiply(torch.ones(2, 32), packed.codes[:0], packed.scales[:0], format).shape == (2, 0)


def test_a_compiled_graph_holds_the_product_as_one_node():
    format = find_format("mxfp6_e3m2")
    packed = pack(torch.randn(8, 32, generator=torch.Generator().manual_seed(4)), format)
    x_NI = torch.randn(2, 32)
    graph = torch.compile(lambda x_NI: multiply(x_NI, *packed, format) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(graph(x_NI), multiply(x_NI, *packed, format) + 1)


def test_shapes_that_do_not_belong_together_are_refused():
    format = find_format("mxfp6_e2m3")
    codes, scales = pack(torch.ones(4, 64), format)
    for x_NI, given in (
        (torch.ones(1, 32), (codes, scales)),
        (torch.ones(64), (codes, scales)),
        (torch.ones(1, 64), (codes, scales[:, :1])),
        (torch.ones(1, 64), (codes.int(), scales)),
        (torch.ones(1, 64), (codes[:, :-1], scales)),
    ):
        with pytest.raises(ValueError, match="for mxfp6_e2m3 codes are"):
            multiply(x_NI, *given, format)
    with pytest.raises(ValueError, match=r"x in torch\.int64 was given"):
        multiply(torch.ones(1, 64).long(), codes, scales, format)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_is_one_warning_and_the_plain_product(monkeypatch, tmp_path, compiler):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches = (kernels.load, kernels.why_unavailable, cpu.entry, multiplying.warn_slow)
    for cache in caches:
        cache.cache_clear()
    format = find_format("mxfp4_e2m1")
    packed = pack(torch.full((2, 32), 0.5), format)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [multiply(torch.ones(1, 32), *packed, format).tolist() for _ in range(2)]
    assert found == [[[16.0, 16.0]]] * 2
    assert ["slower than 16-bit weights" in str(one.message) for one in caught] == [True]
    for cache in caches:
        cache.cache_clear()
