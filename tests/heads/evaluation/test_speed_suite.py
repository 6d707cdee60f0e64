"""`headway evaluate --suite speed` and `headway compare` on a tiny model: counts, caches, resume and bad input."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from tiny import tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from heads.backbone.compiling import graph
from heads.checkpoint import save_load
from heads.cli.main import app
from heads.cli.options import LoadingOptions
from heads.cli.suites import SuiteOptions, suite_task
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP, MAX_GROWTH
from heads.decoding.tuned_file import TunedTree
from heads.evaluation.methods import GreedySettings
from heads.evaluation.report.page import column_classes, render_page
from heads.evaluation.report.sections import Section, Table
from heads.evaluation.runs.ratios import ratio_of_ratios, ratio_of_sums
from heads.evaluation.runs.rows import Rows
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.speed import positions
from heads.evaluation.speed.conversation import Prompter
from heads.evaluation.speed.figures import by_depth
from heads.evaluation.speed.questions import SHIPPED, Question, read_questions
from heads.evaluation.speed.report_sections import depth_section, speed_sections, verdict
from heads.evaluation.speed.speakers import HeadsSpeaker, PlainSpeaker, as_prompt
from heads.evaluation.suites import speed, suite_module
from heads.families import create
from heads.quantization.packed_heads import pack_heads
from heads.quantization.quantizer import MXConfig

NEW_TOKENS = 12
POSITIONS = 768  # of a tiny model
SYSTEM, HI = {"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}
ROWS = [
    {"question_id": 1, "category": "code", "turns": ["def main", "\n\ndef other"]},
    {"question_id": 2, "category": "code", "turns": ["class A:"]},
    {"question_id": "s", "category": "prose", "messages": [SYSTEM, HI]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone `base`, heads `medusa` and `grounded`, and `questions.jsonl`."""
    folder = tmp_path_factory.mktemp("speed")
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    for config in (model.generation_config, model.config):
        config.eos_token_id = config.pad_token_id = config.bos_token_id = EOS
    model.config.name_or_path = str(folder / "base")
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    for family in ("medusa", "grounded"):
        save_load.save(create(family, model, num_heads=2), folder / family)
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return folder


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def asked(folder: Path, family: str) -> list[Any]:
    small = ["--max-new-tokens", NEW_TOKENS, "--repeats", 1, "--position-tokens", 20, "--position-texts", 1]
    suite = ["--suite", "speed", "--out", folder / f"run-{family}", "--questions", folder / "questions.jsonl"]
    counting = ["--no-flops", "--pack"] if family == "grounded" else []  # seconds for each method
    return ["evaluate", folder / family, *suite, "--form", "text", *small, *counting]


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """What the command wrote about both sets of heads."""
    for family in ("medusa", "grounded"):
        result = run(*asked(folder, family))
        assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((folder / "run-medusa/results.json").read_text(encoding="utf-8"))["results"]
    return found


def test_every_request_counts_its_tokens_and_passes(results):
    chain = MAX_GROWTH * DEFAULT_LOOKUP
    deepest = {"heads alone": 2, "lookup without heads": chain, "heads with lookup": chain}
    assert len(results["requests"]) == 4
    for request in results["requests"]:
        plain = request["methods"]["plain"]
        assert plain["tokens"] == plain["passes"] <= NEW_TOKENS
        for method in ("heads alone", "lookup without heads", "heads with lookup"):
            ours = request["methods"][method]
            vllm = ours["speculative_decoding"]
            assert ours["tokens"] == plain["tokens"]
            assert vllm["num_spec_tokens"] == len(vllm["acceptance_histogram"]) - 1 == deepest[method]
            assert vllm["num_spec_steps"] == ours["passes"] - 1 == sum(vllm["acceptance_histogram"])
            histogram = enumerate(vllm["acceptance_histogram"])
            assert vllm["num_accepted_draft_tokens"] == sum(n * times for n, times in histogram)
            # each pass emits one token more than it accepts, but the last one may end on an accepted token
            most = 1 + vllm["num_accepted_draft_tokens"] + vllm["num_spec_steps"]
            assert ours["tokens"] in (most, most - 1)
            assert vllm["num_draft_tokens"] >= (0 if method == "lookup without heads" else vllm["num_spec_steps"])


