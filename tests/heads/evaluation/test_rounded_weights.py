"""Weights are rounded to what packed ones stand for, measured, and put back as they were."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from heads.cli.quantize import quality_table
from heads.evaluation.lossy.rounded_weights import linear_layers, measure_quality, perplexity_of, rounded
from heads.evaluation.methods import GreedySettings
from heads.evaluation.perplexity_report import interval
from heads.families import create
from heads.quantization.codec import pack
from heads.quantization.formats import FORMATS, find_format
from heads.quantization.multiply import multiply


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.4, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_rounded_layers_give_the_products_of_packed_ones(model, format):
    layer, x_NI = model.model.layers[0].mlp.gate_proj, torch.randn(3, 32)
    packed, before = pack(layer.weight, format), layer.weight.clone()
    with rounded(model, format) as (size, error):
        torch.testing.assert_close(layer(x_NI), multiply(x_NI, *packed, format), atol=1e-5, rtol=1e-5)
        assert 0 < error < 0.2
    assert torch.equal(layer.weight, before)
    weights = sum(layer.weight.numel() for layer in linear_layers(model))
    rest = sum(parameter.numel() for parameter in model.parameters()) - weights
    assert size == 4 * rest + weights * format.bits_per_weight / 8


def test_weights_come_back_after_an_error(model):
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    with pytest.raises(RuntimeError, match="stop"), rounded(model, find_format("mxfp4_e2m1")):
        raise RuntimeError("stop")
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_the_unembedding_is_left_and_short_inputs_are_refused(model):
    assert model.lm_head not in list(linear_layers(model))
    model.short = nn.Linear(40, 4)
    try:
        with pytest.raises(ValueError, match="short has 40 inputs, and blocks of weights hold 32"):
            list(linear_layers(model))
    finally:
        del model.short


@torch.no_grad()
def test_perplexity_is_that_of_the_models_own_loss(model):
    text_T = torch.randint(64, (20,))
    loss = model(text_T[None], labels=text_T[None]).loss
    found = perplexity_of(model, [text_T])
    assert found.value == pytest.approx(math.exp(loss), rel=1e-4)
    assert interval(found) == "one text"


def test_a_row_for_each_format_with_heads_that_write_plain_text(model):
    token_heads = create("medusa", model, num_heads=2)
    formats = [None, find_format("mxint8"), find_format("mxfp4_e2m1")]
    texts, prompts = [torch.randint(64, (24,)) for _ in range(2)], [torch.randint(64, (1, 6))]
    settings = GreedySettings(new_tokens=8)
    found = list(measure_quality(model, formats, texts, token_heads, prompts, settings=settings))
    assert [one.format for one in found] == formats
    assert found[0].weight_error == 0 < found[1].weight_error < found[2].weight_error
    assert found[0].weight_bytes > found[1].weight_bytes > found[2].weight_bytes
    assert all(one.same_text.startswith("yes") and one.tokens_per_pass >= 1 for one in found)
    assert quality_table(found, "a model").row_count == 3
