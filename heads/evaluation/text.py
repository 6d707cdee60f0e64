"""What is said about generated text: how much it repeats itself, and whether it is plain generation's text.

A difference is excused only where plain generation itself stands between two tokens: the scores of both lie within
rounding of the best, by their dtype's or as a float32 judge measures it (heads/evaluation/float32_judge.py). From there
on the text is held against plain generation from the other's own prefix: one excuse does not cover what follows it.
"""
# V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heads.evaluation.float32_judge import Ruling  # which imports this file

ScoresAt = Callable[[list[int]], Tensor]
"""Plain generation's processed scores (V,) for the token after these new tokens."""

Excuse = Callable[[list[int], list[int]], bool]
"""May these two texts part at the first place where they do?"""

ContinueFrom = Callable[[list[int]], list[int]]
"""Plain generation's new tokens, starting with these ones."""

# Two ways to compute one logit (one token at a time, a whole tree, a whole prefix) differed on an 8-layer model by up
# to 9 units of eps * (largest score) in float32 and by 1.3 in bfloat16 and float16, whose sums are kept in float32 and
# rounded once. A gap lies between two logits, so it can close by twice that; the rest is for deeper models.
ROUNDING_UNITS = {torch.float64: 32.0, torch.float32: 32.0, torch.bfloat16: 4.0, torch.float16: 4.0}


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that stood in the tokens before: 1 - distinct / all; 0 where there are fewer than n tokens.

    >>> repeated_ngrams([1, 2, 1, 2, 1, 2, 1], n=4)      # 1212 2121 1212 2121
    0.5
    """
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that differs, the end of the shorter one included; None where both are the same.

    >>> first_difference([5, 6, 7], [5, 9, 7]), first_difference([5, 6], [5, 6, 7]), first_difference([5], [5])
    (1, 2, None)
    """
    if list(tokens) == list(others):
        return None
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a text compares with plain generation's.

    Attributes:
        differs_at: index of the first new token with no excuse; None for the same text.
        ties: positions at which both texts went on from two tokens within rounding of each other.
        rulings: what a float32 judge says about each place at which the texts part, where one was asked.
    """

    differs_at: int | None = None
    ties: int = 0
    rulings: tuple[Ruling, ...] = ()


def judge(plain: list[int], other: list[int], excuse: Excuse, continue_from: ContinueFrom) -> Verdict:
    """Hold a method's new tokens against plain generation's.

    Args:
        excuse: asked only where the texts part.
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
    """Texts may part where plain generation's own scores of both tokens are tied; never where one of them ended."""

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
