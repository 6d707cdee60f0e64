"""Read prompts for measurements from a user's file, or from held-out text of the Python standard library.

A `.txt` file holds one prompt in each paragraph (blank lines between them), or in each line if it has no blank line.
A `.jsonl` file holds one object a line: {"prompt": …} or {"text": …} is a text; {"messages": […]} or
{"conversations": […]} is a chat up to its last user turn, rendered by the tokenizer's template. Nothing is random.
"""
# T prompt position

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.backbone.loading import max_positions
from heads.data.chat import choose_template, encode_chat
from heads.data.conversations import read_turn
from heads.data.standard_library import load_heldout_files, stdlib_documents

PromptContent = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""

FIELDS = ("prompt", "text", "messages", "conversations")


def read_prompts(
    path: str | Path, tokenizer: Any, count: int | None = None, max_tokens: int | None = None
) -> list[Tensor]:
    """The first `count` prompts of a file, each (1, T), cut to their first `max_tokens` tokens.

    Raises:
        ValueError: no such file, an unknown kind of file, or a line that is no prompt, which the error names.
    """
    found = parse_prompts(path, count)
    prompts = [
        encode_numbered(prompt, tokenizer, f"Prompt {number} of {path}")[:, :max_tokens]
        for number, prompt in enumerate(found, start=1)
    ]
    if any(prompt_1T.shape[1] == 0 for prompt_1T in prompts):
        raise ValueError(f"{path} holds an empty prompt; give at least one text in every paragraph or line.")
    return prompts


def parse_prompts(path: str | Path, count: int | None = None) -> list[PromptContent]:
    """The first `count` prompts of a file as texts or messages.

    Raises:
        ValueError: as `read_prompts`.
    """
    path = Path(path)
    readers: dict[str, Callable[[Path], Sequence[PromptContent]]] = {".txt": read_paragraphs, ".jsonl": read_json_lines}
    if path.suffix not in readers:
        raise ValueError(f"The prompts {path} end in {path.suffix!r}; allowed are {' and '.join(readers)}.")
    if not path.is_file():
        raise ValueError(f"The file of prompts {path} does not exist; give a .txt or .jsonl file.")
    found = list(readers[path.suffix](path)[:count])
    if not found:
        raise ValueError(f"{path} holds no prompt; give at least one text in every paragraph or line.")
    return found


def read_paragraphs(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8-sig").strip("\n")
    paragraphs = re.split(r"\n[ \t]*\n\s*", text)
    return [part for part in (paragraphs if len(paragraphs) > 1 else text.split("\n")) if part.strip()]


def read_json_lines(path: Path) -> list[PromptContent]:
    lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1)  # U+2028 may stand inside a text
    return [read_object(line, f"{path} line {number}") for number, line in lines if line.strip()]


def read_object(line: str, place: str) -> PromptContent:
    """A text, or the messages of a chat up to its last user turn."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON ({error}); write one object in each line.") from None
    name = next((name for name in FIELDS if isinstance(row, dict) and row.get(name)), None)
    if name is None:
        raise ValueError(f"{place} has none of the fields {', '.join(FIELDS)}; a prompt needs one of them.")
    if isinstance(row[name], str):
        return str(row[name])
    if not isinstance(row[name], list):
        raise ValueError(f"{place} has a {type(row[name]).__name__} as its {name}; give a text or a list of turns.")
    try:
        messages = [read_turn(turn, number) for number, turn in enumerate(row[name], start=1)]
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ValueError(f"{place} has no turn of a user in its {name}; a prompt ends with one.")
    return messages


def encode_numbered(prompt: PromptContent, tokenizer: Any, which: str) -> Tensor:
    """`encode`, with errors that name the prompt."""
    try:
        return encode(prompt, tokenizer)
    except ValueError as error:
        raise ValueError(f"{which}: {error}") from None


def encode(prompt: PromptContent, tokenizer: Any) -> Tensor:
    """(1, T): the tokens of a text, or of a chat up to where the assistant's answer begins."""
    if isinstance(prompt, str):
        tokens = tokenizer(prompt)["input_ids"]
    else:
        tokens = encode_chat(tokenizer, choose_template(tokenizer, None), prompt)
    return torch.tensor([tokens], dtype=torch.long)


def check_length(model: Any, prompts: Sequence[Tensor], new_tokens: int) -> None:
    """Check that every prompt and the new tokens after it fit the backbone's positions.

    Raises:
        ValueError: a prompt does not.
    """
    longest, most = max_positions(model), max(prompt_1T.shape[1] for prompt_1T in prompts)
    if longest is not None and most + new_tokens > longest:
        raise ValueError(
            f"A prompt has {most} tokens and {new_tokens} new ones may follow, but the backbone has {longest} "
            f"positions; lower --prompt-tokens or --max-new-tokens."
        )


def default_prompts(backbone: str | Path, tokenizer: Any, count: int, num_tokens: int = 64) -> list[Tensor]:
    """Prompts from the text that was held out when a backbone was trained, as its folder records.

    Raises:
        ValueError: the folder has no such record.
    """
    record = Path(backbone) / "training.json"
    if not record.is_file():
        raise ValueError(
            f"The backbone {backbone} does not record which text was held out (no {record.name} with heldout_files); "
            f"give a .txt or .jsonl file of prompts."
        )
    return demo_prompts(tokenizer, load_heldout_files(record), count, num_tokens)


def demo_prompts(tokenizer: Any, heldout_files: Sequence[str], count: int, num_tokens: int = 64) -> list[Tensor]:
    """`count` prompts of `num_tokens` tokens: one from each of `count` files spread over the held-out files.

    A prompt begins at the first line start after a third of the file, past imports and licences. Short files are
    skipped.

    Raises:
        ValueError: too few files are long enough.
    """
    prompts = [cut_prompt(text, tokenizer, num_tokens) for _, text in stdlib_documents("heldout", heldout_files)]
    long_enough = [prompt_1T for prompt_1T in prompts if prompt_1T.shape[1] == num_tokens]
    if len(long_enough) < count:
        raise ValueError(
            f"{count} prompts of {num_tokens} tokens were requested, but only {len(long_enough)} held-out files of "
            f"this Python's standard library are long enough; request fewer, or give a file of prompts."
        )
    return [long_enough[i * len(long_enough) // count] for i in range(count)]


def cut_prompt(text: str, tokenizer: Any, num_tokens: int) -> Tensor:
    """(1, T): at most `num_tokens` tokens from the first line start after a third of the text."""
    start = text.find("\n", len(text) // 3) + 1
    piece = text[start:].lstrip("\n")[: 20 * num_tokens]  # no tokenizer has more than 20 characters a token
    return encode(piece, tokenizer)[:, :num_tokens]
