"""Whole runs on a tiny backbone, in this process or as the user's own command; what they left, to be compared."""

from __future__ import annotations

import json
import os
import random
import time

import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from forked import Forked
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import train.run as run_module
from train.config import read_config
from train.run import run

TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "heads_overhead"}


def prepare(folder, monkeypatch):
    """A tiny backbone and texts of uneven length; few enough for several epochs in a dozen steps."""
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdef ", k=generator.randrange(8, 60))) for _ in range(44)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)  # tests run side by side


def add_bad_token(folder):
    """A text of a token whose embedding is NaN; the token."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    (bad,) = AutoTokenizer.from_pretrained(folder / "base")("@", add_special_tokens=False).input_ids
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = float("nan")
    model.save_pretrained(folder / "base")
    texts = (folder / "text.jsonl").read_text().splitlines()
    texts[20] = json.dumps({"text": "here it is: @@@@ and it goes on"})
    (folder / "text.jsonl").write_text("\n".join(texts) + "\n")
    return bad


def write_config(folder, name, **changes):
    """13 steps over more than two epochs; logs, evaluations and checkpoints fall on different steps."""
    content = {
        "output_dir": str(folder / name),
        "backbone": {"name_or_path": str(folder / "base")},
        "data": {"train": [{"path": str(folder / "text.jsonl")}], "eval_fraction": 0.1, "block_size": 32},
        "family": "grounded",
        "heads": {"num_heads": 2},
        "rates": {"heads": 3e-3},
        "evaluation": {"every_steps": 4, "num_prompts": 2, "prompt_tokens": 8, "new_tokens": 8},
        "save_every_steps": 3,
        "trainer": {
            "max_steps": 13,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "logging_steps": 5,
            "use_cpu": True,
        },
    }
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) and key in content else value
    content["heads"] = content["heads"] or {}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return str(path)


def train(config, *flags):
    """In this process."""
    return run(read_config(["--config", config, *flags]))


def add_callback(monkeypatch, callback):
    """Runs in this process have one more callback, after those of a run."""
    build = run_module.build_trainer

    def with_callback(*args, **kwargs):
        trainer = build(*args, **kwargs)
        trainer.add_callback(callback)
        return trainer

    monkeypatch.setattr("train.run.build_trainer", with_callback)


SLOW = """
import time
from train.checkpoint import save
from train.loop.trainer import HeadsTrainer
from train.run import main

def slow(action, seconds):
    def slowed(*args, **kwargs):
        time.sleep(seconds)
        return action(*args, **kwargs)
    return slowed

HeadsTrainer.training_step = slow(HeadsTrainer.training_step, {step})
save.write_progress = slow(save.write_progress, {save})
main()
"""


def slow_script(folder, *, step=0.0, save=0.0):
    """train.py with seconds to be killed in: before each micro-batch, and before the last file of a checkpoint."""
    path = folder / "slow.py"
    path.write_text(SLOW.format(step=step, save=save))
    return path


SIGNALLED = """
import os, signal
from train.loop.trainer import HeadsTrainer
from train.run import main

get_batch_samples = HeadsTrainer.get_batch_samples

def signalled(self, *args, **kwargs):
    if os.environ["RANK"] == "{rank}" and self.state.global_step == {step} - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return get_batch_samples(self, *args, **kwargs)

HeadsTrainer.get_batch_samples = signalled
main()
"""


def signalled_script(folder, *, rank, step):
    """train.py in which one process gets SIGTERM before a step begins, so that this step is the last."""
    path = folder / "signalled.py"
    path.write_text(SIGNALLED.format(rank=rank, step=step))
    return path


def start(config, *flags, script, **environment):
    """The script in a process, group and session of its own."""
    return Forked(script, ["--config", config, *flags], {**os.environ, **environment})


def wait_until(condition, process, seconds=60):
    """Poll; fails with what the process said if it ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


def metrics(run_folder):
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def logged(run_folder):
    """What was logged, times left out."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(run_folder)]


def tensors(run_folder):
    return {str(p.relative_to(run_folder)): load_file(p) for p in sorted((run_folder / "last").rglob("*.safetensors"))}


def assert_same_run(one, other):
    """Bit-equal weights, the same lines, the same best."""
    first, second = ({k: t for f in tensors(run).values() for k, t in f.items()} for run in (one, other))
    assert first.keys() == second.keys()
    assert first
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name
    assert logged(one) == logged(other)
    for name in ("best", "last"):
        found = [run / name / "heads.json" for run in (one, other)]
        if found[0].is_file() or found[1].is_file():
            assert measured(found[0]) == measured(found[1])


def measured(path):
    description = json.loads(path.read_text())
    return description["recipe"]["measured"], description["measured_accuracy"]
