"""The time of decoding by part: backbone forwards, head forwards and everything else, for our methods and plain.

Both are measured in the same way: the wall time of `generate` minus the time inside wrapped callables. For plain
`generate` that is `model.forward`, including the unembedding; for tree decoding it is `Backbone.forward` and
`Backbone.logits`, and for the heads their layers inside a pass, `token_heads.step` and their projections. Everything
else is masks, caches, drafting, lookup, acceptance, logits processors and the loop.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.backbone.projection import Projection
from heads.evaluation.methods import Method, replaced
from heads.evaluation.throughput import clock_of, rotated
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Milliseconds for each emitted token."""

    name: str
    backbone: float
    heads: float
    rest: float

    @property
    def total(self) -> float:
        return self.backbone + self.heads + self.rest


class Stopwatch:
    """Adds up the seconds spent in the functions that it wraps."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())  # generate reads the signature of model.forward
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += self.clock() - start

        return timed


class TimedProjection:
    """A projection whose product is timed; every other attribute is the projection's own."""

    def __init__(self, projection: Projection, stopwatch: Stopwatch) -> None:
        self.projection = projection
        self.timed = stopwatch.wrap(projection.__call__)

    def __call__(self, hidden_ND: Tensor) -> Any:
        return self.timed(hidden_ND)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.projection, name)


Watched = Callable[[Stopwatch, Stopwatch], contextlib.AbstractContextManager[None]]
"""Sends the backbone's time to the first stopwatch and the heads' to the second while it is open."""


@contextlib.contextmanager
def watch_plain(model: Any, backbone: Stopwatch, _: Stopwatch) -> Iterator[None]:
    with replaced(model, "forward", backbone.wrap(model.forward)):
        yield


@contextlib.contextmanager
def watch_heads(token_heads: TokenHeads, backbone: Stopwatch, heads: Stopwatch) -> Iterator[None]:
    projection = token_heads.projection
    wrapped = token_heads.backbone
    with (
        replaced(wrapped, "forward", backbone.wrap(wrapped.forward)),
        replaced(wrapped, "logits", backbone.wrap(wrapped.logits)),
        replaced(token_heads, "run_stack", heads.wrap(token_heads.run_stack)),
        replaced(token_heads, "step", heads.wrap(token_heads.step)),
        replaced(token_heads, "projection", lambda k: TimedProjection(projection(k), heads)),
    ):
        yield


def measure_parts(
    watched: Sequence[tuple[Method, Watched]],
    prompts: Sequence[Tensor],
    repeats: int,
    device: torch.device,
    advance: Callable[[], Any] = lambda: None,
) -> list[Parts]:
    """Parts by method, for each emitted token: the median over interleaved repeats, summed over prompts."""
    clock = clock_of(device)
    found: dict[tuple[str, int], list[tuple[float, float, float, int]]] = {}
    for repeat in range(repeats):
        for p, prompt_1T in enumerate(prompts):
            for method, watch in rotated(watched, p + repeat):
                found.setdefault((method.name, p), []).append(measure_once(method, watch, prompt_1T, clock))
                advance()
    return [summarise(method.name, [found[method.name, p] for p in range(len(prompts))]) for method, _ in watched]


def measure_once(
    method: Method, watch: Watched, prompt_1T: Tensor, clock: Callable[[], float]
) -> tuple[float, float, float, int]:
    """Seconds in the backbone, in the heads and elsewhere, and the tokens emitted."""
    backbone, heads = Stopwatch(clock), Stopwatch(clock)
    with watch(backbone, heads):
        start = clock()
        outcome = method.run(prompt_1T)
        wall = clock() - start
    return backbone.seconds, heads.seconds, wall - backbone.seconds - heads.seconds, len(outcome.tokens)


def summarise(name: str, by_prompt: Sequence[Sequence[tuple[float, float, float, int]]]) -> Parts:
    tokens = sum(runs[0][3] for runs in by_prompt)
    backbone, heads, rest = (
        1000 * sum(statistics.median(run[part] for run in runs) for runs in by_prompt) / tokens for part in range(3)
    )
    return Parts(name=name, backbone=backbone, heads=heads, rest=rest)
