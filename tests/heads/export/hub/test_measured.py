"""What other commands wrote as JSON stands on the model card: a real file of `headway evaluate`, and others."""

from __future__ import annotations

import json
import shutil

import pytest
from repository import ROOT
from typer.testing import CliRunner

from heads.cli.main import app
from heads.export.hub.card import BESIDE, write_card
from heads.export.hub.measured import read_measured

GRU = ROOT / "checkpoints" / "demo" / "gru"
MACHINE = {"device": "cpu", "cpu": "one", "threads": 2}


def card_of(out, **more):
    write_card(out, heads=more.pop("heads", GRU), **more)
    return (out / "README.md").read_text(encoding="utf-8")


def test_perplexity_and_accuracy_on_held_out_text(tmp_path):
    file = tmp_path / "evaluation.json"
    asked = ["evaluate", GRU, "--metrics", "perplexity,accuracy", "--blocks", 2, "--block-tokens", 24, "--json", file]
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "heads" / "inside.py").read_text(encoding="utf-8"), encoding="utf-8")
    ran = CliRunner().invoke(app, [str(word) for word in [*asked, "--text", text]])
    assert ran.exit_code == 0, ran.output
    found = json.loads(file.read_text(encoding="utf-8"))
    card = card_of(tmp_path, measured=[file])
    assert f"held-out texts of {found['text']['tokens']} tokens:" in card
    for name, row in found["perplexity"].items():
        assert f"| perplexity, {name} | {row['value']:.2f} |" in card
    assert f"| backbone: the true token is its likeliest | {found['accuracy'][0]['top1']:.1%} |" in card
    assert f"| head 1: the true token is its likeliest | {found['accuracy'][1]['top1']:.1%} |" in card
    assert "Nothing was measured" not in card


def suite(**more):
    def row(per_pass, speed):
        return {
            "tokens_per_pass": {"value": per_pass},
            "speed_up": {"value": speed, "low": speed - 0.1, "high": speed + 0.1},
            "requests": 8,
            "different_texts": 0,
        }

    overall = {"plain": row(1.0, 1.0), "heads with lookup": row(3.0, 1.7), "heads alone": row(2.5, 1.5)}
    results = {"questions": 4, "new_tokens": 64, "categories": {"overall": overall}}
    return {"suite": "speed", "results": results, "machine": MACHINE} | more


def test_the_speed_suite_and_a_file_beside_the_heads(tmp_path):
    shutil.copytree(GRU, tmp_path / "heads")
    (tmp_path / "heads" / BESIDE).write_text(json.dumps(suite()), encoding="utf-8")
    card = card_of(tmp_path, heads=tmp_path / "heads")
    rows = [line for line in card.splitlines() if "4 questions, 64 new tokens; cpu, one, threads: 2" in line]
    assert [row.split(" | ")[:5] for row in rows] == [
        ["| plain", "1.00", "1.00", "0.90–1.10", "8 of 8"],
        ["| heads alone", "2.50", "1.50", "1.40–1.60", "8 of 8"],
        ["| heads with lookup", "3.00", "1.70", "1.60–1.80", "8 of 8"],
    ]


@pytest.mark.parametrize(
    "content", ["[1]", "{}", '{"suite": "vicuna"}', '{"suite": "speed"}', '{"perplexity": 1}', "no"]
)
def test_other_files_are_one_sentence(content, tmp_path):
    (tmp_path / "x.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"x.json cannot be read as measurements .*headway evaluate --suite speed"):
        read_measured(tmp_path / "x.json")
