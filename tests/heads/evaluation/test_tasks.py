"""lm-evaluation-harness on tiny local tasks: the model's own likelihoods, and texts that heads decode."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from repository import ROOT
from throwaway_families import make_heads
from tiny import tiny_model
from typer.testing import CliRunner

from heads.backbone.model import Backbone
from heads.checkpoint import save_load
from heads.cli.main import app
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.lossless.verdicts import Scorer
from heads.evaluation.runs.rows import Rows
from heads.evaluation.suites import lm_eval
from heads.evaluation.suites.lm_eval import as_table
from heads.evaluation.tasks import harness
from heads.evaluation.tasks.harness import HeadsLM
from heads.evaluation.tasks.presets import PRESETS, Preset, TaskColumn, read_tasks
from heads.evaluation.tasks.run import TaskResult, make_manager, read_result, run_task
from heads.evaluation.tasks.side_by_side import (
    Contender,
    TaskRun,
    cell_of,
    decoded_line,
    difference,
    preset_table,
    run_all,
)

FOLDER = ROOT / "tests/tasks"
CHOICE, CONTINUE = "tiny_choice", "tiny_continue"
PART, WHOLE = "tiny_part", "tiny_whole"


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS
    model.config.eos_token_id = model.config.pad_token_id = EOS
    return model


@pytest.fixture(scope="module")
def manager() -> Any:
    return make_manager([CHOICE, CONTINUE], FOLDER)


@pytest.fixture(scope="module")
def runs(model: Any, manager: Any) -> list[TaskRun]:
    decoding = TreeDecoding(make_heads("medusa", Backbone(model)), 4)
    contenders = [
        Contender(name="plain", load=lambda: HeadsLM(model, byte_tokenizer())),
        Contender(name="heads", load=lambda: HeadsLM(model, byte_tokenizer(), decoding)),
    ]
    (preset,) = read_tasks(f"{CHOICE},{CONTINUE}")
    return run_all(contenders, [preset], running(manager), Rows(None, {}))


def running(manager: Any) -> Any:
    return lambda lm, preset, name: run_task(lm, preset, name, manager, None)


def test_likelihoods_are_the_backbones_own(model, runs):
    """The choice whose tokens are likelier under the model, by its logits alone."""
    rows = [json.loads(line) for line in (FOLDER / f"{CHOICE}.jsonl").read_text().splitlines()]
    right = []
    for row in rows:
        scores = [log_likelihood(model, row["text"], choice) for choice in row["choices"]]
        right.append(float(scores.index(max(scores)) == row["label"]))
    for run in runs:
        assert run.results[CHOICE].samples["acc"] == right
        assert run.results[CHOICE].metrics["acc"][0] == pytest.approx(sum(right) / len(right))
        assert run.results[CHOICE].metrics["acc"][1] > 0


def log_likelihood(model: Any, text: str, choice: str) -> float:
    before, whole = (byte_tokenizer()(part)["input_ids"] for part in (text, text + choice))
    with torch.no_grad():
        log_p_TV = model(torch.tensor([whole])).logits[0].log_softmax(dim=1)
    return sum(float(log_p_TV[i - 1, whole[i]]) for i in range(len(before), len(whole)))


def test_texts_are_decoded_with_heads_and_equal_plain_greedy(runs):
    plain, ours = runs
    assert plain.decoded is None
    assert ours.decoded is not None
    assert (ours.decoded["texts"], ours.decoded["same"]) == (3, 3)
    assert 0 < ours.decoded["passes"] <= ours.decoded["tokens"]
    assert ours.results[CONTINUE].samples == plain.results[CONTINUE].samples
    assert "3 equal to plain greedy" in decoded_line(ours)


def test_a_wrong_text_is_a_bug(model, manager, monkeypatch):
    decoding = TreeDecoding(make_heads("medusa", Backbone(model)), 4)
    exact = TreeDecoding.__call__

    def planted(self: Any, model: Any, input_ids: Any, *arguments: Any, **more: Any) -> Any:
        output = exact(self, model, input_ids, *arguments, **more)
        output.sequences[0, input_ids.shape[1]] = (output.sequences[0, input_ids.shape[1]] + 1) % 200
        return output

    scorers: list[Any] = []
    monkeypatch.setattr(harness, "Scorer", lambda **given: scorers.append(given) or Scorer(**given))
    monkeypatch.setattr(TreeDecoding, "__call__", planted)
    lm = HeadsLM(model, byte_tokenizer(), decoding)
    run_task(lm, Preset(columns=(TaskColumn(task=CONTINUE),), shots=None, shows=""), CONTINUE, manager, 2)
    assert [finding.verdict for finding in lm.decoded.findings] == ["bug", "bug"]
    assert len(scorers) == 1, "one for all texts: it may hold a copy of the model"


def test_an_interruption_loses_the_task_that_was_running_alone(model, manager, runs):
    kept, asked = Rows(None, {}), read_tasks(f"{CHOICE},{CONTINUE}")
    contender = Contender(name="plain", load=lambda: HeadsLM(model, byte_tokenizer()))

    def interrupted(lm: Any, preset: Preset, name: str) -> Any:
        if name == CONTINUE:
            raise KeyboardInterrupt
        return run_task(lm, preset, name, manager, None)

    with pytest.raises(KeyboardInterrupt):
        run_all([contender], asked, interrupted, kept)
    ran: list[str] = []

    def counted(lm: Any, preset: Preset, name: str) -> Any:
        ran.append(name)
        return run_task(lm, preset, name, manager, None)

    (resumed,) = run_all([contender], asked, counted, kept)
    assert (ran, resumed) == ([CONTINUE], runs[0])

    def never() -> Any:
        raise AssertionError("loaded")

    assert run_all([Contender(name="plain", load=never)], asked, counted, kept) == [resumed]


def test_groups_in_a_group_are_run_once_and_shown_each(model):
    """As the preset of table 13 does with mmlu; the harness refuses a group beside one of its own."""
    manager = make_manager([PART, WHOLE], FOLDER)
    columns = (TaskColumn(task=PART, metric="acc", group=WHOLE), TaskColumn(task=WHOLE, metric="acc"))
    preset, kept = Preset(columns=columns, shots=1, shows="table 13"), Rows(None, {})
    contender = Contender(name="plain", load=lambda: HeadsLM(model, byte_tokenizer()))
    (run,) = run_all([contender], [preset], running(manager), kept)
    assert len(kept) == 1
    part, whole = run.results[PART], run.results[WHOLE]
    assert (part.num_samples, whole.num_samples, part.shots, whole.shots) == (6, 12, 1, 1)
    assert whole.samples["acc"][:6] == part.samples["acc"]
    for result in (part, whole):
        assert result.metrics["acc"][0] == pytest.approx(sum(result.samples["acc"]) / result.num_samples)
    assert preset_table(preset, [run]).title == "table 13, 1-shot, 12 examples"


def test_the_groups_of_table_13_are_those_of_the_harness():
    folder = Path(str(files("lm_eval"))) / "tasks/mmlu/default"
    index = make_manager(["mmlu"], folder).task_index
    assert list(PRESETS["mmlu-5"].runs) == ["mmlu"]
    assert {*index["mmlu"].cfg["task"], "mmlu"} == set(PRESETS["mmlu-5"].tasks)


@pytest.mark.parametrize(
    ("positions", "choices", "texts", "said"),
    [
        (64, 0, 0, ""),
        (16, 0, 1, "backbone, 1 request of tiny_continue."),
        (13, 2, 3, "backbone, 2 requests of tiny_choice; backbone, 3 requests of tiny_continue."),
    ],
)
def test_prompts_that_are_longer_than_the_context_are_counted(
    model, manager, monkeypatch, positions: int, choices: int, texts: int, said: str
):
    """Of a likelihood the last token is not read; a text to be written leaves room for its 12 tokens."""
    monkeypatch.setattr(model.config, "max_position_embeddings", positions)
    contender = Contender(name="backbone", load=lambda: HeadsLM(model, byte_tokenizer()))
    (preset,), kept = read_tasks(f"{CHOICE},{CONTINUE}"), Rows(None, {})
    (run,) = run_all([contender], [preset], running(manager), kept)
    assert run.cut == {CHOICE: choices, CONTINUE: texts}
    (again,) = run_all([contender], [preset], lambda *_: [], kept)
    assert again == run
    note = as_table(preset, [again]).note
    assert note == (f"Longer than the context, so without their beginning: {said}" if said else "")


def made(name: str, accuracy: list[float]) -> TaskRun:
    value = sum(accuracy) / len(accuracy)
    return TaskRun(
        name=name, results={"t": TaskResult(task="t", metrics={"acc": (value, 0.05)}, samples={"acc": accuracy})}
    )


def test_only_differences_outside_their_interval_are_marked():
    first, same, better = made("a", [0.0, 1.0] * 20), made("b", [1.0, 0.0] * 20), made("c", [1.0] * 40)
    column = TaskColumn(task="t", metric="acc")
    assert [cell_of(column, run, first).mark for run in (first, same, better)] == ["", "", " ▲"]  # type: ignore[union-attr]
    low, high = difference([1.0, 0.0] * 20, [0.0, 1.0] * 20)
    assert low < 0 < high
    table = preset_table(Preset(columns=(column,), shots=0, shows="table 1"), [first, same, better])
    assert list(table.columns[1].cells) == ["50.0 ± 5.0", "50.0 ± 5.0", "100.0 ± 5.0 ▲"]
    assert table.title == "table 1, 0-shot, 40 examples"


def test_presets_are_the_papers_tables():
    assert {name: (preset.shots, len(preset.columns)) for name, preset in PRESETS.items()} == {
        "common-sense": (0, 8),
        "triviaqa-5": (5, 1),
        "reading": (0, 3),
        "mmlu-5": (5, 5),
        "bias": (0, 4),
    }
    assert [preset.shots for preset in read_tasks("mmlu-5,lambada_openai", shots=2)] == [2, 2]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: read_tasks(" , "), "give different names with commas"),
        (lambda: read_tasks("piqa,piqa"), "give different names with commas"),
        (lambda: read_tasks("reading,race"), "which has race twice; leave the preset or the task out"),
        (lambda: make_manager([CHOICE], Path("nowhere")), "The folder of tasks nowhere does not exist"),
    ],
)
def test_wrong_names_end_in_a_sentence(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def command_on(model, folder: Path, without_heads: Path) -> list[Any]:
    """The words of an evaluation of heads on the model, both of which are saved in the folder first."""
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    model.config.name_or_path = str(folder / "base")
    save_load.save(make_heads("medusa", Backbone(model)), folder / "medusa")
    asked = ["evaluate", folder / "medusa", "--suite", "lm-eval", "--tasks", CONTINUE, "--limit", 2]
    asked += ["--task-folder", FOLDER, "--without-heads", without_heads, "--out", folder / "out"]
    return asked


def test_the_command_compares_backbones_and_goes_on(model, tmp_path: Path, monkeypatch):
    asked = command_on(model, tmp_path, without_heads=tmp_path / "base")
    result = CliRunner().invoke(app, list(map(str, asked)))
    assert result.exit_code == 0, result.output
    assert "2 texts decoded with heads" in result.output
    written = json.loads((tmp_path / "out/results.json").read_text())
    first, second = written["results"]["rows"]
    assert [first["name"], second["name"]] == ["backbone", "backbone, trained further without heads"]
    assert first["results"] == second["results"]  # the same weights, so the same figures
    rows = (tmp_path / "out/rows.jsonl").read_text()
    assert len(rows.splitlines()) == 2
    for name in ("load_plain", "load_with_heads"):
        monkeypatch.delattr(lm_eval, name)  # nothing is loaded anew
    assert CliRunner().invoke(app, list(map(str, asked))).exit_code == 0
    assert (tmp_path / "out/rows.jsonl").read_text() == rows


def test_a_wrong_path_without_heads_is_found_before_any_task_has_run(model, tmp_path: Path):
    asked = command_on(model, tmp_path, without_heads=tmp_path / "nowhere")
    result = CliRunner().invoke(app, list(map(str, asked)))
    assert result.exit_code == 1
    assert "nowhere" in " ".join(result.output.split())
    assert not (tmp_path / "out/rows.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heads", "--tasks", "piqa"], "--tasks is no option of headway evaluate"),
        (["--suite", "lm-eval", "--tasks", "piqa"], "--suite lm-eval needs a folder of heads"),
        (
            ["h", "--suite", "lm-eval", "--tasks", "a", "--blocks", "3", "--top-k", "9"],
            "--blocks, --top-k is about held-out text",
        ),
    ],
)
def test_options_of_a_suite_that_do_not_fit_end_in_a_sentence(arguments, said):
    result = CliRunner().invoke(app, ["evaluate", *arguments])
    assert result.exit_code == 1
    assert said in result.output


def test_a_tag_and_a_group_without_a_figure_name_their_tasks(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\ntag: both\noutput_type: multiple_choice\n")
    with pytest.raises(ValueError, match=r"both is a tag of the harness and no task; give .* have it: first, second"):
        make_manager(["both"], tmp_path)
    assert make_manager(["first"], tmp_path).all_tags == ["both"]
    found = {"results": {"whole": {"alias": "whole"}}, "group_subtasks": {"whole": ["first", "second"]}}
    with pytest.raises(ValueError, match="no figure for whole as a whole; give its tasks: first, second"):
        read_result("whole", found)
