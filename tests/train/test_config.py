"""YAML and command line: overrides, unknown keys with the nearest real one, help, what cannot train."""

import re
from pathlib import Path

import pytest
import yaml

from train.config import TrainConfig, known_keys, read_config

ROOT = Path(__file__).resolve().parents[2]
BASE = {
    "output_dir": "out",
    "backbone": {"name_or_path": "somewhere"},
    "data": {"train": [{"path": "a.txt"}], "block_size": 64},
    "heads": {"num_heads": 3},
}


def write(tmp_path, **changes):
    content = {**BASE, **changes}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in content.items() if value is not ...}))
    return ["--config", str(path)]


def test_yaml_then_overrides(tmp_path):
    flags = ["--rates.heads", "3e-4", "--heads.num_heads", "2", "--trainer.max_steps", "5", "--data.train.0.path"]
    config = read_config([*write(tmp_path), *flags[:-1]])
    assert (config.rates.heads, config.heads["num_heads"], config.trainer["max_steps"]) == (3e-4, 2, 5)
    assert config.data.train[0].path == "a.txt"
    assert config.num_heads == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"famly": "medusa"}, r"unknown key 'famly'. Did you mean 'family'"),
        ({"data": {**BASE["data"], "blocksize": 3}}, r"unknown key 'data.blocksize'. Did you mean 'data.block_size'"),
        ({"data": {"train": [{"pth": "x"}]}}, r"unknown key 'data.train.pth'. Did you mean 'data.train.path'"),
        ({"heads": {"num_head": 3}}, r"'num_head' is no field of grounded heads.*Did you mean 'num_heads'"),
        ({"family": "grouned"}, r"family='grouned'.*Did you mean 'grounded'"),
        ({"trainer": {"max_step": 3}}, r"trainer.max_step is no field.*Did you mean 'max_steps'"),
        ({"trainer": {"learning_rate": 3}}, r"trainer.learning_rate has a field of its own"),
        ({"rates": {"heads": 0}}, r"rates.heads=0.*nothing would be learned"),
        ({"rates": {"heads": float("nan")}}, r"rates.heads=nan"),
        ({"rates": {"base": 0.0}}, r"rates.base=0.0 was given; .*nothing would be learned"),
        ({"rates": {"heads_to_base": 1e-6}}, r"rates.heads_to_base was given without heads on a trained backbone"),
        (
            {"rates": {"base": 1e-5, "heads_to_base": -1e-6}},
            r"rates.heads_to_base=-1e-06 was given; allowed are numbers",
        ),
        ({"lora": {"rank": 4}}, r"lora.rank was given but rates.base is null"),
        ({"lora": {"alpha": 4.0}}, r"lora.alpha, dropout or targets were given without lora.rank"),
        (
            {"lora": {"rank": 4, "alpha": 0.0}, "rates": {"base": 1e-4}},
            r"lora.alpha=0.0 was given; allowed are numbers above 0, or null; at 0 the adapter",
        ),
        ({"lora": {"rank": 4, "alpha": -4.0}, "rates": {"base": 1e-4}}, r"lora.alpha=-4.0"),
        ({"lora": {"rank": 4, "alpha": float("nan")}, "rates": {"base": 1e-4}}, r"lora.alpha=nan"),
        (
            {"warm_in": {"schedule": "sine", "steps": float("nan")}},
            r"warm_in.steps=nan was given; .*whole steps",
        ),
        ({"label_shift": 2}, r"label_shift and lookahead are for family: null"),
        ({"family": None, "heads": ...}, r"rates.base=None"),
        (
            {"heads": {"num_heads": 30}, "data": {**BASE["data"], "block_size": 16}},
            r"30 heads need blocks of at least 32",
        ),
        ({"heads": {"num_heads": 0}}, r"num_heads=0.*allowed are integers from 1 to"),
        ({"head_decay": 0}, r"head_decay=0"),
        ({"head_decay": float("nan")}, r"head_decay=nan was given; allowed are numbers above 0"),
        ({"head_decay": float("inf")}, r"head_decay=inf"),
        ({"optimizer": {"eps": float("nan")}}, r"optimizer.eps=nan was given; allowed are numbers of at least 0"),
        ({"optimizer": {"weight_decay": float("nan")}}, r"optimizer.weight_decay=nan"),
        ({"trainer": {"warmup_steps": float("nan")}}, r"trainer.warmup_steps takes a number; nan was given"),
        ({"heads": None}, r"heads was given with nothing below it; it takes names and values: give some, or leave it"),
        ({"heads": {1: 2}}, r"heads was given with \{1: 2\}; it takes names and values"),
        ({"trainer": None}, r"trainer was given with nothing below it"),
        ({"trainer": {1: 2}}, r"trainer was given with \{1: 2\}"),
        ({"backbone": {"name_or_path": "x", "quantization": {4: True}}}, r"backbone.quantization was given with"),
        ({"rates": None}, r"rates was given with nothing below it; .* \(heads, base, heads_to_base\)"),
        ({"lora": None}, r"lora was given with nothing below it; it takes names and values \(rank, alpha, "),
        ({"loss": None}, r"loss was given with nothing below it"),
        ({"loss": [1]}, r"loss was given with \[1\]; it takes names and values \(hard, soft, "),
        ({"warm_in": None}, r"warm_in was given with nothing below it"),
        ({"self_distillation": None}, r"self_distillation was given with nothing below it"),
        ({"optimizer": None}, r"optimizer was given with nothing below it"),
        ({"evaluation": None}, r"evaluation was given with nothing below it"),
        ({"loss": {"hard": 0}}, r"loss.hard, loss.soft and loss.regression are all 0"),
        ({"loss": {"soft": -1}}, r"loss.soft=-1.0 was given; allowed are numbers of at least 0"),
        ({"loss": {"soft": 1, "temperature": 0}}, r"loss.temperature=0.0 was given; allowed are numbers above 0"),
        ({"loss": {"soft": 1, "top_n": 0}}, r"loss.top_n=0 was given; allowed are integers of at least 1, or null"),
        ({"loss": {"temperature": 2}}, r"temperature or top_n were given with loss.soft 0"),
        ({"loss": {"head_weights": [1, 2]}}, r"head_weights=\[1.0, 2.0\] was given for 3 heads"),
        ({"loss": {"head_weights": [1, 1, 1]}, "head_decay": 0.8}, r"both weight the heads: give one of them"),
        ({"loss": {"sofft": 1}}, r"unknown key 'loss.sofft'. Did you mean 'loss.soft'"),
        (
            {"family": None, "heads": ..., "rates": {"base": 1e-4}, "loss": {"soft": 1}},
            r"loss was given with family: null",
        ),
        ({"max_skipped_steps": -1}, r"max_skipped_steps=-1 was given; allowed are integers of at least 0"),
        ({"trainer": {"enable_jit_checkpoint": True}}, r"SIGTERM or SIGUSR1 is saved in any case"),
        ({"report_to": ["tensorbord"]}, r"Did you mean 'tensorboard'"),
        ({"save_every_steps": -1}, r"save_every_steps=-1"),
        ({"trainer": {"max_steps": "abc"}}, r"trainer.max_steps takes a number; 'abc' was given"),
        ({"trainer": {"bf16": "yes please"}}, r"trainer.bf16 takes true or false"),
        ({"trainer": {"optim": "adafactor"}}, r"trainer.optim has no effect here.*AdamW"),
        ({"trainer": {"fsdp": "full_shard"}}, r"trainer.fsdp has no effect here.*launch file"),
        ({"trainer": {"deepspeed": "x.json"}}, r"trainer.deepspeed has no effect here"),
        ({"trainer": {"gradient_checkpointing": True}}, r"set backbone.gradient_checkpointing"),
        ({"optimizer": {"beta1": 2}}, r"optimizer.beta1=2"),
        ({"evaluation": {"tree_nodes": 1}}, r"evaluation.tree_nodes=1 was given; allowed are integers from 2 to"),
        ({"evaluation": {"new_tokens": 0}}, r"evaluation.new_tokens=0"),
        ({"evaluation": {"every_steps": -5}}, r"evaluation.every_steps=-5"),
    ],
)
def test_what_cannot_train_is_said_before_anything_is_loaded(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(write(tmp_path, **changes))


@pytest.mark.parametrize("name", ["heads", "trainer", "lora", "loss", "rates"])
def test_null_on_the_command_line_is_no_block_either(tmp_path, name, capsys):
    with pytest.raises((ValueError, SystemExit)) as refused:
        read_config([*write(tmp_path), f"--{name}", "null"])
    assert name in f"{refused.value} {capsys.readouterr().err}"


def test_null_stays_none_where_that_is_a_value(tmp_path):
    backbone = {"name_or_path": "somewhere", "quantization": None, "tokenizer": None}
    config = read_config(write(tmp_path, backbone=backbone, loss={"head_weights": None}, init_from=None, heads={}))
    assert (config.backbone.quantization, config.loss.head_weights, config.heads) == (None, None, {})


def test_a_tracker_that_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'wandb', which is not installed"):
        read_config(write(tmp_path, report_to=["wandb"]))


def test_unknown_flags_name_the_nearest(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        read_config([*write(tmp_path), "--rates.haeds", "1"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "rates.haeds" in error
    assert "'rates.heads'" in error
    assert "Traceback" not in error


def test_a_choice_says_what_may_be_chosen(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        read_config([*write(tmp_path), "--save_dtype", "int4"])
    assert stop.value.code == 2
    assert "save_dtype='int4' was given; allowed are 'float32', 'bfloat16', 'float16'." in capsys.readouterr().err


def test_missing_and_malformed_files(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml does not exist"):
        read_config(["--config", "nowhere.yaml"])
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1,\n")
    with pytest.raises(ValueError, match="no valid YAML"):
        read_config(["--config", str(path)])
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="keys and values"):
        read_config(["--config", str(path)])


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        read_config(["--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for key in known_keys(TrainConfig):
        if not key.startswith(("data.train.", "data.eval.")):  # fields of list entries have a --help of their own
            assert re.search(rf"--{re.escape(key)}[ ,]", text), key
    unexplained = re.findall(r"--([\w.]+) [A-Z_0-9{}\[\],a-z.]+ \(type:", text)
    assert not unexplained


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/**/*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_is_valid(path):
    config = read_config(["--config", str(path)])
    assert config.output_dir.startswith("checkpoints/runs/")


def test_paper_settings_of_grounded_heads():
    """Ankner et al., section 4.1."""
    config = read_config(["--config", str(ROOT / "configs/sharegpt/grounded_vicuna_7b.yaml")])
    twin = read_config(["--config", str(ROOT / "configs/sharegpt/medusa_vicuna_7b.yaml")])
    assert (config.optimizer.beta1, config.optimizer.beta2, config.rates.heads) == (0.9, 0.99, 1e-4)
    assert (config.data.block_size, config.num_heads, config.trainer["num_train_epochs"]) == (2048, 4, 1)
    assert config.trainer["lr_scheduler_type"] == "cosine"
    assert config.trainer["per_device_train_batch_size"] * config.trainer["gradient_accumulation_steps"] * 8 == 128
    assert (twin.family, twin.rates, twin.optimizer, twin.trainer) == (
        "medusa",
        config.rates,
        config.optimizer,
        config.trainer,
    )
