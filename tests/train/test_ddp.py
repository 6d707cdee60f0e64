"""Two processes train the same heads as one: the user's own command over gloo, against the same global batch."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from safetensors.torch import load_file
from tiny import tiny_model

from train.config import read_config
from train.run import run

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}  # float32 sums in another order; the weights move a thousand times as far
STEPS = 6

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this PyTorch was built without gloo, the backend of processes on CPUs",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny backbone, and texts of uneven length: blocks of two processes then hold different numbers of labels."""
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdef ", k=generator.randrange(3, 60))) for _ in range(120)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)  # tests run side by side
    return tmp_path


def write_config(folder, name, batch):
    content = {
        "output_dir": str(folder / name),
        "backbone": {"name_or_path": str(folder / "base")},
        "data": {"train": [{"path": str(folder / "text.jsonl")}], "eval_fraction": 0.1, "block_size": 32},
        "family": "grounded",
        "heads": {"num_heads": 2},
        "rates": {"heads": 3e-3},
        "evaluation": {"every_steps": 0, "num_prompts": 2, "prompt_tokens": 8, "new_tokens": 8},
        "trainer": {
            "max_steps": STEPS,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": 2,
            "logging_steps": 1,
            "use_cpu": True,
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return str(path)


def launch_two(config):
    """As a user would, from the repository root; what the processes said.

    The config's use_cpu makes them gloo processes. With accelerate's own --cpu there would be one process, whatever
    --num_processes says.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "launch/ddp.yaml"]
    command += ["--num_processes", "2", "--main_process_port", free_port(), "train.py", "--config", config]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def losses(run_folder):
    """(step, name) -> what was logged, at every step and in the last evaluation."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], name): line[name] for line in lines for name in line if name.endswith("loss")}


def test_two_processes_train_what_one_trains(folder):
    output = launch_two(write_config(folder, "two", batch=2))
    assert output.count("engine: DDP over CPUs on 2 processes") == 2, output[-3000:]
    run(read_config(["--config", write_config(folder, "one", batch=4)]))
    one, two = losses(folder / "one"), losses(folder / "two")
    assert {step for step, name in one if name == "head2_loss"} == set(range(1, STEPS + 1))
    assert one == pytest.approx(two, rel=0, abs=TOLERANCE["atol"])
    first, second = (load_file(folder / name / "last/heads.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
