"""Multi-token perplexity: of the n-th next token, and of the next n tokens together.

The mean of log p runs over all positions t of a text for which x_{t+n} lies in the same text (DynaMo, equation 4):

    PPL_n    exp(−mean log p(x_{t+n} | x_{1:t}))             n = 1 is the backbone, n = k + 1 is head k
    PPL_1:n  exp(−mean 1/n log p(x_{t+1:t+n} | x_{1:t}))     the geometric mean of PPL_1 … PPL_n at these positions

The equation divides by T though its sum has T − n terms; this file divides by the number of terms. Grounded heads also
read the true tokens in between, so they give p(x_{t+n} | x_{1:t+n-1}), and PPL_1:n follows from the chain rule.
"""
# T position

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heads.evaluation.predictions import BATCH, Block, check_blocks, predict, stack
from heads.interface.token_heads import TokenHeads

NORMAL_95 = 1.96


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """exp(−mean log p) with a 95 % interval from the variance between texts; a single text has no interval.

    >>> found = Estimate.of(sums=[-3.0, -5.0], counts=[2, 2], texts=[0, 1])
    >>> [round(number, 1) for number in (found.value, found.low, found.high)], found.terms
    ([7.4, 2.8, 19.7], 4)
    """

    value: float
    low: float | None
    high: float | None
    terms: int

    @classmethod
    def of(cls, sums: Sequence[float], counts: Sequence[int], texts: Sequence[int]) -> Estimate:
        """Estimate from each block's sum of log p and number of terms; the blocks of one text are one observation.

        Raises:
            ValueError: a log p is NaN.
        """
        terms, mean = sum(counts), math.fsum(sums) / sum(counts)
        if math.isnan(mean):
            raise ValueError("Some log-probabilities are NaN; look for damaged weights or load in float32.")
        rest = dict.fromkeys(texts, 0.0)
        for text, log_sum, count in zip(texts, sums, counts, strict=True):
            rest[text] += log_sum - mean * count
        if len(rest) < 2 or math.isinf(mean):
            return cls(value=exp(-mean), low=None, high=None, terms=terms)
        squares = math.fsum(difference**2 for difference in rest.values())  # a ratio's variance, linearised
        error = NORMAL_95 * math.sqrt(len(rest) / (len(rest) - 1) * squares) / terms
        return cls(value=exp(-mean), low=exp(-mean - error), high=exp(-mean + error), terms=terms)


def exp(x: float) -> float:
    """e^x, or infinity in place of an overflow error."""
    return math.exp(x) if x < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """PPL_n for n = 1 … K + 1 at index n − 1, and PPL_1:n likewise."""

    nth: list[Estimate]
    joint: list[Estimate]


def refuse_draft_vocabulary(token_heads: TokenHeads) -> None:
    """Refuse heads that score only some tokens of the vocabulary.

    Raises:
        ValueError: the heads have a draft vocabulary.
    """
    if token_heads.draft_tokens_S is not None:
        raise ValueError(
            f"These heads score {token_heads.num_scored:,} of {token_heads.backbone.vocab_size:,} tokens and give the "
            f"others no probability, so their perplexity is infinite; measure accuracy (--metrics accuracy) or tokens "
            f"per pass (headway benchmark)."
        )


def no_report() -> None:
    """The default of `report`: shows nothing."""


@torch.no_grad()
def measure_perplexity(
    token_heads: TokenHeads, blocks: Sequence[Block], report: Callable[[], None] = no_report
) -> Perplexity:
    """PPL_n and PPL_1:n over blocks.

    Args:
        report: called after every batch of BATCH blocks.

    Raises:
        ValueError: no blocks, one too short, a backbone or heads that give NaN, or heads with a draft vocabulary.
    """
    refuse_draft_vocabulary(token_heads)
    check_blocks(blocks, token_heads.num_heads)
    logs = []
    for start in range(0, len(blocks), BATCH):
        logs += true_logs(token_heads, blocks[start : start + BATCH])
        report()
    texts = [block.text for block in blocks]
    places = range(1, token_heads.num_heads + 2)

    def estimate(terms: list[Tensor]) -> Estimate:
        return Estimate.of([float(log_T.sum()) for log_T in terms], [len(log_T) for log_T in terms], texts)

    return Perplexity(
        nth=[estimate([log[n - 1] for log in logs]) for n in places],
        joint=[
            estimate([torch.stack([i[: len(log[n - 1])] for i in log[:n]]).mean(0) for log in logs]) for n in places
        ],
    )


def true_logs(token_heads: TokenHeads, blocks: Sequence[Block]) -> list[list[Tensor]]:
    """For each block and place n: log p of x_{t+n} at every t (T − n,)."""
    places, device = range(1, token_heads.num_heads + 2), token_heads.backbone.device
    stacked = [stack(blocks, n, device) for n in places]
    tokens_BT = stacked[0][0]
    logs: list[list[Tensor]] = [[] for _ in blocks]
    for n, made in zip(places, predict(token_heads, tokens_BT, [rows_R for _, rows_R, _ in stacked]), strict=True):
        log_R = made.log_probs(tokens_BT.flatten()[made.rows_R + n])
        for log, part in zip(logs, torch.split(log_R, stacked[n - 1][2]), strict=True):
            log.append(part)
    return logs
