"""Warm-in of the heads' loss where backbone and heads are trained together (Medusa-2: Cai et al., 2024, section 2.2.2).

    loss = (backbone's own) + c · s(t) · Σ_k (head k's)        t optimizer steps taken, T the warm-in's length

New heads know nothing, and what flows from them into the backbone at first is noise; s(t) lets it in slowly. AdamW
divides each gradient by its running size, so a constant that all of a weight's gradients share changes nothing: the
heads' own weights learn at their rate whatever c is (under a growing s a little faster: docs/joint_training.md). What c
and s set is how much heads count against the backbone's own loss in the backbone's weights. Where heads change no
backbone they are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from train.objective.amounts import is_amount, is_positive

Schedule = Literal["constant", "linear", "sine"]


@dataclass(kw_only=True)
class WarmInConfig:
    """How much the heads' loss counts beside the backbone's own, step by step.

    Attributes:
        schedule: constant (at once), linear (t / T) or sine (sin(π t / 2 T)); then 1.
        steps: T: steps, or a share of all steps below 1, as trainer.warmup_steps.
        coefficient: c, the heads' loss relative to the backbone's own; Medusa-2 has 0.2, 0.01 with self-distillation.
    """

    schedule: Schedule = "constant"
    steps: float = 0.0
    coefficient: float = 1.0

    def check(self, *, heads_change_backbone: bool) -> None:
        """Raise ValueError on a value that is none, or where it would change nothing."""
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"warm_in.schedule={self.schedule!r} was given; allowed are constant, linear, sine.")
        if not is_amount(self.steps) or (self.steps > 1 and self.steps != int(self.steps)):
            raise ValueError(
                f"warm_in.steps={self.steps} was given; give whole steps, or a share of all steps below 1."
            )
        if (self.schedule == "constant") != (self.steps == 0):
            raise ValueError(
                f"warm_in.schedule={self.schedule} was given with warm_in.steps={self.steps:g}; linear and sine take "
                f"steps (or a share of all steps below 1), constant takes none."
            )
        if not is_positive(self.coefficient):
            raise ValueError(f"warm_in.coefficient={self.coefficient} was given; it must be above 0, such as 0.2.")
        if self != WarmInConfig() and not heads_change_backbone:
            raise ValueError(
                "warm_in was given where heads change no backbone (rates.base is null, rates.heads_to_base is 0, or "
                "there are no heads); AdamW divides by the gradient's size, so it would change nothing: give "
                "rates.base and heads, or warm up the heads' rate with trainer.warmup_steps."
            )

    def length(self, all_steps: int) -> int:
        """T in steps; counted as transformers counts warmup_steps.

        >>> WarmInConfig(steps=0.25).length(10), WarmInConfig(steps=40).length(10)
        (3, 40)
        """
        return math.ceil(self.steps * all_steps) if self.steps < 1 else int(self.steps)

    def reached(self, all_steps: int) -> float:
        """s(t) of the last of all steps; below 1 where the warm-in is longer than the run.

        >>> WarmInConfig(schedule="linear", steps=40).reached(11), WarmInConfig(schedule="linear", steps=10).reached(11)
        (0.25, 1.0)
        """
        return warmth(self.schedule, all_steps - 1, self.length(all_steps))

    def weight(self, step: int, all_steps: int) -> float:
        """c · s(t) of the step that follows `step` steps; it depends on nothing else, so that a run can go on.

        >>> warm_in = WarmInConfig(schedule="linear", steps=0.5, coefficient=0.2)
        >>> [round(warm_in.weight(t, 8), 3) for t in (0, 1, 2, 4, 8)]
        [0.0, 0.05, 0.1, 0.2, 0.2]
        """
        return self.coefficient * warmth(self.schedule, step, self.length(all_steps))


def warmth(schedule: Schedule, step: int, steps: int) -> float:
    """s(t), from 0 at the first step to 1 from step T on; 1 throughout where it is constant.

    >>> [warmth("linear", t, 4) for t in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    >>> [round(warmth("sine", t, 3), 4) for t in (0, 1, 2, 3)]   # sin 0°, 30°, 60°, 90°
    [0.0, 0.5, 0.866, 1.0]
    >>> warmth("constant", 0, 0)
    1.0
    """
    if schedule == "constant" or step >= steps:
        return 1.0
    return step / steps if schedule == "linear" else math.sin(math.pi * step / (2 * steps))
