"""One folder for TGI, LoRAX and vLLM, and TensorRT-LLM's: each program's reading restated, from the file alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_medusa import head_logits
from throwaway_families import make_heads
from tiny import random_tokens, shared_model

import heads
from heads.export.exporting import export_heads, import_heads
from heads.export.formats import recognise

KINDS = [("own", 1), ("own", 2), ("shared", 1)]


def made(unembedding: str = "own", num_blocks: int = 1) -> Any:
    model = shared_model("llama", "sdpa", torch.float64)
    return make_heads("medusa", heads.Backbone(model), unembedding=unembedding, num_blocks=num_blocks)


def run(blocks: list[list[tuple]], unembeddings: list[torch.Tensor], hidden: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for layers, unembedding in zip(blocks, unembeddings, strict=True):
        x = hidden
        for weight, bias in layers:
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        found.append(x @ unembedding.T)
    return found


def as_tgi(folder: Path, backbone_weight: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Version 1 where `0.{n}.weight` is there, else version 2 with one block; LoRAX chooses in the same way."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "medusa_lm_head.safetensors")
    assert "architectures" not in config
    assert "base_model_name_or_path" in config
    float(config.get("version", 1))  # LoRAX
    assert "lm_head.weight" not in tensors  # TGI: a key of two files is an error
    heads_, layers = config["medusa_num_heads"], config["medusa_num_layers"]
    one = f"0.{layers}.weight" in tensors
    assert one or layers == 1
    blocks = [
        [(tensors[f"{k}.{n}.linear.weight"], tensors[f"{k}.{n}.linear.bias"]) for n in range(layers)]
        for k in range(heads_)
    ]
    return run(blocks, [tensors[f"{k}.{layers}.weight"] if one else backbone_weight for k in range(heads_)], hidden)


def as_vllm(folder: Path, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Keys of config.json rewritten, original names mapped, what has no place dropped without a word."""
    config = json.loads((folder / "config.json").read_text())
    for key in list(config):
        if "num" in key and "heads" in key:
            config["num_heads"] = config.pop(key)
        elif "num" in key and "layers" in key:
            config["num_hidden_layers"] = config.pop(key)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    layers = config["num_hidden_layers"]
    blocks = [
        [
            (
                tensors[f"{k}.{n}.linear.weight"],
                tensors[f"{k}.{n}.linear.bias"] if config.get("medusa_fc_bias", False) else None,
            )
            for n in range(layers)
        ]
        for k in range(config["num_heads"])
    ]
    shared = tensors.get("lm_heads.0.weight") if config.get("original_lm_head", False) else None
    assert (config["model_type"], config["hidden_size"], config["vocab_size"]) == ("medusa", *reversed(hidden_sizes()))
    return run(blocks, [tensors[f"{k}.{layers}.weight"] if shared is None else shared for k in range(3)], hidden)


def hidden_sizes() -> tuple[int, int]:
    return tuple(shared_model("llama", "sdpa", torch.float64).lm_head.weight.shape)


@pytest.mark.parametrize(("unembedding", "num_blocks"), KINDS)
def test_every_server_computes_our_logits_from_the_one_folder(unembedding, num_blocks, tmp_path):
    token_heads = made(unembedding, num_blocks)
    export_heads(token_heads, "medusa-servers", tmp_path / "out")
    tokens_BT = random_tokens(2, 7, seed=3)
    model = token_heads.backbone.model
    with torch.no_grad():
        wanted = head_logits(token_heads, tokens_BT)
        hidden = model.model(tokens_BT).last_hidden_state[:, -1]
        for found in (as_tgi(tmp_path / "out", model.lm_head.weight, hidden), as_vllm(tmp_path / "out", hidden)):
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, atol=1e-12, rtol=0.0)  # float64
    assert recognise(tmp_path / "out") == "medusa-servers"


@pytest.mark.parametrize("bias", [True, False])
def test_vllms_own_names_are_read(bias, tmp_path):
    """As vLLM's documentation lists them, with and without the biases that it drops by default."""
    model = shared_model("llama", "sdpa", torch.float64)
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for k in range(3):
        tensors[f"blocks.{k}.layers.0.weight"] = torch.randn(32, 32, generator=generator)
        tensors[f"lm_heads.{k}.weight"] = torch.randn(29, 32, generator=generator)
        if bias:
            tensors[f"blocks.{k}.layers.0.bias"] = torch.randn(32, generator=generator)
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 29}
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_fc_bias": bias}))
    save_file(tensors, tmp_path / "model.safetensors")
    token_heads = import_heads(tmp_path, model)
    tokens_BT = random_tokens(2, 7, seed=3)
    blocks = [
        [(tensors[f"blocks.{k}.layers.0.weight"].double(), tensors.get(f"blocks.{k}.layers.0.bias"))] for k in range(3)
    ]
    blocks = [[(weight, bias if bias is None else bias.double()) for weight, bias in layers] for layers in blocks]
    with torch.no_grad():
        hidden = model.model(tokens_BT).last_hidden_state[:, -1]
        wanted = run(blocks, [tensors[f"lm_heads.{k}.weight"].double() for k in range(3)], hidden)
        for found, other in zip(head_logits(token_heads, tokens_BT), wanted, strict=True):
            torch.testing.assert_close(found, other, atol=1e-12, rtol=0.0)
    (tmp_path / "config.json").write_text(json.dumps(config | {"truncated_vocab_size": 8}))
    with pytest.raises(ValueError, match="truncated_vocab_size 8"):
        import_heads(tmp_path, model)
    if bias:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="vLLM drops them"):
            import_heads(tmp_path, model)


def test_a_shared_unembedding_must_be_the_backbones(tmp_path):
    token_heads = made("shared")
    export_heads(token_heads, "medusa-servers", tmp_path / "out")
    file = tmp_path / "out" / "medusa_lm_head.safetensors"
    save_file(load_file(file) | {"lm_heads.0.weight": torch.zeros(29, 32)}, file)
    with pytest.raises(ValueError, match="which is not that of"):
        import_heads(tmp_path / "out", token_heads.backbone)
    with pytest.raises(ValueError, match="TGI and LoRAX allow one block"):
        export_heads(made("shared", 2), "medusa-servers", tmp_path / "two")


def test_tensorrt_llm_would_run_blocks_with_the_backbones_activation(tmp_path):
    token_heads = make_heads("medusa", heads.Backbone(shared_model("gemma", "sdpa", torch.float64)))
    with pytest.raises(ValueError, match="written for backbones with 'silu'"):
        export_heads(token_heads, "tensorrt-llm", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("unembedding", "num_blocks"), [*KINDS, ("shared", 2)])
def test_tensorrt_llm_computes_our_logits(unembedding, num_blocks, tmp_path):
    token_heads = made(unembedding, num_blocks)
    export_heads(token_heads, "tensorrt-llm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = torch.load(tmp_path / "out" / "medusa_lm_head.pt", weights_only=True)
    layers = config["medusa_num_layers"]
    blocks = [
        [(tensors[f"{k}.{n}.linear.weight"], tensors[f"{k}.{n}.linear.bias"]) for n in range(layers)]
        for k in range(config["medusa_num_heads"])
    ]
    tokens_BT = random_tokens(2, 7, seed=3)
    with torch.no_grad():
        hidden = token_heads.backbone.model.model(tokens_BT).last_hidden_state[:, -1]
        found = run(blocks, [tensors[f"{k}.{layers}.weight"] for k in range(3)], hidden)
        for one, other in zip(found, head_logits(token_heads, tokens_BT), strict=True):
            torch.testing.assert_close(one, other, atol=1e-12, rtol=0.0)