@pytest.mark.parametrize(("family", "packed"), [("medusa", False), ("grounded", True)])
def test_results_and_report_say_whether_weights_were_packed(results, folder, family: str, packed: bool):
    run_folder = folder / f"run-{family}"
    assert json.loads((run_folder / "results.json").read_text(encoding="utf-8"))["pack"] is packed
    assert ("packed for a CPU" in (run_folder / "report.html").read_text(encoding="utf-8")) == packed


def test_pooled_and_mean_of_requests_are_their_own_sums(results):
    requests = [request["methods"]["heads alone"] for request in results["requests"]]
    overall = results["categories"]["overall"]["heads alone"]
    pooled = sum(one["tokens"] for one in requests) / sum(one["passes"] for one in requests)
    assert overall["tokens_per_pass"]["value"] == pytest.approx(pooled)
    mean = sum(one["tokens"] / one["passes"] for one in requests) / len(requests)
    assert overall["tokens_per_pass_mean_of_requests"] == pytest.approx(mean)
    assert set(results["categories"]) == {"code", "prose", "overall"}
    assert overall["different_texts"] == 0
    assert overall["flops_per_token"] > results["categories"]["overall"]["plain"]["flops_per_token"] > 0


def test_a_finished_run_is_not_measured_again(results, folder: Path):
    before = (folder / "run-medusa/rows.jsonl").read_bytes()
    again = run(*asked(folder, "medusa"))
    assert again.exit_code == 0, again.output
    assert (folder / "run-medusa/rows.jsonl").read_bytes() == before
    assert json.loads((folder / "run-medusa/results.json").read_text())["results"] == results


