"""Text while it is generated: tokens in, whole characters out, with those that were drafted and accepted in colour.

A token can hold a part of a character, and a tokenizer can decode a token otherwise at the start of a text than behind
another. So text is decoded together with what came just before, and held back while it ends within a character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Write = Callable[[str, bool], Any]
"""Takes a piece of text, and whether all of its tokens were drafted."""

CUT_CHARACTER = "\ufffd"  # what decoders put for bytes that are no whole character
CONTEXT = 8  # tokens of the prompt that are decoded along: more than the bytes of any character


class TextStream:
    """A streamer for `heads.generate(…, streamer=TextStream(tokenizer, write))`.

    The prompt, which `generate` puts first, is not written. The pieces together are the text of the new tokens.
    """

    def __init__(self, tokenizer: Any, write: Write) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.text = ""
        self.num_tokens = 0
        self.num_passes = 0
        self._prompt_seen = False
        self._settled: list[int] = []  # written, and decoded along with what follows
        self._held: list[int] = []
        self._held_drafted: list[bool] = []

    def put(self, tokens: Tensor) -> None:
        """The prompt, once; then new tokens, none of them drafted."""
        new = tokens.flatten().tolist()
        if not self._prompt_seen:
            self._prompt_seen = True
            self._settled = new[-CONTEXT:]
            return
        self.put_drafted(tokens, [False] * len(new))

    def put_drafted(self, tokens: Tensor, drafted: Sequence[bool]) -> None:
        """One pass's tokens, and which of them were drafted."""
        self.num_passes += 1
        self.num_tokens += len(drafted)
        for token, was_drafted in zip(tokens.flatten().tolist(), drafted, strict=True):
            self._held.append(token)
            self._held_drafted.append(was_drafted)
            piece = self._held_text()
            if piece and not piece.endswith(CUT_CHARACTER):
                self._release(piece)

    def end(self) -> None:
        """Write what is still held back: the text ended within a character."""
        if piece := self._held_text():
            self._release(piece)

    def _held_text(self) -> str:
        before = self._decode(self._settled)
        return self._decode(self._settled + self._held)[len(before) :]

    def _release(self, piece: str) -> None:
        self.text += piece
        self.write(piece, all(self._held_drafted))
        self._settled = self._held
        self._held, self._held_drafted = [], []

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
