"""`headway quantize --out` writes a packed backbone that opens without the original and is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from repository import ROOT
from typer.testing import CliRunner

import heads
from heads.backbone.loading import BackboneConfig, load_backbone
from heads.checkpoint.packed_backbone import pack_backbone
from heads.cli.main import app
from heads.quantization.linear import MXLinear

BASE, GROUNDED = ROOT / "checkpoints" / "demo" / "base", ROOT / "checkpoints" / "demo" / "grounded"
FEW = ["--blocks", "2", "--block-tokens", "32", "--num-prompts", "1", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder, and the figures of the command that wrote it."""
    place = tmp_path_factory.mktemp("packed")
    out, figures = place / "base-mxfp6", place / "figures.json"
    words = [str(BASE), "--heads", str(GROUNDED), "--format", "mxfp6_e2m3", "--out", str(out), "--json", str(figures)]
    result = CliRunner().invoke(app, ["quantize", *words, *FEW])
    assert result.exit_code == 0, result.output
    return out, json.loads(figures.read_text())["rows"], result.output


def test_the_folder_is_whole_and_nothing_is_left_beside_it(written):
    out, _, output = written
    assert (out / "training.json").read_bytes() == (BASE / "training.json").read_bytes()
    assert (out / "tokenizer.json").is_file()
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"  # what is not packed stays as stored
    assert {path.name for path in out.parent.iterdir()} == {"base-mxfp6", "figures.json"}
    assert "base-mxfp6" in output
    bits = 8 * (out / "model.safetensors").stat().st_size / sum(p.numel() for p in load_backbone(plain()).parameters())
    assert 6.25 < bits < 8  # the embedding of the tiny model has 16 bits


def plain():
    return BackboneConfig(name_or_path=str(BASE))


def test_what_is_measured_computes_on_packed_weights(written):
    _, (before, after), _ = written
    assert (before["format"], after["format"]) == (None, "mxfp6_e2m3")
    assert 0.01 < after["weight_error"] < 0.06
    assert after["weight_bytes"] < 0.5 * before["weight_bytes"]
    assert after["perplexity"]["value"] != before["perplexity"]["value"]
    assert after["perplexity"]["value"] == pytest.approx(before["perplexity"]["value"], rel=0.05)
    assert after["same_text"] == before["same_text"] == "yes"


def test_text_of_heads_is_plain_generations_on_the_packed_folder(written):
    out, *_ = written
    model = load_backbone(BackboneConfig(name_or_path=str(out), dtype="float64"))  # where no difference is excused
    assert sum(isinstance(module, MXLinear) for module in model.modules()) == 8 * 7
    decoding = heads.TreeDecoding(heads.load(GROUNDED, model), lookup=0)
    asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    prompt_1T = torch.arange(24)[None] * 13
    inputs = {"inputs": prompt_1T, "attention_mask": torch.ones_like(prompt_1T)}
    assert torch.equal(model.generate(**inputs, **asked), model.generate(**inputs, **asked, custom_generate=decoding))


def refusal(*words: object) -> str:
    result = CliRunner().invoke(app, ["quantize", *map(str, words)])
    assert result.exit_code != 0
    return str(result.exception) if result.exception and str(result.exception) != "1" else result.output


def test_what_cannot_be_written_is_one_sentence_and_writes_nothing(written, tmp_path):
    out, *_ = written
    assert "takes one format; give --format" in refusal(BASE, "--out", tmp_path / "new")
    assert "exists already and is not empty" in refusal(BASE, "--format", "mxint8", "--out", out)
    assert "mxfp5" in refusal(BASE, "--format", "mxfp5", "--out", tmp_path / "new")
    assert "is quantised already (headway_mx)" in refusal(out, "--format", "mxint8", "--out", tmp_path / "new")
    packed = ["--heads", GROUNDED, "--format", "mxint8", "--out", tmp_path / "new", "--heads-out"]
    assert "exists already or is --out" in refusal(BASE, *packed, out)
    assert "exists already or is --out" in refusal(BASE, *packed, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_options_about_tokens_per_pass_need_heads():
    said = "--num-prompts, --max-new-tokens is about tokens per pass of heads; give --heads too"
    assert said in refusal(BASE, "--num-prompts", 8, "--max-new-tokens", 8)


def test_a_folder_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch):
    def full(_: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("heads.checkpoint.packed_backbone.sync", full)
    with pytest.raises(OSError, match=r"\(no space left\); free space"):
        pack_backbone(str(BASE), "mxfp4_e2m1", tmp_path / "new")
    assert not list(tmp_path.iterdir())