def test_long_texts_reach_the_backbones_last_position(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Unless told otherwise; a text that ends before is said to."""
    small = ["--categories", "prose", "--position-texts", 1, "--max-new-tokens", 2, "--repeats", 1, "--lookup", 0]
    suite = ["--suite", "speed", "--questions", folder / "questions.jsonl", "--form", "text", "--no-flops", *small]

    def position(out: str, *words: Any) -> tuple[dict[str, Any], str]:
        result = run("evaluate", folder / "medusa", *suite, "--out", tmp_path / out, *words)
        assert result.exit_code == 0, result.output
        found = json.loads((tmp_path / out / "results.json").read_text(encoding="utf-8"))["results"]["position"]
        return found, " ".join(result.output.split())

    prompt = len(Prompter(tokenizer=byte_tokenizer(), form="text").prompt(prose(folder), []))
    found, said = position("all")
    assert (found["longest"], found["tokens"], found["cut"]) == (POSITIONS, POSITIONS - prompt, False)
    assert "end before the last position" not in said
    monkeypatch.setattr(positions, "MOST_TOKENS", 40)
    found, said = position("most")
    assert (found["tokens"], found["cut"]) == (40, True)
    assert "The texts end before the last position; --position-tokens 0 writes on to it." in said
    assert position("zero", "--position-tokens", 0)[0]["tokens"] == POSITIONS - prompt
    assert position("given", "--position-tokens", 50)[0]["tokens"] == 50


def test_flops_of_microscaling_weights_are_left_out_with_the_reason(folder: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    save_load.save(pack_heads(create("medusa", model, num_heads=2), MXConfig("mxint8")), tmp_path / "mx")
    suite = ["--suite", "speed", "--questions", folder / "questions.jsonl", "--form", "text", "--categories", "prose"]
    small = ["--position-texts", 0, "--max-new-tokens", 2, "--repeats", 1, "--lookup", 0]
    result = run("evaluate", tmp_path / "mx", *suite, *small, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out/results.json").read_text(encoding="utf-8"))["results"]
    assert [one["flops_per_token"] for one in found["categories"]["overall"].values()] == [None, None]
    assert "FLOPs are not counted, since the kernels that multiply with microscaling" in in_one_line(result.output)
    assert "FLOPs are not counted" in (tmp_path / "out/report.html").read_text(encoding="utf-8")


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_report_says_whose_passes_are_compiled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: True)
    shutil.copytree(folder / "medusa", tmp_path / "medusa")

    def drafting(compile: bool) -> str:
        here = {"device_type": "cpu", "dtype": "float32"}
        tuned = TunedTree(kind="static", paths=((0,), (0, 0)), lookup=3, measured_on=here, compile=compile)
        (tmp_path / "medusa/tree.json").write_text(tuned.as_json(), encoding="utf-8")
        return speed.build(SuiteTask(folder=tmp_path / "medusa", dtype="float32"), speed.Config())[1]

    plain = "Heads draft a static tree of 2 tokens, 2 deep; looked-up chain: 3."
    assert drafting(compile=False) == plain
    assert drafting(compile=True) == (
        f"{plain} As the tree's file says, passes of heads alone and of heads with lookup are compiled; all others, "
        f"plain generation's too, are not."
    )


def test_long_texts_go_round_the_categories_until_there_are_enough(folder: Path, tmp_path: Path):
    small = ["--position-texts", 3, "--position-tokens", 4, "--max-new-tokens", 2, "--repeats", 1, "--lookup", 0]
    suite = ["--suite", "speed", "--questions", folder / "questions.jsonl", "--form", "text", "--no-flops", *small]
    result = run("evaluate", folder / "medusa", *suite, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["results"]["position"]["texts"] == 3
    written = [json.loads(line)["name"] for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [name for name in written if name.startswith("position")] == ["position 1", "position s", "position 2"]


def test_the_terminal_names_the_heads_and_shows_in_tables_what_pictures_show(results, folder: Path):
    said = run(*asked(folder, "medusa")).output
    assert said.splitlines()[0].strip() == "medusa: speed" or "\nmedusa: speed\n" in said
    assert "Categories side by side" not in said
    by_title = {section.title: section for section in speed_sections(results)}
    curve, tree = results["position"]["curve"], results["tree"]
    (positions_table,) = by_title["Acceptance by position"].tables
    assert 0 < len(positions_table.rows) <= len(curve) <= 16
    assert positions_table.rows[0] == [
        f"0–{curve[0]['to'] - 1}",
        str(curve[0]["passes"]),
        f"{curve[0]['tokens_per_pass']:.2f}",
    ]
    (nodes,) = by_title["The tree, with acceptance at its edges"].tables
    assert [row[:2] for row in nodes.rows] == [[str(i), str(p)] for i, p in enumerate(tree["parents"]) if i]
    assert nodes.rows[0][2:] == ["1", f"{tree['accepted'][1] / tree['verified']:.1%}"]
    compared = run("compare", folder / "run-medusa", folder / "run-grounded").output
    assert compared.startswith("speed: medusa, grounded\n")
    assert "Side by side" not in compared


def prose(folder: Path) -> Question:
    (question,) = read_questions(folder / "questions.jsonl", ["prose"])
    return question


def test_long_texts_show_progress_by_token(folder: Path):
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    speaker = HeadsSpeaker("heads alone", model, create("medusa", model, num_heads=2), None, 0, None)
    advanced: list[int] = []
    answer = speaker.answer(as_prompt([3, 4, 5]), positions.Endless(new_tokens=30, advance=advanced.append), float)
    assert sum(advanced) == len(answer.tokens) == 30
    assert len(advanced) == answer.passes


class Links(HTMLParser):
    """What a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_report_loads_nothing_and_compare_calls_nothing_a_win_inside_its_interval(results, folder: Path):
    result = run("compare", folder / "run-medusa", folder / "run-grounded", "--out", folder / "compare.html")
    assert result.exit_code == 0, result.output
    for page in (folder / "run-medusa/report.html", folder / "compare.html"):
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        assert all(link.startswith("#") for link in links.found)
        assert "svg" in links.tags
        assert not links.tags & {"script", "img", "link", "iframe"}
    assert "no difference" in result.output
    assert verdict({"value": 1.3, "low": 0.9, "high": 1.6, "questions": 9}) == "no difference"
    assert verdict({"value": 1.3, "low": 1.1, "high": 1.6, "questions": 9}) == "faster"
    assert ratio_of_sums([3.0], [1.0]).verdict == ""  # one question says nothing


def test_text_of_pictures_is_readable_on_a_phone_and_in_the_dark(results, folder: Path):
    """At 340 px, the width of a phone less its margins, and in the page's ink: black is drawn as no colour at all."""
    page = (folder / "run-medusa/report.html").read_text(encoding="utf-8")
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) >= 4
    for picture in pictures:
        (width,) = re.findall(r'viewBox="0 0 ([0-9.]+) ', picture)
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([0-9.]+)px", picture)]
        assert sizes
        assert min(sizes) * 340 / float(width) >= 9
        texts = "".join(re.findall(r"<text[^>]*>", picture))
        assert not re.search(r"fill:(?! currentColor)", texts)
        assert "#333333" not in picture
        assert "#ffffff" not in picture
    assert re.search(r"svg \{[^}]*fill: currentColor", page)


