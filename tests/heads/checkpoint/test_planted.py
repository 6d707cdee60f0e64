"""Folders from elsewhere that name, or link to, something of the user's: it is not read, overwritten or removed."""

import json
import os

import pytest
import torch
from tiny import tiny_model

import heads
from heads.checkpoint.backbone import save_backbone
from heads.checkpoint.save_load import write_whole
from heads.decoding.tuned_file import UnreadableTree
from heads.families import create


@pytest.fixture
def victim(tmp_path):
    """A folder of the user's with a file in it, outside the folder of heads."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    return folder


@pytest.fixture
def token_heads():
    return create("medusa", tiny_model("llama", dtype=torch.float32), num_heads=1, unembedding="shared")


def plant(folder, trained_folder):
    """Let heads.json say that its backbone was trained and lies in `trained_folder`."""
    description = json.loads((folder / "heads.json").read_text())
    description["trained_backbone"] = {"folder": trained_folder, "fingerprint": [0.0], "adapter": True}
    (folder / "heads.json").write_text(json.dumps(description))


def lives(victim):
    return [path.name for path in victim.iterdir()] == ["thesis.txt"] and (
        victim / "thesis.txt"
    ).read_text() == "years of work"


@pytest.mark.parametrize(
    "name", ["backbone-/../../victim", "../victim", "ABSOLUTE", ".", "..", "", "backbone-x\\..\\v"]
)
def test_a_backbone_elsewhere_is_neither_loaded_nor_removed(token_heads, victim, tmp_path, name, caplog):
    folder = tmp_path / "heads"
    heads.save(token_heads, folder)
    (folder / "backbone-").mkdir()
    plant(folder, str(victim) if name == "ABSOLUTE" else name)
    with pytest.raises(
        ValueError, match=r"trained_backbone.folder=.* allowed is the name of a folder beside the heads"
    ):
        heads.load(folder, token_heads.backbone)
    with pytest.raises(ValueError, match=r"trained_backbone.folder="):
        heads.load_with_backbone(folder)
    heads.save(token_heads, folder)
    assert lives(victim)
    assert "outside the folder; that is not touched" in caplog.text
    heads.load(folder, token_heads.backbone)


def test_a_backbone_that_is_a_link_is_neither_loaded_nor_removed(token_heads, victim, tmp_path):
    folder = tmp_path / "heads"
    heads.save(token_heads, folder)
    token_heads.backbone.model.save_pretrained(tmp_path / "base")
    description = json.loads((folder / "heads.json").read_text())
    description["backbone"]["name"] = str(tmp_path / "base")
    (folder / "heads.json").write_text(json.dumps(description))
    plant(folder, "backbone-12345678")
    (folder / "backbone-12345678").symlink_to(victim)
    with pytest.raises(
        ValueError, match=r"backbone-12345678 is a link to .*victim; allowed are files and folders them"
    ):
        heads.load_with_backbone(folder)
    heads.save(token_heads, folder)
    assert lives(victim)
    (folder / "backbone-12345678").unlink()
    plant(folder, "backbone-12345678")
    (folder / "backbone-12345678").mkdir()
    (folder / "backbone-12345678" / "adapter_config.json").symlink_to(victim / "thesis.txt")
    with pytest.raises(ValueError, match=r"adapter_config.json is a link to .*thesis.txt"):
        heads.load_with_backbone(folder)


def test_links_under_temporary_names_are_not_written_through(token_heads, victim, tmp_path):
    folder = tmp_path / "heads"
    folder.mkdir()
    for name in ("heads.json", "heads.safetensors"):
        (folder / f".{name}.{os.getpid()}.tmp").symlink_to(victim / "thesis.txt")
    (folder / ".backbone.tmp").symlink_to(victim)
    heads.save(token_heads, folder, with_backbone=True)
    assert lives(victim)
    assert [path.name for path in folder.iterdir() if path.is_symlink() or path.suffix == ".tmp"] == []
    (folder / ".whole.json.1.tmp").symlink_to(victim / "thesis.txt")
    write_whole(folder, {"heads.json": b"{}"})
    assert lives(victim)


def test_a_link_in_the_place_of_the_new_backbone_is_replaced(token_heads, victim, tmp_path):
    name = save_backbone(token_heads.backbone.model, tmp_path / "first")["folder"]
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / name).symlink_to(victim)
    save_backbone(token_heads.backbone.model, tmp_path / "second")
    assert lives(victim)
    assert (tmp_path / "second" / name / "model.safetensors").is_file()


def test_a_tree_that_is_a_link_is_not_read(token_heads, tmp_path):
    heads.save(token_heads, tmp_path / "heads")
    (tmp_path / "tree.json").write_text('{"paths": [[0]]}')
    (tmp_path / "heads" / "tree.json").symlink_to(tmp_path / "tree.json")
    loaded = heads.load(tmp_path / "heads", token_heads.backbone)
    assert isinstance(loaded.tuned_tree, UnreadableTree)
    assert "tree.json is a link to" in loaded.tuned_tree.reason


def test_a_snapshot_of_the_hub_s_cache_loads(token_heads, tmp_path):
    """There every file is a link to a blob beside the snapshots."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    heads.save(token_heads, snapshot)
    (snapshot / "tree.json").write_text('{"paths": [[0]]}')
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / f"hash-{file.name}")
        file.symlink_to(f"../../blobs/hash-{file.name}")
    loaded = heads.load(snapshot, token_heads.backbone)
    assert loaded.tuned_tree.paths == ((0,),)
