"""Mixture-of-experts backbones decode exactly: each node of a tree wakes its own experts."""

import pytest
import torch
from moe_models import CONFIGS, moe_model

import heads
from heads.backbone.model import Backbone
from heads.families import create


@pytest.mark.parametrize(("family", "config"), [("grounded", {"prefix_layers": 1}), ("dynamo", {"start": "copied"})])
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_plain_generation_s(name, family, config):
    model = moe_model(name, torch.float64)
    model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    own = create(family, Backbone(model), num_heads=3, **config).double()
    prompt = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    expected = model.generate(prompt, do_sample=False, max_new_tokens=32)
    decoding = heads.TreeDecoding(own, lookup=4)
    assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=32, custom_generate=decoding), expected)
    assert len(set(expected[0, 12:].tolist())) > 8
