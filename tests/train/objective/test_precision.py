"""Frozen backbones in less than float32: bfloat16 beside float32, 4 and 8 bits where their library is installed."""

import importlib.util

import pytest
import torch
from tiny import random_tokens, tiny_model

from heads.backbone.loading import BackboneConfig, load_backbone
from heads.backbone.model import Backbone
from heads.backbone.projection import read_projection
from heads.families import create
from train.objective.model import TrainedModel

QUANTIZED = {
    "bitsandbytes, 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes, 8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama", attn="sdpa", dtype=torch.float32).save_pretrained(tmp_path)
    return str(tmp_path)


def heads_on(model, family="grounded"):
    backbone = Backbone(model)
    torch.manual_seed(1)
    options = {} if family == "mtp" else {"unembedding": "own"}  # mtp heads share the backbone's
    token_heads = create(family, backbone, num_heads=2, **options).float()
    for p in token_heads.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return TrainedModel(backbone, token_heads).train()


def step(model):
    """Loss and gradients of one batch."""
    tokens = random_tokens(4, 24)
    whole = {"loss_mask": torch.ones_like(tokens, dtype=torch.bool), "document_ids": torch.zeros_like(tokens)}
    loss = model(input_ids=tokens, **whole)["loss"]
    loss.backward()
    return loss.detach(), [p.grad for p in model.token_heads.parameters()]


@pytest.mark.parametrize("family", ["medusa", "grounded", "eagle", "mtp", "dynamo"])
def test_float32_heads_learn_the_same_from_a_bfloat16_backbone(folder, family):
    found = []
    for dtype in ("float32", "bfloat16"):
        model = heads_on(load_backbone(BackboneConfig(name_or_path=folder, dtype=dtype), "cpu"), family)
        assert model.backbone.dtype == getattr(torch, dtype)
        assert {p.dtype for p in model.token_heads.parameters()} == {torch.float32}
        found.append(step(model))
    (exact, exact_gradients), (half, half_gradients) = found
    # bfloat16 keeps 8 bits: three layers leave hidden states about 1 % off, and losses and gradients with them.
    assert half.item() == pytest.approx(exact.item(), rel=2e-2)
    for one, other in zip(half_gradients, exact_gradients, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 0.1 * other.norm()


@pytest.mark.cuda
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("quantization", QUANTIZED.values(), ids=QUANTIZED)
def test_a_quantised_backbone_is_trained_on(folder, quantization):
    config = BackboneConfig(name_or_path=folder, dtype="bfloat16", quantization=quantization)
    model = heads_on(load_backbone(config, "cuda")).to("cuda")
    loss, gradients = step(model)
    assert loss.isfinite()
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert model.backbone.projection.weight.is_floating_point()


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed: nothing is missing"
)
def test_a_missing_library_is_said_in_a_sentence(folder):
    config = BackboneConfig(name_or_path=folder, quantization=QUANTIZED["bitsandbytes, 4 bits"])
    with pytest.raises(ValueError, match=r"could not be loaded .*bitsandbytes"):
        load_backbone(config, "cpu")


def test_a_quantised_unembedding_is_refused(folder):
    """Heads are trained against its logits, and a shared one passes gradients on: it has to be floating-point."""
    model = load_backbone(BackboneConfig(name_or_path=folder), "cpu")
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter((weight * 16).to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"keep the lm_head unquantised \(skip_modules\)"):
        read_projection(model, model.model.norm)
