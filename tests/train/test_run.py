"""Whole runs on a tiny backbone: the real command, splits of a batch, resume, continuing, errors without tracebacks."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from learned_run import DEMO_BASE, ROOT, folder, metrics, own_cache, train, write_config  # noqa: F401 - fixtures
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import heads
from heads.backbone.model import Backbone
from heads.checkpoint import save_load, schema
from heads.export.exporting import export_heads, import_heads
from train.__main__ import main as train_main
from train.config import read_config
from train.data.packing import build_datasets
from train.loop.evaluation import count_decoding, spread
from train.loop.trainer import HeadsTrainer
from train.objective.losses import plain_cross_entropy
from train.objective.model import TrainedModel
from train.run import main, run


def launch(*arguments, **environment):
    """As a user would: `accelerate launch train.py …`, from the repository root."""
    command = [str(Path(sys.executable).with_name("accelerate")), "launch", "train.py", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_the_real_command_trains_saves_and_measures(folder):  # noqa: F811
    path = write_config(folder, "real", trainer={"max_steps": 20}, evaluation={"every_steps": 10})
    done = launch("--config", path, HF_DATASETS_CACHE=str(folder / "cache"), COLUMNS="60")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "engine: one process, cpu" in done.stdout
    lines = done.stdout.splitlines()
    steps = lines[lines.index(next(line for line in lines if line.split()[:2] == ["step", "loss"])) :]
    assert [line.split()[0] for line in steps[1:22]] == [*map(str, range(1, 21)), "20"]  # the last begins the summary
    assert all(len(steps[n].split()) == 9 for n in (10, 20)), "an evaluation's line has the loss of its step"
    assert max(map(len, steps[:22])) <= 60
    assert "{" not in done.stdout, "a dictionary was printed"
    assert "%|" not in done.stdout + done.stderr, "a bar was drawn into a file"
    assert "ccelerator" not in done.stdout, "a notice of DeepSpeed's"
    logged = metrics(folder / "real")
    losses = [line["head1_loss"] for line in logged if "head1_loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert [line["step"] for line in logged if "eval_head2_top5" in line] == [10, 20]
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    for name in ("last", "best"):
        token_heads = heads.load(folder / "real" / name, model)
        assert token_heads.measured_accuracy is not None
    recipe = json.loads((folder / "real/last/heads.json").read_text())["recipe"]
    assert recipe["config"]["rates"]["heads"] == 1e-2
    assert recipe["versions"]["torch"] == torch.__version__
    assert recipe["versions"]["peft"] == importlib.metadata.version("peft")
    assert recipe["measured"]["step"] == 20


def test_logged_loss_is_the_mean_over_labels(folder, monkeypatch):  # noqa: F811
    """At a rate near 0 each step's logged head losses equal a forward of the first weights on that step's batch."""
    steps, get_batch_samples = [], HeadsTrainer.get_batch_samples

    def noted(self, *args, **kwargs):
        batches, counts = get_batch_samples(self, *args, **kwargs)
        steps.append(batches)
        return batches, counts

    monkeypatch.setattr(HeadsTrainer, "get_batch_samples", noted)
    where = train(folder, "logged", rates={"heads": 1e-12}, trainer={"max_steps": 3, "gradient_accumulation_steps": 2})
    lines = [line for line in metrics(where) if "head1_loss" in line]
    assert len(lines) == len(steps) == 3
    backbone = Backbone(AutoModelForCausalLM.from_pretrained(folder / "base"))
    model = TrainedModel(backbone, heads.load(where / "last", backbone.model)).eval()
    for line, batches in zip(lines, steps, strict=True):
        assert len(batches) == 2
        for k in (1, 2):
            assert line[f"head{k}_loss"] == pytest.approx(mean_loss(model, batches, k), rel=1e-4)
        # The summed loss of the Trainer's log and our heads' means come by two routes; logs keep four digits.
        assert line["loss"] == pytest.approx(line["head1_loss"] + line["head2_loss"], rel=1e-3)


@torch.no_grad()
def mean_loss(model, batches, k):
    """The mean of head k's plain cross-entropy over its labels in all of these batches."""
    total = count = 0
    for batch in batches:
        states = model.backbone_states(batch["input_ids"], batch["loss_mask"], batch["document_ids"])
        rows = list(model.head_rows(states, with_backbone=False))[k - 1]
        total += float(plain_cross_entropy(rows.projection, rows.hidden_RD, rows.labels_R))
        mask, documents = batch["loss_mask"].bool(), batch["document_ids"]
        count += int((mask[:, k + 1 :] & (documents[:, k + 1 :] == documents[:, : -k - 1])).sum())
    return total / count