def test_a_table_keeps_names_in_view_intervals_whole_and_long_texts_in_lines():
    texts = ["a text of a model " * 9, ""]
    table = Table(
        columns=["run", "method", "speed", "text"], rows=[["a", "b", f"1.50 (1.20–1.70){t}", t] for t in texts]
    )
    assert column_classes(table) == ["words name1", "words name2", "long", "long"]
    table = Table(columns=["run", "speed", "faster?"], rows=[["1", "1.50 (1.20–1.70)", "no difference"], ["2", "", ""]])
    assert column_classes(table) == ["words name1", "", "words"]
    page = render_page("t", {}, [Section(title="s", tables=[table])])
    assert '<td>1.50 <span class="keep">(1.20–1.70)</span></td><td class="words">no difference</td>' in page
    assert '<th scope="col" class="words name1">run</th>' in page


def test_compare_states_plain_of_every_run_once_and_whose_plain_a_ratio_is_over(results, folder: Path):
    measured = [
        json.loads((folder / name / "results.json").read_text())["results"]["categories"]["overall"]["plain"]
        for name in ("run-medusa", "run-grounded")
    ]
    low, high = sorted(one["tokens_per_second"] for one in measured)
    said = " ".join(run("compare", folder / "run-medusa", folder / "run-grounded").output.split())
    assert f"{low:.1f} to {high:.1f} tokens/s over the runs, {high / low - 1:.0%} apart" in said
    assert "Every speed-up is over the plain generation of its own run" in said


