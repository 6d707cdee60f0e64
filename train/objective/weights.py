"""Weights of the losses in a run's config: of each head, of the heads relative to the backbone, and of the teacher.

    loss = (backbone's own) + c · s(t) · Σ_k weight_k · (head k's)
    backbone's own = (1 - weight) · CE(labels) + weight · T² · KL(teacher ‖ trained), both at temperature T

s(t) is the warm-in of Medusa-2 (Cai et al., 2024, section 2.2.2) after t optimizer steps; T is its length. Gradients of
new heads into the backbone are noise at first, and s(t) raises their weight slowly. c and s weight the heads' losses
against the backbone's own in the backbone's gradients. The heads' own weights learn at their rate whatever c is, since
AdamW divides each gradient by its running size (under a growing s a little faster: docs/train.md).

Self-distillation (section 2.3 there) holds the trained backbone near its state before training
(train/objective/teacher.py), so that text of another model trains the heads without changing the backbone's own style.
The paper trains with weight 1, without labels. The heads' losses do not use this teacher, since the heads draft for the
backbone that is being trained.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from heads.validation import validated, within
from train.objective.soft_targets import Divergence

logger = logging.getLogger(__name__)

Schedule = Literal["constant", "linear", "sine"]


@validated
@dataclass(kw_only=True)
class LossConfig:
    """Weights and kinds of the heads' losses; docs/train.md has the formulas.

    Attributes:
        hard: weight of the cross-entropy with the true tokens.
        soft: weight of the distillation from the backbone's own distribution of the same token.
        divergence: cross_entropy of that distribution with the head's, or kl, which is smaller by the backbone's
            entropy and has the same gradients.
        temperature: T, by which the logits of backbone and head are divided for the distillation; its term has the
            factor T².
        top_n: restrict the backbone's distribution to its n most probable tokens, renormalised; null is all.
        regression: weight of SmoothL1 between a head's hidden states and the backbone's final ones, k places ahead.
        head_weights: weight of each head's whole loss, one number for each head; replaces head_decay.
    """

    hard: float = within(0, default=1.0)
    soft: float = within(0, default=0.0)
    divergence: Divergence = "cross_entropy"
    temperature: float = within(above=0, default=1.0)
    top_n: int | None = within(1, default=None)
    regression: float = within(0, default=0.0)
    head_weights: list[float] | None = None

    @property
    def reads_final_states(self) -> bool:
        """Whether the loss needs the backbone's final hidden states, for its distribution or as regression target."""
        return self.soft > 0 or self.regression > 0

    def weights(self, num_heads: int, head_decay: float) -> list[float]:
        """The weight of each head's loss.

        >>> LossConfig().weights(3, 0.5), LossConfig(head_weights=[2.0, 1.0]).weights(2, 1.0)
        ([1.0, 0.5, 0.25], [2.0, 1.0])
        """
        return self.head_weights or [head_decay**k for k in range(num_heads)]

    def check(self, *, num_heads: int, head_decay: float) -> None:
        """Raise ValueError on weights that train nothing, and on settings of a loss whose weight is 0."""
        if not num_heads:
            if self != LossConfig() or head_decay != 1.0:
                raise ValueError(
                    "loss or head_decay were given with family: null; only heads have them: remove them or name a "
                    "family."
                )
            return
        if self.hard == self.soft == self.regression == 0:
            raise ValueError(
                "loss.hard, loss.soft and loss.regression are all 0, so heads would learn nothing; give one a weight."
            )
        unused = (self.divergence, self.temperature, self.top_n) != ("cross_entropy", 1.0, None)
        if not self.soft and unused:
            raise ValueError(
                "loss.divergence, temperature or top_n were given with loss.soft 0, so they would have no effect; give "
                "loss.soft a weight, or leave them out."
            )
        self.check_head_weights(num_heads, head_decay)

    def check_head_weights(self, num_heads: int, head_decay: float) -> None:
        if self.head_weights is None:
            return
        if head_decay != 1.0:
            raise ValueError(
                f"loss.head_weights and head_decay={head_decay} were given; both weight the heads: give one of them."
            )
        if len(self.head_weights) != num_heads or not all(weight > 0 for weight in self.head_weights):
            raise ValueError(
                f"loss.head_weights={self.head_weights} was given for {num_heads} heads; give {num_heads} numbers "
                f"above 0."
            )