def test_any_split_of_a_batch_trains_the_same_heads(folder):  # noqa: F811
    weights = []
    for name, batch, accumulation in (("split8", 8, 1), ("split2", 2, 4)):
        trainer = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation, "max_steps": 3}
        weights.append(load_file(train(folder, name, trainer=trainer) / "last/heads.safetensors"))
    for name, tensor in weights[0].items():
        # float32 sums in another order; Adam divides by the gradient's size, so an entry near 0 may move by a few
        # thousandths of the rate (1e-2).
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=5e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_resume_ends_with_the_same_weights(folder):  # noqa: F811
    whole = train(folder, "whole", trainer={"max_steps": 6})
    with pytest.raises(ValueError, match="holds no checkpoint-"):
        train(folder, "parts", "--resume", "true")
    train(folder, "parts", trainer={"max_steps": 6}, save_every_steps=3)
    parts = folder / "parts"
    for path in (parts / "last").iterdir():
        path.unlink()
    (parts / "checkpoint-6").rename(folder / "put-away")
    train(folder, "parts", "--resume", "true", trainer={"max_steps": 6}, save_every_steps=3)
    for name, tensor in load_file(whole / "last/heads.safetensors").items():
        assert torch.equal(load_file(parts / "last/heads.safetensors")[name], tensor), name


def test_init_from_continues_where_the_heads_were(folder):  # noqa: F811
    first = train(folder, "first", trainer={"max_steps": 20})
    trained = metrics(first)[-1]
    again = train(folder, "again", init_from=str(first / "last"), trainer={"max_steps": 1, "eval_on_start": True})
    start = metrics(again)[0]
    assert start["step"] == 0
    assert start["eval_head1_loss"] == pytest.approx(trained["eval_head1_loss"], rel=1e-5)
    with pytest.raises(ValueError, match=r"init_from .* holds grounded heads"):
        train(folder, "wrong", init_from=str(first / "last"), heads={"num_heads": 1})


@pytest.mark.parametrize(("family", "format"), [("medusa", "medusa"), ("grounded", "hydra"), ("eagle", "speculators")])
def test_imported_heads_are_trained_further_and_written_back(folder, family, format):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    settings = {"num_heads": 2, **({"normalize_embeddings": False} if format == "hydra" else {})}
    export_heads(heads.create(family, model, **settings), format, folder / f"{format}-foreign")
    imported = import_heads(folder / f"{format}-foreign", model)
    heads.save(imported, folder / f"{format}-native")
    more = {
        "family": family,
        "heads": asdict(imported.config),
        "init_from": str(folder / f"{format}-native"),
        "trainer": {"max_steps": 2},
    }
    trained = heads.load(train(folder, f"{format}-further", **more) / "last", model)
    before, after = imported.state_dict(), trained.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert "the same logits" in export_heads(trained, format, folder / f"{format}-again")


def test_the_backbone_alone_learns_and_can_be_loaded(folder):  # noqa: F811
    changes = {"family": None, "rates": {"heads": 1e-4, "base": 1e-2}, "trainer": {"max_steps": 25}}
    path = write_config(folder, "alone", **changes)
    content = json.loads(Path(path).read_text())
    content["heads"] = {}
    content["backbone"]["random_weights"] = True
    Path(path).write_text(json.dumps(content))
    where = run(read_config(["--config", path]))
    losses = [line["backbone_loss"] for line in metrics(where) if "backbone_loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    loaded = AutoModelForCausalLM.from_pretrained(where / "last")
    assert loaded.config.vocab_size == 2048


def test_tokens_per_pass_is_what_the_loaded_heads_do(folder):  # noqa: F811
    """The decoder that ships, on the same prompts, after a save and a load."""
    where = train(folder, "measured", trainer={"max_steps": 30})
    measured = metrics(where)[-1]["eval_tokens_per_pass"]
    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    token_heads = heads.load(where / "last", model)
    config = read_config(["--config", write_config(folder, "measured", trainer={"max_steps": 30})])
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    blocks = build_datasets(config.data, tokenizer, num_heads=2, vocab_size=2048).eval
    prompts = [torch.tensor(blocks[i]["input_ids"][:8]) for i in spread(len(blocks), 2)]
    tokens, passes = count_decoding(token_heads, prompts, config.evaluation)
    assert tokens / passes == pytest.approx(measured, rel=1e-6)
    assert measured > 1.2
    config.evaluation.tree_nodes = 2  # the root and one drafted token
    fewer, more_passes = count_decoding(token_heads, prompts, config.evaluation)
    assert fewer / more_passes <= 2
    assert (fewer, more_passes > passes) == (tokens, True)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("family", "unembedding"), [("grounded", "own"), ("medusa", "shared")])
