"""YAML and command line: overrides, unknown keys with the nearest real one, help, what cannot train."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from heads.data.documents import SourceConfig
from train.config import TrainConfig, known_keys, read_config
from train.config.trainer_fields import CHOICES, NOT_HERE, SET_BY_HEADWAY, check_trainer_fields

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


@pytest.mark.parametrize("flag", [["--data.train", '[{"path": "b"}]'], ['--data.train=[{"path": "b"}]'], ["--config"]])
def test_a_list_of_sources_replaces_the_old_one_whole(tmp_path, flag):
    old = {"path": "a.txt", "format": "tokens", "fraction": 0.5}
    arguments = write(tmp_path, data={"train": [old], "eval": [old], "block_size": 64})
    (tmp_path / "other.yaml").write_text('data: {train: [{path: "b"}]}')
    config = read_config([*arguments, *flag, *([str(tmp_path / "other.yaml")] if flag == ["--config"] else [])])
    assert config.data.train == [SourceConfig(path="b")]
    assert config.data.eval == [SourceConfig(**old)]
    assert config.data.block_size == 64
    changed = read_config([*arguments, "--data.train.fraction", "0.1", "--data.eval+", '{"path": "b"}'])
    assert changed.data.train == [SourceConfig(**old | {"fraction": 0.1})]
    assert changed.data.eval == [SourceConfig(**old), SourceConfig(path="b")]


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
        ({"head_decay": float("nan")}, r"head_decay=nan was given; allowed are finite numbers above 0"),
        ({"head_decay": float("inf")}, r"head_decay=inf"),
        (
            {"optimizer": {"eps": float("nan")}},
            r"optimizer.eps=nan was given; allowed are finite numbers of at least 0",
        ),
        ({"optimizer": {"weight_decay": float("nan")}}, r"optimizer.weight_decay=nan"),
        (
            {"trainer": {"warmup_steps": float("nan")}},
            r"trainer.warmup_steps=nan was given; allowed are numbers of",
        ),
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
            r"loss or head_decay were given with family: null",
        ),
        (
            {"family": None, "heads": ..., "rates": {"base": 1e-4}, "head_decay": 0.8},
            r"loss or head_decay were given with family: null",
        ),
        ({"data": {**BASE["data"], "streaming": True, "num_proc": 4}}, r"data.num_proc was given with data.streaming"),
        (
            {"data": {**BASE["data"], "streaming": True}, "trainer": {"dataloader_num_workers": 2}},
            r"dataloader_num_workers=2 was given with data.streaming, whose blocks one worker reads .* give 1, or",
        ),
        ({"max_skipped_steps": -1}, r"max_skipped_steps=-1 was given; allowed are integers of at least 0"),
        ({"trainer": {"enable_jit_checkpoint": True}}, r"SIGTERM, SIGUSR1 or Ctrl-C is saved in any case"),
        ({"report_to": ["tensorbord"]}, r"Did you mean 'tensorboard'"),
        ({"save_every_steps": -1}, r"save_every_steps=-1"),
        ({"trainer": {"max_steps": "abc"}}, r"trainer.max_steps='abc' was given; allowed are integers of at least -1"),
        ({"trainer": {"bf16": "yes please"}}, r"trainer.bf16='yes please' was given; allowed are true and false"),
        ({"trainer": {"bf16": "auto", "fp16": True}}, r"bf16 and trainer.fp16 were both given"),
        ({"trainer": {"tf32": "auto"}}, r"trainer.tf32='auto' was given; allowed are true and false"),
        ({"trainer": {"optim": "adafactor"}}, r"trainer.optim was given and is refused: .*AdamW"),
        ({"trainer": {"fsdp": "full_shard"}}, r"trainer.fsdp was given and is refused: .*launch file"),
        ({"trainer": {"deepspeed": "x.json"}}, r"trainer.deepspeed was given and is refused"),
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_device_train_batch_size": 0}, r"train_batch_size=0 was given; allowed are integers of at least 1\.$"),
        ({"per_device_train_batch_size": 2.5}, r"train_batch_size=2.5 was given; allowed are integers of at least 1"),
        ({"per_device_eval_batch_size": True}, r"eval_batch_size=True was given; allowed are integers"),
        ({"gradient_accumulation_steps": 0}, r"accumulation_steps=0 was given; allowed are integers of at least 1"),
        ({"warmup_steps": -1}, r"warmup_steps=-1 was given; allowed are numbers of at least 0"),
        ({"num_train_epochs": 0}, r"num_train_epochs=0 was given; allowed are numbers above 0"),
        ({"max_steps": 0}, r"max_steps=0 was given; give 1 and more, or -1"),
        ({"max_grad_norm": float("inf")}, r"max_grad_norm=inf was given; allowed are numbers of at least 0"),
        ({"save_total_limit": -1}, r"save_total_limit=-1 was given; allowed are integers of at least 0, or null"),
        ({"lr_scheduler_type": "cosin"}, r"lr_scheduler_type='cosin' .* allowed are linear, .* Did you mean 'cosine'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, r"lr_scheduler_type='reduce_lr_on_plateau' was given"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, r"cosine_with_min_lr .*kwargs None: .*min_lr"),
        ({"lr_scheduler_kwargs": {"cycles": 1}}, r"cosine was given .*'cycles'"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, r"use constant_with_warmup"),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}}, r"constant, which takes none"),
        ({"logging_strategy": "step"}, r"logging_strategy='step' was given; .* Did you mean 'steps'"),
        ({"bf16": True, "fp16": True}, r"bf16 and trainer.fp16 were both given"),
        ({"save_steps": 5}, r"save_steps has a field of its own"),
        ({"bf16_full_eval": True}, r"bf16_full_eval was given and is refused: held-out blocks"),
        ({"hub_model_id": "me/heads"}, r"hub_model_id was given and is refused: upload last/ or best/"),
        ({"save_on_each_node": True}, r"save_on_each_node was given and is refused: all processes share output_dir"),
        ({"activation_checkpointing": True}, r"set backbone.gradient_checkpointing"),
    ],
)
def test_values_of_the_trainer_that_cannot_train_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        check_trainer_fields(fields)


TAKEN = {
    *("per_device_train_batch_size", "num_train_epochs", "max_steps", "gradient_accumulation_steps", "max_grad_norm"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "bf16", "fp16", "tf32", "torch_empty_cache_steps"),
    *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "include_num_input_tokens_seen"),
    *("log_level", "log_level_replica", "disable_tqdm", "run_name", "debug", "skip_memory_metrics"),
    *("eval_delay", "eval_on_start", "per_device_eval_batch_size", "save_total_limit"),
    *("full_determinism", "use_cpu", "accelerator_config", "train_sampling_strategy"),
    *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
    *("ddp_backend", "ddp_timeout"),
}
"""Fields of the Trainer that change a run."""


def test_every_field_of_the_trainer_is_taken_set_or_refused():
    stands = Counter([*TAKEN, *SET_BY_HEADWAY, *NOT_HERE])
    assert stands == Counter(field.name for field in dataclasses.fields(TrainingArguments))


def test_every_schedule_that_is_offered_can_be_built():
    needed = {"cosine_with_min_lr": {"min_lr": 0.1}, "cosine_warmup_with_min_lr": {"min_lr": 0.1}}
    needed["warmup_stable_decay"] = {"num_decay_steps": 2}
    for name in CHOICES["lr_scheduler_type"]:
        check_trainer_fields({"lr_scheduler_type": name, "lr_scheduler_kwargs": needed.get(name)})
    check_trainer_fields({"warmup_steps": 0.03, "tf32": None, "save_total_limit": None, "num_train_epochs": 0.5})


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


@pytest.mark.parametrize("folder", ["alpaca", "chat", "sharegpt"])
def test_configs_for_chats_cut_no_answer_from_its_question(folder):
    packings = {
        path.stem: read_config(["--config", str(path)]).data.packing for path in ROOT.glob(f"configs/{folder}/*.yaml")
    }
    assert set(packings.values()) == {"whole"}, packings


def shipped(name):
    return yaml.safe_load((ROOT / f"configs/{name}.yaml").read_text())


def test_paper_settings_of_grounded_heads():
    """Ankner et al., section 4.1: every number in it; 8 A100s."""
    run = shipped("sharegpt/grounded_vicuna_7b_paper")
    assert run["backbone"]["name_or_path"] == "lmsys/vicuna-7b-v1.3"  # the last one on LLaMA 1
    assert "sharegpt" in run["data"]["train"][0]["path"].lower()
    assert (run["family"], run["rates"], run["data"]["block_size"]) == ("grounded", {"heads": 1e-4}, 2048)
    layers = {"num_heads": 4, "num_hidden_layers": 1, "hidden_width": 4096}
    assert run["heads"] == layers | {"hidden_offset": 0, "normalize_embeddings": False, "raw_hidden_states": True}
    assert run["optimizer"] == {"beta1": 0.9, "beta2": 0.99}
    schedule = run["trainer"]
    assert (schedule["num_train_epochs"], schedule["lr_scheduler_type"]) == (1, "cosine")
    assert 0 < schedule["warmup_steps"] < 1
    assert blocks_of_a_step(schedule, gpus=8) == 128
    for twin in ("grounded", "medusa"):
        other = shipped(f"sharegpt/{twin}_vicuna_7b")
        same = ("rates", "optimizer", "trainer", "data")
        assert (other["family"], *(other[key] for key in same)) == (twin, *(run[key] for key in same))


def blocks_of_a_step(schedule, *, gpus):
    return schedule["per_device_train_batch_size"] * schedule["gradient_accumulation_steps"] * gpus


TABLE_4 = {
    "70m": (1e-5, 1e-3, 1e-6),
    "160m": (6e-6, 6e-4, 6e-7),
    "410m": (3e-6, 3e-4, 3e-7),
    "1b": (2e-6, 2e-4, 2e-7),
    "1_4b": (2e-6, 2e-4, 2e-7),
    "2_8b": (1.6e-6, 1.6e-4, 1.6e-7),
    "6_9b": (1.2e-6, 1.2e-4, 1.2e-7),
}


@pytest.mark.parametrize("size", TABLE_4)
def test_paper_settings_of_dynamo(size):
    """Tuli et al., appendix A.1 and table 4: 5 % of the Pile, 97 % of it for training."""
    run = shipped(f"pile/dynamo_pythia_{size}")
    base, of_heads, to_base = TABLE_4[size]
    assert run["rates"] == {"base": base, "heads": of_heads, "heads_to_base": to_base}
    assert run["backbone"]["name_or_path"] == f"EleutherAI/pythia-{size.replace('_', '.')}-deduped"
    data, schedule = run["data"], run["trainer"]
    assert (data["train"][0]["format"], data["train"][0]["fraction"], data["streaming"]) == ("text", 0.05, True)
    assert (data["eval_fraction"], data["block_size"]) == (0.03, 2048)
    assert (schedule["max_steps"], schedule["warmup_steps"], schedule["lr_scheduler_type"]) == (75782, 758, "cosine")
    assert blocks_of_a_step(schedule, gpus=8) * data["block_size"] == 131_072
    assert run["optimizer"] == {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    assert (run["evaluation"]["every_steps"], run["heads"]["num_heads"]) == (5000, 2)
    header = (ROOT / f"configs/pile/dynamo_pythia_{size}.yaml").read_text()
    assert ("launch/fsdp2.yaml" in header) == (size == "6_9b")


def test_variants_and_fine_tuned_twins_are_trained_as_what_they_are_compared_with():
    same = ("data", "trainer", "optimizer")
    first = shipped("pile/dynamo_pythia_70m")
    for path in ROOT.glob("configs/pile/ablation/*.yaml"):
        variant = yaml.safe_load(path.read_text())
        assert variant["data"] == first["data"], path
        assert all(first["trainer"][key] == value for key, value in variant["trainer"].items()), path
    for size, (base, of_heads, to_base) in TABLE_4.items():
        tuned, twin = shipped(f"alpaca/dynamo_pythia_{size}"), shipped(f"alpaca/pythia_{size}")
        assert tuned["rates"] == {"base": base, "heads": of_heads, "heads_to_base": to_base}
        assert (twin["family"], twin["rates"]) == (None, {"base": base})
        assert all(tuned[key] == twin[key] for key in same)
        assert twin["evaluation"] == {"every_steps": tuned["evaluation"]["every_steps"]}
        assert tuned["init_from"] == f"{shipped(f'pile/dynamo_pythia_{size}')['output_dir']}/last"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"output_dir: \xff\xfe", "no valid YAML: 'utf-8' codec"),
        (b"a: &a [*a]", "no valid YAML: an alias contains itself"),
        (
            b"a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + b"".join(b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 10)) for c in b"bcdefgh"),
            "no valid YAML: its aliases stand for more than 100,000 values",
        ),
        (b"seed: 2020-13-45", "no valid YAML: month must be in 1..12"),
        (b"[" * 500, "no valid YAML: "),
    ],
)
def test_yaml_that_cannot_be_read_ends_in_a_sentence(tmp_path, content, says):
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_config(["--config", str(path)])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("block_size", None, "data.block_size=None was given; allowed are integers of at least 2"),
        ("eval_fraction", None, "data.eval_fraction=None was given; allowed are numbers"),
        ("eval_fraction", float("nan"), "data.eval_fraction=nan was given"),
        ("seed", None, "data.seed=None was given; allowed are integers"),
        ("streaming", None, "data.streaming=None was given; allowed are true and false"),
        ("eval", None, "data.eval=None was given; allowed are lists"),
        ("train", [{"path": "a", "weight": None}], "data.train.0.weight=None was given; allowed are numbers above 0"),
        ("train", [{"path": "a", "fraction": 1.5}], "data.train.0.fraction=1.5 was given; allowed are numbers"),
    ],
)
def test_fields_of_the_data_are_checked(tmp_path, name, value, says):
    path = tmp_path / "run.yaml"
    data = {"train": [{"path": "a"}], name: value}
    path.write_text(yaml.safe_dump({"output_dir": "x", "backbone": {"name_or_path": "b"}, "data": data}))
    with pytest.raises(ValueError, match=says):
        read_config(["--config", str(path)])


def test_roles_of_a_source_are_free_names(tmp_path):
    path = tmp_path / "run.yaml"
    data = {"train": [{"path": "a", "roles": {"visitor": "user"}}], "max_bad_fraction": 0.2}
    path.write_text(yaml.safe_dump({"output_dir": "x", "backbone": {"name_or_path": "b"}, "data": data}))
    config = read_config(["--config", str(path)])
    assert config.data.train[0].roles == {"visitor": "user"}
    assert config.data.max_bad_fraction == 0.2


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            {"roles": {"moderator": "boss"}},
            "data.train.roles='boss' was given; allowed are 'user', 'assistant'",
        ),
        ({"weight": "much"}, "data.train.weight='much' was given; allowed are numbers."),
        ({"wieght": 1.0}, "data.train: Option 'wieght' is not accepted"),
    ],
    ids=["roles", "weight", "unknown"],
)
def test_what_a_source_cannot_have_is_named_with_its_list(source, said, capsys):
    sources = json.dumps([{"path": "a"}, {"path": "b", **source}])
    with pytest.raises(SystemExit):
        read_config(["--config", "configs/demo/grounded.yaml", "--data.train", sources], prog="train.py")
    assert capsys.readouterr().err.startswith(f"train.py: error: {said}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output_dir: a\nfamily: gru\noutput_dir: b\n", r"key 'output_dir' twice, in lines 1 and 3, .* keep one"),
        (
            "data:\n  seed: 1\n  train:\n    - path: x\n      path: y\n",
            r"key 'data.train.path' twice, in lines 4 and 5",
        ),
        ("data: {seed: 1}\ndata: {block_size: 3}\n", r"key 'data' twice, in lines 1 and 2"),
    ],
)
def test_a_key_stands_once(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_config(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config"], "--config was given without a file"),
        (["--config="], "--config was given without a file"),
        (["--config", "."], r"--config . is a folder; runs are described"),
        (["--output_dir", ""], r"output_dir='' was given; give the name of a folder"),
        (["--output_dir", "  "], r"output_dir='  ' was given; give the name of a folder"),
        (["--data.seed", "-1"], r"data.seed=-1 was given; allowed are integers from 0 to 4294967295"),
        (["--data.seed", "4294967296"], r"data.seed=4294967296 was given"),
    ],
)
def test_flags_that_name_nothing_are_one_sentence(tmp_path, arguments, message):
    before = [] if arguments[0].startswith("--config") else write(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_config([*before, *arguments])
