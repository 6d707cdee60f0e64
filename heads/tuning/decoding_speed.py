"""Measure tokens per second of whole `generate` calls without the prompts' passes, to compare with predictions."""
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
    """Measured on whole texts, without the prompts' passes and the first tokens."""

    tokens_per_pass: float
    tokens_per_second: float


def measure_speeds(
    model: Any,
    decodings: dict[str, TreeDecoding | None],
    prompts: Sequence[Tensor],
    config: TuneConfig,
    clock: Clock,
    progress: Progress = lambda what, total: lambda: None,
) -> dict[str, Speed]:
    """Run each decoding (None: plain `generate`) on the first prompts, in batches, interleaved.

    Raises:
        ValueError: no text has two new tokens, so that there is nothing to measure.
    """
    wanted = max(config.checked_prompts, config.batch)
    count = wanted - wanted % config.batch
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    batches = [chosen[i : i + config.batch] for i in range(0, count, config.batch)]
    totals = {name: [0.0, 0.0, 0.0] for name in decodings}  # tokens, row passes, seconds
    advance = progress("decoding", len(batches) * len(decodings))
    for batch in batches:
        for name, decoding in decodings.items():
            totals[name] = [
                a + b for a, b in zip(totals[name], decode(model, decoding, batch, config, clock), strict=True)
            ]
            advance()
    if any(tokens <= 0 for tokens, _, _ in totals.values()):
        raise ValueError("The texts end right after the prompts; give prompts that the backbone continues.")
    return {
        name: Speed(tokens_per_pass=tokens / max(1, passes), tokens_per_second=tokens / seconds)
        for name, (tokens, passes, seconds) in totals.items()
    }


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