@validated
@dataclass(kw_only=True)
class WarmInConfig:
    """The weight of the heads' loss relative to the backbone's own, step by step.

    Attributes:
        schedule: constant (1 from the first step), linear (t / T) or sine (sin(π t / 2 T)); then 1.
        steps: T in steps, or below 1 as a share of all steps, like trainer.warmup_steps.
        coefficient: c, the heads' loss relative to the backbone's own; Medusa-2 has 0.2, 0.01 with self-distillation.
    """

    schedule: Schedule = "constant"
    steps: float = within(0, default=0.0, advice="give whole steps, or a share of all steps below 1")
    coefficient: float = within(above=0, default=1.0)

    def check(self, *, heads_change_backbone: bool) -> None:
        """Raise ValueError on a value that is not allowed, or where the warm-in would change nothing."""
        if self.steps > 1 and self.steps != int(self.steps):
            raise ValueError(
                f"warm_in.steps={self.steps} was given; give whole steps, or a share of all steps below 1."
            )
        if (self.schedule == "constant") != (self.steps == 0):
            raise ValueError(
                f"warm_in.schedule={self.schedule} was given with warm_in.steps={self.steps:g}; linear and sine take "
                f"steps (or a share of all steps below 1), constant takes none."
            )
        if self != WarmInConfig() and not heads_change_backbone:
            raise ValueError(
                "warm_in was given where heads change no backbone (rates.base is null, rates.heads_to_base is 0, or "
                "there are no heads); AdamW divides by the gradient's size, so it would change nothing: give "
                "rates.base and heads, or warm up the heads' rate with trainer.warmup_steps."
            )

    def length(self, all_steps: int) -> int:
        """T in steps, counted as transformers counts warmup_steps.

        >>> WarmInConfig(steps=0.25).length(10), WarmInConfig(steps=40).length(10)
        (3, 40)
        """
        return math.ceil(self.steps * all_steps) if self.steps < 1 else int(self.steps)

    def reached(self, all_steps: int) -> float:
        """s(t) of the last step; below 1 where the warm-in is longer than the run.

        >>> WarmInConfig(schedule="linear", steps=40).reached(11), WarmInConfig(schedule="linear", steps=10).reached(11)
        (0.25, 1.0)
        """
        return warmth(self.schedule, all_steps - 1, self.length(all_steps))

    def weight(self, step: int, all_steps: int) -> float:
        """c · s(t) after `step` steps; it depends on nothing else, so that a run can resume.

        >>> warm_in = WarmInConfig(schedule="linear", steps=0.5, coefficient=0.2)
        >>> [round(warm_in.weight(t, 8), 3) for t in (0, 1, 2, 4, 8)]
        [0.0, 0.05, 0.1, 0.2, 0.2]
        """
        return self.coefficient * warmth(self.schedule, step, self.length(all_steps))


def warmth(schedule: Schedule, step: int, steps: int) -> float:
    """s(t): 0 at the first step, 1 from step T on; always 1 where it is constant.

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


def warn_of_a_long_warm_in(warm_in: WarmInConfig, all_steps: int) -> None:
    """Warn if the run ends before the heads' loss has its full weight, which may be intended in a short run."""
    if warm_in.length(all_steps) > all_steps:
        logger.warning(
            "warm_in.steps=%g is longer than the run of %d steps; at its last step the heads' loss has %.0f %% of "
            "warm_in.coefficient; give fewer steps, or a share of all steps below 1.",
            warm_in.steps,
            all_steps,
            100 * warm_in.reached(all_steps),
        )


@validated
@dataclass(kw_only=True)
class SelfDistillationConfig:
    """Distillation of the backbone from before training into the trained one.

    Attributes:
        weight: share of the backbone's own loss that is the divergence from the teacher, 0 (off) to 1 (Medusa-2).
        temperature: T, by which the logits of both are divided.
    """

    weight: float = within(0, 1, default=0.0, advice="0 is off, 1 leaves labels out of the backbone's own loss")
    temperature: float = within(above=0, default=1.0)

    def check(self, *, joint: bool) -> None:
        """Raise ValueError on a value that is not allowed, or where no backbone is trained together with heads."""
        if not self.weight and self.temperature != 1.0:
            raise ValueError("self_distillation.temperature was given without a weight; give both, or neither.")
        if self.weight and not joint:
            raise ValueError(
                "self_distillation.weight was given where no backbone is trained with heads: an untrained backbone "
                "does not change, and one trained alone would only be held back; give rates.base and a family, or "
                "weight 0."
            )
