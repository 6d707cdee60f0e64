"""configs/chat: each trains on a tiny model of its backbone's class, and its shipped shape has the real size."""

import json

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from repository import ROOT
from tiny_run import prepare, train
from transformers import AutoConfig, AutoModelForCausalLM

import heads
from train.config import read_config
from train.plan.shapes import build_on_meta, numel

SIZES = {  # what the models' cards say, to the last parameter where they do
    "llama_3_1_8b": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
    "qwen3_5_9b": 8_953_803_264,  # without the parts for images and for multi-token prediction
    "gemma_3_1b": 999_885_952,
    "granite_4_0_h_micro": 3_191_396_096,
}
SMALL = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": 256,
}
DELTA = {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
OTHERS = {
    "qwen3_5_9b": {**DELTA, "head_dim": 32},
    "llama_3_1_8b": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "gemma_3_1b": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "granite_4_0_h_micro": {**MAMBA, "shared_intermediate_size": 48},
}


def shape(name):
    return ROOT / "configs/chat/shapes" / name


def tiny(name):
    """The shipped config.json with four layers, kinds of them as there, and small everywhere."""
    config = AutoConfig.from_pretrained(shape(name))
    kinds = {"granite_4_0_h_micro": slice(4, 8), "gemma_3_1b": slice(2, 6)}.get(name, slice(4))
    changes = {**SMALL, **OTHERS.get(name, {}), "num_hidden_layers": 4}
    if getattr(config, "layer_types", None):
        changes["layer_types"] = list(config.layer_types)[kinds]
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_every_config_has_a_shape():
    assert {path.stem for path in ROOT.glob("configs/chat/*.yaml")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_the_shipped_shape_has_the_real_size(name):
    flags = ["--config", str(ROOT / f"configs/chat/{name}.yaml"), "--backbone.name_or_path", str(shape(name))]
    model = build_on_meta(read_config(flags), "cuda")
    assert numel(model.model.parameters()) == SIZES[name]
    assert model.token_heads.draft_vocabulary is not None
    assert len(model.token_heads.prefix) == 1


@pytest.mark.parametrize("name", SIZES)
def test_it_trains_a_tiny_model_of_its_class(name, tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    tiny(name).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    turns = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Fine, thank you all. " * 3}]
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    small = {
        "backbone.name_or_path": tmp_path / "base",
        "backbone.dtype": "float32",
        "data.train": json.dumps([{"path": str(tmp_path / "chat.jsonl")}]),
        "data.eval_fraction": 0.1,
        "data.block_size": 128,
        "heads.draft_vocabulary": 40,
        "output_dir": tmp_path / "run",
        "evaluation.num_prompts": 1,
        "evaluation.new_tokens": 8,
        "trainer.max_steps": 2,
        "trainer.gradient_accumulation_steps": 1,
        "trainer.bf16": "false",
        "trainer.use_cpu": "true",
        "report_to": "[jsonl]",
    }
    train(str(ROOT / f"configs/chat/{name}.yaml"), *(f"--{key}={value}" for key, value in small.items()))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    token_heads = heads.load(tmp_path / "run" / "last", model)
    assert token_heads.config.prefix_layers == 1
