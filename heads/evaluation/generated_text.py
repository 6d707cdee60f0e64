"""Compare generated token ids with plain generation's: repetition, first differences, and which of them are excused.

In finite precision a pass over a tree and a pass over one token round differently. So a difference is excused if plain
generation's own scores of both tokens lie within rounding of the best score. After an excused difference plain
generation continues from the other text's prefix, so that every later difference needs its own excuse.
"""
# V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ScoresAt = Callable[[list[int]], Tensor]
"""Plain generation's processed scores (V,) for the token after these new tokens."""

Excuse = Callable[[list[int], list[int]], bool]
"""Whether the first difference of two texts is excused."""

ContinueFrom = Callable[[list[int]], list[int]]
"""Plain generation's continuation of these new tokens, which it starts with."""

# Two ways to compute one logit (one token at a time, a whole tree, a whole prefix) differed on an 8-layer model by up
# to 9 units of eps * (largest score) in float32 and by 1.3 in bfloat16 and float16, whose sums are taken in float32 and
# rounded once. A gap lies between two logits, so it can close by twice that; the rest allows for deeper models.
ROUNDING_UNITS = {torch.float64: 32.0, torch.float32: 32.0, torch.bfloat16: 4.0, torch.float16: 4.0}


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that repeat an earlier one: 1 - distinct / all; 0 for fewer than n tokens.

    >>> repeated_ngrams([1, 2, 1, 2, 1, 2, 1], n=4)      # 1212 2121 1212 2121
    0.5
    """
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter text included; None for equal texts.

    >>> first_difference([5, 6, 7], [5, 9, 7]), first_difference([5, 6], [5, 6, 7]), first_difference([5], [5])
    (1, 2, None)
    """
    if list(tokens) == list(others):
        return None
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """The float32 scores at a position where a text differs from plain generation's.

    >>> Ruling(position=4, plain=7, other=9, gap=0.02, rounding=0.015).within_rounding
    True
    >>> Ruling(position=4, plain=7, other=9, gap=-0.5, rounding=0.015).preferred
    'other'

    Attributes:
        position: index of the new token.
        plain, other: the two tokens; None where that text had ended.
        gap: the score of plain's token minus the other's, in float32; infinite where a text had ended.
        rounding: the largest error of the low-precision scores of all tokens at this place.
        prompt: number of the prompt, counted from 1, where several were compared.
    """

    position: int
    plain: int | None
    other: int | None
    gap: float
    rounding: float
    prompt: int | None = None

    @property
    def within_rounding(self) -> bool:
        """Each of the two scores is off by at most `rounding`, so a gap of twice that can change its sign."""
        return abs(self.gap) <= 2 * self.rounding

    @property
    def preferred(self) -> str:
        """Whose token the float32 model scores higher; "plain" for equal scores."""
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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a text compares with plain generation's.

    Attributes:
        differs_at: index of the first new token that differs without an excuse; None for the same text.
        ties: number of excused differences.
        rulings: how float32 scores explain each difference; empty where none were computed.
    """

    differs_at: int | None = None
    ties: int = 0
    rulings: tuple[Ruling, ...] = ()


def compare_texts(plain: list[int], other: list[int], excuse: Excuse, continue_from: ContinueFrom) -> Verdict:
    """Compare a method's new tokens with plain generation's.

    Args:
        excuse: asked only where the texts differ.
        continue_from: asked only after an excuse.
    """
    ties = 0
    while (at := first_difference(plain, other)) is not None:
        if not excuse(plain, other):
            return Verdict(differs_at=at, ties=ties)
        ties += 1
        plain = continue_from(other[: at + 1])
    return Verdict(ties=ties)


def excuse_ties(scores_at: ScoresAt, dtype: torch.dtype) -> Excuse:
    """Excuse a difference where plain generation's own scores of both tokens tie; never where one text ended."""

    def excuse(plain: list[int], other: list[int]) -> bool:
        at = first_difference(plain, other)
        if at is None or at >= min(len(plain), len(other)):
            return False
        return tied(scores_at(other[:at]), plain[at], other[at], dtype)

    return excuse


def tied(scores_V: Tensor, token: int, other: int, dtype: torch.dtype) -> bool:
    """Are both tokens' scores within rounding of the best?"""
    scores_V = scores_V.double()
    largest = scores_V[scores_V.isfinite()].abs().max()
    tolerance = ROUNDING_UNITS[dtype] * torch.finfo(dtype).eps * largest
    return bool(scores_V.max() - torch.minimum(scores_V[token], scores_V[other]) <= tolerance)
