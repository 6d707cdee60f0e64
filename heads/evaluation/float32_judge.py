"""Who is right where two low-precision texts part: a float32 copy of the model scores both candidates.

In bfloat16 and float16 a logit depends on how a pass is cut: over one token, a tree or a whole prompt, sums come in
another order. So no decoder that scores several tokens at once gives the text of one that does not, at places where the
two best tokens lie within the precision's own error. That error is measured where it matters: the low-precision scores
at the place in question against the float32 copy's. Two candidates closer than twice it may change places; a wrong mask
or position makes a text part where they are not close.
"""
# V vocabulary

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.evaluation.methods import Request
from heads.evaluation.text import Excuse, first_difference

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """A place at which a text parts from plain generation's.

    >>> Ruling(position=4, plain=7, other=9, gap=0.02, rounding=0.015).within_rounding
    True
    >>> Ruling(position=4, plain=7, other=9, gap=-0.5, rounding=0.015).preferred
    'other'

    Attributes:
        position: index of the new token.
        plain, other: the two tokens; None where a text had ended.
        gap: plain's token's score less the other's, in float32; infinite where a text had ended.
        rounding: the largest error of the low-precision scores of all tokens at this place.
        prompt: number of the prompt, where several were judged.
    """

    position: int
    plain: int | None
    other: int | None
    gap: float
    rounding: float
    prompt: int | None = None

    @property
    def within_rounding(self) -> bool:
        """Each of the two scores is off by `rounding` at most, so a gap of twice that can change its sign."""
        return abs(self.gap) <= 2 * self.rounding

    @property
    def preferred(self) -> str:
        """Whose token the float32 model likes better; "plain" for equals."""
        return "plain" if self.gap >= 0 else "other"

    def describe(self, tokenizer: Any) -> str:
        plain, other = ("nothing" if t is None else repr(tokenizer.decode([t])) for t in (self.plain, self.other))
        place = (
            f"token {self.position + 1}" if self.prompt is None else f"prompt {self.prompt}, token {self.position + 1}"
        )
        verdict = "within rounding" if self.within_rounding else "NOT within rounding"
        return (
            f"{place}: plain {plain}, here {other}; float32 prefers {plain if self.gap >= 0 else other} by "
            f"{abs(self.gap):.3g}, rounding here is up to {self.rounding:.3g}: {verdict}"
        )


@dataclass(kw_only=True)
class Float32Judge:
    """Rules on texts of one bfloat16 or float16 model; holds a float32 copy of it, made when it is first needed.

    Raises:
        ValueError: the model is in another dtype, and has nothing to be judged by.
    """

    model: Any
    request: Request
    _copy: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.model.dtype not in LOW:
            name = str(self.model.dtype).removeprefix("torch.")
            raise ValueError(
                f"The float32 judge was asked about a model in {name}; it rules on bfloat16 and float16 (--dtype)."
            )

    def __call__(self, prompt_1T: Tensor, plain: list[int], other: list[int]) -> Ruling | None:
        """The first difference; None for the same text."""
        at = first_difference(plain, other)
        if at is None:
            return None
        if at >= min(len(plain), len(other)):
            first, second = (tokens[at] if at < len(tokens) else None for tokens in (plain, other))
            return Ruling(position=at, plain=first, other=second, gap=math.inf, rounding=0.0)
        if self._copy is None:
            self._copy = copy.deepcopy(self.model).float()
        low_V, high_V = (self._scores(model, prompt_1T, plain[:at]) for model in (self.model, self._copy))
        finite_V = low_V.isfinite() & high_V.isfinite()
        return Ruling(
            position=at,
            plain=plain[at],
            other=other[at],
            gap=float(high_V[plain[at]] - high_V[other[at]]),
            rounding=float((low_V - high_V)[finite_V].abs().max()),
        )

    def excuse(self, prompt_1T: Tensor, rulings: list[Ruling]) -> Excuse:
        """Texts behind a prompt may part within rounding; each ruling is left in the list."""

        def excuse(plain: list[int], other: list[int]) -> bool:
            ruling = self(prompt_1T, plain, other)
            if ruling is None:
                return True
            rulings.append(ruling)
            return ruling.within_rounding

        return excuse

    def _scores(self, model: Any, prompt_1T: Tensor, new: list[int]) -> Tensor:
        """Plain generation's processed scores (V,) for the token behind a prompt and new tokens."""
        text_1L = torch.cat([prompt_1T, prompt_1T.new_tensor([new])], dim=1)
        asked = {"max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
        scores_V: Tensor = self.request.generate(model, text_1L, **asked).scores[0][0]
        return scores_V.double()
