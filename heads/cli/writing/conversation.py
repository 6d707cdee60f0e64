"""A conversation over several turns: before each answer the chat template renders the whole conversation."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heads.cli.writing.streaming import StreamedText, TextGenerator
from heads.data.chat import choose_template, encode_chat
from heads.evaluation.methods import end_tokens

PROMPT = "> "


class Conversation:
    """The messages so far, and the generator of answers.

    A tokenizer without a chat template gets the built-in vicuna template, with one warning.
    """

    def __init__(self, text_generator: TextGenerator) -> None:
        self.text_generator = text_generator
        self.template = choose_template(text_generator.tokenizer, None)
        self.messages: list[dict[str, Any]] = []
        text_generator.end_tokens = answer_ends(text_generator)

    def answer(self, question: str) -> StreamedText:
        """Stream an answer; if it is stopped, the part so far stays in the conversation."""
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = self.text_generator.stream(self.encode(asked))
        self.messages = [*asked, {"role": "assistant", "content": answer.text.strip()}]
        return answer

    def reset(self) -> None:
        """Start a new conversation, and drop the decoder's caches of the old one."""
        self.messages = []
        if self.text_generator.decoding is not None:
            self.text_generator.decoding.forget()

    def encode(self, messages: list[dict[str, Any]]) -> Tensor:
        tokens = encode_chat(self.text_generator.tokenizer, self.template, messages)
        return torch.tensor([tokens], dtype=torch.long, device=self.text_generator.model.device)


def answer_ends(text_generator: TextGenerator) -> list[int] | None:
    """The tokens that end an answer: the backbone's own and the tokenizer's, which differ for many chat models."""
    tokens = set(end_tokens(text_generator.model))
    if text_generator.tokenizer.eos_token_id is not None:
        tokens.add(text_generator.tokenizer.eos_token_id)
    return sorted(tokens) or None


def converse(conversation: Conversation, print_aside: Callable[[str], None]) -> None:
    """Read questions from stdin until it ends or /exit.

    Args:
        print_aside: prints a line about the conversation.
    """
    while (question := read_question()) is not None:
        if question == "/reset":
            conversation.reset()
            print_aside("A new conversation starts.")
        elif question.startswith("/"):
            print_aside(f"There is no command {question.split()[0]}; there are /reset and /exit.")
        elif question:
            try_to_answer(conversation, question, print_aside)


def try_to_answer(conversation: Conversation, question: str, print_aside: Callable[[str], None]) -> None:
    """Answer, or print why that is not possible, such as a conversation that has grown too long."""
    try:
        answer = conversation.answer(question)
    except ValueError as error:
        if not conversation.messages:
            raise
        print_aside(f"{error} Or start a new conversation with /reset.")
        return
    sys.stdout.write("\n")
    print_aside(answer.summary())


def read_question() -> str | None:
    """Read a line from the user; None at the end of input, on Ctrl-C and on /exit."""
    try:
        question = input(PROMPT if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            sys.stdout.write("\n")
        return None
    return None if question == "/exit" else question
