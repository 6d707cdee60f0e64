"""`headway tune-tree` leaves a tree that decoding uses by itself; Ctrl-C leaves what was there."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from tiny import tiny_model
from tuning_cases import counting_clock
from typer.testing import CliRunner

import heads
from heads.checkpoint import save_load
from heads.cli import measure
from heads.cli.main import app
from heads.decoding.tuned_file import TunedTree, read_tree_file
from heads.families import create
from heads.tuning import tune as tune_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS
    model.config.name_or_path = str(folder / "base")
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    (folder / "prompts.txt").write_text("def main\n\nclass Stack\n\nimport os\n", encoding="utf-8")
    for family in ("medusa", "grounded"):
        save_load.save(create(family, model, num_heads=2), folder / family)
    return folder


def run_command(folder: Path, family: str, *more: Any) -> Any:
    asked = ["tune-tree", folder / family, "--prompts", folder / "prompts.txt", "--max-new-tokens", 16, "--repeats", 1]
    return CliRunner().invoke(app, [str(argument) for argument in (*asked, *more)])


def test_a_temperature_that_overflows_is_one_sentence(folder):
    result = run_command(folder, "medusa", "--temperature", "1e-45")
    assert result.exit_code == 1
    assert result.output.strip().splitlines()[-1].endswith("give 1e-06 or more, or 0 for greedy text.")


@pytest.mark.parametrize(("family", "batch"), [("medusa", 1), ("grounded", 2)])
def test_the_command_leaves_a_tree_that_decoding_uses_by_itself(folder, family, batch, monkeypatch):
    monkeypatch.setattr(measure, "clock_of", lambda _: counting_clock())
    result = run_command(folder, family, "--batch", batch, "--picture", folder / "picture.png")
    assert result.exit_code == 0, result.output
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "By matrix products alone a pass of 8 nodes costs" in result.output
    written = json.loads((folder / family / "tree.json").read_text())
    (said,) = [line for line in result.output.splitlines() if line.startswith(("Chosen: ", "No tree pays"))]
    if written["kind"] == "plain":
        assert said.startswith(f"No tree pays at batch {batch}: ")
        assert said.endswith(f"decodes {'with prompt lookup alone' if written['lookup'] else 'plainly'} here.")
    else:
        assert said.startswith(f"Chosen: a {written['kind']} tree of ")
        assert said.endswith(f"(lookup={written['lookup']}).")
    assert written["measured_on"]["batch"] == batch
    assert {"tokens_per_pass", "tokens_per_second", "ratio_to_plain"} <= set(written["prediction"])
    model, token_heads = heads.load_with_backbone(folder / family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoding = heads.TreeDecoding(token_heads)
    tuned = read_tree_file(folder / family / "tree.json")
    settings = decoding.settings.at(batch)
    assert settings.lookup == tuned.lookup
    if tuned.kind == "dynamic":
        assert settings.tree == tuned.dynamic
    else:
        assert settings.tree.paths == tuned.tree.paths
    prompt = torch.tensor([byte_tokenizer()("def main")["input_ids"]])
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt, custom_generate=decoding, **options), model.generate(prompt, **options))


def test_several_batch_sizes_are_stored_in_one_file_and_later_ones_are_added(folder, monkeypatch):
    fitted: list[int] = []

    def quick(token_heads: Any, prompts: Any, configs: Any, **_: Any) -> list[Any]:
        fitted.extend(config.batch for config in configs)
        return [SimpleNamespace(config=config, static=[]) for config in configs]

    def written(token_heads: Any, tuning: Any, **_: Any) -> TunedTree:
        measured_on = {"batch": tuning.config.batch, "device_type": "cpu", "dtype": "float32"}
        return TunedTree(kind="plain", measured_on=measured_on, heads_sha256=token_heads.checksum)

    monkeypatch.setattr(measure, "tune_batches", quick)
    monkeypatch.setattr(measure, "build_tuned_tree", written)
    for name in ("show", "measure_forms", "advise"):
        monkeypatch.setattr(measure, name, lambda *_: None)
    for asked in ("4,1", "2"):
        result = run_command(folder, "medusa", "--batch", asked)
        assert result.exit_code == 0, result.output
    assert fitted == [4, 1, 2]
    assert "(kept: batch 1, 4)" in result.output
    tuned = read_tree_file(folder / "medusa" / "tree.json")
    assert [one.batch for one in tuned.entries] == [1, 2, 4]


@pytest.mark.parametrize("batch", ["0", "1,,4", "1,1", "four", ""])
def test_batch_sizes_are_integers_with_commas(folder, batch):
    result = run_command(folder, "medusa", "--batch", batch)
    assert result.exit_code == 1
    assert f"--batch {batch!r} was given; allowed are different integers" in result.output


@pytest.mark.parametrize(
    ("module", "step"),
    [(measure, "tune_batches"), (tune_module, "measure_times"), (tune_module, "measure_speeds")],
    ids=["at once", "while timing", "in the last step"],
)
def test_ctrl_c_leaves_what_was_there(folder, monkeypatch, module, step):
    path = folder / "grounded" / "tree.json"
    heads.Tree([[1]]).save(path)
    there = path.read_bytes()
    reached: list[str] = []

    def interrupted(*_: Any, **__: Any) -> None:
        reached.append(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "clock_of", lambda _: counting_clock())
    monkeypatch.setattr(module, step, interrupted)
    result = run_command(folder, "grounded")
    assert (result.exit_code, reached) == (130, [step])
    assert "nothing was written" in result.output
    assert path.read_bytes() == there
    assert [file.name for file in path.parent.iterdir() if file.suffix == ".tmp"] == []
