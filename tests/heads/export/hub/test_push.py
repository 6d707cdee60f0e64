"""Heads to and from a hub: what is uploaded, how it loads again, and what is refused in one sentence."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from huggingface_hub import constants
from repository import ROOT
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import heads
from heads.checkpoint import remote
from heads.checkpoint.remote import find_heads
from heads.cli.main import app
from heads.export.hub.folder import export_to_hub_folder

DEMO = ROOT / "checkpoints" / "demo"
PROMPT = torch.tensor([[574, 511, 199, 199, 513]])


@pytest.fixture(scope="module")
def model():
    return heads.load_backbone(heads.BackboneConfig(name_or_path=str(DEMO / "base"), dtype="float32"))


def drafted(token_heads, model):
    asked = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(PROMPT, **asked, custom_generate=heads.TreeDecoding(token_heads, lookup=0)).stats.passes


def test_heads_come_back_from_the_hub(hub, model):
    token_heads = heads.load(DEMO / "gru", model)
    address = heads.push_to_hub(token_heads, "org/gru-heads", license="mit", message="first")
    assert address.startswith(f"{hub.address}/org/gru-heads/commit/")
    assert set(hub.branches["org/gru-heads"]["main"]) == {"heads.json", "heads.safetensors", "README.md"}
    assert hub.messages == ["first"]
    back = heads.load("org/gru-heads", model)
    assert all(torch.equal(p, q) for p, q in zip(back.parameters(), token_heads.parameters(), strict=True))
    assert drafted(back, model) == drafted(token_heads, model)
    card = hub.branches["org/gru-heads"]["main"]["README.md"].decode()
    assert "license: mit" in card
    assert 'heads.load("org/gru-heads", model)' in card


def test_a_folder_is_uploaded_byte_for_byte(hub):
    heads.push_to_hub(DEMO / "grounded", "org/grounded")
    found = hub.branches["org/grounded"]["main"]
    assert set(found) == {"heads.json", "heads.safetensors", "README.md"}
    for name in ("heads.json", "heads.safetensors"):
        assert found[name] == (DEMO / "grounded" / name).read_bytes()
    assert "2.43 tokens per pass" in found["README.md"].decode(), "what the run measured"


@pytest.mark.parametrize("part_bytes", [None, 100_000], ids=["one part", "several parts"])
def test_large_files_take_git_lfs(hub, model, monkeypatch, part_bytes):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # as the environment variable of that name
    hub.lfs_from, hub.part_bytes = 50_000, part_bytes
    heads.push_to_hub(DEMO / "gru", "org/heads")
    tensors = (DEMO / "gru" / "heads.safetensors").read_bytes()
    assert len(tensors) > 100_000
    assert list(hub.large.values()) == [tensors]
    assert hub.verified == list(hub.large)
    assert hub.branches["org/heads"]["main"]["heads.safetensors"] == tensors
    heads.load("org/heads", model)
    heads.push_to_hub(DEMO / "gru", "org/again")  # there already: nothing is sent
    assert len(hub.verified) == 1


def test_a_large_file_that_is_not_stored_is_one_sentence(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.lfs_from, hub.stores = 50_000, False
    with pytest.raises(ValueError, match=r"org/heads could not be written .*heads\.safetensors.*storage is full"):
        heads.push_to_hub(DEMO / "gru", "org/heads")
    assert hub.messages == []


def test_revision_and_cache(hub, model, tmp_path):
    heads.push_to_hub(DEMO / "medusa", "org/heads")
    heads.push_to_hub(DEMO / "gru", "org/heads", revision="small")
    families = [heads.load("org/heads", model, revision=revision).family for revision in (None, "main", "small")]
    assert families == ["medusa", "medusa", "gru"]
    own = tmp_path / "own-cache"
    commit = heads.push_to_hub(DEMO / "gru", "org/heads", revision="small").rpartition("/")[2]
    assert heads.load("org/heads", model, revision=commit, cache_dir=own).family == "gru"
    assert (own / "models--org--heads" / "snapshots" / commit).is_dir()


def test_what_is_in_the_cache_loads_without_the_hub(hub, model, monkeypatch):
    heads.push_to_hub(DEMO / "gru", "org/heads")
    heads.load("org/heads", model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert heads.load("org/heads", model).family == "gru"
    assert len(hub.asked) == asked


def test_only_files_of_heads_are_fetched(hub, model):
    heads.push_to_hub(DEMO / "gru", "org/heads")
    hub.branches["org/heads"]["main"] |= {"code.py": b"raise SystemExit", "pytorch_model.bin": b"a pickle"}
    heads.load("org/heads", model)
    assert not any("code.py" in path or ".bin" in path for path in hub.asked)


def test_heads_come_back_with_the_backbone_that_was_trained_with_them(hub):
    heads.push_to_hub(DEMO / "dynamo", "org/dynamo")
    model, token_heads = heads.load_with_backbone("org/dynamo", dtype="float32")
    here, _ = heads.load_with_backbone(DEMO / "dynamo", dtype="float32")
    assert token_heads.family == "dynamo"
    assert torch.equal(model(PROMPT).logits, here(PROMPT).logits)


def test_an_exported_folder_is_opened_by_its_name(hub, tmp_path, monkeypatch):
    out = export_to_hub_folder(DEMO / "grounded", tmp_path / "out")
    heads.push_to_hub(out, "org/served")
    found = hub.branches["org/served"]["main"]
    assert {"config.json", "model.safetensors", "heads/heads.json", "custom_generate/generate.py"} <= set(found)
    assert b"transformers serve org/served --trust-remote-code" in found["README.md"]
    model = AutoModelForCausalLM.from_pretrained("org/served", trust_remote_code=True, dtype=torch.float32)
    output = model.generate(PROMPT, max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
    assert output.stats.passes < 16
    assert torch.equal(output.sequences, type(model).generate(model, PROMPT, max_new_tokens=16, do_sample=False))
    assert heads.load("org/served", model).family == "grounded"
    assert heads.load_with_backbone("org/served")[1].family == "grounded"


def test_a_card_of_one_s_own_is_uploaded_as_it_is(hub, tmp_path):
    mine = shutil.copytree(DEMO / "gru", tmp_path / "mine")
    (mine / "README.md").write_text("# Mine\n", encoding="utf-8")
    heads.push_to_hub(mine, "org/mine")
    assert hub.branches["org/mine"]["main"]["README.md"] == b"# Mine\n"
    with pytest.raises(ValueError, match="is uploaded as it is; leave them out"):
        heads.push_to_hub(mine, "org/mine", license="mit")


def test_the_command_prints_the_commit(hub, tmp_path):
    asked = [
        "push",
        str(DEMO / "gru"),
        "org/heads",
        "--revision",
        "small",
        "--license",
        "mit",
        "--message",
        "two heads",
        "--private",
    ]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.startswith(f"{hub.address}/org/heads/commit/")
    assert hub.messages == ["two heads"]
    assert hub.visibility == {"org/heads": "private"}
    assert b"license: mit" in hub.branches["org/heads"]["small"]["README.md"]
    ran = CliRunner().invoke(app, ["push", str(tmp_path), "org/heads"])
    assert (ran.exit_code, ran.stderr.startswith(f"error: {tmp_path} holds no heads.json")) == (1, True)


@pytest.mark.parametrize("name", ["heads", "a/b/c", "../heads", "org/", "", "/etc"])
def test_other_names_are_refused(hub, name):
    with pytest.raises(ValueError, match="give its name on the hub, organisation/name"):
        heads.push_to_hub(DEMO / "gru", name)
    assert hub.branches == {}


def test_the_hub_s_refusal_is_one_sentence(hub):
    hub.writable = False
    with pytest.raises(ValueError, match=r"could not be written .*You have no right to write here.*hf auth login"):
        heads.push_to_hub(DEMO / "gru", "org/heads")


def test_a_hub_that_does_not_answer_is_one_sentence(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError,
        match=r"org/heads could not be written at http://127\.0\.0\.1:9 .*connect to the network.*push again",
    ):
        heads.push_to_hub(DEMO / "gru", "org/heads")


def test_what_the_hub_does_not_have_is_one_sentence(hub, model):
    with pytest.raises(ValueError, match="org/nothing is no folder here, and could not be fetched from the hub"):
        heads.load("org/nothing", model)
    hub.branches["org/other"] = {"main": {"config.json": b"{}"}}
    with pytest.raises(ValueError, match=r"org/other on the hub holds no heads\.json"):
        heads.load("org/other", model)
    heads.push_to_hub(DEMO / "gru", "org/heads")
    with pytest.raises(ValueError, match="at revision v2"):
        heads.load("org/heads", model, revision="v2")


def test_settings_of_the_hub_for_a_folder_are_refused(model):
    with pytest.raises(ValueError, match="they belong to names on the hub"):
        heads.load(DEMO / "gru", model, revision="main")
    with pytest.raises(ValueError, match="they belong to names on the hub"):
        heads.load(DEMO / "gru", model, cache_dir="cache")


def test_a_folder_comes_before_a_name_on_the_hub(tmp_path, monkeypatch):
    shutil.copytree(DEMO / "gru", tmp_path / "org" / "heads")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "download", lambda *_: pytest.fail("the hub was asked"))
    assert find_heads("org/heads").resolve() == tmp_path / "org" / "heads"


def test_a_link_inside_a_model_folder_is_not_followed(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "heads").symlink_to(DEMO / "gru")
    with pytest.raises(ValueError, match="is a link to"):
        find_heads(tmp_path / "model")


def test_a_link_that_leads_out_is_not_uploaded(hub, tmp_path):
    out = export_to_hub_folder(DEMO / "gru", tmp_path / "out")
    (out / "secret").symlink_to(os.devnull)
    with pytest.raises(ValueError, match="is a link that leads out"):
        heads.push_to_hub(out, "org/heads")
    assert hub.messages == []
