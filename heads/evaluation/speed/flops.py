"""Floating-point operations of an answer, as PyTorch's own counter sees them: DynaMo, table 3, FLOPs per token.

Every matrix product and attention of backbone and heads is counted, whatever family they are of, with the prompt's
pass. Dividing by the tokens of the answer gives what a generated token costs; a tree's rejected nodes are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heads.evaluation.methods import GreedySettings
from heads.evaluation.speed.speakers import Speaker

Result = TypeVar("Result")


def flops_of(run: Callable[[], Result]) -> tuple[int, Result]:
    """The operations of a call, and what it returns."""
    with FlopCounterMode(display=False) as counter:
        found = run()
    return int(counter.get_total_flops()), found


def count_flops(speaker: Speaker, prompt_1T: Tensor, settings: GreedySettings) -> dict[str, int]:
    """`flops` of an untimed answer without earlier turns, and its `tokens`."""
    speaker.begin()
    flops, answer = flops_of(lambda: speaker.answer(prompt_1T, settings, lambda: 0.0))
    speaker.begin()
    return {"flops": flops, "tokens": len(answer.tokens)}
