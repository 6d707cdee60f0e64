"""A packed linear layer is a plain one over the unpacked weight, forward and backward."""

import copy

import pytest
import torch
from torch import nn

from heads.quantization.codec import unpack
from heads.quantization.formats import FORMATS, find_format
from heads.quantization.linear import MXLinear


def make_layer(bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[MXLinear, nn.Linear]:
    torch.manual_seed(0)
    layer = MXLinear.of(nn.Linear(64, 24, bias=bias, dtype=dtype), find_format("mxfp6_e2m3"))
    return layer, layer.unpacked(dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradients_are_the_plain_layer_s(bias: bool) -> None:
    layer, plain = make_layer(bias)
    x = torch.randn(2, 5, 64, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    plain(other).square().sum().backward()
    assert torch.equal(layer(x), plain(other))
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-12)  # float64: another order of sums
    if bias:
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=1e-12, atol=1e-12)


def test_no_unpacked_weight_is_kept_for_backward() -> None:
    layer, _ = make_layer()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(torch.randn(3, 64, dtype=torch.float64, requires_grad=True))
    assert max(kept, default=0) < 64 * 24


def test_casting_and_copying_leave_the_codes() -> None:
    layer, plain = make_layer()
    cast = copy.deepcopy(layer).to(torch.bfloat16)
    assert torch.equal(cast.weight, layer.weight)
    assert cast.bias.dtype == torch.bfloat16
    x = torch.randn(3, 64)
    # Both round to bfloat16's 8 bits; ours once, after a sum in float32
    torch.testing.assert_close(cast(x.bfloat16()), plain.bfloat16()(x.bfloat16()), rtol=2**-6, atol=2**-6)


def test_autocast_multiplies_in_its_dtype() -> None:
    layer, _ = make_layer(dtype=torch.float32)
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_layer_holds_is_what_its_format_says(name: str) -> None:
    layer = MXLinear.of(nn.Linear(128, 16, bias=False), find_format(name))
    held = sum(8 * parameter.nbytes for parameter in layer.parameters())
    assert held / (128 * 16) == find_format(name).bits_per_weight
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert torch.equal(layer.unpacked(torch.float32).weight, unpack(layer.packed, layer.format))
