"""Stream text while it is generated: tokens in, whole characters out, with drafted and accepted tokens in colour.

A token can be a part of a character, and a tokenizer can decode a token differently at the start of a text than after
another one. So text is decoded together with the tokens just before it, and held back while it ends within a character.
`TextGenerator` generates one text, streams it to stdout and measures its speed.
"""
# T prompt position

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.backbone.loading import max_positions
from heads.cli.options import SamplingOptions
from heads.decoding.draft_model_decoding import DraftModelDecoding
from heads.decoding.generate import generate
from heads.decoding.tree_decoding import TreeDecoding

ExactDecoding = TreeDecoding | DraftModelDecoding
Write = Callable[[str, bool], Any]
"""Takes a piece of text, and whether all of its tokens were drafted."""

CUT_CHARACTER = "\ufffd"  # tokenizers decode an incomplete character to this
CONTEXT = 8  # tokens of the prompt that are decoded too; no character has as many bytes
DRAFTED, RESET = "\x1b[32m", "\x1b[0m"


class TextStream:
    """A streamer for `heads.generate(…, streamer=TextStream(tokenizer, write))`.

    The prompt, which `generate` sends first, is not written. The pieces together are the text of the new tokens.
    """

    def __init__(self, tokenizer: Any, write: Write) -> None:
        self.tokenizer = tokenizer
        self.write = write
        self.text = ""
        self.num_tokens = 0
        self.num_passes = 0
        self._prompt_seen = False
        self._written: list[int] = []  # the last ones, decoded along with what follows
        self._held: list[int] = []
        self._held_drafted: list[bool] = []

    def put(self, tokens: Tensor) -> None:
        """Take the prompt at the first call, then new tokens, none of them drafted."""
        new = tokens.flatten().tolist()
        if not self._prompt_seen:
            self._prompt_seen = True
            self._written = new[-CONTEXT:]
            return
        self.put_drafted(tokens, [False] * len(new))

    def put_drafted(self, tokens: Tensor, drafted: Sequence[bool]) -> None:
        """Take the tokens of one pass, and which of them were drafted."""
        self.num_passes += 1
        self.num_tokens += len(drafted)
        for token, was_drafted in zip(tokens.flatten().tolist(), drafted, strict=True):
            self._held.append(token)
            self._held_drafted.append(was_drafted)
            piece = self._held_text()
            if piece and not piece.endswith(CUT_CHARACTER):
                self._release(piece)

    def end(self) -> None:
        """Write what is still held back, if the text ended within a character."""
        if piece := self._held_text():
            self._release(piece)

    def _held_text(self) -> str:
        before = self._decode(self._written)
        return self._decode(self._written + self._held)[len(before) :]

    def _release(self, piece: str) -> None:
        self.text += piece
        self.write(piece, all(self._held_drafted))
        self._written = self._held
        self._held, self._held_drafted = [], []

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


@dataclass(kw_only=True)
class StreamedText:
    """A streamed text and its speed.

    Attributes:
        first_seconds: seconds until the first characters; None for an empty text.
        stopped: Ctrl-C stopped it.
    """

    text: str = ""
    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    first_seconds: float | None = None
    stopped: bool = False

    def summary(self) -> str:
        """Its speed in one line.

        >>> StreamedText(tokens=12, passes=5, seconds=0.5, first_seconds=0.25).summary()
        '12 tokens, 2.40 tokens per pass, 24.0 tokens/s, the first after 0.25 s'
        """
        per_pass, per_second = self.tokens / max(1, self.passes), self.tokens / max(1e-9, self.seconds)
        first = "" if self.first_seconds is None else f", the first after {self.first_seconds:.2f} s"
        stopped = ", stopped" if self.stopped else ""
        return f"{self.tokens} tokens, {per_pass:.2f} tokens per pass, {per_second:.1f} tokens/s{first}{stopped}"


@dataclass(kw_only=True)
class TextGenerator:
    """A backbone and its settings for generating text.

    Attributes:
        decoding: None is plain `generate`.
        end_tokens: None is the backbone's own.
    """

    model: Any
    tokenizer: Any
    decoding: ExactDecoding | None
    sampling: SamplingOptions
    new_tokens: int
    highlight: bool = False
    end_tokens: list[int] | None = None

    def encode(self, text: str) -> Tensor:
        """(1, T) on the model's device."""
        return torch.tensor([self.tokenizer(text)["input_ids"]], dtype=torch.long, device=self.model.device)

    def stream(self, prompt_1T: Tensor) -> StreamedText:
        """Write the text after the prompt to stdout while it is generated; Ctrl-C stops it and keeps the text so far.

        Raises:
            ValueError: prompt and text would not fit the backbone's positions.
        """
        self.check_length(prompt_1T.shape[1])
        first: list[float] = []

        def write(piece: str, drafted: bool) -> None:
            if not first:
                first.append(time.perf_counter())
            self.write(piece, drafted)

        stream = TextStream(self.tokenizer, write)
        ends: dict[str, Any] = {} if self.end_tokens is None else {"eos_token_id": self.end_tokens}
        start, stopped = time.perf_counter(), False
        try:
            generate(
                self.model,
                self.decoding,
                streamer=stream,
                input_ids=prompt_1T,
                attention_mask=torch.ones_like(prompt_1T),
                max_new_tokens=self.new_tokens,
                **ends,
                **self.sampling.arguments(),
            )
        except KeyboardInterrupt:
            stream.end()
            stopped = True
        return StreamedText(
            text=stream.text,
            tokens=stream.num_tokens,
            passes=stream.num_passes,
            seconds=time.perf_counter() - start,
            first_seconds=first[0] - start if first else None,
            stopped=stopped,
        )

    def write(self, piece: str, drafted: bool) -> None:
        sys.stdout.write(f"{DRAFTED}{piece}{RESET}" if drafted and self.highlight else piece)
        sys.stdout.flush()

    def check_length(self, prompt_tokens: int) -> None:
        longest = max_positions(self.model)
        if prompt_tokens == 0:
            raise ValueError("The prompt has no tokens; give at least one word.")
        if longest is not None and prompt_tokens + self.new_tokens > longest:
            raise ValueError(
                f"The prompt has {prompt_tokens} tokens and {self.new_tokens} new ones may follow, but the "
                f"backbone has {longest} positions; shorten the prompt or lower --max-new-tokens."
            )