def test_kept_caches_change_no_text(folder: Path):
    opened_model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    settings, tokenizer = GreedySettings(new_tokens=NEW_TOKENS), byte_tokenizer()
    question = Question(name="1", category="c", turns=("def main", "\n\ndef other", "\nclass"))
    prompter = Prompter(tokenizer=tokenizer, form="text")
    token_heads = create("medusa", opened_model, num_heads=2)
    speakers = [PlainSpeaker(opened_model), HeadsSpeaker("heads alone", opened_model, token_heads, None, 0, None)]
    answers: list[list[int]] = []
    for _ in question.turns:
        prompt_1T = as_prompt(prompter.prompt(question, answers))
        fresh = settings.generate(opened_model, prompt_1T)[0, prompt_1T.shape[1] :].tolist()
        assert [speaker.answer(prompt_1T, settings, lambda: 0.0).tokens for speaker in speakers] == [fresh, fresh]
        answers.append(fresh)
    other_1T = as_prompt([*prompter.prompt(question, [])[:3], 7, 9])  # cut back to what is shared
    fresh = settings.generate(opened_model, other_1T)[0, 5:].tolist()
    assert speakers[0].answer(other_1T, settings, lambda: 0.0).tokens == fresh


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_a_hybrid_reads_a_turn_anew_that_does_not_go_on_with_its_text(name: str):
    """Recurrent layers keep their last state alone, and a template may write a turn in other tokens than the model."""
    model = tiny_model(name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    settings, speaker = GreedySettings(new_tokens=NEW_TOKENS), PlainSpeaker(model)
    first = speaker.answer(as_prompt([3, 4, 5]), settings, lambda: 0.0).tokens
    other_1T = as_prompt([3, 4, 5, *first[:-4], (first[-4] + 1) % 29, 7])
    fresh = settings.generate(model, other_1T)[0, other_1T.shape[1] :].tolist()
    assert speaker.answer(other_1T, settings, lambda: 0.0).tokens == fresh


def test_intervals_of_a_ratio():
    unequal = ratio_of_ratios([10.0, 1.0, 4.0], [1.0, 10.0, 4.0], [1.0] * 3, [1.0] * 3)
    assert unequal.low < 1 < unequal.high
    assert unequal.verdict == ""
    assert ratio_of_sums([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]).verdict == "more"
    with pytest.raises(ValueError, match="give as many of each"):
        ratio_of_sums([1.0], [])
    assert by_depth([0, 0], 2)["conditional"] == [0.0, None]


def test_acceptance_by_depth_has_a_row_for_each_depth_that_enough_passes_reached():
    found = {"alone": by_depth([2, 1, 0, 2] * 10, 3), "lookup": by_depth([9, *[1] * 20], 9), "nothing": by_depth([], 2)}
    table = depth_section({"depth": found}).tables[0]
    assert table.columns[:3] == ["depth", "alone, conditional", "alone, joint"]
    assert table.rows == [
        ["1", "75.0%", "75.0%", "100.0%", "100.0%", "", ""],
        ["2", "66.7%", "50.0%", "4.8%", "4.8%", "", ""],
        ["3", "0.0%", "0.0%", "", "", "", ""],
    ]


def test_the_shipped_questions_have_several_turns():
    questions = read_questions(SHIPPED)
    assert len({question.category for question in questions}) >= 6
    assert any(len(question.turns) > 1 for question in questions)
    assert [q.category for q in read_questions(SHIPPED, ["test"], 2)] == ["test", "test"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ("[]", "line 2 is no object"),
        ('{"category": "a", "turns": ["b"]}', "line 2 has no question_id"),
        ('{"question_id": 3, "turns": ["b"]}', "line 2 has no category"),
        ('{"question_id": 3, "category": "a"}', "line 2 has neither turns nor a list of messages"),
        ('{"question_id": 3, "category": "a", "turns": []}', "line 2 has no turn of a user"),
        ('{"question_id": 3, "category": "a", "turns": [" "]}', "line 2 has an empty turn"),
        ('{"question_id": 3, "category": "a", "turns": "b"}', "line 2 has turns that are no list"),
        ('{"question_id": 3, "category": "a", "messages": [{"role": "x"}]}', "line 2: turn 1 has the role 'x'"),
        ('{"question_id": 1, "category": "a", "turns": ["b"]}', "line 2 has the question_id 1 of"),
    ],
)
def test_a_bad_row_is_named_by_its_line(line: str, said: str, tmp_path: Path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["b"]}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_questions(path)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_unicode_s_line_separators_end_no_question(tmp_path: Path, separator: str):
    path = tmp_path / "questions.jsonl"
    row = {"question_id": 1, "category": "a", "turns": [f"one{separator}two"]}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\nno JSON", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        read_questions(path)
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    assert read_questions(path)[0].turns == (f"one{separator}two",)


