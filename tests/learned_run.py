"""Short runs on a tiny Llama that has learned its text, so that heads agree with it after a few steps."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from train.config import read_config
from train.run import run

ROOT = Path(__file__).resolve().parents[1]
DEMO_BASE = ROOT / "checkpoints/demo/base"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text that repeats, and the Llama that has learned it."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_BASE)
    lines = [f"def f{i % 7}(x):\n    return x + {i % 5}\n" * 12 for i in range(60)]
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        tokens = tokenizer(lines[step % 60], return_tensors="pt").input_ids[:, :96]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return folder


@pytest.fixture(autouse=True)
def own_cache(folder, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)  # tests run side by side


def write_config(folder, name, **changes):
    content = {
        "output_dir": str(folder / name),
        "backbone": {"name_or_path": str(folder / "base")},
        "data": {"train": [{"path": str(folder / "text.jsonl")}], "eval_fraction": 0.1, "block_size": 32},
        "family": "grounded",
        "heads": {"num_heads": 2},
        "rates": {"heads": 1e-2},
        "evaluation": {"every_steps": 0, "num_prompts": 2, "prompt_tokens": 8, "new_tokens": 8},
        "trainer": {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True},
    }
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(content.get(key), dict) else value
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return str(path)


def train(folder, name, *flags, **changes):
    return run(read_config(["--config", write_config(folder, name, **changes), *flags]))


def metrics(run_folder):
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


JOINT = {"family": "dynamo", "rates": {"base": 1e-3, "heads": 1e-2, "heads_to_base": 1e-4}}


def train_jointly(folder, name, *flags, **changes):
    """Backbone and heads together."""
    return train(folder, name, *flags, **(JOINT | changes))
