"""Self-distillation: the backbone that is trained stays near the one that it was (Medusa-2: Cai et al., 2024, 2.3).

    backbone's own loss = (1 - weight) · CE(labels) + weight · T² · KL(original ‖ trained), both at temperature T

The original (train/objective/teacher.py) reads the same tokens. Text of another model then trains the heads without
teaching the backbone its manner of speaking: the paper trains with weight 1, labels left out of the backbone's own
loss. Heads have no part in it: they draft for the backbone as it becomes, which verifies them, and so follow what
`loss` says. The divergence is taken at the positions that have a label.
"""

from __future__ import annotations

from dataclasses import dataclass

from train.objective.amounts import is_positive


@dataclass(kw_only=True)
class SelfDistillationConfig:
    """The original as teacher of the backbone's own distribution.

    Attributes:
        weight: share of the backbone's own loss that is the divergence from the original, 0 (off) to 1 (Medusa-2).
        temperature: T, which the logits of both are divided by.
    """

    weight: float = 0.0
    temperature: float = 1.0

    def check(self, *, joint: bool) -> None:
        """Raise ValueError on a value that is none, or where no backbone is trained together with heads."""
        if not 0 <= self.weight <= 1:
            raise ValueError(
                f"self_distillation.weight={self.weight} was given; it is a share: give 0 (off) up to 1 (labels left "
                f"out of the backbone's own loss)."
            )
        if not is_positive(self.temperature):
            raise ValueError(f"self_distillation.temperature={self.temperature} was given; it must be above 0.")
        if not self.weight and self.temperature != 1.0:
            raise ValueError("self_distillation.temperature was given without a weight; give both, or neither.")
        if self.weight and not joint:
            raise ValueError(
                "self_distillation.weight was given where no backbone is trained with heads: what is not trained stays "
                "the original, and one trained alone would only be held back; give rates.base and a family, or weight "
                "0."
            )
