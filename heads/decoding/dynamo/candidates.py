"""The candidates of each place in an n-gram, and how `generate`'s settings apply to dynamic decoding.

A pass that emits one token (line 19 of DynaMo's Algorithm 1) uses all logits processors as plain generation does. For a
joint distribution, all processors but the repetition penalty act on the logits of each place. They get the text and the
likeliest tokens of the places before, so that lengths are right (minimum length, forced end token) and processors that
ban n-grams see the likeliest one. The penalty acts on the joint distribution: line 11 divides probabilities, and only
there are the tokens before known. Processors that may keep a state are copied here, and are called themselves before a
token is emitted (`keep_allowed` in decoding.py).
"""
# B batch, R row that is still running, V vocabulary, k candidates of one place

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from heads.decoding.request.request import Row, fork


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The candidates of one place, best first; a row with fewer than other rows has probabilities of 0 at its end."""

    tokens_Bk: Tensor
    probs_Bk: Tensor

    @property
    def counts(self) -> Tensor:
        """How many candidates each row has (B,)."""
        return (self.probs_Bk > 0).sum(dim=1)

    def select(self, rows_R: Tensor) -> Candidates:
        return Candidates(tokens_Bk=self.tokens_Bk[rows_R], probs_Bk=self.probs_Bk[rows_R])

    def first(self, count: int) -> Candidates:
        """At most `count` likeliest candidates, made to sum to 1."""
        if count >= self.probs_Bk.shape[1]:
            return self
        probs_Bk = self.probs_Bk[:, :count]
        return Candidates(tokens_Bk=self.tokens_Bk[:, :count], probs_Bk=probs_Bk / probs_Bk.sum(dim=1, keepdim=True))


def find_candidates(running: list[Row], logits: Sequence[Tensor], top_k: int) -> list[Candidates]:
    """Line 6: each place's candidates, after all processors but the repetition penalty.

    They are on the rows' device, as in plain generation; a backbone that is spread over devices may end on another.

    Args:
        logits: (R, V) for each place; the first are the backbone's, the others the heads'.
    """
    prefixes = [row.prefix() for row in running]
    processors = [fork(without_penalty(row.processors)) for row in running]
    places: list[Candidates] = []
    for i, logits_RV in enumerate(logits, start=1):
        raw_RV = logits_RV.to(running[0].device, torch.float32, copy=True)  # processors may write into it
        scores_RV = torch.cat([own(prefixes[r], raw_RV[r : r + 1]) for r, own in enumerate(processors)])
        places.append(take_candidates(torch.softmax(scores_RV, dim=-1), top_k, place=i))
        best_R1 = places[-1].tokens_Bk[:, :1]
        prefixes = [torch.cat([prefix, best_R1[r : r + 1]], dim=1) for r, prefix in enumerate(prefixes)]
    return places


def take_candidates(probs_BV: Tensor, top_k: int, *, place: int = 1) -> Candidates:
    """Line 6: the `top_k` likeliest tokens of a place, without those of probability 0, made to sum to 1.

    >>> take_candidates(torch.tensor([[0.2, 0.5, 0.0, 0.3]]), top_k=2)
    Candidates(tokens_Bk=tensor([[1, 3]]), probs_Bk=tensor([[0.6250, 0.3750]]))

    Raises:
        ValueError: NaN among the probabilities.
    """
    probs_Bk, tokens_Bk = probs_BV.topk(min(top_k, probs_BV.shape[1]), dim=1)
    if bool((nan_B := probs_Bk.isnan().any(dim=1)).any()):
        source, row = "the backbone" if place == 1 else f"head {place - 1}", int(nan_B.int().argmax())
        raise ValueError(
            f"The probabilities of {source} for token {place} of the n-gram are NaN in row {row}; look for damaged "
            f"weights, for overflow (load float16 models in bfloat16) and for processors that forbid every token."
        )
    widest = int((probs_Bk > 0).sum(dim=1).max())
    probs_Bk = probs_Bk[:, :widest]
    return Candidates(tokens_Bk=tokens_Bk[:, :widest], probs_Bk=probs_Bk / probs_Bk.sum(dim=1, keepdim=True))


def without_penalty(processors: LogitsProcessorList) -> LogitsProcessorList:
    return LogitsProcessorList(p for p in processors if not isinstance(p, RepetitionPenaltyLogitsProcessor))


def read_penalty(rows: list[Row], vocab_size: int) -> tuple[float, Tensor | None]:
    """The request's repetition penalty, and True for tokens that it counts as repeated (R, V); else 1 and None."""
    found = [[p for p in row.processors if isinstance(p, RepetitionPenaltyLogitsProcessor)] for row in rows]
    if not found[0]:
        return 1.0, None
    seen_RV = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=rows[0].device)
    for r, (row, penalties) in enumerate(zip(rows, found, strict=True)):
        ignored = int(penalties[0].prompt_ignore_length or 0)
        seen_RV[r, row.prefix()[0, ignored:]] = True
    return math.prod(p.penalty for p in found[0]), seen_RV
