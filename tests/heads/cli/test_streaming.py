"""The streamed pieces together are the text, whatever bytes tokens end in; no piece ends within a character."""

from __future__ import annotations

import pytest
import torch
from byte_tokenizer import EOS, byte_tokenizer

from heads.cli.writing.streaming import CUT_CHARACTER, TextStream


def stream(tokens: list[int], drafted: list[bool], prompt: str = "ab") -> list[tuple[str, bool]]:
    """The pieces of new tokens after a prompt, as passes of up to 3 tokens."""
    pieces: list[tuple[str, bool]] = []
    tokenizer = byte_tokenizer()
    streamer = TextStream(tokenizer, lambda piece, was_drafted: pieces.append((piece, was_drafted)))
    streamer.put(torch.tensor([tokenizer(prompt)["input_ids"]]))
    for start in range(0, len(tokens), 3):
        streamer.put_drafted(torch.tensor(tokens[start : start + 3]), drafted[start : start + 3])
    streamer.end()
    assert streamer.text == "".join(piece for piece, _ in pieces)
    assert (streamer.num_tokens, streamer.num_passes) == (len(tokens), -(-len(tokens) // 3))
    return pieces


@pytest.mark.parametrize("text", ["plain", "naïve — 日本語", "👩‍👩‍👧 ok", "tab\tand\r\nbreak ", " lead", "é"])
def test_pieces_are_the_text_and_whole_characters(text: str) -> None:
    tokens = byte_tokenizer()(text)["input_ids"]
    pieces = stream(tokens, [False] * len(tokens))
    assert "".join(piece for piece, _ in pieces) == text
    assert not any(CUT_CHARACTER in piece for piece, _ in pieces)


def test_bytes_that_are_no_text_come_out_as_the_tokenizer_decodes_them() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (200,), generator=generator).tolist()
    pieces = stream(tokens, [False] * len(tokens))
    assert "".join(piece for piece, _ in pieces) == byte_tokenizer().decode(tokens)


def test_a_text_that_ends_within_a_character_is_written_at_the_end() -> None:
    tokens = byte_tokenizer()("aé")["input_ids"][:-1]
    assert [piece for piece, _ in stream(tokens, [False] * len(tokens))] == ["a", CUT_CHARACTER]


def test_a_character_counts_as_drafted_when_all_its_tokens_were() -> None:
    tokens = byte_tokenizer()("aéé")["input_ids"]
    pieces = stream(tokens, [True, True, True, False, True])
    assert pieces == [("a", True), ("é", True), ("é", False)]


def test_the_prompt_and_the_end_token_are_not_written() -> None:
    tokens = [*byte_tokenizer()("x")["input_ids"], EOS]
    assert stream(tokens, [False, True], prompt="hidden") == [("x", False)]


def test_plain_generation_may_put_one_token_at_a_time() -> None:
    tokenizer = byte_tokenizer()
    streamer = TextStream(tokenizer, lambda piece, drafted: None)
    streamer.put(torch.tensor([tokenizer("ab")["input_ids"]]))
    for token in tokenizer("né")["input_ids"]:
        streamer.put(torch.tensor([token]))
    assert streamer.text == "né"
