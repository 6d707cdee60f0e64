"""Runs that train backbone and heads together, or the backbone through an adapter: learnt, saved, resumed."""

import re
import shutil

import pytest
import torch
from learned_run import JOINT, ROOT, folder, metrics, own_cache, train, train_jointly, write_config  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoTokenizer, set_seed
from typer.testing import CliRunner

import heads
from heads.checkpoint.opening import open_heads
from heads.cli.main import app
from train.config import read_config
from train.loop.building import load_trainable


def weights(where):
    """All that a run saved, heads and backbone or adapter."""
    (backbone,) = where.glob("backbone-*")
    (tensors,) = backbone.glob("*.safetensors")
    return load_file(where / "heads.safetensors") | {f"base {n}": t for n, t in load_file(tensors).items()}


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "alpha": 8.0}])
def test_a_joint_run_learns_saves_and_resumes(folder, lora):  # noqa: F811
    name = f"joint-{len(lora)}"
    whole = train_jointly(folder, f"{name}-whole", trainer={"max_steps": 6}, lora=lora)
    logged = metrics(whole)
    assert logged[-2]["eval_backbone_loss"] > 0
    assert {"backbone_loss", "head1_loss", "head2_loss"} <= set(logged[0])
    assert [("heads_overhead" in line) for line in logged].count(True) == 1
    last = weights(whole / "last")
    start = load_file(folder / "base/model.safetensors")
    if lora:
        assert any(t.abs().max() > 0 for n, t in last.items() if "lora_B" in n), "the adapter was trained"
        assert not any("lora" in n for n in last if not n.startswith("base "))
    else:
        moved = [n for n, t in start.items() if not torch.equal(last[f"base {n}"], t)]
        assert len(moved) == len(start)
    parts = train_jointly(folder, name, trainer={"max_steps": 6}, save_every_steps=3, lora=lora)
    (parts / "checkpoint-6").rename(folder / f"{name}-put-away")
    train_jointly(folder, name, "--resume", "true", trainer={"max_steps": 6}, save_every_steps=3, lora=lora)
    for tensor_name, tensor in weights(parts / "last").items():
        torch.testing.assert_close(tensor, last[tensor_name], rtol=0, atol=1e-6)
    _, token_heads = heads.load_with_backbone(parts / "last")
    assert token_heads.measured_accuracy is not None
    assert AutoTokenizer.from_pretrained(next((parts / "last").glob("backbone-*"))) is not None
    shown = " ".join(CliRunner().invoke(app, ["info", str(parts / "last")]).stdout.split())
    assert re.search(r"backbone-[0-9a-f]{8}; load both with heads\.load_with_backbone", shown)
    assert ("LoRA adapter" in shown) == bool(lora)


@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
def test_a_backbone_alone_resumes(folder, lora):  # noqa: F811
    alone = {"family": None, "rates": {"base": 1e-3}, "lora": lora, "trainer": {"max_steps": 6}}
    name = f"alone-{len(lora)}"
    whole = train_jointly(folder, f"{name}-whole", "--heads", "{}", **alone)
    parts = train_jointly(folder, name, "--heads", "{}", save_every_steps=3, **alone)
    (parts / "checkpoint-6").rename(folder / f"{name}-put-away")
    train_jointly(folder, name, "--heads", "{}", "--resume", "true", save_every_steps=3, **alone)
    for wanted, found in zip(
        sorted(whole.glob("last/*.safetensors")), sorted(parts.glob("last/*.safetensors")), strict=True
    ):
        tensors = load_file(found)
        for tensor_name, tensor in load_file(wanted).items():
            torch.testing.assert_close(tensors[tensor_name], tensor, rtol=0, atol=1e-6)
    assert bool(list(whole.glob("last/adapter_model.safetensors"))) == bool(lora)


