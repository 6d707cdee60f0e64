"""Decide whether a method's text counts as plain generation's, by the model's own scores or by a float32 copy's.

In bfloat16 and float16 a logit depends on whether the pass ran over one token, a tree or a whole prompt, because sums
are taken in another order. So a decoder that scores several tokens in one pass may choose another token than plain
generation where the two best tokens lie within the rounding error. `Float32Judge` measures that error at the position
of the difference, as the largest difference between the low-precision scores and a float32 copy's. Two candidates
closer than twice the error may change places; a wrong mask or position would make texts differ elsewhere too.
"""
# T prompt position, L prompt and new tokens, V vocabulary

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from heads.evaluation.generated_text import Excuse, Ruling, Verdict, compare_texts, excuse_ties, first_difference
from heads.evaluation.methods import SampledSettings, Settings, end_tokens, new_tokens

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(kw_only=True)
class Float32Judge:
    """Compares texts of one bfloat16 or float16 model; makes a float32 copy of it at the first difference.

    Raises:
        ValueError: the model has another dtype.
    """

    model: Any
    settings: Settings
    _copy: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.model.dtype not in LOW_PRECISION:
            name = str(self.model.dtype).removeprefix("torch.")
            raise ValueError(
                f"The float32 judge was given a model in {name}; allowed are bfloat16 and float16 (--dtype)."
            )

    def __call__(self, prompt_1T: Tensor, plain: list[int], other: list[int]) -> Ruling | None:
        """The ruling on the first difference; None for the same text."""
        at = first_difference(plain, other)
        if at is None:
            return None
        if at >= min(len(plain), len(other)):
            first, second = (tokens[at] if at < len(tokens) else None for tokens in (plain, other))
            return Ruling(position=at, plain=first, other=second, gap=math.inf, rounding=0.0)
        low_V, high_V = self.scores(prompt_1T, plain[:at])
        finite_V = low_V.isfinite() & high_V.isfinite()
        return Ruling(
            position=at,
            plain=plain[at],
            other=other[at],
            gap=float(high_V[plain[at]] - high_V[other[at]]),
            rounding=float((low_V - high_V)[finite_V].abs().max()),
        )

    def scores(self, prompt_1T: Tensor, new: list[int]) -> tuple[Tensor, Tensor]:
        """The model's scores (V,) for the token after a prompt and new tokens, and the float32 copy's."""
        if self._copy is None:
            self._copy = copy.deepcopy(self.model).float()
        low_V, high_V = (
            scores_after(model, self.settings, prompt_1T, new).double() for model in (self.model, self._copy)
        )
        return low_V, high_V

    def excuse(self, prompt_1T: Tensor, rulings: list[Ruling]) -> Excuse:
        """Excuse differences within rounding after this prompt; every ruling is appended to the list."""

        def excuse(plain: list[int], other: list[int]) -> bool:
            ruling = self(prompt_1T, plain, other)
            if ruling is None:
                return True
            rulings.append(ruling)
            return ruling.within_rounding

        return excuse


@dataclass(frozen=True, kw_only=True)
class SameText:
    """Compares a method's tokens with plain generation's and excuses ties by the model's scores.

    Sampled texts are compared without excuses, since scores do not show between which tokens a random number fell.

    Attributes:
        float32: decides which differences are excused; None allows a fixed number of the dtype's rounding units.
    """

    model: Any
    settings: Settings
    float32: Float32Judge | None = None

    def __call__(self, prompt_1T: Tensor, plain_tokens: list[int], tokens: list[int]) -> Verdict:
        if isinstance(self.settings, SampledSettings):
            return Verdict(differs_at=first_difference(plain_tokens, tokens))

        def scores_at(new: list[int]) -> Tensor:
            return scores_after(self.model, self.settings, prompt_1T, new)

        def continue_from(new: list[int]) -> list[int]:
            left = self.settings.new_tokens - len(new)
            if left <= 0 or new[-1] in end_tokens(self.model):
                return new
            longer = self.settings.generate(self.model, extended(prompt_1T, new), max_new_tokens=left)
            return new_tokens(longer, prompt_1T)

        rulings: list[Ruling] = []
        if self.float32 is None:
            excuse = excuse_ties(scores_at, self.model.dtype)
        else:
            excuse = self.float32.excuse(prompt_1T, rulings)
        return replace(compare_texts(plain_tokens, tokens, excuse, continue_from), rulings=tuple(rulings))


def scores_after(model: Any, settings: Settings, prompt_1T: Tensor, new: list[int]) -> Tensor:
    """Plain generation's processed scores (V,) for the token after a prompt and new tokens."""
    options = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
    scores_V: Tensor = settings.generate(model, extended(prompt_1T, new), **options).scores[0][0]
    return scores_V


def extended(prompt_1T: Tensor, new: list[int]) -> Tensor:
    return torch.cat([prompt_1T, prompt_1T.new_tensor([new])], dim=1)
