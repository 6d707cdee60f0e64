"""humming-kernels as another way of multiplying: what it is given, and what stays ours.

Its kernels need a GPU. Here a stand-in takes their place that reads a weight as humming documents it, bit by bit; where
humming-kernels is installed, the code that it unpacks weights with is compiled for the CPU and compared too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from heads.quantization import humming_kernels
from heads.quantization.codec import unpack
from heads.quantization.formats import FORMATS, find_format
from heads.quantization.humming_kernels import HummingLinear, as_humming, use_humming
from heads.quantization.linear import MXLinear

FLOATS = [name for name, format in FORMATS.items() if format.exponent_bits]
HEADER = "include/humming/kernel/pack_weight.cuh"


class StandIn(nn.Module):
    """humming.layer.HummingLayer in plain Python: codes are consecutive bits of little-endian 32-bit words."""

    def __init__(self, *, shape_n, shape_k, weight_config, has_bias, torch_dtype) -> None:
        super().__init__()
        assert torch_dtype == torch.bfloat16
        assert weight_config["group_size"] == 32
        self.shape, self.has_bias = (shape_n, shape_k), has_bias
        (self.format,) = [f for f in FORMATS.values() if weight_config["dtype"] == name_of(f)]

    def load_from_tensors(self, tensors) -> None:
        assert sorted(tensors) == sorted(["weight", "weight_scale", *["bias"] * self.has_bias])
        assert tensors["weight"].dtype == torch.int32
        assert tensors["weight"].shape == (self.shape[0], self.shape[1] * self.format.bits // 32)
        self.weight, self.scale, self.bias = tensors["weight"], tensors["weight_scale"], tensors.get("bias")

    def transform(self) -> None:
        values = [self.format.value(code) for code in range(1 << self.format.bits)]
        elements = torch.tensor([[values[c] for c in codes_of(row, self.format.bits)] for row in self.weight.tolist()])
        self.dense = elements * self.scale.float().repeat_interleave(32, 1)

    def forward(self, x_NI):
        return nn.functional.linear(x_NI.float(), self.dense, None if self.bias is None else self.bias.float()).to(
            x_NI.dtype
        )


def name_of(format) -> str:
    return f"float{format.bits}e{format.exponent_bits}m{format.mantissa_bits}"


def codes_of(words, bits: int) -> list[int]:
    whole = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return [(whole >> (bits * i)) & ((1 << bits) - 1) for i in range(32 * len(words) // bits)]


def make_layer(name: str, bias: bool = True) -> MXLinear:
    torch.manual_seed(0)
    return MXLinear.of(nn.Linear(128, 64, bias=bias, dtype=torch.bfloat16), find_format(name)).requires_grad_(False)


@pytest.fixture
def humming(monkeypatch) -> None:
    """A machine with humming and a GPU, as far as our code asks."""
    module = types.ModuleType("humming.layer")
    module.HummingLayer = StandIn
    monkeypatch.setitem(sys.modules, "humming", types.ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", module)
    monkeypatch.setattr(humming_kernels, "why_unavailable", lambda: "")
    monkeypatch.setattr(humming_kernels, "on_gpu", lambda layer: True)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_humming_is_given_the_weight_that_the_codes_stand_for(humming, name, bias) -> None:
    layer = make_layer(name, bias)
    model = nn.Sequential(layer)
    assert use_humming(model) == 1
    assert torch.equal(model[0].humming.dense, unpack(layer.packed, layer.format))
    x = torch.randn(2, 3, 128).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(model(x), layer(x), rtol=2**-6, atol=2**-6)  # bfloat16, sums in other orders
    assert isinstance(model[0], HummingLinear)


def test_what_humming_does_not_take_is_ours(humming) -> None:
    narrow = MXLinear.of(nn.Linear(96, 64), find_format("mxfp6_e2m3"))
    model = nn.Sequential(make_layer("mxfp6_e2m3"), make_layer("mxint8"), narrow)
    assert use_humming(model) == 1
    assert [type(layer) for layer in model] == [HummingLinear, MXLinear, MXLinear]
    model[0].humming.forward = None  # gradients and other dtypes do not reach it
    x = torch.randn(1, 128, requires_grad=True)
    model[0](x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert model[0](x).dtype == torch.float32


def test_saving_casting_and_dequantising_are_those_of_the_packed_layer(humming) -> None:
    layer = make_layer("mxfp4_e2m1")
    model = nn.Sequential(layer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    use_humming(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()
    assert torch.equal(model.float()[0].unpacked(torch.float32).weight, unpack(layer.packed, layer.format))


def test_without_the_package_or_a_layer_for_it_a_sentence_says_so(humming, monkeypatch) -> None:
    with pytest.raises(ValueError, match="Sequential has no packed layer for humming-kernels"):
        use_humming(nn.Sequential(make_layer("mxint8")))
    monkeypatch.setattr(humming_kernels, "why_unavailable", lambda: "PyTorch finds no GPU")
    with pytest.raises(ValueError, match="cannot multiply here: PyTorch finds no GPU; without use_humming"):
        use_humming(nn.Sequential(make_layer("mxfp6_e2m3")))


def find_header() -> Path | None:
    spec = importlib.util.find_spec("humming")
    return Path(spec.submodule_search_locations[0]) / HEADER if spec and spec.submodule_search_locations else None


@pytest.mark.skipif(find_header() is None, reason="humming-kernels is not installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", FLOATS)
def test_humming_s_own_unpacking_finds_our_codes(name, tmp_path) -> None:
    """The function that its kernel runs, of one block of 32 codes, built as plain C++."""
    header = find_header()
    functions = (
        header.read_text().partition("template <uint32_t kNumBits>\n__global__")[0].partition("#include <humming")
    )
    source = tmp_path / "unpack.cpp"
    bits = find_format(name).bits
    source.write_text(
        "#include <cstdint>\n#define CUDA_INLINE inline\n#define PRAGMA_UNROLL\n"
        "#define MIN(a, b) ((a) < (b) ? (a) : (b))\n"
        + functions[2].partition("\n")[2]
        + f'\nextern "C" void unpack(uint32_t* in, uint32_t* out) {{ common_unpack_weight<{bits}>(in, out); }}\n'
    )
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "unpack.so")], check=True)
    words = as_humming(make_layer(name))["weight"].reshape(-1, bits).contiguous()
    found = torch.empty(len(words), 32, dtype=torch.int32)
    unpack_one = ctypes.CDLL(str(tmp_path / "unpack.so")).unpack
    for row, out in zip(words, found, strict=True):
        unpack_one(ctypes.c_void_p(row.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    assert found.tolist() == [codes_of(row, bits) for row in words.tolist()]


@pytest.mark.cuda
@pytest.mark.skipif(bool(humming_kernels.why_unavailable()), reason=humming_kernels.why_unavailable() or "there is one")
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("rows", [1, 16, 70])
def test_humming_s_products_are_the_unpacked_weight_s(name, rows) -> None:
    layer = MXLinear.of(nn.Linear(512, 256, dtype=torch.bfloat16), find_format(name)).cuda()
    model, x_NI = nn.Sequential(layer), torch.randn(rows, 512).cuda().bfloat16()
    use_humming(model)
    with torch.no_grad():
        exact_NO = layer.unpacked(torch.float64)(x_NI.double())
        torch.testing.assert_close(model(x_NI).double(), exact_NO, rtol=2**-7, atol=2**-5)
