"""Heads with packed layers: in memory, in their folder, under every way to decode; and where they are refused."""

from __future__ import annotations

import json
import os

import pytest
import torch
from repository import ROOT
from safetensors import safe_open
from throwaway_families import fitted_heads
from tiny import PAD, random_tokens, shared_model
from typer.testing import CliRunner

import heads
from heads.cli.main import app
from heads.quantization.linear import MXLinear
from heads.quantization.packed_heads import packed_layers

FAMILIES = ("medusa", "grounded", "eagle", "dynamo")
SKIP = {family: ["down_proj"] for family in ("eagle", "dynamo")}  # its 48 inputs do not fill blocks
PROMPT = random_tokens(1, 6, seed=3)
ASKED = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


def packed_heads(family, format="mxfp6_e2m3"):
    config = heads.MXConfig(format, skip=SKIP.get(family, ()))
    return heads.pack_heads(heads.create(family, shared_model("llama"), num_heads=3), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_come_back_as_they_were_saved(family, tmp_path):
    token_heads = packed_heads(family)
    heads.save(token_heads, tmp_path / "h")
    again = heads.load(tmp_path / "h", token_heads.backbone)
    assert packed_layers(again) == packed_layers(token_heads) != {}
    for name, tensor in token_heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    model = token_heads.backbone.model
    decoded = [model.generate(PROMPT, custom_generate=heads.TreeDecoding(h), **ASKED) for h in (token_heads, again)]
    assert torch.equal(decoded[0], decoded[1])
    assert torch.equal(decoded[0], model.generate(PROMPT, **ASKED))


def test_drafts_are_those_of_the_rounded_weights():
    """Fitted heads, so that drafts are accepted: packed layers draft what plain layers with the same numbers draft."""
    model = fitted_heads("grounded", "llama").backbone.model
    plain = heads.create("grounded", model, num_heads=3)
    plain.load_state_dict(fitted_heads("grounded", "llama").state_dict())
    packed = heads.create("grounded", model, num_heads=3)
    packed.load_state_dict(plain.state_dict())
    heads.pack_heads(packed.to(torch.float64), heads.MXConfig("mxfp8_e4m3"))
    for name, layer in list(packed.named_modules()):
        if isinstance(layer, MXLinear):
            plain.set_submodule(name, layer.unpacked(torch.float64))
    asked = {**ASKED, "max_new_tokens": 32, "return_dict_in_generate": True}
    one, other = (
        model.generate(PROMPT, custom_generate=heads.TreeDecoding(h.eval()), **asked) for h in (packed, plain)
    )
    assert torch.equal(one.sequences, other.sequences)
    assert one.stats.drafted == other.stats.drafted
    assert one.stats.tokens_per_pass > 1.2


def test_they_take_as_many_bytes_as_their_format(tmp_path):
    heads.save(packed_heads("medusa", "mxfp4_e2m1"), tmp_path / "h")
    with safe_open(tmp_path / "h" / "heads.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if "linear.weight" in name}  # noqa: SIM118
    assert {tuple(shape) for shape in shapes.values()} == {(32, 1, 16), (32, 1)}, "32 inputs: 16 bytes and a scale"
    content = json.loads((tmp_path / "h" / "heads.json").read_text())
    assert set(content["packed_layers"].values()) == {"mxfp4_e2m1"}
    plain = heads.create("medusa", shared_model("llama"), num_heads=3)
    assert content["num_parameters"] == sum(p.numel() for p in plain.parameters())


def test_info_counts_packed_weights_and_names_their_layers(tmp_path):
    heads.save(packed_heads("medusa", "mxfp4_e2m1"), tmp_path / "h")
    plain = sum(p.numel() for p in heads.create("medusa", shared_model("llama"), num_heads=3).parameters())
    result = CliRunner().invoke(app, ["info", str(tmp_path / "h"), "--json"])
    assert json.loads(result.stdout)["num_parameters"] == plain
    shown = " ".join(CliRunner().invoke(app, ["info", str(tmp_path / "h")]).stdout.split())
    assert f"{plain:,}" in shown
    assert "mxfp4_e2m1: bodies." in shown


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"bodies.9.linear": "mxfp4_e2m1"}, "names 'bodies.9.linear', which is no"),
        ({"bodies.0.0.linear": "fp3"}, "fp3"),
    ],
)
def test_odd_records_are_refused(layers, said, tmp_path):
    heads.save(packed_heads("medusa"), tmp_path / "h")
    content = json.loads((tmp_path / "h" / "heads.json").read_text())
    (tmp_path / "h" / "heads.json").write_text(json.dumps({**content, "packed_layers": layers}))
    with pytest.raises(ValueError, match=said):
        heads.load(tmp_path / "h", shared_model("llama"))


def test_what_needs_floating_point_says_so(tmp_path):
    token_heads = packed_heads("medusa")
    with pytest.raises(ValueError, match="Exporting as medusa needs heads in floating point"):
        heads.export_heads(token_heads, "medusa", tmp_path / "m")
    with pytest.raises(ValueError, match="Cutting heads to some tokens needs heads in floating point"):
        heads.prune_vocabulary(token_heads, [1, 2, 3])
    with pytest.raises(ValueError, match="packed already"):
        heads.pack_heads(token_heads, heads.MXConfig())
    with pytest.raises(ValueError, match="skip='nothing'"):
        heads.pack_heads(heads.create("medusa", shared_model("llama"), num_heads=1), heads.MXConfig(skip=["nothing"]))
    with pytest.raises(ValueError, match="no linear layers to pack"):
        packed_heads("gru")


def test_the_command_writes_the_pair(tmp_path):
    asked = ["quantize", str(ROOT / "checkpoints/demo/base"), "--heads", str(ROOT / "checkpoints/demo/medusa")]
    asked += ["--format", "mxfp6_e2m3", "--out", str(tmp_path / "base"), "--heads-out", str(tmp_path / "heads")]
    asked += ["--blocks", "0", "--num-prompts", "1", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    model, token_heads = heads.load_with_backbone(tmp_path / "heads")
    assert packed_layers(token_heads)
    assert packed_layers(model), "heads.json names the packed backbone"
    plain, packed = (ROOT / "checkpoints/demo/medusa/heads.safetensors", tmp_path / "heads" / "heads.safetensors")
    assert os.path.getsize(packed) < os.path.getsize(plain)
    assert CliRunner().invoke(app, [*asked[:4], "--heads-out", "x"]).exit_code != 0
