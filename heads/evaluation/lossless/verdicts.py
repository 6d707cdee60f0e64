"""Decides about two greedy texts: they are the same, differ by rounding, differ by a bug, or it is unknown why.

At the first difference a local copy of the backbone scores both tokens after the text that the two share:

    rounding    both tokens score within rounding of the best token, so greedy decoding may choose either
    bug         the reference's token does and the other one does not
    unknown     not even the reference's token does: the local backbone is not the model that wrote the texts

For a bfloat16 or float16 backbone a float32 copy gives the scores, and rounding is the largest difference between both
models' scores at that place (`Float32Judge`). For a float32 one it is the bound of
`generated_text.ROUNDING_UNITS`.
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

VerdictKind = Literal["same", "rounding", "bug", "unknown"]
Resume = Callable[[list[int]], Answer | None]
"""`Source.resume` of the reference: the answer that continues these new tokens, or None."""

NO_BACKBONE = "no local copy of the backbone was given (--backbone)"
OTHER_MODEL = "the local backbone would not write the reference's token either: another model, dtype or template?"
CUT = "one text is shorter, and no end-of-text token ended it"


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Differences of scores, in logits, at the place where two texts differ.

    Attributes:
        gap: the score of the reference's token minus that of the other text's token.
        behind_best: the best score minus that of the reference's token.
        rounding: how far rounding may move one score.
    """

    gap: float
    behind_best: float
    rounding: float

    @property
    def kind(self) -> VerdictKind:
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
        position: index of the first difference that rounding does not explain, or of the first one if rounding explains
            all; None for the same text.
        unit: what `position` counts.
        reference, other: the token there in each text; "end" where a text had ended.
        margins: None where no backbone scored the place.
        excused: how many differences rounding explains.
        why: a reason in words, where the verdict needs one.
        texts: the reference's and the other.
    """

    prompt: int
    verdict: VerdictKind
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
    """Scores tokens with a local backbone; of one in bfloat16 or float16 it makes a float32 copy."""

    model: Any
    settings: GreedySettings
    _float32: Float32Judge | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.model.dtype in LOW_PRECISION:
            self._float32 = Float32Judge(model=self.model, settings=self.settings)

    def margins(self, prompt_1T: Tensor, shared: list[int], reference: int, other: int) -> Margins:
        """The margins of two tokens that follow the prompt and the shared new tokens.

        Args:
            reference, other: token ids; END is scored as the likeliest end-of-text token.
        """
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

    After a difference that rounding explains, the reference goes on from the other text up to and including that place,
    if it can, so that later differences are examined too.

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
    """The verdict on texts whose tokens are not known: the same, or unknown with the first character that differs."""
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
    """A token as a table shows it; "end" for END and past the last token."""
    if at >= len(tokens) or tokens[at] == END:
        return "end"
    return str(tokens[at]) if tokenizer is None else repr(tokenizer.decode([tokens[at]]))
