"""LoRA on a packed backbone: it starts as the backbone, learns, and is saved and loaded beside the packed weights."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from tiny import tiny_model
from transformers import AutoModelForCausalLM

import heads
from heads.backbone.model import Backbone
from heads.checkpoint.adapter import LoraSettings, add_adapter, put_on_adapter
from heads.quantization.linear import MXLinear


def test_an_adapter_on_packed_layers_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "plain")
    config = heads.MXConfig("mxfp6_e2m3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16)
    other, prompt_1T = copy.deepcopy(model).eval(), torch.arange(1, 9)[None]
    before = model.eval()(prompt_1T).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapter(model, LoraSettings(rank=2))
    assert torch.equal(model(prompt_1T).logits, before)
    model(prompt_1T, labels=prompt_1T).loss.backward()
    learning = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert learning
    assert all("lora_" in name and p.dtype == torch.float32 for name, p in learning.items())
    for name, p in learning.items():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    model.save_pretrained(tmp_path / "adapter")
    put_on_adapter(other, tmp_path / "adapter")
    assert isinstance(other.model.layers[0].self_attn.q_proj.base_layer, MXLinear)
    assert torch.equal(other(prompt_1T).logits, model(prompt_1T).logits)
    assert not torch.equal(other(prompt_1T).logits, before)
    layer = heads.create("dynamo", Backbone(other), num_heads=1, start="copied").layers[0][0]
    merged = other.model.layers[-1].self_attn.q_proj
    expected = merged.base_layer.unpacked(torch.float32).weight + merged.get_delta_weight("default")
    assert torch.equal(layer.self_attn.q_proj.weight, expected.to(layer.self_attn.q_proj.weight.dtype))
