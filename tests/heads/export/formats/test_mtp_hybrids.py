"""Modules of hybrid backbones: a Qwen3-Next or Qwen3.5 folder is read, decodes exactly, and is written back."""

from __future__ import annotations

import pytest
import torch
from family_checks import check_greedy
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from heads.export.exporting import export_heads, import_heads
from heads.export.formats import recognise

PARTS = {"fc": (1, 2), "norm": (1,), "pre_fc_norm_embedding": (1,), "pre_fc_norm_hidden": (1,)}


def write_folder(folder, model):
    """The model's folder with one module: the layer is like the last full one, all of it random."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(1)
    layer = f"model.layers.{model.config.num_hidden_layers - 1}."
    module = {key.replace(layer, "mtp.layers.0."): tensor for key, tensor in tensors.items() if key.startswith(layer)}
    width = model.config.hidden_size
    for name, shape in PARTS.items():
        module[f"mtp.{name}.weight"] = torch.zeros([width * size for size in shape], dtype=torch.float64)
    for name, tensor in module.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        module[name] = tensor + noise / tensor.shape[-1] ** 0.5
    save_file(tensors | module, path, metadata={"format": "pt"})
    return module


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_a_module_is_read_decodes_and_is_written_back(name, tmp_path):
    model = tiny_model(name, attn="sdpa")
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    module = write_folder(tmp_path / "model", model)
    assert recognise(tmp_path / "model") == "mtp"
    token_heads = import_heads(tmp_path / "model", model)
    for ours, theirs in (("eh_proj", "fc"), ("enorm", "pre_fc_norm_embedding"), ("hnorm", "pre_fc_norm_hidden")):
        assert torch.equal(getattr(token_heads.layers[0], ours).weight, module[f"mtp.{theirs}.weight"])
    export_heads(token_heads, "mtp", tmp_path / "same", model=str(tmp_path / "model"))
    files = [load_file(tmp_path / place / "model.safetensors") for place in ("model", "same")]
    assert all(torch.equal(tensor, files[1][key]) for key, tensor in files[0].items())
    check_greedy(token_heads, steps=4)
    export_heads(token_heads, "mtp", tmp_path / "trained", model=str(tmp_path / "model"))
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert {key for key, tensor in files[0].items() if not torch.equal(tensor, after[key])} == set(module)