def test_a_bfloat16_backbone_trains_evaluates_and_saves(folder, family, unembedding, autocast):  # noqa: F811
    """What the 7B configs do: float32 heads on a bfloat16 backbone, decoded in bfloat16 at evaluations."""
    name = f"half-{family}-{autocast}"
    path = write_config(
        folder,
        name,
        family=family,
        heads={"num_heads": 2, "unembedding": unembedding},
        backbone={"dtype": "bfloat16"},
        trainer={"max_steps": 8, "bf16": autocast},
        save_dtype="bfloat16",
    )
    where = run(read_config(["--config", path]))
    logged = metrics(where)
    losses = [line["loss"] for line in logged if "loss" in line]
    assert losses[-1] < losses[0]
    assert logged[-1]["eval_tokens_per_pass"] >= 1
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    assert next(heads.load(where / "last", model).parameters()).dtype == torch.bfloat16


def test_bf16_auto_is_what_the_machine_has(folder, caplog, monkeypatch):  # noqa: F811
    monkeypatch.setattr("train.engine.half_precision.multiplies_bfloat16", lambda: True)
    caplog.set_level("INFO", "train")
    seen, step = [], HeadsTrainer.training_step

    def watched(self, *args, **kwargs):
        seen.append(self.args.bf16)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "training_step", watched)
    train(folder, "auto-bf16", trainer={"max_steps": 1, "bf16": "auto"})
    assert "trainer.bf16: auto is bfloat16 here" in caplog.text
    assert set(seen) == {True}


def test_without_held_out_data_nothing_is_evaluated(folder, caplog):  # noqa: F811
    where = train(folder, "unmeasured", data={"eval_fraction": 0.0}, evaluation={"every_steps": 2})
    assert "nothing is evaluated" in caplog.text
    assert (where / "last" / schema.TENSORS).is_file()
    assert not (where / "best").exists()


