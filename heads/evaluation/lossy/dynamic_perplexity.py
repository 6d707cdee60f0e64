"""PPL_d: the perplexity of lossy dynamic decoding, against tokens per pass (DynaMo, figure 14).

In the paper the joint distribution and ε_b decide n, and PPL_d is calculated on the tokens generated. Here it is
calculated along the true text. At position t, `decide` finds n as dynamic decoding would after x_{1:t}; the true
x_{t+1:t+n} are scored with the heads' unprocessed distributions at t (no temperature, no mask), and t + n is next. This
ends where fewer than K + 1 tokens are left, so that no n is cut. ε_b = 1 gives PPL_1 of all these tokens, ε_b = 0 gives
PPL_1:K+1 of every (K + 1)-th position.
"""
# B block, T position, R row (a position of some block), N place (n = 1 … K + 1), k candidate, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from heads.decoding.dynamo.candidates import Candidates
from heads.decoding.dynamo.cooccurrence import Cooccurrence, open_cooccurrence
from heads.decoding.dynamo.joint import check_independent, decide
from heads.decoding.dynamo.settings import JointConfig
from heads.evaluation.perplexity import Estimate, no_report, refuse_draft_vocabulary
from heads.evaluation.predictions import BATCH, Block, check_blocks, predict, stack
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class DynamicPerplexity:
    """PPL_d at one threshold ε_b, and the mean number of tokens of a decision (in decoding, of a pass)."""

    threshold: float
    perplexity: Estimate
    tokens_per_pass: float


@dataclass(frozen=True, kw_only=True)
class DecisionSettings:
    """How dynamic decoding decides n; the defaults are the paper's settings for generation, and ours for the
    adaptive threshold.

    Attributes:
        config: settings of the joint distribution, without its threshold, which the sweep gives.
        cooccurrence: a table of n-grams of up to K + 1 tokens; None masks nothing.
        temperature: above 0.
        penalty: repetition penalty, at least 1; the block's tokens up to t count as seen.
    """

    config: JointConfig = field(default_factory=JointConfig)
    cooccurrence: Cooccurrence | None = None
    temperature: float = 0.7
    penalty: float = 1.1

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.penalty < 1:
            raise ValueError(
                f"temperature={self.temperature} and penalty={self.penalty} were given; a temperature is above 0 and a "
                f"penalty at least 1."
            )

    def at(self, threshold: float) -> DecisionSettings:
        return replace(self, config=replace(self.config, threshold=threshold))


@dataclass(frozen=True, kw_only=True)
class BatchPredictions:
    """Predictions along a batch of blocks; its rows are the positions with K + 1 tokens after them.

    Attributes:
        counts: number of rows of each block, in the order in which the blocks are stacked.
        places: the candidates of x_{t+1} … x_{t+K+1}, for all rows.
        log_sums_RN: log p of the true x_{t+1}, of x_{t+1:t+2}, …, of x_{t+1:t+K+1}.
    """

    blocks: Sequence[Block]
    counts: list[int]
    places: list[Candidates]
    log_sums_RN: Tensor

    def row(self, b: int, t: int) -> int:
        return sum(self.counts[:b]) + t


Walk = list[tuple[int, int]]
"""The (t, n) of each decision along a block; t counts from 0."""


@torch.no_grad()
def measure_dynamic(
    token_heads: TokenHeads,
    blocks: Sequence[Block],
    thresholds: Sequence[float],
    settings: DecisionSettings | None = None,
    report: Callable[[], None] = no_report,
) -> list[DynamicPerplexity]:
    """PPL_d and tokens per pass at each threshold ε_b.

    Args:
        settings: by default the paper's, without a co-occurrence table.
        report: called after every batch of BATCH blocks at every threshold.

    Raises:
        ValueError: heads or a table that `DynamicDecoding` refuses, a threshold outside 0 to 1, or as
            `measure_perplexity`.
    """
    check_independent(token_heads)
    refuse_draft_vocabulary(token_heads)
    check_blocks(blocks, token_heads.num_heads)
    settings, vocab_size = settings or DecisionSettings(), token_heads.backbone.vocab_size
    open_cooccurrence(settings.cooccurrence, token_heads.num_heads + 1, vocab_size)  # checks it
    sweep = [settings.at(threshold) for threshold in thresholds]
    scores: list[list[tuple[float, int, int]]] = [[] for _ in sweep]
    for start in range(0, len(blocks), BATCH):
        predictions = predict_batch(token_heads, blocks[start : start + BATCH], settings)
        for found, at_threshold in zip(scores, sweep, strict=True):
            found += score(predictions, walk_blocks(predictions, at_threshold, vocab_size))
            report()
    texts = [block.text for block in blocks]
    return [summarize(threshold, found, texts) for threshold, found in zip(thresholds, scores, strict=True)]


