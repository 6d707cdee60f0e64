"""One answer as other harnesses need it: the tokens of each pass, and when each pass ended."""
# T prompt position, L prompt and new tokens

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import heads


@dataclass(kw_only=True)
class Passes:
    """A streamer that stores the tokens and the end of each pass; a pass of plain `generate` has one token."""

    chunks: list[list[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _prompt_seen: bool = False

    def put(self, tokens: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._keep(tokens)

    def put_drafted(self, tokens: Tensor, drafted: Sequence[bool]) -> None:
        self._keep(tokens)

    def end(self) -> None:
        """Called after the last token; nothing is left to store."""

    def _keep(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.chunks.append(tokens.flatten().tolist())


def decode(model: Any, decoding: Any, prompt_1T: Tensor, new_tokens: int, **asked: Any) -> tuple[Tensor, Passes]:
    """(1, L) and its passes, greedily; `times` begins with the moment of the call."""
    passes = Passes(times=[time.perf_counter()])
    sequences_1L = heads.generate(
        model,
        decoding,
        streamer=passes,
        input_ids=prompt_1T,
        attention_mask=torch.ones_like(prompt_1T),
        max_new_tokens=new_tokens,
        do_sample=False,
        **asked,
    )
    return sequences_1L, passes