def test_a_short_last_accumulation_is_averaged_over_what_it_has(folder):  # noqa: F811
    """One epoch whose last step has fewer micro-batches than the others."""
    trainer = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 4}
    logged = metrics(train(folder, "short", trainer=trainer, rates={"heads": 1e-12}))
    lines = [line for line in logged if "head1_loss" in line]
    config = read_config(["--config", write_config(folder, "short")])
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    batches = -(-len(build_datasets(config.data, tokenizer, num_heads=2, vocab_size=2048).train) // 4)
    assert batches % 4, "every step is whole: the test shows nothing"
    assert len(lines) == -(-batches // 4)
    for line in lines:
        assert line["loss"] == pytest.approx(line["head1_loss"] + line["head2_loss"], rel=1e-3)  # logs keep four digits


def test_a_second_run_replaces_the_first_only_when_it_is_told_to(folder):  # noqa: F811
    where = train(folder, "twice", save_every_steps=2)
    before = {path: path.read_bytes() for path in where.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"checkpoint-2, checkpoint-4, last, best, metrics.jsonl of an earlier run"):
        train(folder, "twice", "--seed", "7", save_every_steps=2)
    with pytest.raises(ValueError, match="holds no heads"):
        train(folder, "twice", "--overwrite", "true", init_from=str(folder / "no-heads"))
    assert {path: path.read_bytes() for path in where.rglob("*") if path.is_file()} == before
    train(folder, "twice", "--overwrite", "true", trainer={"max_steps": 1})
    assert [line["step"] for line in metrics(where) if "head1_loss" in line] == [1]
    assert not list(where.glob("checkpoint-*"))


def test_resume_keeps_the_best_so_far_and_refuses_what_is_damaged(folder, monkeypatch):  # noqa: F811
    where = train(folder, "kept", save_every_steps=2)
    description = json.loads((where / "best/heads.json").read_text())
    description["recipe"]["measured"]["tokens_per_pass"] = 99.0
    (where / "best/heads.json").write_text(json.dumps(description))
    (where / "checkpoint-4").rename(folder / "kept-away")
    train(folder, "kept", "--resume", "true", save_every_steps=2)
    assert json.loads((where / "best/heads.json").read_text())["recipe"]["measured"]["tokens_per_pass"] == 99.0
    for name in ("optimizer.safetensors", "heads.safetensors"):
        for number in (2, 4):
            file = where / f"checkpoint-{number}" / name
            file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(ValueError, match=r"holds no checkpoint that is whole: checkpoint-4: .* has 100 bytes"):
            train(folder, "kept", "--resume", "true", save_every_steps=2, trainer={"max_steps": 6})


def test_a_resumed_run_follows_the_rates_of_its_config(folder, caplog):  # noqa: F811
    trainer = {"max_steps": 4, "lr_scheduler_type": "constant"}
    where = train(folder, "rates", save_every_steps=2, trainer=trainer)
    (where / "checkpoint-4").rename(folder / "kept-away-rates")
    train(folder, "rates", "--resume", "true", save_every_steps=2, trainer=trainer, rates={"heads": 1e-6})
    assert "is 1e-06 from now on" in caplog.text
    rates = {line["step"]: line["learning_rate"] for line in metrics(where) if "learning_rate" in line}
    assert (rates[2], rates[3], rates[4]) == (1e-2, 1e-6, 1e-6)


def test_a_full_disk_at_the_end_saves_elsewhere(folder, monkeypatch):  # noqa: F811
    save = save_load.save

    def full_under_the_run(token_heads, where, **options):
        if str(where).startswith(str(folder)):
            raise OSError("No space left on device.")
        save(token_heads, where, **options)

    monkeypatch.setattr(save_load, "save", full_under_the_run)
    with pytest.raises(OSError, match="The trained weights are in") as error:
        train(folder, "nowhere-to-save")
    assert (Path(str(error.value).split(" weights are in ")[1].rstrip(".")) / schema.TENSORS).is_file()


@pytest.mark.parametrize("raised", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_checkpoint_that_cannot_be_written_costs_itself_not_the_run(folder, monkeypatch, caplog, raised):  # noqa: F811
    def full(*args, **kwargs):
        raise raised

    monkeypatch.setattr("train.loop.trainer.save_optimizer", full)
    where = train(folder, f"full-{type(raised).__name__}", save_every_steps=2)
    assert "No checkpoint at step 2" in caplog.text
    assert not list(where.glob("checkpoint-*"))
    assert (where / "last" / schema.TENSORS).is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data.train", '[{"path": "nowhere.jsonl"}]'], "nowhere.jsonl"),
        (["--backbone.name_or_path", "nowhere"], "'nowhere' could not be loaded as a causal LM"),
        (["--rates.heads", "0"], "rates.heads=0"),
        (["--init_from", "nowhere"], "nowhere holds no heads.json"),
        (["--trainer.max_step", "3"], "Did you mean 'max_steps'"),
        (["--data.block_size", "3"], "2 heads need blocks of at least 4"),
        (["--resume", "true"], "holds no checkpoint-"),
    ],
)
def test_what_a_user_can_cause_ends_in_a_sentence(folder, flags, message, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no network: ends as an unknown name does
    with pytest.raises(SystemExit) as stop:
        main(["--config", write_config(folder, f"errors{flags[0]}"), *flags])
    assert stop.value.code in (1, 2)
    said = capsys.readouterr().err
    assert message in re.sub(r"\s+", " ", said.strip().splitlines()[-1])
    assert "Traceback" not in said


def test_an_engine_that_is_not_there_is_an_error(folder, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(SystemExit):
        main(["--config", write_config(folder, "engine")])
    assert "asks for FSDP" in capsys.readouterr().err


def test_processes_that_did_not_start_are_an_error(folder, capsys, monkeypatch):  # noqa: F811
    """What `accelerate launch --cpu --num_processes 2` leaves in the environment of its single process."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        main(["--config", write_config(folder, "lost")])
    assert "asks for several processes and started one" in capsys.readouterr().err


def test_inspect_data_shows_samples_and_counts(folder, capsys):  # noqa: F811
    train_main(["inspect-data", "--config", write_config(folder, "inspected"), "--samples", "2"])
    shown = capsys.readouterr().out
    assert "def f" in shown
    assert "text.jsonl" in shown


@pytest.mark.parametrize("command", ["plan", "inspect-data", "regenerate-data"])
def test_ctrl_c_in_a_command_is_one_line(folder, command, capsys, monkeypatch):  # noqa: F811
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    for place in (
        "train.data.inspect.read_sources",
        "train.plan.command.make_plan",
        "train.regenerate.command.SourceRows",
    ):
        monkeypatch.setattr(place, interrupted)
    flags = ["--out", str(folder / "out.jsonl")] if command == "regenerate-data" else []
    with pytest.raises(SystemExit) as stop:
        train_main([command, "--config", write_config(folder, "interrupted"), *flags])
    assert stop.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted: ended before it was done."


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["inspect-data", "--config", "nowhere.yaml"], ["inspect-data", "--what"]]
)
def test_wrong_commands_end_in_a_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        train_main(arguments)
    assert stop.value.code in (1, 2)
    assert "error" in capsys.readouterr().err
