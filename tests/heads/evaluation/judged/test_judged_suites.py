"""The judged suites: win rates by hand, the whole suite on tiny dynamo heads, resume, and bad input."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from tiny import tiny_model
from transformers import AutoModelForCausalLM

import heads
from heads.checkpoint import save_load
from heads.checkpoint.adapter import LoraSettings, add_adapter
from heads.checkpoint.opening import open_backbone
from heads.evaluation.judged import completion
from heads.evaluation.judged.completion import count, judge_all
from heads.evaluation.judged.llm_judges import EndpointJudge
from heads.evaluation.judged.own_texts import same_weights
from heads.evaluation.judged.sentences import Prompt
from heads.evaluation.judged.win_rates import describe, line_of_scores, sum_up
from heads.evaluation.runs.rows import Rows
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.suites import sentence_completion, suites, vicuna
from heads.families import create


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Backbone `base`, another model `judge`, heads `dynamo`, and two questions."""
    folder = tmp_path_factory.mktemp("judged")
    for name, seed in (("base", 0), ("judge", 1)):
        model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS, seed=seed)
        for config in (model.generation_config, model.config):
            config.eos_token_id = config.pad_token_id = config.bos_token_id = EOS
        model.config.name_or_path = str(folder / name)
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
        if name == "base":
            save_load.save(create("dynamo", model, num_heads=2), folder / "dynamo")
            save_load.save(create("grounded", model, num_heads=2), folder / "grounded")
    rows = [{"question_id": i, "category": "writing", "turns": [f"Tell {i}"]} for i in range(2)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_line_crosses_one_where_wins_equal_losses():
    wins, losses = np.repeat([[2.0], [6], [10]], 8, axis=1), np.full((3, 8), 8.0)
    tokens, passes = np.repeat([[30.0], [20], [10]], 8, axis=1), np.full((3, 8), 10.0)
    found = sum_up(wins, losses, tokens, passes, most=3)
    assert found["speeds"] == [3.0, 2.0, 1.0]
    assert found["rates"] == [0.25, 0.75, 1.25]
    assert found["same_quality"] == pytest.approx(1.5)
    assert found["interval"] == pytest.approx([1.5, 1.5])  # all prompts are equal, so every resample is
    assert not found["theoretical"]
    assert found["speed_intervals"] == [[3, 3], [2, 2], [1, 1]]
    alone = sum_up(wins[:, :1], losses[:, :1], tokens[:, :1], passes[:, :1], most=3)
    assert alone["interval"] is None
    assert alone["rate_intervals"] == alone["speed_intervals"] == [None] * 3  # resamples of one prompt are all equal
    better = sum_up(wins + 40, losses, tokens, passes, most=3)
    assert better["theoretical"]
    assert better["same_quality"] > better["speed_up"] == 3
    worse = sum_up(wins, losses + 40, tokens, passes, most=3)
    assert worse["same_quality"] < 1
    assert worse["speed_up"] is None
    assert describe(worse).startswith("below every measured speed")


def test_scores_have_a_line_and_seconds_are_added_up_before_they_are_divided():
    """One prompt takes 10 s and is not sped up, one takes 1 s and is sped up tenfold: together 11 / 10.1."""
    plain, dynamic = np.array([[10.0, 1.0], [10.0, 1.0]]), np.array([[10.0, 1.0], [10.0, 0.1]])
    found = line_of_scores(np.array([[4.0, 2.0], [2.0, 0.0]]), np.array([[2.0, 1.0], [2.0, 0.0]]), plain, dynamic)
    assert found["speeds"] == pytest.approx([1.0, 11 / 10.1])
    assert found["means"] == [2.0, 1.0]
    assert found["line"][0] == pytest.approx(-1 / (11 / 10.1 - 1))
    assert found["band"] is None  # a bootstrap of two prompts says nothing
    tables = (np.array([[4.0, 2.0], [2.0, 0.0]]), np.array([[2.0, 1.0], [2.0, 0.0]]), plain, dynamic)
    assert np.shape(line_of_scores(*(np.tile(table, 4) for table in tables))["band"]) == (2, 20)


def test_a_verdict_that_cannot_be_read_counts_nowhere():
    class Half:
        name, unreadable = "half", 3

        def verdicts(self, texts, pairs, seed):
            return [4.0, None, 6.0, None], ["A", None]

    texts = {"base p": [{"text": "a"}, {"text": "b"}], "0.5 p": [{"text": "c"}, {"text": "d"}]}
    found = judge_all(Half(), [Prompt(name="p", kind="k", text="P")], [0.5], texts, seed=0)
    assert found["unreadable"] == 3
    assert found["scores"] == {"base p": [4.0, None], "0.5 p": [6.0, None]}
    assert count(found["winners"]["0.5 p"]) == {"wins": 1, "losses": 0, "ties": 0}


def test_sentence_completion_runs_resumes_and_is_shown(folder, tmp_path):
    config = sentence_completion.Config(judge_model=str(folder / "judge"), step=0.5, draws=2, max_new_tokens=6)
    task = SuiteTask(folder=folder / "dynamo", rows=Rows(tmp_path / "rows.jsonl", {}))
    found = sentence_completion.run(task, config)
    assert found["overall"]["speeds"][-1] == 1.0  # ε_b = 1 emits one token a pass
    assert found["overall"]["speeds"][0] == pytest.approx(3.0)  # ε_b = 0 emits all three
    assert [sum(found["counts"][name][i] for name in ("wins", "ties", "losses")) for i in range(3)] == [20] * 3
    assert "log-likelihood" in found["judge"]
    assert len(found["kinds"]) == 7
    json.dumps(found)
    shown = sentence_completion.sections(found)
    assert sum(len(section.pictures) for section in shown) == 5
    assert sentence_completion.compare({"a": found, "b": found})[0].tables[0].rows[0][0] == "a"
    before = (tmp_path / "rows.jsonl").read_text()
    again = SuiteTask(folder=folder / "dynamo", rows=Rows(tmp_path / "rows.jsonl", {}))
    assert sentence_completion.run(again, config) == found
    assert (tmp_path / "rows.jsonl").read_text() == before
    with pytest.raises(ValueError, match="different judges"):
        sentence_completion.compare({"a": found, "b": {**found, "judge": "other"}})
    with pytest.raises(ValueError, match=r"different lengths \(6, 7\)"):
        sentence_completion.compare({"a": found, "b": {**found, "max_new_tokens": 7}})
    assert [len(section.pictures) for section in sentence_completion.compare({"a": found, "b": found})] == [1, 1]
    with pytest.raises(ValueError, match="The run b was written by an earlier version"):
        sentence_completion.compare({"a": found, "b": {k: v for k, v in found.items() if k != "by_score"}})
    assert np.sum(found["by_prompt"]["wins"], axis=1).tolist() == found["counts"]["wins"]
    (by_type,) = shown[2].tables
    alone = [found["kinds"][kind] for kind in ("affirmative imperative", "exclamatory")]  # one prompt, and two
    assert [one["speed_interval"] for one in alone] == [None, None]
    assert [row[0] for row in by_type.rows] == list(found["kinds"])
    assert by_type.note == "A type of fewer than 3 prompts has no interval."


class Says:
    """A judge who finds one side better in every pair."""

    unreadable = 0

    def __init__(self, name, winner, url=""):
        self.name, self.identity, self.winner = name, f"{name} at {url}", winner

    def verdicts(self, texts, pairs, seed):
        return [5.0] * len(texts), [self.winner] * len(pairs)


def test_verdicts_of_another_judge_are_asked_anew_and_its_own_are_kept(folder, tmp_path, monkeypatch):
    config = sentence_completion.Config(judge="endpoint", step=1.0, draws=1, max_new_tokens=1)

    def wins(judge):
        monkeypatch.setattr(completion, "choose_judge", lambda *given, **asking: judge)
        task = SuiteTask(folder=folder / "dynamo", rows=Rows(tmp_path / "rows.jsonl", {}))
        return sum(sentence_completion.run(task, config)["counts"]["wins"])

    assert wins(Says("a", "A", "here")) == 20
    assert wins(Says("b", "B", "here")) == 0
    assert wins(Says("a", "B", "there")) == 0
    assert wins(Says("a", "B", "here")) == 20, "those of the first call"


def test_an_unreachable_judge_ends_the_call_before_texts_are_written(folder, monkeypatch):
    monkeypatch.setenv("HEADWAY_JUDGE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("HEADWAY_JUDGE_MODEL", "m")
    task = SuiteTask(folder=folder / "dynamo")
    config = vicuna.Config(
        questions=str(folder / "questions.jsonl"), judge="endpoint", tries=1, step=1.0, max_new_tokens=2
    )
    with pytest.raises(ValueError, match="cannot be reached after 1 tries"):
        vicuna.run(task, config)
    assert len(task.rows) == 0
    judge = EndpointJudge.from_environment(tries=1)
    monkeypatch.setattr(
        EndpointJudge, "verdicts", lambda self, texts, pairs, seed: ([5.0] * len(texts), ["A"] * len(pairs))
    )
    monkeypatch.setattr(EndpointJudge, "reach", lambda self: None)
    found = vicuna.run(task, config)
    monkeypatch.undo()
    monkeypatch.setattr(completion, "choose_judge", lambda *given, **asking: judge)
    assert vicuna.run(task, config) == found, "nothing is left to ask"


def test_an_endpoint_is_asked_as_the_options_say(folder, monkeypatch):
    made = []

    def judge_of(**given):
        made.append({name: given[name] for name in ("concurrency", "tries") if name in given})
        return Says("m", "A")

    monkeypatch.setattr(EndpointJudge, "from_environment", judge_of)
    for given in ({}, {"concurrency": 3, "tries": 2}):
        config = vicuna.Config(
            questions=str(folder / "questions.jsonl"), judge="endpoint", step=1.0, max_new_tokens=1, **given
        )
        vicuna.run(SuiteTask(folder=folder / "dynamo"), config)
    assert made == [{}, {"concurrency": 3, "tries": 2}]


def test_vicuna_asks_the_questions_of_its_file(folder):
    config = vicuna.Config(
        questions=str(folder / "questions.jsonl"), judge_model=str(folder / "judge"), step=1.0, max_new_tokens=4
    )
    found = vicuna.run(SuiteTask(folder=folder / "dynamo"), config)
    assert found["examples"][0] == "Tell 0"
    assert list(found["kinds"]) == ["writing"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs a model; give --judge-model"),
        ({"judge_model": "base"}, "judge of its own texts"),
        ({"judge_model": "judge", "max_new_tokens": 10**6}, "Lower --max-new-tokens"),
        ({"judge_model": "judge", "step": 0.3}, "1 has to be a multiple of it"),
        ({"judge": "endpoint", "prices": [1.0]}, "give two: dollars"),
        (
            {"judge_model": "judge", "prices": [1.0, 2.0]},
            "prices is about --judge endpoint, and the judge is likelihood",
        ),
        ({"judge": "local", "judge_model": "judge", "concurrency": 2, "tries": 1}, "concurrency and tries are about"),
        ({"judge": "endpoint", "tries": 0}, "tries=0 was given; allowed are integers of at least 1"),
        ({"judge_model": "judge", "transparency": 0.5}, "transparency=0.5 was given without a table"),
        ({"judge_model": "judge", "adaptive": "none", "blur": 3}, "blur=3 was given with adaptive=none"),
    ],
)
def test_bad_input_is_a_sentence(folder, given, said):
    if "judge_model" in given:
        given = {**given, "judge_model": str(folder / given["judge_model"])}
    with pytest.raises(ValueError, match=said):
        sentence_completion.run(SuiteTask(folder=folder / "dynamo"), sentence_completion.Config(**given))


def test_a_baseline_does_not_judge_its_own_texts(folder, monkeypatch):
    """Heads that were trained with their backbone are compared with the backbone before that."""
    before = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS, seed=2)
    judged = open_backbone(str(folder / "judge")).model
    for baseline, refused in ((before, False), (judged, True)):
        monkeypatch.setattr(completion, "open_baseline", lambda task, baseline=baseline: (baseline, "before"))
        config = sentence_completion.Config(judge_model=str(folder / "judge"), step=1.0, draws=1, max_new_tokens=1)
        with pytest.raises(ValueError, match="judge of its own texts") if refused else nullcontext():
            sentence_completion.run(SuiteTask(folder=folder / "dynamo"), config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_with_microscaling_weights_is_the_same_model_and_an_adapted_one_is_not(folder, dtype):
    model, other = (AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype) for name in ("base", "judge"))
    options = {"dtype": torch.float32, "quantization_config": heads.MXConfig("mxfp6_e2m3", skip=["down_proj"])}
    packed = AutoModelForCausalLM.from_pretrained(folder / "base", **options)
    assert same_weights(model, packed)
    assert not same_weights(other, packed)
    adapted = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    add_adapter(adapted, LoraSettings(rank=2))
    assert not same_weights(model, adapted)


def test_the_heads_own_backbone_can_be_the_baseline(folder, monkeypatch):
    def other(task):
        raise AssertionError("another model was opened")

    monkeypatch.setattr(completion, "open_baseline", other)
    given = {"judge_model": str(folder / "judge"), "step": 1.0, "draws": 1, "max_new_tokens": 1, "baseline": "own"}
    found = sentence_completion.run(SuiteTask(folder=folder / "dynamo"), sentence_completion.Config(**given))
    assert found["base"] == "the heads' backbone"


def test_grounded_heads_are_refused_before_a_judge_is_loaded(folder):
    config = sentence_completion.Config(judge_model=str(folder / "no model"), step=1.0)
    with pytest.raises(ValueError, match="are grounded"):
        sentence_completion.run(SuiteTask(folder=folder / "grounded"), config)


def test_vicuna_asks_the_shipped_questions_where_no_file_is_given(folder):
    config = vicuna.Config(judge_model=str(folder / "judge"), step=1.0, max_new_tokens=1)
    assert len(vicuna.run(SuiteTask(folder=folder / "dynamo"), config)["kinds"]) > 1


def test_both_are_found_by_name():
    assert {"sentence-completion", "vicuna"} <= set(suites())
