"""One step of superposed decoding as arithmetic on k drafts of each prompt (Shen et al., equations 1 to 7).

Scores are logarithms of the drafts' joint probabilities p_i, in float64: products of ten probabilities at a temperature
of 0.06 leave the range of float32. A draft that has ended keeps its score and counts as a single candidate; the
superposed embedding is that of the other drafts.
"""
# B prompt, K draft, M candidate token, T token of a draft, C context, O order from 2 on, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

PAPER_WEIGHTS = (0.01, 0.04, 0.15, 0.18, 0.12)
"""λ of equation 5 for n = 2 to 6 (appendix B). They sum to 0.5, as published."""


class NgramModel(Protocol):
    """Counted n-grams: `heads.NgramTable`, or any object with these methods."""

    @property
    def max_order(self) -> int: ...

    def next_token_probabilities(self, contexts_NC: Tensor, tokens_NM: Tensor) -> Tensor:
        """(N, max_order - 1, M): p_n of each token after each context; -1 stands for missing tokens of a context."""
        ...


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The k drafts of each prompt, likeliest first (equation 2).

    Attributes:
        tokens_BKT: the tokens that follow the prompts.
        scores_BK: log p_i since the prompt, or since the last reset.
        ended_BK: whether a draft has ended, or is impossible because processors forbid a token of it.
        lengths_BK: number of tokens of each draft, its end token included, its padding not.
    """

    tokens_BKT: Tensor
    scores_BK: Tensor
    ended_BK: Tensor
    lengths_BK: Tensor

    def rows(self, rows_R: Tensor | list[int]) -> Drafts:
        """The drafts of some prompts."""
        return Drafts(
            tokens_BKT=self.tokens_BKT[rows_R],
            scores_BK=self.scores_BK[rows_R],
            ended_BK=self.ended_BK[rows_R],
            lengths_BK=self.lengths_BK[rows_R],
        )

    def after(self, before_BT: Tensor) -> Drafts:
        """The drafts with `before_BT` put before their tokens."""
        before_BKT = before_BT[:, None].expand(-1, self.tokens_BKT.shape[1], -1)
        return replace(
            self,
            tokens_BKT=torch.cat([before_BKT, self.tokens_BKT], dim=-1),
            lengths_BK=self.lengths_BK + before_BT.shape[1],
        )


def log_probabilities(logits_V: Tensor, temperature: float) -> Tensor:
    """(…, V): log p_θ at the temperature τ."""
    return torch.log_softmax(logits_V.double() / temperature, dim=-1)


def first_drafts(log_p_BV: Tensor, k: int, eos_E: Tensor) -> Drafts:
    """Equation 1: draft i begins with the i-th most probable token.

    >>> drafts = first_drafts(torch.tensor([[0.1, 0.6, 0.3]]).log(), 2, torch.tensor([2]))
    >>> drafts.tokens_BKT.tolist(), drafts.scores_BK.exp(), drafts.ended_BK.tolist()
    ([[[1], [2]]], tensor([[0.6000, 0.3000]]), [[False, True]])
    """
    scores_BK, tokens_BK = log_p_BV.topk(k, dim=-1)
    return Drafts(
        tokens_BKT=tokens_BK[..., None],
        scores_BK=scores_BK,
        ended_BK=torch.isin(tokens_BK, eos_E) | scores_BK.isneginf(),
        lengths_BK=torch.ones_like(tokens_BK),
    )


def superpose(embeddings_BKD: Tensor, drafts: Drafts) -> Tensor:
    """(B, D): the newest tokens' embeddings, weighted by the drafts' normalised probabilities (equations 3 and 4).

    >>> drafts = first_drafts(torch.tensor([[0.6, 0.2]]).log(), 2, torch.tensor([9]))
    >>> superpose(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), drafts)
    tensor([[0.7500, 0.2500]])
    """
    weights_BK = draft_weights(drafts.scores_BK.masked_fill(drafts.ended_BK, -torch.inf))
    return torch.einsum("bk,bkd->bd", weights_BK.to(embeddings_BKD.dtype), embeddings_BKD)


def draft_weights(scores_BK: Tensor) -> Tensor:
    """γ of equation 4: p_i divided by their sum."""
    return torch.softmax(scores_BK, dim=-1)


def ngram_mixture(ngrams: NgramModel, weights: Sequence[float], contexts_NC: Tensor, tokens_NM: Tensor) -> Tensor:
    """(N, M): equation 5, the orders' next-token probabilities weighted by λ; the first weight is that of n = 2."""
    by_order_NOM = ngrams.next_token_probabilities(contexts_NC, tokens_NM)[:, : len(weights)]
    return torch.einsum("o,nom->nm", by_order_NOM.new_tensor(list(weights)), by_order_NOM)


