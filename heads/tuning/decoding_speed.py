"""Measure tokens per second of `generate` calls, without the prompts' passes, to compare with predictions."""
# B row, T prompt position

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heads.decoding.generate import generate
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.methods import end_tokens
from heads.tuning.config import TuneConfig
from heads.tuning.replay import length_of, pad_left
from heads.tuning.timing import Clock, Timestamps

Progress = Callable[[str, int], Callable[[], Any]]
"""Begins a stage of a progress bar (name, total); returns the function that advances it by one."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured without the prompts' passes and the first tokens."""

    tokens_per_pass: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Tokens, row passes and seconds of each batch, as in `Speed` without the prompts' passes and the first tokens.

    >>> BatchTotals(tokens=[6.0, 2.0], row_passes=[3.0, 1.0], seconds=[1.0, 3.0]).speed
    Speed(tokens_per_pass=2.0, tokens_per_second=2.0)
    """

    tokens: list[float]
    row_passes: list[float]
    seconds: list[float]

    @property
    def speed(self) -> Speed:
        tokens = sum(self.tokens)
        return Speed(
            tokens_per_pass=tokens / max(1, sum(self.row_passes)), tokens_per_second=tokens / sum(self.seconds)
        )


def measure_speeds(
    model: Any,
    decodings: dict[str, TreeDecoding | None],
    prompts: Sequence[Tensor],
    config: TuneConfig,
    clock: Clock,
    progress: Progress = lambda what, total: lambda: None,
) -> dict[str, Speed]:
    """The speed of each decoding over all batches.

    Raises:
        ValueError: as `measure_batches`.
    """
    found = measure_batches(model, decodings, prompts, config, clock, progress)
    return {name: totals.speed for name, totals in found.items()}


def measure_batches(
    model: Any,
    decodings: dict[str, TreeDecoding | None],
    prompts: Sequence[Tensor],
    config: TuneConfig,
    clock: Clock,
    progress: Progress = lambda what, total: lambda: None,
) -> dict[str, BatchTotals]:
    """Run each decoding (None: plain `generate`) on the first prompts, batch by batch in turn.

    Raises:
        ValueError: no text has two new tokens, so that there is nothing to measure.
    """
    wanted = max(config.checked_prompts, config.batch)
    count = wanted - wanted % config.batch
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    batches = [chosen[i : i + config.batch] for i in range(0, count, config.batch)]
    totals = {name: BatchTotals(tokens=[], row_passes=[], seconds=[]) for name in decodings}
    advance = progress("decoding", len(batches) * len(decodings))
    for batch in batches:
        for name, decoding in decodings.items():
            tokens, row_passes, seconds = decode(model, decoding, batch, config, clock)
            totals[name].tokens.append(tokens)
            totals[name].row_passes.append(row_passes)
            totals[name].seconds.append(seconds)
            advance()
    if any(sum(one.tokens) <= 0 for one in totals.values()):
        raise ValueError("The texts end right after the prompts; give prompts that the backbone continues.")
    return totals


def decode(
    model: Any, decoding: TreeDecoding | None, prompts: Sequence[Tensor], config: TuneConfig, clock: Clock
) -> tuple[float, float, float]:
    """Tokens, row passes and seconds of one `generate` call, without the prompt's pass and each row's first token."""
    tokens_BT, valid_BT = pad_left(prompts)
    stamps = Timestamps(clock)
    output = generate(
        model,
        decoding,
        input_ids=tokens_BT,
        attention_mask=valid_BT.long(),
        return_dict_in_generate=True,
        streamer=stamps,
        **config.request,
    )
    rows = len(prompts)
    new = output.sequences[:, tokens_BT.shape[1] :].tolist()
    tokens = sum(length_of(row, end_tokens(model)) for row in new) - rows
    if decoding is None:
        return tokens, tokens, stamps.seconds[-1] - stamps.seconds[0]
    return tokens, output.stats.row_passes - rows, stamps.seconds[-1] - stamps.seconds[rows - 1]
