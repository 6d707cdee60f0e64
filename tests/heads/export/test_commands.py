"""`headway export` and `headway import` on the demo's heads, and one sentence where something cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import ROOT
from typer.testing import CliRunner

import heads
from heads.cli.main import app
from heads.export.drafted_logits import largest_difference
from heads.export.formats import formats

DEMO = ROOT / "checkpoints" / "demo"


def run(*words: object) -> str:
    """What the command prints; its error where it has one."""
    result = CliRunner().invoke(app, list(map(str, words)))
    assert (result.exit_code == 0) == (not result.stderr.startswith("error: "))
    return result.stdout if result.exit_code == 0 else result.stderr


def test_there_and_back_is_the_same_heads(tmp_path: Path) -> None:
    said = run("export", DEMO / "medusa", "--to", "medusa-servers", "--out", tmp_path / "a")
    assert "the same logits bit for bit" in said
    said = run("import", tmp_path / "a", "--backbone", DEMO / "base", "--out", tmp_path / "b")
    assert "4 medusa heads" in said
    assert "as medusa-servers" in said
    model = heads.load_backbone(heads.BackboneConfig(name_or_path=str(DEMO / "base"), dtype="float32"))
    one, other = (heads.load(folder, model) for folder in (DEMO / "medusa", tmp_path / "b"))
    assert largest_difference(one, other) == 0
    assert "imported" in (tmp_path / "b" / "heads.json").read_text()
    again = run("import", tmp_path / "a", "--backbone", DEMO / "base", "--out", tmp_path / "b")
    assert "holds heads, which would be lost" in again


def test_formats_are_listed_with_who_loads_them() -> None:
    shown = run("export", "--list")
    assert all(name in shown for name in formats())
    assert run("import", "--list") == shown
    assert "--file" in run("export", "--to", "medusa", "--format-help")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", DEMO / "medusa", "--to", "medusas", "--out", "a"], "Did you mean 'medusa'?"),
        (["export", DEMO / "medusa", "--to", "medusa"], "Give --out FOLDER"),
        (["export", "--format-help"], "--format-help lists the options of a format; give --to"),
        (
            ["export", DEMO / "gru", "--to", "hub", "--out", "a", "--backbone", DEMO / "draft"],
            f"The heads in {DEMO / 'gru'} belong to checkpoints/demo/base with hidden_size 192; the given backbone "
            f"{DEMO / 'draft'} has 128.",
        ),
        (
            ["import", DEMO / "base", "--backbone", DEMO / "base", "--out", DEMO / "base"],
            "which is read; give a folder",
        ),
        (["import", DEMO / "base", "--backbone", "x", "--out", DEMO / "base" / "new"], "is, or lies in,"),
        (["export", DEMO / "grounded", "--to", "medusa", "--out", "a"], "grounded heads were given"),
        (["import", DEMO / "base", "--backbone", DEMO / "base", "--out", "a"], "of no known format"),
        (["import", "none", "--backbone", DEMO / "base", "--out", "a", "--from", "medusa"], "none is no folder"),
        (["import", "none", "--backbone", DEMO / "base", "--out", "a", "--from", "tensorrt-llm"], "only written"),
    ],
)
def test_mistakes_are_one_sentence(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run(*words)
    assert said in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())
