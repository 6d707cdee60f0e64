"""Runs on hybrid backbones, from one config in which nothing but the backbone changes; their heads decode exactly."""

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from tiny import HYBRIDS, tiny_model
from tiny_run import prepare, train, write_config
from transformers import AutoModelForCausalLM

import heads

FEW = {"max_steps": 1, "gradient_accumulation_steps": 1, "logging_steps": 1}
ONCE = {"every_steps": 0, "num_prompts": 1}


@pytest.mark.parametrize("name", HYBRIDS)
def test_grounded_heads_train_and_decode(name, tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    tiny_model(name, dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    train(write_config(tmp_path, "run", trainer=FEW, evaluation=ONCE))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    token_heads = heads.load(tmp_path / "run" / "last", model)
    prompt = byte_tokenizer()("a bad cab", return_tensors="pt").input_ids
    asked = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(prompt, **asked)
    decoded = model.generate(prompt, **asked, custom_generate=heads.TreeDecoding(token_heads))
    assert torch.equal(decoded, plain)  # in float32: no two of the best scores here lie within rounding
