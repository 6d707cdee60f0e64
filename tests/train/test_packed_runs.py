"""A whole run on a backbone with packed microscaling weights: trained, saved, loaded back, decoded."""

import json

import pytest
import torch
from tiny import random_tokens
from tiny_run import prepare, train, write_config
from transformers import AutoModelForCausalLM

import heads
from heads.backbone.loading import load_backbone
from heads.quantization.linear import MXLinear
from train.config import read_config
from train.plan.plan import make_plan

PACKED = {"quant_method": "headway_mx", "format": "mxfp6_e2m3", "skip": ["down_proj"]}


@pytest.mark.parametrize("family", ["grounded", "dynamo", "eagle"])
def test_heads_are_trained_on_packed_weights_and_load_back_on_them(family, tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    changes = {"family": family, "backbone": {"name_or_path": str(tmp_path / "base"), "quantization": PACKED}}
    train(write_config(tmp_path, "run", **changes, trainer={"max_steps": 6}))
    losses = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval_head1_top1" in line for line in losses) >= 1
    model, token_heads = heads.load_with_backbone(tmp_path / "run" / "last", dtype="float32")
    packed = [name for name, module in model.named_modules() if isinstance(module, MXLinear)]
    assert len(packed) == 6 * model.config.num_hidden_layers  # all but down_proj and the unembedding
    plain = heads.create(family, AutoModelForCausalLM.from_pretrained(tmp_path / "base"), num_heads=2)
    untrained = {name: tensor for name, tensor in plain.state_dict().items() if tensor.is_floating_point()}
    trained = token_heads.state_dict()
    assert any(not torch.equal(trained[name], tensor) for name, tensor in untrained.items())
    prompt = random_tokens(1, 8, seed=4)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model, token_heads = model.double(), token_heads.double()
    wanted = model.generate(prompt, **settings)
    found = model.generate(prompt, **settings, custom_generate=heads.TreeDecoding(token_heads, lookup=0))
    assert torch.equal(found, wanted)


def test_plan_counts_the_bytes_that_are_loaded(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    backbone = {"name_or_path": str(tmp_path / "base"), "quantization": PACKED}
    config = read_config(["--config", write_config(tmp_path, "run", backbone=backbone)])
    planned = make_plan(config, device_type="cpu", tokens=1000).backbone
    model = load_backbone(config.backbone, "cpu")
    assert planned.frozen_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert planned.frozen_bytes < 0.7 * 4 * planned.numel  # float32, but for what is packed