def test_questions_that_are_no_utf_8_are_a_sentence(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_bytes('{"question_id": 1, "category": "caf\u00e9", "turns": ["a"]}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"questions\.jsonl are no text in UTF-8 .*; save the file as UTF-8"):
        read_questions(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--suite", "sped"], "Did you mean 'speed'?"),
        (["--suite", "speed", "--metrics", "accuracy"], "--metrics is about held-out text"),
        (["--suite", "speed", "--categories", "poems"], "no question of the category 'poems'; there are"),
        (["--suite", "speed", "--max-new-tokens", "5000"], "No question of"),
        (["--fresh"], "--fresh is about a suite"),
    ],
)
def test_wrong_options_end_in_one_sentence(folder: Path, tmp_path: Path, words: list[str], said: str):
    result = run("evaluate", folder / "medusa", *words, *(["--out", tmp_path] if "--suite" in words else []))
    assert result.exit_code == 1
    assert said in result.output
    assert "Traceback" not in result.output


def test_runs_on_other_questions_of_the_same_names_are_not_compared(folder: Path, tmp_path: Path, results):
    content = json.loads((folder / "run-grounded/results.json").read_text(encoding="utf-8"))
    asked = [
        {**row, "turns": ["def other"]} if row["question_id"] == 2 else {**row, "question_id": "t"} for row in ROWS[1:]
    ]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    digests = {question.name: question.digest for question in read_questions(tmp_path / "other.jsonl")}

    def compared(requests: list[dict[str, Any]]) -> Any:
        content["results"]["requests"] = requests
        (tmp_path / "results.json").write_text(json.dumps(content), encoding="utf-8")
        return run("compare", folder / "run-medusa", tmp_path)

    ours = content["results"]["requests"]
    assert compared(ours).exit_code == 0
    refused = compared(
        [{**one, "question_digest": digests.get(one["question_id"], one["question_digest"])} for one in ours]
    )
    assert refused.exit_code == 1
    assert "asked other questions under the question_id 2; measure both on the same file" in refused.output
    older = compared([{name: value for name, value in one.items() if name != "question_digest"} for one in ours])
    assert older.exit_code == 0, older.output


def test_wrong_runs_end_in_one_sentence(folder: Path, results):
    assert "at least two" in run("compare", folder / "run-medusa").output
    assert "holds no results.json" in run("compare", folder, folder / "run-medusa").output
    assert "given twice" in run("compare", folder / "run-medusa", folder / "run-medusa").output


@pytest.mark.parametrize(
    ("suite", "option"),
    [("speed", "questions"), ("speed", "tree"), ("vicuna", "cooccurrence"), ("lm-eval", "task_folder")],
)
def test_rows_belong_to_what_files_hold(folder: Path, tmp_path: Path, suite: str, option: str):
    given = tmp_path / "given"
    file = given / "a.json" if option in ("cooccurrence", "task_folder") else given
    file.parent.mkdir(exist_ok=True)
    needed = {"tasks": ",".join(["piqa"] * 99)} if suite == "lm-eval" else {}
    config = suite_module(suite).Config(**{option: str(given)}, **needed)

    def key(content: bytes) -> str:
        file.write_bytes(content)
        out = SuiteOptions(suite=suite, out=tmp_path / "out")
        return suite_task(folder / "medusa", out, LoadingOptions(), config, suite).rows.key

    first, other, again = key(b"[]"), key(b"[\xff]"), key(b"[]")
    assert first == again != other


def test_fresh_forgets_the_rows_of_the_same_settings_alone(folder: Path, tmp_path: Path):
    def rows(new_tokens: int, *, fresh: bool = False) -> Rows:
        config = suite_module("speed").Config(max_new_tokens=new_tokens)
        options = SuiteOptions(suite="speed", out=tmp_path, fresh=fresh)
        return suite_task(folder / "medusa", options, LoadingOptions(), config, "speed").rows

    for new_tokens in (4, 8):
        rows(new_tokens).put("question 1", {"tokens": new_tokens})
    assert rows(4, fresh=True).get("question 1") is None
    assert (rows(4).resumed, rows(8).get("question 1")) == (0, {"tokens": 8})


def test_how_a_judge_is_asked_changes_no_rows(folder: Path, tmp_path: Path):
    def key(**given: Any) -> str:
        config = suite_module("vicuna").Config(judge="endpoint", **given)
        return suite_task(folder / "medusa", SuiteOptions(out=tmp_path), LoadingOptions(), config, "vicuna").rows.key

    assert key() == key(concurrency=1, tries=9) != key(seed=1)


def test_rows_survive_an_interruption(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    Rows(path, {"a": 1}).put("x", {"n": 1})
    with path.open("a") as file:
        file.write('{"key": "torn')
    rows = Rows(path, {"a": 1})
    assert rows.get("x") == {"n": 1}
    rows.put("y", {"n": 2})
    assert (Rows(path, {"a": 1}).resumed, Rows(path, {"a": 2}).resumed) == (2, 0)
    path.write_text("no row\n")
    with pytest.raises(ValueError, match="line 1 is no row"):
        Rows(path, {})


def test_a_page_shows_text_as_text():
    table = Table(columns=["a", "b"], rows=[["<script>", "1"]])
    page = render_page("t", {"command": "<b>"}, [Section(title="<i>", tables=[table])])
    assert "<script>" not in page
    assert "<b>" not in page
    assert "prefers-color-scheme: dark" in page
    with pytest.raises(ValueError, match="row of another length"):
        Table(columns=["a"], rows=[["1", "2"]])
