"""Ctrl-C stops an answer, not the conversation; what was said before it stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backbone_passes import reads
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from throwaway_families import make_heads
from tiny import tiny_model

from heads.backbone.model import Backbone
from heads.cli.options import SamplingOptions
from heads.cli.writing.conversation import Conversation
from heads.cli.writing.streaming import TextGenerator
from heads.decoding.tree_decoding import TreeDecoding


class Interrupted:
    """A decoding that says a little and is then stopped by the user."""

    def __call__(self, *args: Any, streamer: Any, **kwargs: Any) -> None:
        streamer.put_drafted(torch.tensor(byte_tokenizer()("Well, é")["input_ids"][:-1]), [False] * 7)
        raise KeyboardInterrupt


def test_a_stopped_answer_stays_as_far_as_it_went(capsys: pytest.CaptureFixture[str]) -> None:
    text_generator = TextGenerator(
        model=tiny_model("llama", vocab_size=NUM_TOKENS),
        tokenizer=byte_tokenizer(),
        decoding=Interrupted(),  # type: ignore[arg-type]
        sampling=SamplingOptions(),
        new_tokens=20,
    )
    conversation = Conversation(text_generator)
    answer = conversation.answer("Hi")
    assert answer.stopped
    assert answer.summary().endswith(" s, stopped")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Well, \ufffd"}
    assert capsys.readouterr().out == "Well, \ufffd"
    assert EOS in (text_generator.end_tokens or [])


def test_turns_that_the_template_refuses_are_one_sentence() -> None:
    text_generator = TextGenerator(
        model=tiny_model("llama", vocab_size=NUM_TOKENS),
        tokenizer=byte_tokenizer(),
        decoding=None,
        sampling=SamplingOptions(),
        new_tokens=2,
    )
    conversation = Conversation(text_generator)
    conversation.template = "{{ raise_exception('only system turns') }}"
    with pytest.raises(ValueError, match=r"template refuses turns of user \(only system turns\)"):
        conversation.answer("Hi")


def test_a_second_turn_reads_what_is_new_and_answers_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", vocab_size=NUM_TOKENS)
    token_heads = make_heads("dynamo", Backbone(model))
    said = []
    for decoding in (TreeDecoding(token_heads, keep_caches=True), TreeDecoding(token_heads), None):
        text_generator = TextGenerator(
            model=model, tokenizer=byte_tokenizer(), decoding=decoding, sampling=SamplingOptions(), new_tokens=12
        )
        conversation = Conversation(text_generator)
        conversation.answer("What is the longest word?")
        with reads(token_heads.backbone) as seen:
            second = conversation.answer("More")
        said.append((conversation.messages, capsys.readouterr().out))
        prompt = conversation.encode(conversation.messages[:-1]).shape[1]
        if decoding is not None and decoding.reusable is not None:
            # the answer as the tokenizer sees it, "More" and what the template puts around; the rest was there
            assert seen[0] < prompt - conversation.encode(conversation.messages[:1]).shape[1] + 12
            assert 0.0 < (second.first_seconds or 0.0) <= second.seconds
        elif decoding is not None:
            assert seen[0] == prompt
    assert said[0] == said[1] == said[2]
