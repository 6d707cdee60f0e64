"""Mixture-of-experts backbones that were trained: their stacked experts are saved one by one, and read again."""

import pytest
import torch
from moe_models import CONFIGS, moe_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from heads.checkpoint.backbone import read_model, write_model


def zeroed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_saved_is_read_into_the_same_tensors(name, tmp_path):
    model = moe_model(name)
    write_model(model, tmp_path, dtype=torch.float32)
    assert not set(load_file(tmp_path / "model.safetensors")) <= set(model.state_dict())
    other = zeroed(moe_model(name))
    kept = dict(other.named_parameters())
    read_model(other, tmp_path)
    assert all(kept[n] is p for n, p in other.named_parameters())  # optimizers hold them
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for n, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[n], tensor)
        assert torch.equal(loaded.state_dict()[n], tensor)


def test_an_expert_that_is_missing_is_an_error(tmp_path):
    model = moe_model("qwen3_moe")
    write_model(model, tmp_path, dtype=torch.float32)
    file = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if ".layers.1.mlp.experts" not in n}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"missing or unexpected tensors model\.layers\.1\.mlp\.experts"):
        read_model(moe_model("qwen3_moe"), tmp_path)
