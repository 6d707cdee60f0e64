"""FLOPs of a pass against counts by hand, however its products are made, and which are not counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_models import moe_model
from tiny import random_tokens, tiny_model
from torch import nn

from heads.evaluation.speed.flops import flops_of, why_not_counted
from heads.products.packed import pack_weights
from heads.quantization.formats import find_format
from heads.quantization.linear import MXLinear

LENGTH = 7


def by_hand(model: Any) -> int:
    """Two operations for each weight and token, and for each query's width of all pairs twice: scores and values."""
    weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
    width = model.config.num_attention_heads * model.config.head_dim
    return 2 * LENGTH * weights + model.config.num_hidden_layers * 2 * 2 * LENGTH**2 * width


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_pass_counts_its_linear_layers_and_attention(packed: bool, attention: Any) -> None:
    """Four heads of queries read two of keys and values."""
    model = tiny_model("llama", attn=attention, dtype=torch.float32)
    if packed:
        pack_weights(model)
    flops, output = flops_of(lambda: model(random_tokens(1, LENGTH)))
    assert output.logits.shape[:2] == (1, LENGTH)
    assert flops == by_hand(model)


@torch.no_grad()
def test_experts_count_alike_in_one_call_and_one_by_one() -> None:
    model = moe_model("mixtral")
    tokens = random_tokens(1, LENGTH)

    def counted(experts: str) -> int:
        model.set_experts_implementation(experts)
        return flops_of(lambda: model(tokens))[0]

    assert counted("grouped_mm") == counted("eager")


def test_compiled_passes_are_counted_as_they_run_uncompiled() -> None:
    weight_OI = torch.ones(4, 8)
    product = torch.compile(lambda x: x @ weight_OI.T, fullgraph=True, backend="eager")
    x = torch.ones(3, 8)
    for _ in range(2):  # never compiled before, and compiled
        assert flops_of(lambda: product(x))[0] == 2 * 3 * 8 * 4
        product(x)


def test_microscaling_weights_are_not_counted() -> None:
    layer = nn.Linear(32, 8)
    assert why_not_counted(layer) == ""
    packed = nn.Sequential(MXLinear.of(layer, find_format("mxint8")))
    assert "microscaling" in why_not_counted(layer, packed)
