"""Prompts, greedy answers, and the sources that answer: a local model, or an OpenAI-compatible server (endpoint.py).

Two sources are compared on the same prompts. Each answers a prompt and, where it can, continues an answer from given
tokens. A server may return text alone; its tokens are then what the backbone's tokenizer makes of that text.
"""
# T prompt position

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from heads.evaluation.methods import GreedySettings, end_tokens, new_tokens
from heads.evaluation.prompts import PromptContent, encode

END = -1
"""Stands for any end-of-text token of the model, since servers do not say which one ended a text."""

UNFINISHED = "�"  # a text that was cut within a character may end in this


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt, as text or messages, and its tokens (1, T), or None without a tokenizer."""

    prompt: PromptContent
    prompt_1T: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A greedy answer.

    Attributes:
        text: without the end-of-text token.
        tokens: the new tokens, END last if the text ended; None where they are not known.
        ended: True if an end-of-text token ended the text, False if the limit on new tokens did.
        prompt: the prompt's token ids as the server read them; None where it does not return them.
    """

    text: str
    tokens: list[int] | None = None
    ended: bool = False
    prompt: list[int] | None = None


class Source(Protocol):
    """Answers prompts at temperature 0."""

    def answer(self, asked: Asked) -> Answer: ...

    def resume(self, asked: Asked, new: Sequence[int]) -> Answer | None:
        """The answer that continues these new tokens and includes them; None where a source cannot continue."""


@dataclass(frozen=True, kw_only=True)
class LocalSource:
    """A local backbone: plain `generate`, or a decoding method of this library."""

    model: Any
    tokenizer: Any
    settings: GreedySettings
    decoding: Any = None

    def answer(self, asked: Asked) -> Answer:
        return self._generate(asked, [], self.decoding)

    def resume(self, asked: Asked, new: Sequence[int]) -> Answer | None:
        return self._generate(asked, list(new), self.decoding)

    def _generate(self, asked: Asked, new: list[int], decoding: Any) -> Answer:
        assert asked.prompt_1T is not None, "a local model is asked in tokens"
        prompt_1T = asked.prompt_1T.to(self.model.device)
        left = self.settings.new_tokens - len(new)
        if left > 0 and new[-1:] != [END]:
            given_1T = torch.cat([prompt_1T, prompt_1T.new_tensor([new])], dim=1)
            more = {} if decoding is None else {"custom_generate": decoding}
            new = new_tokens(self.settings.generate(self.model, given_1T, max_new_tokens=left, **more), prompt_1T)
        new = mark_end(new, end_tokens(self.model))
        return Answer(text=text_of(self.tokenizer, new), tokens=new, ended=new[-1:] == [END])


def mark_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Replace a last token that is an end-of-text token by END.

    >>> mark_end([5, 6, 2], [2, 3]), mark_end([5, 6], [2, 3])
    ([5, 6, -1], [5, 6])
    """
    return [*tokens[:-1], END] if tokens and tokens[-1] in ends else tokens


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode([token for token in tokens if token != END], skip_special_tokens=True)
    return text


def with_tokens(answer: Answer, asked: Asked, tokenizer: Any) -> Answer:
    """The answer with the tokens that the tokenizer makes of its text, if the server returned text alone.

    The model may have written the same text in other tokens. A difference is then reported some tokens away from where
    it is, with the scores of the tokenizer's tokens.
    """
    if answer.tokens is not None or asked.prompt_1T is None:
        return answer
    before = asked.prompt_1T[0].tolist()
    text = answer.text.rstrip(UNFINISHED)
    found: list[int] = []
    if isinstance(asked.prompt, str):  # read behind the prompt, since many tokenizers mark a text's beginning
        whole = encode(asked.prompt + text, tokenizer)[0].tolist()
        found = whole[len(before) :] if whole[: len(before)] == before else []
    if not found:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Answer(text=text, tokens=[*found, *([END] if answer.ended else [])], ended=answer.ended)