def interpolate(log_p_BKM: Tensor, ngram_BKM: Tensor, alpha: float, log_penalty: float) -> Tensor:
    """(B, K, M): log p_f by equation 6, or by equation 7 for drafts for which the n-grams contain none of the tokens.

    >>> log_p_BKM = torch.tensor([[[0.5, 0.2], [0.5, 0.2]]]).log()
    >>> ngram_BKM = torch.tensor([[[0.08, 0.0], [0.0, 0.0]]])
    >>> log_penalty = torch.tensor(0.1).log().item()
    >>> interpolate(log_p_BKM, ngram_BKM, 0.5, log_penalty).exp()  # √(0.5 · 0.08), then 0.1 · √0.5 and 0.1 · √0.2
    tensor([[[0.2000, 0.0000],
             [0.0707, 0.0447]]])
    """
    possible_BKM = ~log_p_BKM.isneginf()
    weighted_BKM = torch.where(possible_BKM, (1 - alpha) * log_p_BKM, -torch.inf)  # 0 · ∞ where α is 1
    met_BKM = (ngram_BKM > 0) & possible_BKM
    interpolated_BKM = torch.where(met_BKM, weighted_BKM + alpha * ngram_BKM.clamp(min=1e-300).log(), -torch.inf)
    return torch.where(met_BKM.any(dim=-1, keepdim=True), interpolated_BKM, weighted_BKM + log_penalty)


def grow(drafts: Drafts, log_p_f_BKM: Tensor, tokens_BKM: Tensor, eos_E: Tensor, pad: int) -> Drafts:
    """The k drafts with the greatest p_i · p_f (equation 2), of all drafts extended by all tokens and of ended drafts.

    Of equal scores the candidate of the better draft comes first, and in one draft that of the likelier token.
    """
    k, many = log_p_f_BKM.shape[1:]
    extended_BKM = drafts.scores_BK[..., None] + log_p_f_BKM
    once_M = torch.arange(many, device=tokens_BKM.device) == 0
    kept_BKM = torch.where(once_M, drafts.scores_BK[..., None], -torch.inf)
    candidates_BKM = torch.where(drafts.ended_BK[..., None], kept_BKM, extended_BKM)
    scores_BC, places_BC = candidates_BKM.flatten(1).sort(dim=-1, descending=True, stable=True)
    scores_BK, places_BK = scores_BC[:, :k], places_BC[:, :k]
    parents_BK = places_BK // many
    ended_BK = drafts.ended_BK.gather(1, parents_BK)
    new_BK = tokens_BKM.flatten(1).gather(1, places_BK).masked_fill(ended_BK, pad)
    before_BKT = drafts.tokens_BKT.gather(1, parents_BK[..., None].expand_as(drafts.tokens_BKT))
    return Drafts(
        tokens_BKT=torch.cat([before_BKT, new_BK[..., None]], dim=-1),
        scores_BK=scores_BK,
        ended_BK=ended_BK | torch.isin(new_BK, eos_E) | scores_BK.isneginf(),
        lengths_BK=drafts.lengths_BK.gather(1, parents_BK) + ~ended_BK,
    )
