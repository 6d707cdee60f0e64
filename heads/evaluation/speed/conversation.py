"""A question's turns as prompts: each holds the earlier turns and the answers to them.

A tokenizer with a chat template gets chats. Without one a turn's text follows the text so far, which is what a backbone
of plain text or code continues.
"""
# T prompt position

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from heads.data.chat import choose_template, encode_chat
from heads.evaluation.speed.questions import Question

PromptForm = Literal["chat", "text"]


@dataclass(frozen=True, kw_only=True)
class Prompter:
    """Writes the prompts of conversations in one form."""

    tokenizer: Any
    form: PromptForm

    def prompt(self, question: Question, answers: Sequence[Sequence[int]]) -> list[int]:
        """Token ids of the turn after these answers, and of everything before it."""
        if self.form == "chat":
            return self.chat(question, answers)
        texts = [f"{question.system}\n\n" if question.system else "", *question.turns]
        tokens = list(self.tokenizer(texts[0] + texts[1])["input_ids"])
        for answer, turn in zip(answers, question.turns[1:], strict=False):
            tokens += [*answer, *self.tokenizer(turn, add_special_tokens=False)["input_ids"]]
        return tokens

    def chat(self, question: Question, answers: Sequence[Sequence[int]]) -> list[int]:
        messages = [{"role": "system", "content": question.system}] if question.system else []
        for i, turn in enumerate(question.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": turn})
            if i < len(answers):
                text = self.tokenizer.decode(answers[i], skip_special_tokens=True).strip()
                messages.append({"role": "assistant", "content": text})
        return list(encode_chat(self.tokenizer, choose_template(self.tokenizer, None), messages))


def choose_form(tokenizer: Any, form: str) -> PromptForm:
    """The form that was asked for; by default chats where the tokenizer has a template for them.

    >>> choose_form(object(), "text")
    'text'
    """
    if form == "auto":
        return "chat" if getattr(tokenizer, "chat_template", None) else "text"
    return "chat" if form == "chat" else "text"
