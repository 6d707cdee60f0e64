"""Multi-token perplexity: of the n-th next token, of the next n tokens, and of dynamic multi-token prediction.

With log p averaged over all positions t of a text for which x_{t+n} lies in the same text (DynaMo, equation 4):

    PPL_n    exp(−mean log p(x_{t+n} | x_{1:t}))             n = 1 is the backbone, n = k + 1 is head k
    PPL_1:n  exp(−mean 1/n log p(x_{t+1:t+n} | x_{1:t}))     the geometric mean of PPL_1 … PPL_n at these positions

The equation divides by T though its sum has T − n terms; here the number of terms divides. Grounded heads read the true
tokens in between, so theirs is p(x_{t+n} | x_{1:t+n-1}), and their PPL_1:n comes from the chain rule.
"""
# B block, T position, R row (a position of some block), C row of a chunk, N place (n = 1 … K + 1), k candidate,
# D model width, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.backbone.masks import causal
from heads.backbone.projection import Projection
from heads.decoding.dynamo.candidates import Candidates, take_candidates
from heads.evaluation.accuracy import CHUNK_ELEMENTS
from heads.interface.token_heads import TeacherForcing, TokenHeads

BATCH = 8  # blocks that are read at once
NORMAL_95 = 1.96


class Block(NamedTuple):
    """A piece of one text, read without what stands before it."""

    tokens_T: Tensor
    text: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """exp(−mean log p), with a 95 % interval that comes from how texts differ; None where there is one text.

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
        """From each block's sum of log p and its number of terms; the blocks of one text are one observation.

        Raises:
            ValueError: a log p that is no number.
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
    """Infinity, and no error, where a perplexity is beyond all numbers."""
    return math.exp(x) if x < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """PPL_n for n = 1 … K + 1 at index n − 1, and PPL_1:n likewise."""

    nth: list[Estimate]
    joint: list[Estimate]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the backbone (n = 1) or head n − 1 says at some rows of the flattened (B, T)."""

    rows_R: Tensor
    hidden_RD: Tensor
    projection: Projection

    def logits(self) -> Iterator[Tensor]:
        """(C, V) in float32, chunk by chunk."""
        weight = self.projection.weight
        for hidden_CD in torch.split(self.hidden_RD, max(1, CHUNK_ELEMENTS // weight.shape[0])):
            yield self.projection(hidden_CD.to(weight.dtype)).float()

    def log_probs(self, tokens_R: Tensor) -> Tensor:
        """(R,): log p of one token a row; float64 on the CPU, for sums."""
        found: list[Tensor] = []
        for logits_CV in self.logits():
            start = sum(map(len, found))
            found.append(-F.cross_entropy(logits_CV, tokens_R[start : start + len(logits_CV)], reduction="none"))
        return torch.cat(found).double().cpu()

    def candidates(self, top_k: int, temperature: float, place: int) -> Candidates:
        """The candidates of x_{t+place} (R, k), after temperature and top-k as in `generate`."""
        tops = [
            torch.softmax(logits_CV / temperature, dim=-1).topk(min(top_k, logits_CV.shape[1]))
            for logits_CV in self.logits()
        ]
        found = take_candidates(torch.cat([top.values for top in tops]), top_k, place=place)
        tokens_Rk = torch.cat([top.indices for top in tops])
        return Candidates(tokens_Bk=tokens_Rk.gather(1, found.tokens_Bk), probs_Bk=found.probs_Bk)


@torch.no_grad()
def predict(token_heads: TokenHeads, tokens_BT: Tensor, rows: Sequence[Tensor]) -> Iterator[Prediction]:
    """The backbone's and each head's predictions, one after the other, from one pass along the true tokens.

    Args:
        tokens_BT: blocks, filled up on the right.
        rows: for each place n its positions as indices into the flattened (B · T); x_{t+n} is in the row's block.
    """
    backbone = token_heads.backbone
    positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    may_attend = causal(torch.ones_like(tokens_BT, dtype=torch.bool))  # what fills up lies behind all that is read
    mask = backbone.mask_style.finish(may_attend, positions_BT, positions_BT, backbone.dtype)
    final_BTD, taps = backbone.forward(
        tokens_BT, taps=token_heads.hidden_taps, attention_mask=mask, position_ids=positions_BT, use_cache=False
    )
    own = backbone.projection.without_norm()
    yield Prediction(rows_R=rows[0], hidden_RD=final_BTD.flatten(0, 1)[rows[0]], projection=own)
    forcing = TeacherForcing(tokens_BT=tokens_BT, taps=taps, positions_BT=positions_BT, mask=mask, rows=rows[1:])
    for k, hidden_RD in enumerate(token_heads.teacher_forced(forcing), start=1):
        yield Prediction(rows_R=rows[k], hidden_RD=hidden_RD, projection=token_heads.projection(k))


def refuse_draft_vocabulary(token_heads: TokenHeads) -> None:
    """Heads that give most tokens of the vocabulary no probability.

    Raises:
        ValueError: they have a draft vocabulary.
    """
    if token_heads.draft_tokens_S is not None:
        raise ValueError(
            f"These heads score {token_heads.num_scored:,} of {token_heads.backbone.vocab_size:,} tokens and give the "
            f"others no probability, so their perplexity is infinite; measure accuracy (--metrics accuracy) or tokens "
            f"per pass (headway benchmark)."
        )


def stack(blocks: Sequence[Block], ahead: int, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Blocks as (B, T), the rows R with `ahead` tokens behind them, and how many rows each block has."""
    tokens_BT = torch.nn.utils.rnn.pad_sequence([block.tokens_T for block in blocks], batch_first=True).to(device)
    counts = [len(block.tokens_T) - ahead for block in blocks]
    rows = [torch.arange(count, device=device) + b * tokens_BT.shape[1] for b, count in enumerate(counts)]
    return tokens_BT, torch.cat(rows), counts


def check_blocks(blocks: Sequence[Block], num_heads: int) -> None:
    """Every block has a position from which all places can be judged.

    Raises:
        ValueError: no blocks, or one that is too short.
    """
    shortest = min((len(block.tokens_T) for block in blocks), default=0)
    if shortest < num_heads + 2:
        raise ValueError(
            f"The shortest block has {shortest} tokens (0: there is none), but {num_heads} heads are judged on blocks "
            f"of {num_heads + 2} tokens and more; give longer texts."
        )


def no_report() -> None:
    """Progress that nobody sees."""


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
