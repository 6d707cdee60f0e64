"""Ctrl-C stops an answer, not the conversation; what was said before it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from tiny import tiny_model

from heads.conversation import Conversation
from heads.speaking import Sampling, Speaker


class Interrupted:
    """A decoding that says a little and is then stopped by the user."""

    def __call__(self, *args: Any, streamer: Any, **kwargs: Any) -> None:
        streamer.put_drafted(torch.tensor(byte_tokenizer()("Well, é")["input_ids"][:-1]), [False] * 7)
        raise KeyboardInterrupt


def test_a_stopped_answer_stays_as_far_as_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    speaker = Speaker(
        model=tiny_model("llama", vocab_size=NUM_TOKENS),
        tokenizer=byte_tokenizer(),
        decoding=Interrupted(),  # type: ignore[arg-type]
        sampling=Sampling(),
        new_tokens=20,
    )
    conversation = Conversation(speaker)
    spoken = conversation.answer("Hi")
    assert spoken.stopped
    assert spoken.summary().endswith("tokens/s, stopped")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Well, \ufffd"}
    assert capsys.readouterr().out == "Well, \ufffd"
    assert EOS in (speaker.end_tokens or [])


def test_turns_that_the_template_refuses_are_one_sentence() -> None:
    speaker = Speaker(
        model=tiny_model("llama", vocab_size=NUM_TOKENS),
        tokenizer=byte_tokenizer(),
        decoding=None,
        sampling=Sampling(),
        new_tokens=2,
    )
    conversation = Conversation(speaker)
    conversation.template = "{{ raise_exception('only system turns') }}"
    with pytest.raises(ValueError, match=r"template refuses turns of user \(only system turns\)"):
        conversation.answer("Hi")
