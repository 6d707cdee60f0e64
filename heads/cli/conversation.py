"""A conversation over several turns: the whole of it is rendered by the chat template before each answer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heads.cli.speaker import Speaker, Spoken
from heads.data.chat import choose_template, encode_chat
from heads.decoding.tree_decoding import TreeDecoding

PROMPT = "> "


class Conversation:
    """Messages so far, and a speaker that answers them.

    A tokenizer without a chat template gets the built-in vicuna template, which is said once.
    """

    def __init__(self, speaker: Speaker) -> None:
        self.speaker = speaker
        self.template = choose_template(speaker.tokenizer, None)
        self.messages: list[dict[str, Any]] = []
        speaker.end_tokens = end_tokens(speaker)

    def answer(self, question: str) -> Spoken:
        """Stream an answer; a stopped one stays in the conversation as far as it went."""
        asked = [*self.messages, {"role": "user", "content": question}]
        spoken = self.speaker.speak(self.encode(asked))
        self.messages = [*asked, {"role": "assistant", "content": spoken.text.strip()}]
        return spoken

    def reset(self) -> None:
        """Begin anew, and let go of what the decoder keeps of the text so far."""
        self.messages = []
        if isinstance(self.speaker.decoding, TreeDecoding):
            self.speaker.decoding.forget()

    def encode(self, messages: list[dict[str, Any]]) -> Tensor:
        tokens = encode_chat(self.speaker.tokenizer, self.template, messages)
        return torch.tensor([tokens], dtype=torch.long, device=self.speaker.model.device)


def end_tokens(speaker: Speaker) -> list[int] | None:
    """What ends an answer: the backbone's own end tokens and the tokenizer's, which chat models often set apart."""
    named = speaker.model.generation_config.eos_token_id
    tokens = set() if named is None else set(named) if isinstance(named, list) else {named}
    if speaker.tokenizer.eos_token_id is not None:
        tokens.add(speaker.tokenizer.eos_token_id)
    return sorted(tokens) or None


def converse(conversation: Conversation, say: Callable[[str], None]) -> None:
    """Read questions from stdin until it ends or /exit.

    Args:
        say: writes a line about the conversation, beside it.
    """
    while (question := read_question()) is not None:
        if question == "/reset":
            conversation.reset()
            say("The conversation begins anew.")
        elif question.startswith("/"):
            say(f"There is no command {question.split()[0]}; there are /reset and /exit.")
        elif question:
            try_to_answer(conversation, question, say)


def try_to_answer(conversation: Conversation, question: str, say: Callable[[str], None]) -> None:
    """Answer, or say why not: a conversation that has grown too long can go on after /reset."""
    try:
        spoken = conversation.answer(question)
    except ValueError as error:
        if not conversation.messages:
            raise
        say(f"{error} Or begin anew with /reset.")
        return
    sys.stdout.write("\n")
    say(spoken.summary())


def read_question() -> str | None:
    """A line from the user; None at the end of input, on Ctrl-C and on /exit."""
    try:
        question = input(PROMPT if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            sys.stdout.write("\n")
        return None
    return None if question == "/exit" else question
