"""Packed weights give the plain ones' numbers and text, follow every edit, and stay out of training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import random_tokens, tiny_model
from torch import Tensor, nn
from tree_runs import texts_with_packed_heads

import heads
from heads.products import packed
from heads.products.packed import LaidOutProduct, pack_weights, what_stops_packing


def packed_pair() -> tuple[Any, Any]:
    """A float32 model as it is, and a packed copy."""
    plain = tiny_model("llama").float().requires_grad_(False)
    packed = copy.deepcopy(plain)
    pack_weights(packed)
    return plain, packed


def products_of(model: Any) -> list[LaidOutProduct]:
    return [layer.forward.func for layer in model.modules() if "forward" in vars(layer)]


def test_every_linear_layer_but_the_unembedding_is_packed() -> None:
    model = tiny_model("llama").float()
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert pack_weights(model) == len(linear) - 1 == pack_weights(model)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 64])
@torch.no_grad()
def test_logits_are_the_plain_ones(rows: int) -> None:
    plain, packed = packed_pair()
    tokens_BT = random_tokens(1, rows)
    # float32 sums of some dozens of terms in another order
    torch.testing.assert_close(packed(tokens_BT).logits, plain(tokens_BT).logits, atol=1e-5, rtol=1e-5)
    assert all(one.packed is not None for one in products_of(packed))


@torch.no_grad()
def test_a_product_without_rows_is_plain() -> None:
    layer = nn.Linear(16, 8)
    pack_weights(layer)
    assert layer(torch.ones(0, 16)).shape == (0, 8)


@pytest.mark.parametrize("family", heads.families())
def test_trees_over_packed_weights_write_the_plain_text(family: str) -> None:
    plain, packed = packed_pair()
    expected, found = texts_with_packed_heads(family, plain, packed)
    assert torch.equal(found, expected)
    assert any(one.packed is not None for one in products_of(packed))


@torch.no_grad()
def test_an_edited_weight_is_packed_anew() -> None:
    layer, x_RI = nn.Linear(16, 8), torch.randn(4, 16)
    pack_weights(layer)
    layer(x_RI)
    layer.weight.mul_(2)
    torch.testing.assert_close(layer(x_RI), nn.functional.linear(x_RI, layer.weight, layer.bias))
    layer.load_state_dict(nn.Linear(16, 8).state_dict())
    torch.testing.assert_close(layer(x_RI), nn.functional.linear(x_RI, layer.weight, layer.bias))


@torch.no_grad()
def test_another_weight_at_the_same_address_is_packed_anew() -> None:
    """As where the allocator gives a freed weight's memory to the next one: versions begin at 0 again."""
    layer, x_RI, memory_OI = nn.Linear(16, 8), torch.randn(4, 16), torch.randn(8, 16)
    layer.weight = nn.Parameter(memory_OI)
    pack_weights(layer)
    layer(x_RI)
    before = layer.weight.data_ptr(), layer.weight._version
    memory_OI.numpy()[:] *= 2  # counts no version up
    layer.weight = nn.Parameter(torch.from_numpy(memory_OI.numpy()))
    assert (layer.weight.data_ptr(), layer.weight._version) == before
    torch.testing.assert_close(layer(x_RI), nn.functional.linear(x_RI, layer.weight, layer.bias))


@torch.no_grad()
def test_packing_again_takes_in_what_was_edited_through_data() -> None:
    layer, x_RI = nn.Linear(16, 8), torch.randn(4, 16)
    pack_weights(layer)
    layer(x_RI)
    layer.weight.data.mul_(2)
    pack_weights(layer)
    torch.testing.assert_close(layer(x_RI), nn.functional.linear(x_RI, layer.weight, layer.bias))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_gradients_are_those_of_the_plain_layer(name: str) -> None:
    """Also where only one of both learns."""

    def gradient(layer: nn.Linear) -> Tensor:
        (found,) = torch.autograd.grad(layer(torch.ones(4, 16)).square().sum(), [getattr(layer, name)])
        return found

    layer = nn.Linear(16, 8).requires_grad_(False)
    getattr(layer, name).requires_grad_(True)
    expected = gradient(layer)
    pack_weights(layer)
    assert torch.equal(gradient(layer), expected)


@torch.no_grad()
def test_a_copy_packs_its_own_weight_and_a_cast_layer_is_plain() -> None:
    layer, x_RI = nn.Linear(16, 8), torch.randn(4, 16)
    pack_weights(layer)
    layer(x_RI)
    other = copy.deepcopy(layer)
    other.weight.zero_()
    torch.testing.assert_close(other(x_RI), other.bias.expand(4, -1))
    double = layer.double()
    assert torch.equal(double(x_RI.double()), nn.functional.linear(x_RI.double(), double.weight, double.bias))


def test_what_cannot_be_packed_is_refused_and_nothing_is_packed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    with pytest.raises(
        ValueError, match="pack_weights was given a Sequential with weights in float64, and only float32, "
    ):
        pack_weights(model)
    assert products_of(model) == []
    assert "packing is for CPUs" in what_stops_packing(torch.ones(2, 2, device="meta"))


def test_a_pytorch_without_onednn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "onednn_multiplies", lambda dtype: False)
    assert what_stops_packing(torch.ones(2, 2)) == (
        "weights that this PyTorch cannot pack, since it has no oneDNN; leave them unpacked"
    )