def predict_batch(token_heads: TokenHeads, blocks: Sequence[Block], settings: DecisionSettings) -> BatchPredictions:
    """Run one pass over a batch of blocks."""
    num_places = token_heads.num_heads + 1
    tokens_BT, rows_R, counts = stack(blocks, num_places, token_heads.backbone.device)
    places, logs = [], []
    for n, prediction in enumerate(predict(token_heads, tokens_BT, [rows_R] * num_places), start=1):
        places.append(prediction.candidates(settings.config.top_k, settings.temperature, n))
        logs.append(prediction.log_probs(tokens_BT.flatten()[rows_R + n]))
    return BatchPredictions(
        blocks=blocks, counts=counts, places=places, log_sums_RN=torch.stack(logs, dim=1).cumsum(dim=1)
    )


def walk_blocks(predictions: BatchPredictions, settings: DecisionSettings, vocab_size: int) -> list[Walk]:
    """Walk along every block; all blocks decide together."""
    walks: list[Walk] = [[] for _ in predictions.blocks]
    at = [0] * len(walks)
    while running := [b for b, count in enumerate(predictions.counts) if at[b] < count]:
        rows = [predictions.row(b, at[b]) for b in running]
        texts = [predictions.blocks[b].tokens_T[: at[b] + 1] for b in running]
        for b, n in zip(running, decide_orders(predictions, rows, texts, settings, vocab_size), strict=True):
            walks[b].append((at[b], n))
            at[b] += n
    return walks


def decide_orders(
    predictions: BatchPredictions, rows: list[int], texts: list[Tensor], settings: DecisionSettings, vocab_size: int
) -> list[int]:
    """Decide n at some rows, given the text of each up to there."""
    if settings.config.threshold in (0, 1):  # `decide` gives this for any candidates
        return [1 if settings.config.threshold else len(predictions.places)] * len(rows)
    device = predictions.places[0].tokens_Bk.device
    seen_RV = None
    if settings.penalty > 1:
        seen_RV = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        for seen_V, text_T in zip(seen_RV, texts, strict=True):
            seen_V[text_T.to(device)] = True
    places = [place.select(torch.tensor(rows, device=device)) for place in predictions.places]
    decision = decide(
        places, settings.config, cooccurrence=settings.cooccurrence, seen_BV=seen_RV, penalty=settings.penalty
    )
    orders: list[int] = decision.order_B.tolist()
    return orders


def score(predictions: BatchPredictions, walks: Sequence[Walk]) -> list[tuple[float, int, int]]:
    """For each block: the sum of log p, the number of tokens and the number of decisions of its walk."""
    logs = predictions.log_sums_RN
    return [
        (sum(float(logs[predictions.row(b, t), n - 1]) for t, n in walk), sum(n for _, n in walk), len(walk))
        for b, walk in enumerate(walks)
    ]


def summarize(threshold: float, scores: Sequence[tuple[float, int, int]], texts: Sequence[int]) -> DynamicPerplexity:
    """One threshold's result from the scores of all blocks."""
    sums, tokens, decisions = zip(*scores, strict=True)
    return DynamicPerplexity(
        threshold=threshold,
        perplexity=Estimate.of(sums, tokens, texts),
        tokens_per_pass=sum(tokens) / sum(decisions),
    )
