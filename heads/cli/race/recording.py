"""Record how the same prompt is decoded by several methods: which pieces of text each pass wrote, and when.

Each method runs alone, one after another in rotating order, after a first run that is not counted. Of several repeats
the one with the median time is kept. So no column takes time from another, as it would if all ran at once.
"""
# T prompt position

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.cli.options import SamplingOptions
from heads.cli.writing.streaming import ExactDecoding, TextStream
from heads.decoding.generate import generate
from heads.evaluation.generated_text import first_difference
from heads.evaluation.throughput import clock_of, rotated

Pieces = tuple[tuple[str, bool], ...]
"""Pieces of text, and whether all tokens of each were drafted and accepted."""


@dataclass(frozen=True, kw_only=True)
class ShownPass:
    """What one pass wrote.

    Attributes:
        seconds: since the call began.
    """

    seconds: float
    tokens: int
    pieces: Pieces


@dataclass(frozen=True, kw_only=True)
class Column:
    """One method's run.

    >>> passes = (ShownPass(seconds=0.5, tokens=1, pieces=()), ShownPass(seconds=1.0, tokens=3, pieces=()))
    >>> column = Column(name="grounded", passes=passes, tokens=[5, 6, 7, 8])
    >>> column.tokens_at(0.7), column.speed, column.tokens_per_pass
    (1, 4.0, 2.0)
    """

    name: str
    passes: tuple[ShownPass, ...]
    tokens: list[int] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.passes[-1].seconds

    @property
    def speed(self) -> float:
        """Tokens a second of the whole call, the prompt's pass included."""
        return self.tokens_at(self.seconds) / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens_at(self.seconds) / len(self.passes)

    def passes_at(self, seconds: float) -> tuple[ShownPass, ...]:
        """The passes that had ended."""
        return self.passes[: bisect_right([one.seconds for one in self.passes], seconds)]

    def tokens_at(self, seconds: float) -> int:
        return sum(one.tokens for one in self.passes_at(seconds))

    def caption_at(self, seconds: float, plain: Column | None = None) -> str:
        """Speed so far; at its end with tokens per pass, and the ratio to plain generation."""
        if seconds < self.seconds:
            return f"{self.tokens_at(seconds) / max(seconds, 1e-9):.0f} tokens/s"
        ratio = "" if plain is None or plain is self else f", {self.speed / plain.speed:.2f} × plain"
        return f"{self.speed:.0f} tokens/s, {self.tokens_per_pass:.2f} tokens per pass{ratio}"


class Recorder(TextStream):
    """A streamer that notes when each pass ended and what it wrote."""

    def __init__(self, tokenizer: Any, clock: Callable[[], float]) -> None:
        super().__init__(tokenizer, lambda piece, drafted: self._pieces.append((piece, drafted)))
        self.clock = clock
        self.begun = clock()
        self.passes: list[ShownPass] = []
        self._pieces: list[tuple[str, bool]] = []

    def put_drafted(self, tokens: Tensor, drafted: Sequence[bool]) -> None:
        seconds = self.clock() - self.begun
        super().put_drafted(tokens, drafted)
        self._note(seconds, len(drafted))

    def end(self) -> None:
        """Add what was held back within a character to the last pass."""
        super().end()
        if self._pieces and self.passes:
            last = self.passes.pop()
            self._pieces[:0] = last.pieces
            self._note(last.seconds, last.tokens)

    def _note(self, seconds: float, tokens: int) -> None:
        self.passes.append(ShownPass(seconds=seconds, tokens=tokens, pieces=tuple(self._pieces)))
        self._pieces.clear()


@dataclass(frozen=True, kw_only=True)
class Track:
    """What every column of a race shares."""

    model: Any
    tokenizer: Any
    prompt_1T: Tensor
    sampling: SamplingOptions
    new_tokens: int

    def run(self, name: str, decoding: ExactDecoding | None) -> Column:
        """Decode the prompt once."""
        recorder = Recorder(self.tokenizer, clock_of(self.model.device))
        torch.manual_seed(self.sampling.seed)
        recorder.begun = recorder.clock()
        sequences = generate(
            self.model,
            decoding,
            streamer=recorder,
            input_ids=self.prompt_1T,
            attention_mask=torch.ones_like(self.prompt_1T),
            max_new_tokens=self.new_tokens,
            **self.sampling.arguments(),
        )
        tokens: list[int] = sequences[0, self.prompt_1T.shape[1] :].tolist()
        return Column(name=name, passes=tuple(recorder.passes), tokens=tokens)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One method on its track; None is plain `generate`."""

    name: str
    track: Track
    decoding: ExactDecoding | None = None

    def run(self) -> Column:
        return self.track.run(self.name, self.decoding)


def race(entries: Sequence[Entry], repeats: int, advance: Callable[[], Any] = lambda: None) -> list[Column]:
    """One column for each method: of `repeats` interleaved runs the one with the median time.

    Args:
        advance: called after each run; there are `repeats` + 1 of each method.
    """
    runs: dict[str, list[Column]] = {entry.name: [] for entry in entries}
    for entry in entries:
        entry.run()  # a first call allocates memory and chooses kernels
        advance()
    for repeat in range(repeats):
        for entry in rotated(entries, repeat):
            runs[entry.name].append(entry.run())
            advance()
    return [sorted(found, key=lambda column: column.seconds)[len(found) // 2] for found in runs.values()]


def say_same(columns: Sequence[Column]) -> str:
    """Whether all columns wrote the first one's tokens, in a sentence.

    >>> say_same([Column(name=name, passes=(), tokens=[5, 6]) for name in ("plain", "medusa")])
    'All columns wrote the same text.'
    """
    places = {column.name: first_difference(columns[0].tokens, column.tokens) for column in columns[1:]}
    parted = [f"{name} from token {at + 1} on" for name, at in places.items() if at is not None]
    if not parted:
        return "All columns wrote the same text."
    return f"Texts differ from {columns[0].name}'s: {', '.join(parted)}; headway verify-lossless says why."


def pieces_at(column: Column, seconds: float) -> Pieces:
    """The text that had been written, neighbours of the same kind joined."""
    found: list[tuple[str, bool]] = []
    for one in column.passes_at(seconds):
        for piece, drafted in one.pieces:
            if found and found[-1][1] == drafted:
                found[-1] = (found[-1][0] + piece, drafted)
            else:
                found.append((piece, drafted))
    return tuple(found)
