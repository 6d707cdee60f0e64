"""Prompts from files of every form, and from held-out text: which text, how many tokens, what is refused."""

from __future__ import annotations

import copyreg
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tiny import shared_model

from heads.evaluation.prompts import check_length, default_prompts, demo_prompts, parse_prompts, read_prompts


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def texts(prompts: list[Any], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(prompt_1T[0]) for prompt_1T in prompts]


def test_paragraphs_of_a_text_file(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "p.txt").write_text("one\nstill one\n\n\ntwo\n \nthree\n", encoding="utf-8")
    found = read_prompts(tmp_path / "p.txt", tokenizer)
    assert texts(found, tokenizer) == ["one\nstill one", "two", "three"]


def test_lines_of_a_text_file_without_blank_lines_cut_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "p.txt").write_text("abcdef\nghijkl\nmnopqr\n", encoding="utf-8")
    found = read_prompts(tmp_path / "p.txt", tokenizer, count=2, max_tokens=4)
    assert texts(found, tokenizer) == ["abcd", "ghij"]


def test_fields_of_json_lines(tmp_path: Path, tokenizer: Any) -> None:
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    rows = [{"prompt": "a"}, {"text": "b"}, {"conversations": turns}, {"messages": [{"role": "user", "content": "Hi"}]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first, second, shared, chat = texts(read_prompts(tmp_path / "p.jsonl", tokenizer), tokenizer)
    assert (first, second) == ("a", "b")
    assert shared == chat
    assert chat.endswith("USER: Hi ASSISTANT:")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085"])
def test_unicode_s_line_separators_end_no_line(tmp_path: Path, separator: str) -> None:
    """JSON allows them inside of a text as they are, and editors do not show them."""
    text = f"one{separator}two"
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + end for end in ("\n", "\r\n")), encoding="utf-8"
    )
    (tmp_path / "p.txt").write_text(f"{text}\n{text}\n", encoding="utf-8")
    assert parse_prompts(tmp_path / "p.jsonl") == parse_prompts(tmp_path / "p.txt") == [text, text]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", "a", "allowed are .txt and .jsonl"),
        ("p.txt", "\n\n", "holds no prompt"),
        ("p.jsonl", '{"prompt": "a"}\nno json', "line 2 is no JSON"),
        ("p.jsonl", '{"question": "a"}', "line 1 has none of the fields"),
        ("p.jsonl", '{"messages": [{"role": "robot", "content": "a"}]}', "'robot'"),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}', "line 1 has no turn of a user"),
        (
            "p.jsonl",
            '{"text": "a"}\n{"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]}',
            r"Prompt 2 of .*template refuses turns of tool, user .*not tool",
        ),
    ],
)
def test_what_is_no_prompt_is_refused(tmp_path: Path, tokenizer: Any, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name, tokenizer)


def test_a_missing_file_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_prompts(tmp_path / "p.txt", tokenizer)


def test_held_out_prompts_are_the_same_every_time_and_begin_at_a_line_start(tokenizer: Any) -> None:
    files = ["copyreg.py", "struct.py", "dataclasses.py", "fractions.py"]
    found = demo_prompts(tokenizer, files, count=2, num_tokens=64)
    assert [prompt_1T.shape for prompt_1T in found] == [(1, 64), (1, 64)]
    assert texts(found, tokenizer) == texts(demo_prompts(tokenizer, files, count=2, num_tokens=64), tokenizer)

    assert "\n" + texts(found, tokenizer)[0] in Path(copyreg.__file__).read_text(encoding="utf-8")


def test_too_few_long_files_are_told(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="only 1 held-out files"):
        demo_prompts(tokenizer, ["copyreg.py"], count=2)


def test_a_backbone_that_does_not_say_what_was_held_out(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"\.txt or \.jsonl"):
        default_prompts(tmp_path, tokenizer, count=1)


def test_what_does_not_fit_the_backbones_positions_is_refused() -> None:
    prompts = [torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 700, dtype=torch.long)]
    check_length(shared_model("llama"), prompts, new_tokens=68)
    with pytest.raises(ValueError, match=r"700 tokens and 69 new ones.* 768 positions"):
        check_length(shared_model("llama"), prompts, new_tokens=69)