def test_a_copied_folder_opens_without_the_original_backbone(folder, tmp_path):  # noqa: F811
    trained = train_jointly(folder, "joint-copied")
    copied = shutil.copytree(trained / "last", tmp_path / "copy")
    (folder / "base").rename(folder / "hidden")
    try:
        opened = open_heads([copied])
        assert len(opened.tokenizer) > 0
    finally:
        (folder / "hidden").rename(folder / "base")


def test_an_adapter_is_trained_on_with_its_own_rank(folder):  # noqa: F811
    first = train_jointly(folder, "joint-adapted", lora={"rank": 4})
    with pytest.raises(ValueError, match=r"adapter of rank 4; to continue its training, give lora\.rank 4"):
        train_jointly(folder, "joint-otherwise", init_from=str(first / "last"))
    frozen = train_jointly(
        folder, "joint-on-adapter", init_from=str(first / "last"), rates={"heads": 1e-2, "base": None}
    )
    assert list((frozen / "last").glob("backbone-*/adapter_model.safetensors")), "the adapter goes with its heads"


def adapter_of(model):
    return {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if "lora_" in n}


def test_an_adapter_learns_in_float32_on_a_bfloat16_backbone(folder):  # noqa: F811
    """Every entry moves at a rate that bfloat16 rounds away; a run that goes on, or starts from it, has all bits."""
    half = {
        "family": "medusa",
        "backbone": {"dtype": "bfloat16"},
        "lora": {"rank": 4},
        "rates": {"base": 1e-4, "heads": 1e-3},
        "trainer": {"max_steps": 4},
    }
    path = write_config(folder, "half-start", **(JOINT | half))
    config = read_config(["--config", path])
    set_seed(config.seed)
    start = adapter_of(load_trainable(config, torch.device("cpu")))
    assert {t.dtype for t in start.values()} == {torch.float32}
    whole = train_jointly(folder, "half", save_every_steps=2, **half)
    trained = {n.removeprefix("base base_model.model."): t for n, t in weights(whole / "last").items() if "lora_" in n}
    assert {t.dtype for t in trained.values()} == {torch.float32}
    for name, tensor in trained.items():
        assert (tensor != start[name]).float().mean() > 0.99, name
    before = {name: tensor.clone() for name, tensor in weights(whole / "last").items()}
    shutil.rmtree(whole / "checkpoint-4")
    train_jointly(folder, "half", "--resume", "true", save_every_steps=2, **half)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(whole / "last").items())
    on = read_config(["--config", write_config(folder, "half-on", **(JOINT | half), init_from=str(whole / "last"))])
    for name, tensor in adapter_of(load_trainable(on, torch.device("cpu"))).items():
        assert torch.equal(tensor, trained[name]), name


def test_init_from_goes_on_with_the_changed_backbone(folder):  # noqa: F811
    first = train_jointly(folder, "joint-first", trainer={"max_steps": 10})
    trained = metrics(first)[-2]  # the last line says what became of the backbone
    init = {"init_from": str(first / "last"), "trainer": {"max_steps": 1, "eval_on_start": True}}
    start = metrics(train_jointly(folder, "joint-again", **init))[0]
    assert start["step"] == 0
    for name in ("eval_backbone_loss", "eval_head1_loss", "eval_head2_loss"):
        assert start[name] == pytest.approx(trained[name], rel=1e-5)


def test_a_run_draws_the_same_with_and_without_the_measured_overhead(folder, monkeypatch):  # noqa: F811
    measured = train_jointly(folder, "joint-measured")
    monkeypatch.setattr("train.run.log_heads_overhead", lambda trainer: None)
    plain = train_jointly(folder, "joint-unmeasured")
    found = weights(measured / "last")
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(plain / "last").items())


def test_heads_on_a_frozen_backbone_save_none(folder):  # noqa: F811
    where = train(folder, "joint-frozen", family="dynamo")
    assert not list((where / "last").glob("backbone-*"))
    assert "heads_overhead" not in metrics(where)[0]
