"""What a `generate` call gives: tokens as they are emitted, the whole text at its end, and statistics."""
# B row, L length

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from heads.decoding.request.request import Row

PHASES = ("prefill", "draft", "verify", "accept", "commit")


@dataclass(kw_only=True)
class DecodingStats:
    """Counts over one `generate` call.

    They come with `return_dict_in_generate=True`, for which lossless decoding of a single row also copies the text's KV
    cache, as the output's `past_key_values`; `use_cache=False` leaves the copy out and changes nothing else.

    Attributes:
        passes: backbone passes; the prefill counts as one, in however many chunks it was read.
        row_passes: the sum over passes of the rows that were still running.
        tokens: tokens emitted, over all rows.
        accepted_per_depth: how often a drafted token of depth 1, 2, … was accepted and emitted.
        prompt_tokens: tokens of the prompts that were read; those found in reused caches are not counted.
        seconds: wall-clock seconds by phase, measured on the host.
        drafted: for each row and emitted token, True if it was drafted, False if it is the backbone's own.
    """

    passes: int = 0
    row_passes: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    drafted: list[list[bool]] = field(default_factory=list)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens emitted for each backbone pass of a row; plain generation has 1."""
        return self.tokens / max(1, self.row_passes)

    def count_pass(self, num_rows: int) -> None:
        self.passes += 1
        self.row_passes += num_rows

    def count_tokens(self, row: int, drafted: list[bool]) -> None:
        """Count the tokens that one pass emitted for a row; the drafted ones have depths 1, 2, …"""
        self.tokens += len(drafted)
        self.drafted[row] += drafted
        for depth in range(sum(drafted)):
            self.accepted_per_depth[depth] += 1

    @contextlib.contextmanager
    def time(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


class DecodingOutput(GenerateDecoderOnlyOutput):
    """`generate`'s output with `stats`."""

    sequences: torch.LongTensor
    stats: Any = None

    def __init__(self, *, stats: DecodingStats, **given: Any) -> None:
        super().__init__(**given)
        object.__setattr__(self, "stats", stats)  # an attribute, not an entry: it is no tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles keep the stats; transformers' `__reduce__` passes fields by position, without stats."""
        return rebuild_output, (self.stats, {field.name: getattr(self, field.name) for field in fields(self)})


def rebuild_output(stats: DecodingStats, given: dict[str, Any]) -> DecodingOutput:
    return DecodingOutput(stats=stats, **given)


def record(row: Row, drafted: list[bool], stats: DecodingStats, streamer: Any) -> None:
    """Count and stream the tokens that a pass emitted for a row.

    Args:
        drafted: for each of these tokens whether it was drafted.
        streamer: an object with `put_drafted(tokens, drafted)` or else `put(tokens)`; or None.
    """
    stats.count_tokens(row.index, drafted)
    if streamer is None:
        return
    tokens = torch.tensor(row.tokens[-len(drafted) :])
    if hasattr(streamer, "put_drafted"):
        streamer.put_drafted(tokens, drafted)
    else:
        streamer.put(tokens)


def finish(rows: list[Row], stats: DecodingStats, streamer: Any, cache: Any = None) -> Tensor | DecodingOutput:
    """End the stream, pad rows that ended early on the right, and return what was asked for.

    Args:
        cache: the `past_key_values` of the output.
    """
    if streamer is not None:
        streamer.end()
    request = rows[0].request
    longest = max(len(row.tokens) for row in rows)
    padded = [row.tokens + [request.pad_token] * (longest - len(row.tokens)) for row in rows]
    sequences_BL = torch.tensor(padded, device=rows[0].device)
    if not request.as_dict:
        return sequences_BL
    return DecodingOutput(
        stats=stats,
        sequences=sequences_BL,
        scores=tuple(rows[0].scores) or None,
        logits=tuple(rows[0].logits) or None,
        past_key_values=cache,
    )
