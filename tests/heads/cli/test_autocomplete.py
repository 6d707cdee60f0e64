"""The editor line: drafts of the newest text, taken with a key; and its drafts from a pipe."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from repository import ROOT
from typer.testing import CliRunner

from heads.checkpoint.opening import open_backbone
from heads.cli.main import app
from heads.cli.writing.autocomplete import READ_TOKENS, STEP_TOKENS, Editor, Suggestions, build_suggest
from heads.cli.writing.text import read_prompt
from heads.decoding.superposed.decoding import SuperposedDecoding
from heads.ngrams.counting import count_ngrams

BASE = str(ROOT / "checkpoints/demo/base")
ESCAPE, TAB, END, LEFT = "\x1b", "\t", "\x04", "\x1b[D"


def suggest(text):
    if "slow" in text:
        time.sleep(0.2)
    if "bad" in text:
        raise ValueError("The prompt is\ntoo long.")
    return Suggestions(
        text=text, drafts=[f"<{text}>", "two\nlines", "three"], scores=[-1.0, -2.0, -3.0], milliseconds=7
    )


def typed(*keys, watch=lambda editor: None):
    """The text after some keys; each is typed once the drafts of what stands there are shown."""
    with create_pipe_input() as pipe:
        editor = Editor(suggest, 3, input=pipe, output=DummyOutput())

        def type_them():
            for key in keys:
                before, deadline = editor.buffer.text, time.monotonic() + 5
                pipe.send_text(key)
                while time.monotonic() < deadline and key != LEFT:
                    there = editor.buffer.text == before + key if key.isprintable() else editor.buffer.text != before
                    if there and (editor.drafts() or editor.problem):
                        break
                    time.sleep(0.005)
                watch(editor)
            pipe.send_text(END)

        threading.Thread(target=type_them).start()
        return editor.run()


def test_tab_takes_the_first_draft_and_alt_another():
    assert typed("ab", TAB) == "ab<ab>"
    assert typed("ab", ESCAPE + "3", TAB) == "abthree<abthree>"


def test_drafts_of_an_older_text_are_dropped():
    seen = []
    text = typed("slow", "er", watch=lambda editor: seen.append(list(editor.drafts())))
    assert text == "slower"
    assert seen == [["<slow>", "two\nlines", "three"], ["<slower>", "two\nlines", "three"]]


def test_drafts_and_times_are_shown_on_one_line_each():
    shown = []
    typed("a", watch=lambda editor: shown.append("".join(text for _, text in editor.show())))
    assert shown == [" 1 <a>\n 2 two⏎lines\n 3 three\n 7 ms, median 7 ms · Tab takes 1, Alt-N takes N, Ctrl-D ends "]


def test_an_error_is_shown_and_the_text_stays():
    problems = []
    assert typed("a bad text", watch=lambda editor: problems.append(editor.problem)) == "a bad text"
    assert problems == ["The prompt is too long."]


def test_nothing_is_suggested_inside_the_text():
    lengths = []
    assert typed("ab", LEFT, watch=lambda editor: (time.sleep(0.05), lengths.append(len(editor.drafts())))) == "ab"
    assert lengths == [3, 0]


def test_shares_and_temperature_are_those_of_the_model(monkeypatch, tmp_path):
    text, opened = "import os\n\ndef main(", open_backbone(BASE)
    ids = opened.tokenizer(text)["input_ids"]
    table = count_ngrams([ids], folder=tmp_path / "table", order=2, vocab_size=len(opened.tokenizer))
    printed = {}
    for alpha in (0.0, 0.9):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        asked = ["--alpha", str(alpha), "--temperature", "0.5", "--tokens", "4", "--ngrams", str(table.folder)]
        result = CliRunner().invoke(app, ["autocomplete", BASE, *asked], input=text)
        assert result.exit_code == 0, result.output
        decoding = SuperposedDecoding(3, table, alpha=alpha, temperature=0.5)
        found = build_suggest(opened.model, opened.tokenizer, decoding, 4)(text)
        printed[alpha] = [line.partition("\t")[0] for line in result.stdout.splitlines() if "\t" in line]
        assert printed[alpha] == [f"{score:.2f}" for score in found.scores]
    assert printed[0.0] != printed[0.9]


def test_a_long_text_is_read_on_from_key_to_key():
    opened = open_backbone(BASE)
    read: list[int] = []
    opened.model.get_input_embeddings().register_forward_hook(lambda _, given, out: read.append(out.shape[1]))
    tell = build_suggest(opened.model, opened.tokenizer, SuperposedDecoding(2, temperature=1.0, keep_caches=True), 2)
    words = [f"name_{number}" for number in range(100)]
    assert len(opened.tokenizer(" ".join(words))["input_ids"]) > READ_TOKENS
    most = []
    for typed_words in range(90, 100):
        read.clear()
        tell(" ".join(words[:typed_words]))
        most.append(max(read))
    assert most[0] > READ_TOKENS - STEP_TOKENS
    assert sum(tokens > 16 for tokens in most[1:]) <= 1, "but for the step, a call reads what is new"


def test_drafts_from_a_pipe(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\ndef main("))
    result = CliRunner().invoke(app, ["autocomplete", BASE, "-k", "2", "--tokens", "4"], input="import os\n\ndef main(")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if "\t" in line]
    opened = open_backbone(BASE)
    found = build_suggest(opened.model, opened.tokenizer, SuperposedDecoding(2, temperature=1.0), 4)(
        "import os\n\ndef main("
    )
    assert [line.partition("\t")[0] for line in lines] == [f"{score:.2f}" for score in found.scores]
    assert found.scores[0] > found.scores[1]
    assert "ms for 2 drafts" in result.stderr


def test_a_prompt_that_is_no_text_is_a_sentence():
    with pytest.raises(ValueError, match="no text in UTF-8"):
        read_prompt("\udcff")


def test_an_empty_text_has_no_drafts():
    opened = open_backbone(BASE)
    assert build_suggest(opened.model, opened.tokenizer, SuperposedDecoding(2), 4)("").drafts == []


@pytest.mark.parametrize("given", [["-k", "10"], ["--ngrams", "no/such"], ["--temperature", "0"]])
def test_options_that_cannot_be(given):
    result = CliRunner().invoke(app, ["autocomplete", BASE, *given], input="import")
    assert result.exit_code != 0
    assert "Traceback" not in result.output
