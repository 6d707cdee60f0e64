"""gru heads for vLLM: what the folder holds, and the plug-in's recurrence, which needs no vLLM, beside the heads."""

from __future__ import annotations

import importlib.util
import json
import tomllib

import pytest
import torch
from repository import ROOT
from safetensors.torch import load_file, save_file
from tiny import random_tokens, shared_model

import heads
from heads.export.drafted_logits import drafted_logits
from heads.export.exporting import export_heads, import_heads

PLUGIN = ROOT / "serving/vllm_gru"


def new_heads(model, **config):
    token_heads = heads.create("gru", model, num_heads=3, **({"unembedding": "shared"} | config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2)
    return token_heads


def recurrence():
    spec = importlib.util.spec_from_file_location("recurrence", PLUGIN / "headway_vllm_gru/recurrence.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Recurrence


@pytest.mark.parametrize("normalize", [True, False])
def test_the_folder_and_the_plug_in_draft_what_the_heads_draft(normalize, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    token_heads = new_heads(model, normalize_embeddings=normalize)
    assert "bit for bit" in export_heads(token_heads, "vllm-gru", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["EagleHeadwayGru"], "llama")
    assert (config["hidden_size"], config["vocab_size"]) == (model.config.hidden_size, model.config.vocab_size)
    assert config["num_attention_heads"] * config["head_dim"] == model.config.hidden_size
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == {f"cell.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    step = recurrence()(config["hidden_size"], config["normalize_embeddings"]).double()
    step.load_state_dict(tensors)
    tokens = random_tokens(1, 9, seed=4)
    with torch.no_grad():
        state = model.model(tokens[:, :6]).last_hidden_state[:, -1]
        wanted = token_heads.head(3, state, tokens[:, 6:])
        for token in tokens[0, 6:]:
            state = step(model.get_input_embeddings()(token[None]), state)
    torch.testing.assert_close(state, wanted, atol=1e-12, rtol=0.0)  # float64


def test_a_folder_comes_back_as_heads(tmp_path):
    model = shared_model("llama", "sdpa", torch.float32)
    token_heads = new_heads(model)
    export_heads(token_heads, "vllm-gru", tmp_path / "out")
    again = import_heads(tmp_path / "out", model)
    assert all(map(torch.equal, drafted_logits(token_heads), drafted_logits(again)))
    save_file({"cell.weight_ih": torch.ones(3)}, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match=r"has shape \(3,\)"):
        import_heads(tmp_path / "out", model)


@pytest.mark.parametrize("config", [{"unembedding": "own"}, {"hidden_offset": 1}, {"prefix_layers": 1}])
def test_what_vllm_has_no_place_for_is_refused(config, tmp_path):
    token_heads = new_heads(shared_model("llama", "sdpa", torch.float32), **config)
    with pytest.raises(ValueError, match=f"gru heads with {next(iter(config))}="):
        export_heads(token_heads, "vllm-gru", tmp_path / "out")


def test_models_that_scale_their_embeddings_or_logits_are_refused(tmp_path):
    with pytest.raises(ValueError, match="scales"):
        export_heads(new_heads(shared_model("gemma3", "eager", torch.float32)), "vllm-gru", tmp_path / "out")
    with pytest.raises(ValueError, match="medusa heads were given"):
        export_heads(heads.create("medusa", shared_model("llama")), "vllm-gru", tmp_path / "out")


def test_the_plug_in_is_a_package_that_vllm_finds():
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"headway_gru": "headway_vllm_gru:register"}
    assert "EagleHeadwayGru" in (PLUGIN / "headway_vllm_gru/model.py").read_text()
