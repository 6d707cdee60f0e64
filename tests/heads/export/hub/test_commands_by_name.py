"""Commands take heads by their name on the hub: fetched first, and one sentence where they are not."""

from __future__ import annotations

import inspect
import json

import pytest
from huggingface_hub import constants
from repository import ROOT
from typer.testing import CliRunner

import heads
from heads.cli.hub import fetching_heads
from heads.cli.main import COMMANDS, app
from heads.export.hub.folder import export_to_hub_folder

DEMO = ROOT / "checkpoints" / "demo"
PROMPT = "import os\n\ndef main("


def run(*words):
    ran = CliRunner().invoke(app, list(map(str, words)))
    assert "Traceback" not in ran.output
    return ran


@pytest.fixture
def pushed(hub):
    heads.push_to_hub(DEMO / "gru", "org/gru-heads", revision="v2")
    return hub


def test_text_of_heads_on_the_hub_is_that_of_the_folder(pushed):
    asked = ("--backbone", DEMO / "base", "--prompt", PROMPT, "--max-new-tokens", 8)
    found, wanted = run("generate", "org/gru-heads", "--revision", "v2", *asked), run("generate", DEMO / "gru", *asked)
    assert (found.exit_code, found.stdout) == (0, wanted.stdout), found.output
    missing = run("generate", "org/gru-heads", "--revision", "v3", *asked)
    assert missing.stderr.startswith("error: org/gru-heads is no folder here, and could not be fetched from the hub at")
    assert "correct the name, or the revision" in missing.stderr


def test_an_exported_model_is_opened_with_its_own_backbone(hub, tmp_path):
    heads.push_to_hub(export_to_hub_folder(DEMO / "gru", tmp_path / "out"), "org/served")
    ran = run("generate", "org/served", "--prompt", PROMPT, "--max-new-tokens", 4)
    assert ran.exit_code == 0, ran.output


def test_info_fetches_the_heads_alone_and_rows_have_the_repository_s_name(pushed, tmp_path):
    assert json.loads(run("info", "org/gru-heads", "--revision", "v2", "--json").stdout)["family"] == "gru"
    out = tmp_path / "out.json"
    asked = ("--backbone", DEMO / "base", "--num-prompts", 1, "--repeats", 1, "--max-new-tokens", 4, "--json", out)
    ran = run("benchmark", "org/gru-heads", "--revision", "v2", "--no-prompt-lookup", "--lookup", 0, *asked)
    assert ran.exit_code == 0, ran.output
    rows = [row["name"] for row in json.loads(out.read_text())["blocks"]["greedy"]]
    assert rows == ["plain", "gru-heads, heads alone"]


def test_a_hub_that_is_not_asked_is_a_sentence(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ran = run("generate", "org/heads", "--prompt", "a")
    assert ran.exit_code == 1
    assert "unset HF_HUB_OFFLINE" in ran.stderr
    assert "log in" not in ran.stderr


def test_a_revision_belongs_to_the_hub(pushed):
    ran = run("info", DEMO / "gru", "--revision", "v2")
    assert (ran.exit_code, "which belongs to heads on the hub" in ran.stderr) == (1, True)
    ran = run("tune-tree", "org/gru-heads")
    assert (ran.exit_code, "hf download org/gru-heads" in ran.stderr) == (1, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_takes_heads_takes_their_name(name):
    """All but tune-tree, which writes beside them."""
    command = COMMANDS[name]
    takes = {"heads", "folder"} & inspect.signature(command).parameters.keys()
    by_folder_alone = {"tune-tree", "import", "push"}
    assert (fetching_heads(command) is not command) == (bool(takes) and name not in by_folder_alone)
