"""The heads' loss in a run's config: what each head is trained on, and how much each head counts."""
# K head

from __future__ import annotations

from dataclasses import dataclass

from train.objective.amounts import is_amount, is_positive
from train.objective.soft_targets import Divergence


@dataclass(kw_only=True)
class LossConfig:
    """Weights and kinds of the heads' losses; docs/losses.md has the formulas.

    Attributes:
        hard: weight of the cross-entropy with the true tokens.
        soft: weight of the distillation from the backbone's own distribution of the same token.
        divergence: cross_entropy of that distribution with the head's, or kl, which is smaller by the backbone's
            entropy: another value, the same gradients.
        temperature: T, which backbone's and head's logits are divided by for the distillation; it counts T² times.
        top_n: tokens that are kept of the backbone's distribution, the most probable ones; null for all.
        regression: weight of SmoothL1 between a head's hidden states and the backbone's final ones, k places ahead.
        head_weights: weight of each head's whole loss, one number a head; in place of head_decay.
    """

    hard: float = 1.0
    soft: float = 0.0
    divergence: Divergence = "cross_entropy"
    temperature: float = 1.0
    top_n: int | None = None
    regression: float = 0.0
    head_weights: list[float] | None = None

    @property
    def reads_final_states(self) -> bool:
        """Of the backbone, at every position: for its distribution there, or as what to come near."""
        return self.soft > 0 or self.regression > 0

    def weights(self, num_heads: int, head_decay: float) -> list[float]:
        """Of each head.

        >>> LossConfig().weights(3, 0.5), LossConfig(head_weights=[2.0, 1.0]).weights(2, 1.0)
        ([1.0, 0.5, 0.25], [2.0, 1.0])
        """
        return self.head_weights or [head_decay**k for k in range(num_heads)]

    def check(self, *, num_heads: int, head_decay: float) -> None:
        """Raise ValueError on weights that train nothing, and on settings of a loss that weighs nothing."""
        for name in ("hard", "soft", "regression"):
            if not is_amount(getattr(self, name)):
                raise ValueError(f"loss.{name}={getattr(self, name)} was given; allowed are 0 and more.")
        if self.divergence not in ("cross_entropy", "kl"):
            raise ValueError(f"loss.divergence={self.divergence!r} was given; allowed are 'cross_entropy' and 'kl'.")
        if not is_positive(self.temperature):
            raise ValueError(f"loss.temperature={self.temperature} was given; it must be above 0.")
        if self.top_n is not None and self.top_n < 1:
            raise ValueError(f"loss.top_n={self.top_n} was given; allowed are 1 and more, or null for all tokens.")
        if not num_heads:
            if self != LossConfig():
                raise ValueError("loss was given with family: null; it is of heads: remove it or name a family.")
            return
        if self.hard == self.soft == self.regression == 0:
            raise ValueError(
                "loss.hard, loss.soft and loss.regression are all 0, so heads would learn nothing; give one a weight."
            )
        unused = (self.divergence, self.temperature, self.top_n) != ("cross_entropy", 1.0, None)
        if not self.soft and unused:
            raise ValueError(
                "loss.divergence, temperature or top_n were given with loss.soft 0, which they are settings of; give "
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
        if len(self.head_weights) != num_heads or not all(map(is_positive, self.head_weights)):
            raise ValueError(
                f"loss.head_weights={self.head_weights} was given for {num_heads} heads; give {num_heads} numbers "
                f"above 0."
            )
