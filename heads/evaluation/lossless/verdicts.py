"""Rule on the first difference of two greedy texts: the same text, rounding, a bug, or not known.

At the first difference a local copy of the backbone scores both tokens behind the text that both share. In bfloat16
and float16 the scores are a float32 copy's, and the rounding is measured at that place (`Float32Judge`); in float32 it
is the bound that `generated_text.ROUNDING_UNITS` gives. Both tokens within rounding of the best: either may be chosen.
Only the reference's token: the other text has a bug. Not even the reference's token: the local backbone is not the
model that wrote the texts, so nothing can be said.
"""
# T prompt position, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from heads.evaluation.generated_text import ROUNDING_UNITS, first_difference
from heads.evaluation.lossless.answers import END, Answer
from heads.evaluation.methods import GreedySettings, end_tokens
from heads.evaluation.same_text import LOW_PRECISION, Float32Judge, scores_after

Kind = Literal["same", "rounding", "bug", "unknown"]
Resume = Callable[[list[int]], Answer | None]
"""The reference's answer that begins with these new tokens; None where that cannot be asked."""

NO_BACKBONE = "no local copy of the backbone was given (--backbone)"
OTHER_MODEL = "the local backbone would not write the reference's token either: another model, dtype or template?"
CUT = "one text is shorter, and no end-of-text token ended it"


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Scores at the place of a difference.

    Attributes:
        gap: the reference's token above the other, in logits; negative where the other scores higher.
        behind_best: the best token above the reference's.
        rounding: by how much one score may be off.
    """

    gap: float
    behind_best: float
    rounding: float

    @property
    def kind(self) -> Kind:
        """
        >>> Margins(gap=0.01, behind_best=0.0, rounding=0.02).kind
        'rounding'
        >>> Margins(gap=3.0, behind_best=0.0, rounding=0.02).kind
        'bug'
        >>> Margins(gap=0.01, behind_best=5.0, rounding=0.02).kind     # neither token is the model's choice
        'unknown'
        """
        allowed = 2 * self.rounding  # both scores may be off
        if self.behind_best > allowed:
            return "unknown"
        return "rounding" if self.behind_best + self.gap <= allowed else "bug"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one prompt.

    Attributes:
        position: where the texts part, counted from 0; None for the same text. A later place if rounding explains the
            earlier ones.
        unit: what `position` counts.
        reference, other: what stands there in each text; "end" where a text had ended.
        margins: None where no backbone scored the place.
        excused: places before `position` that rounding explains; the place itself included if the verdict is rounding.
        why: a reason in words, where the verdict needs one.
    """

    prompt: int
    verdict: Kind
    position: int | None = None
    unit: Literal["token", "character"] = "token"
    reference: str = ""
    other: str = ""
    margins: Margins | None = None
    excused: int = 0
    why: str = ""
    texts: tuple[str, str] = field(default=("", ""), repr=False)


@dataclass(kw_only=True)
class Scorer:
    """A local backbone that scores the place of a difference; makes a float32 copy of a half-precision one."""

    model: Any
    settings: GreedySettings
    _float32: Float32Judge | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.model.dtype in LOW_PRECISION:
            self._float32 = Float32Judge(model=self.model, settings=self.settings)

    def margins(self, prompt_1T: Tensor, shared: list[int], reference: int, other: int) -> Margins:
        """Margins of two tokens behind a prompt and new tokens; END stands for the best end-of-text token."""
        prompt_1T = prompt_1T.to(self.model.device)
        if self._float32 is None:
            low_V = high_V = scores_after(self.model, self.settings, prompt_1T, shared).double()
            units = ROUNDING_UNITS[self.model.dtype] * torch.finfo(self.model.dtype).eps
            rounding = units * float(low_V[low_V.isfinite()].abs().max()) / 2  # the units are for a gap of two scores
        else:
            low_V, high_V = self._float32.scores(prompt_1T, shared)
            finite_V = low_V.isfinite() & high_V.isfinite()
            rounding = float((low_V - high_V)[finite_V].abs().max())
        first, second = (self._score(high_V, token) for token in (reference, other))
        return Margins(gap=first - second, behind_best=float(high_V.max()) - first, rounding=rounding)

    def _score(self, scores_V: Tensor, token: int) -> float:
        ends = end_tokens(self.model)
        return (
            max((float(scores_V[end]) for end in ends), default=-torch.inf) if token == END else float(scores_V[token])
        )


def examine(
    number: int,
    reference: Answer,
    other: Answer,
    *,
    prompt_1T: Tensor | None = None,
    scorer: Scorer | None = None,
    tokenizer: Any = None,
    resume: Resume = lambda new: None,
) -> Finding:
    """The verdict on two answers to one prompt.

    Behind a difference that rounding explains, the reference is resumed from the other text's prefix if it can be, so
    that every later difference needs its own explanation.

    Args:
        number: number of the prompt, from 1.
        prompt_1T: None where there is no tokenizer; then texts are compared by characters.
    """
    texts = reference.text, other.text
    if reference.tokens is None or other.tokens is None:
        return by_characters(number, reference, other)
    excused = 0
    last: Finding | None = None
    first, second = list(reference.tokens), list(other.tokens)
    while (at := first_difference(first, second)) is not None:
        shown = tuple(show(tokenizer, tokens, at) for tokens in (first, second))
        place: dict[str, Any] = {
            "prompt": number,
            "position": at,
            "reference": shown[0],
            "other": shown[1],
            "texts": texts,
        }
        if at >= min(len(first), len(second)):
            return Finding(verdict="bug", why=CUT, excused=excused, **place)
        if scorer is None or prompt_1T is None:
            return Finding(verdict="unknown", why=NO_BACKBONE, **place)
        found = scorer.margins(prompt_1T, first[:at], first[at], second[at])
        if found.kind != "rounding":
            why = OTHER_MODEL if found.kind == "unknown" else ""
            return Finding(verdict=found.kind, margins=found, excused=excused, why=why, **place)
        excused += 1
        last = last or Finding(verdict="rounding", margins=found, excused=excused, **place)
        resumed = resume(second[: at + 1])
        if resumed is None or resumed.tokens is None:
            return Finding(verdict="rounding", margins=found, excused=excused, why="not examined behind it", **place)
        first = resumed.tokens
    if last is None:
        return Finding(prompt=number, verdict="same", texts=texts)
    return Finding(**{**vars(last), "excused": excused})


def by_characters(number: int, reference: Answer, other: Answer) -> Finding:
    """Texts whose tokens are not known: where they part, and nothing about why."""
    first, second = reference.text, other.text
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    if first == second and reference.ended == other.ended:
        return Finding(prompt=number, verdict="same", texts=(first, second))
    return Finding(
        prompt=number,
        verdict="unknown",
        position=at,
        unit="character",
        reference=first[at : at + 12] or "end",
        other=second[at : at + 12] or "end",
        why=NO_BACKBONE,
        texts=(first, second),
    )


def show(tokenizer: Any, tokens: Sequence[int], at: int) -> str:
    """The token's text; "end" behind the last one."""
    if at >= len(tokens) or tokens[at] == END:
        return "end"
    return str(tokens[at]) if tokenizer is None else repr(tokenizer.decode([tokens[at]]))
