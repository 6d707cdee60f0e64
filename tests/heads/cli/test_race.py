"""`headway race`: columns hold plain generation's text and their own times, on the screen and in the SVG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from rich.console import Console
from throwaway_families import make_heads
from tiny import tiny_model
from typer.testing import CliRunner

from heads.backbone.model import Backbone
from heads.checkpoint import save_load
from heads.cli.main import app
from heads.cli.options import SamplingOptions
from heads.cli.race.recording import Column, Entry, ShownPass, Track, pieces_at, race, say_same
from heads.cli.race.screen import replay, summary
from heads.cli.race.svg import draw_race, lay_out
from heads.decoding.tree_decoding import TreeDecoding

PROMPT = "if x:\n\treturn"
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_model("llama", attn="sdpa", dtype=torch.float64, vocab_size=NUM_TOKENS)
    model.generation_config.eos_token_id = None
    model.lm_head.weight.data[~is_letter()] = 0.0  # their logit is 0, and some letter's is above it
    return model


def is_letter() -> torch.Tensor:
    letters = torch.zeros(NUM_TOKENS, dtype=torch.bool)
    letters[byte_tokenizer().convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))] = True
    return letters


@pytest.fixture(scope="module")
def columns(model: Any) -> list[Column]:
    tokenizer = byte_tokenizer()
    track = Track(
        model=model,
        tokenizer=tokenizer,
        prompt_1T=torch.tensor([tokenizer(PROMPT)["input_ids"]]),
        sampling=SamplingOptions(),
        new_tokens=NEW_TOKENS,
    )
    decoding = TreeDecoding(make_heads("medusa", Backbone(model)), 4, lookup=6)
    entries = [Entry(name="plain", track=track), Entry(name="medusa", track=track, decoding=decoding)]
    return race(entries, repeats=2)


def test_columns_hold_the_same_tokens_and_their_own_passes(columns):
    plain, ours = columns
    assert plain.tokens == ours.tokens
    assert len(plain.passes) == NEW_TOKENS
    assert sum(one.tokens for one in ours.passes) == NEW_TOKENS
    assert len(ours.passes) < NEW_TOKENS
    assert "".join(piece for piece, _ in pieces_at(plain, plain.seconds)) == byte_tokenizer().decode(plain.tokens)
    assert not any(drafted for _, drafted in pieces_at(plain, plain.seconds))
    assert any(drafted for _, drafted in pieces_at(ours, ours.seconds))
    assert [one.seconds for one in ours.passes] == sorted(one.seconds for one in ours.passes)
    assert say_same(columns) == "All columns wrote the same text."


def made(name: str, seconds: list[float], drafted: bool) -> Column:
    passes = tuple(
        ShownPass(seconds=at, tokens=2, pieces=((f"{name[0]}{number}", False), ("<&>\n", drafted)))
        for number, at in enumerate(seconds)
    )
    return Column(name=name, passes=passes, tokens=list(range(2 * len(seconds))))


def test_columns_are_replayed_at_their_own_pace():
    slow, fast = made("plain", [1.0, 2.0, 3.0, 4.0], False), made("heads", [0.5, 1.0, 1.5, 2.0], True)
    assert (slow.tokens_at(2.0), fast.tokens_at(2.0)) == (4, 8)
    assert fast.caption_at(2.0, slow) == "4 tokens/s, 2.00 tokens per pass, 2.00 × plain"
    assert fast.caption_at(1.0, slow) == "4 tokens/s"
    output, now = io.StringIO(), iter(0.75 * step for step in range(100))
    console = Console(file=output, force_terminal=True, width=100, height=30, color_system="standard")
    replay(console, [slow, fast], "p", 2.0, clock=lambda: next(now), sleep=lambda _: None)
    shown = output.getvalue()
    assert "2.00 × plain" in shown
    assert shown.count("1.00 × plain") == 0
    assert shown.index("h0") < shown.index("p0")  # in the first frames only the faster column has text
    assert "\x1b[1;32m" in shown


def test_a_table_sums_up_all_columns():
    table = summary([made("plain", [1.0, 2.0, 3.0, 4.0], False), made("heads", [0.5, 1.0], True)])
    assert table.rows == [
        ["plain", "8", "4", "4.00", "2.00", "2.0", "1.00"],
        ["heads", "4", "2", "1.00", "2.00", "4.0", "2.00"],
    ]


def test_texts_that_differ_are_said():
    first, second = made("plain", [1.0], False), made("heads", [1.0], True)
    changed = Column(name="heads", passes=second.passes, tokens=[0, 7])
    assert say_same([first, changed]).startswith("Texts differ from plain's: heads from token 2 on;")


def test_the_svg_is_whole_and_ends_with_the_whole_text():
    columns = [made("plain", [1.0, 2.0], False), made("heads", [0.5, 1.0], True)]
    drawn = draw_race(columns, "p\n", "a note", slower=2.0)
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    texts = [text for text in root.iter(f"{space}text") if text.get("visibility") != "hidden"]
    said = [text.text for text in texts]
    captions = {"2 tokens/s, 2.00 tokens per pass", "4 tokens/s, 2.00 tokens per pass, 2.00 × plain"}
    assert {"p", "p0", "p1", "h0", "h1", "a note", *captions} <= set(said)
    assert said.count("<&>") == 4
    drafted = [text for text in texts if text.get("class") == "d"]
    assert [text.find(f"{space}set").get("dur") for text in drafted] == ["1.00s", "2.00s"]  # type: ignore[union-attr]
    assert "script" not in drawn
    assert "prefers-color-scheme:dark" in drawn


def test_lines_break_at_the_width_and_at_breaks():
    column = Column(name="a", passes=(ShownPass(seconds=1.0, tokens=1, pieces=(("abcdef\n\tg", True),)),), tokens=[])
    assert [(run.line, run.start, run.text) for run in lay_out(column, "", 4)] == [
        (0, 0, "abcd"),
        (1, 0, "ef"),
        (2, 0, "    "),
        (3, 0, "g"),
    ]


def test_the_command_prints_columns_and_writes_the_picture(model, tmp_path: Path):
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    model.config.name_or_path = str(tmp_path / "base")
    save_load.save(make_heads("medusa", Backbone(model)), tmp_path / "medusa")
    arguments = ["race", tmp_path / "medusa", "--prompt", "def main", "--max-new-tokens", "6", "--repeats", "1"]
    arguments.append("--pack")
    result = CliRunner().invoke(app, [str(one) for one in [*arguments, "--svg", tmp_path / "race.svg"]])
    assert result.exit_code == 0, result.output
    assert "medusa with lookup" in result.output
    assert re.search(r"columns decoded one after another", result.output)
    assert re.search(r"^ plain +6 +6 +[\d.]+ +1\.00 +[\d.]+ +1\.00", result.output, flags=re.MULTILINE)
    assert ElementTree.parse(tmp_path / "race.svg").getroot().tag.endswith("svg")
    mixed = CliRunner().invoke(app, [str(one) for one in [*arguments, "--mx", tmp_path / "base"]])
    assert "medusa, MX" in mixed.output
    assert "another model's" in mixed.output
    refused = CliRunner().invoke(app, [str(one) for one in ["race", "a", "b", "c", "--prompt", "x"]])
    assert refused.exit_code == 1
    assert "3 folders of heads were given" in refused.output
