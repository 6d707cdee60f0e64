"""Streamers that keep what they are given, for tests of streaming."""

from __future__ import annotations

from torch import Tensor


class Puts:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class DraftedPuts(Puts):
    def __init__(self) -> None:
        super().__init__()
        self.flags: list[list[bool]] = []

    def put_drafted(self, tokens: Tensor, drafted: list[bool]) -> None:
        self.puts.append(tokens.tolist())
        self.flags.append(drafted)
