"""Losses and gradients that are not finite: skipped without a trace, counted, named, and never saved."""

import math

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import add_bad_token, add_callback, assert_same_run, logged, prepare, train, write_config
from transformers import AutoTokenizer, TrainerCallback

from train.checkpoint.whole import checkpoints, newest_whole, step_of
from train.config import read_config
from train.data.packing import build_datasets
from train.loop.trainer import HeadsTrainer
from train.objective.model import TrainedModel

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    return tmp_path


def spoil(monkeypatch, factor, steps):
    """The loss of the second micro-batch of these steps (counted from 0), times a factor."""
    forward, training_step = TrainedModel.forward, HeadsTrainer.training_step
    seen = []

    def noted(self, *args, **kwargs):
        seen.append(self.state.global_step)
        return training_step(self, *args, **kwargs)

    def spoiled(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        if self.training and seen[-1] in steps and seen.count(seen[-1]) == 2:
            outputs = {name: value * factor for name, value in outputs.items()}
        return outputs

    monkeypatch.setattr(HeadsTrainer, "training_step", noted)
    monkeypatch.setattr(TrainedModel, "forward", spoiled)


class SkipByHand(TrainerCallback):
    """What skipping has to do: no optimizer step, everything else as ever."""

    def __init__(self, *steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, optimizer, **kwargs):
        if state.global_step in self.steps:
            optimizer.zero_grad()


@pytest.mark.parametrize(("factor", "base"), [(NAN, None), (INF, 1e-3)])
def test_a_skipped_step_leaves_no_trace(folder, monkeypatch, factor, base, caplog):
    """In the second of two micro-batches: in the first step of all, when AdamW has no moments yet, and in a later."""
    rates = {"rates": {"heads": 3e-3, "base": base}, "family": "grounded" if base is None else "dynamo"}
    with monkeypatch.context() as patch:
        add_callback(patch, SkipByHand(0, 6))
        by_hand = train(write_config(folder, "by-hand", **rates))
    with monkeypatch.context() as patch:
        spoil(patch, factor, {0, 6})
        where = train(write_config(folder, "skipped", **rates))
    for path in sorted((by_hand / "last").rglob("*.safetensors")):
        one, other = load_file(path), load_file(next((where / "last").rglob(path.name)))
        assert all(torch.equal(one[name], other[name]) for name in one)
    losses = [line for line in logged(where) if "head1_loss" in line]
    assert [(line["step"], line["skipped_steps"]) for line in losses] == [
        (4, 1),
        (5, 1),
        *((n, 2) for n in (8, 10, 12, 13)),
    ]
    for line in losses:
        parts = [value for name, value in line.items() if name in ("head1_loss", "head2_loss", "backbone_loss")]
        assert line["loss"] == pytest.approx(sum(parts), rel=0.05)  # over steps, and over labels; not a fifth too low
    assert "Step 1 was skipped" in caplog.text
    assert "Step 7 was skipped" in caplog.text
    assert "Skipped so far: 2 of at most 10" in caplog.text


def test_a_resumed_run_counts_on(folder, monkeypatch):
    """Skipped before the checkpoint and after it, as in a run that never stopped."""
    with monkeypatch.context() as patch:
        spoil(patch, NAN, {4, 8})
        whole = train(write_config(folder, "whole"))
    parts = write_config(folder, "parts")
    with monkeypatch.context() as patch:
        spoil(patch, NAN, {4})
        stop_in_step(patch, 7)
        with pytest.raises(KeyboardInterrupt):
            train(parts)
    with monkeypatch.context() as patch:
        spoil(patch, NAN, {8})
        train(parts, "--resume", "true")
    assert_same_run(whole, folder / "parts")
    assert logged(whole)[-1]["step"] == 13
    counts = [(line["step"], line.get("skipped_steps")) for line in logged(whole) if "head1_loss" in line]
    assert counts == [(4, None), (8, 1), *((n, 2) for n in (10, 12, 13))]


def stop_in_step(monkeypatch, step):
    training_step = HeadsTrainer.training_step

    def stopped(self, *args, **kwargs):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "training_step", stopped)


def test_too_many_end_the_run_and_name_the_blocks(folder):
    """A token whose embedding is NaN: the very blocks that hold it are named, and the checkpoint before is kept."""
    bad = add_bad_token(folder)
    changes = {"save_every_steps": 1, "max_skipped_steps": 2, "trainer": {"max_steps": 60}}
    with pytest.raises(ValueError, match="max_skipped_steps is 2") as error:
        train(write_config(folder, "stopped", **changes))
    said = str(error.value)
    found, _ = newest_whole(folder / "stopped")
    assert f"{found} is the last whole checkpoint" in said
    named = {int(number) for number in said.split("blocks ")[1].split(" of the")[0].split(", ")}
    assert named & holding(folder, bad, changes), (said, holding(folder, bad, changes))
    assert all(torch.isfinite(t).all() for t in load_file(found / "heads.safetensors").values())
    assert "begins '" in said


def holding(folder, token, changes):
    config = read_config(["--config", write_config(folder, "stopped", **changes)])
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    blocks = build_datasets(config.data, tokenizer, num_heads=2, vocab_size=10**6).train
    return {number for number, block in enumerate(blocks) if token in block["input_ids"]}


def test_weights_that_are_not_finite_are_never_saved(folder, monkeypatch, caplog):
    """However they became so."""

    class Breaks(TrainerCallback):
        @torch.no_grad()
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            if state.global_step == 10:
                next(model.token_heads.parameters()).fill_(NAN)

    add_callback(monkeypatch, Breaks())
    with pytest.raises(ValueError, match=r"weights are not finite and are not saved; the last whole .*checkpoint-9"):
        train(write_config(folder, "broken"))
    assert [step_of(path) for path in checkpoints(folder / "broken")] == [6, 9]
    assert "No checkpoint at step 12: the weights are not finite" in caplog.text
    assert not (folder / "broken/last").exists()


def test_a_step_in_which_all_since_the_last_log_were_skipped_logs_no_loss(folder, monkeypatch):
    spoil(monkeypatch, NAN, {0})
    trainer = {"logging_steps": 1, "max_steps": 2}
    first, second = logged(train(write_config(folder, "first", trainer=trainer, evaluation={"every_steps": 0})))[:2]
    assert "loss" not in first
    assert first["grad_norm"] is None
    assert math.isfinite(second["loss"])
