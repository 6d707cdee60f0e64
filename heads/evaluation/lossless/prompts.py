"""Prompts for `headway verify-lossless` where none are given: short beginnings of several kinds of text.

Decoders differ where many drafts are accepted, as in code and lists, or where the best tokens have nearly equal scores,
as in prose; so the texts are of both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.evaluation.lossless.answers import Asked
from heads.evaluation.prompts import PromptContent, encode_numbered, parse_prompts

DEFAULT_TEXTS: tuple[str, ...] = (
    'def read_lines(path, encoding=\'utf-8\'):\n    """Return the lines of a file without their ends."""\n',
    "The three largest cities of the country are connected by a railway that was built in",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Dear Ms. Berger,\n\nthank you for your letter of last week. We have read it with",
    '{"name": "Ada", "born": 1815, "languages": ["English",',
    "To make bread you need flour, water, salt and yeast. First",
    "Q: A train covers 60 kilometres in 45 minutes. How fast does it go?\nA:",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)


def asked_of(prompts: Sequence[PromptContent], tokenizer: Any) -> list[Asked]:
    """Each prompt with its tokens (1, T), or without them if there is no tokenizer.

    Raises:
        ValueError: a chat for which the tokenizer has no template, or which it refuses; the sentence has its number.
    """
    if tokenizer is None:
        return [Asked(prompt=prompt) for prompt in prompts]
    return [
        Asked(prompt=prompt, prompt_1T=encode_numbered(prompt, tokenizer, f"Prompt {number}"))
        for number, prompt in enumerate(prompts, start=1)
    ]


def choose_prompts(path: Path | None, count: int) -> list[PromptContent]:
    """The first `count` prompts of a file; without a file, of `DEFAULT_TEXTS`."""
    return list(DEFAULT_TEXTS[:count]) if path is None else parse_prompts(path, count)
