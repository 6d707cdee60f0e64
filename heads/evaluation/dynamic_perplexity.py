"""PPL_d: the perplexity of dynamic multi-token prediction, against the tokens that a pass emits (DynaMo, figure 14).

Of PPL_d the paper says that n is decided by the joint distribution and ε_b, and that it is calculated on the tokens
generated. Here: at t `decide` finds n as dynamic decoding would behind x_{1:t}; the true x_{t+1:t+n} are scored with
the heads' distributions at t as they are (no temperature, no mask), and the walk goes on at t + n. It ends where fewer
than K + 1 tokens are left, so that no n is cut short. ε_b = 1 gives PPL_1 of all tokens of the walk, ε_b = 0 PPL_1:K+1
of every (K + 1)-th position.
"""
# B block, T position, R row (a position of some block), C row of a chunk, N place (n = 1 … K + 1), k candidate,
# D model width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from heads.decoding.dynamo.candidates import Candidates
from heads.decoding.dynamo.decoding import open_cooccurrence, refuse_heads
from heads.decoding.dynamo.joint import Cooccurrence, JointConfig, decide
from heads.evaluation.perplexity import (
    BATCH,
    Block,
    Estimate,
    check_blocks,
    no_report,
    predict,
    refuse_draft_vocabulary,
    stack,
)
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class DynamicPerplexity:
    """PPL_d at one ε_b, and how many tokens a decision (in decoding: a pass) emitted on average."""

    threshold: float
    perplexity: Estimate
    tokens_per_pass: float


@dataclass(frozen=True, kw_only=True)
class Deciding:
    """How dynamic decoding would decide n; the defaults are the paper's settings for generation.

    Attributes:
        config: of the joint distribution; its threshold gives way to each of a sweep's.
        cooccurrence: a table of n-grams up to K + 1 tokens; None does not mask.
        temperature: above 0.
        penalty: repetition penalty, at least 1; the tokens of the same block up to t count as seen.
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

    def at(self, threshold: float) -> Deciding:
        return replace(self, config=replace(self.config, threshold=threshold))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A batch of blocks as all walks along them need it; its rows are the positions with K + 1 tokens behind them.

    Attributes:
        counts: rows of each block; they lie behind those of the blocks before it.
        places: the candidates of x_{t+1} … x_{t+K+1} at all rows.
        log_sums_RN: log p of the true x_{t+1}, of x_{t+1:t+2}, …, of x_{t+1:t+K+1}.
    """

    blocks: Sequence[Block]
    counts: list[int]
    places: list[Candidates]
    log_sums_RN: Tensor

    def row(self, b: int, t: int) -> int:
        return sum(self.counts[:b]) + t


Walk = list[tuple[int, int]]
"""The (t, n) of a walk along a block, t counted from 0."""


@torch.no_grad()
def measure_dynamic(
    token_heads: TokenHeads,
    blocks: Sequence[Block],
    thresholds: Sequence[float],
    deciding: Deciding | None = None,
    report: Callable[[], None] = no_report,
) -> list[DynamicPerplexity]:
    """PPL_d and tokens per pass at each threshold ε_b.

    Args:
        deciding: the paper's settings without a co-occurrence table where it is not given.
        report: called after every batch of BATCH blocks at every threshold.

    Raises:
        ValueError: heads or a table that `DynamicDecoding` refuses, a threshold outside 0 to 1, or as
            `measure_perplexity`.
    """
    refuse_heads(token_heads)
    refuse_draft_vocabulary(token_heads)
    check_blocks(blocks, token_heads.num_heads)
    deciding, vocab_size = deciding or Deciding(), token_heads.backbone.vocab_size
    open_cooccurrence(deciding.cooccurrence, token_heads.num_heads + 1, vocab_size)  # checks it
    sweep = [deciding.at(threshold) for threshold in thresholds]
    scores: list[list[tuple[float, int, int]]] = [[] for _ in sweep]
    for start in range(0, len(blocks), BATCH):
        reading = read(token_heads, blocks[start : start + BATCH], deciding)
        for found, at_threshold in zip(scores, sweep, strict=True):
            found += score(reading, walk(reading, at_threshold, vocab_size))
            report()
    texts = [block.text for block in blocks]
    return [summarize(threshold, found, texts) for threshold, found in zip(thresholds, scores, strict=True)]


def read(token_heads: TokenHeads, blocks: Sequence[Block], deciding: Deciding) -> Reading:
    """One pass over a batch of blocks."""
    num_places = token_heads.num_heads + 1
    tokens_BT, rows_R, counts = stack(blocks, num_places, token_heads.backbone.device)
    places, logs = [], []
    for n, made in enumerate(predict(token_heads, tokens_BT, [rows_R] * num_places), start=1):
        places.append(made.candidates(deciding.config.top_k, deciding.temperature, n))
        logs.append(made.log_probs(tokens_BT.flatten()[rows_R + n]))
    return Reading(blocks=blocks, counts=counts, places=places, log_sums_RN=torch.stack(logs, dim=1).cumsum(dim=1))


def walk(reading: Reading, deciding: Deciding, vocab_size: int) -> list[Walk]:
    """Each block's walk; all blocks take a step at once."""
    walks: list[Walk] = [[] for _ in reading.blocks]
    at = [0] * len(walks)
    while running := [b for b, count in enumerate(reading.counts) if at[b] < count]:
        rows = [reading.row(b, at[b]) for b in running]
        texts = [reading.blocks[b].tokens_T[: at[b] + 1] for b in running]
        for b, n in zip(running, decide_orders(reading, rows, texts, deciding, vocab_size), strict=True):
            walks[b].append((at[b], n))
            at[b] += n
    return walks


def decide_orders(
    reading: Reading, rows: list[int], texts: list[Tensor], deciding: Deciding, vocab_size: int
) -> list[int]:
    """n at some rows, of each of which the text so far is given."""
    if deciding.config.threshold in (0, 1):  # as `decide` has it, whatever the candidates are
        return [1 if deciding.config.threshold else len(reading.places)] * len(rows)
    device = reading.places[0].tokens_Bk.device
    seen_RV = None
    if deciding.penalty > 1:
        seen_RV = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        for seen_V, text_T in zip(seen_RV, texts, strict=True):
            seen_V[text_T.to(device)] = True
    places = [place.select(torch.tensor(rows, device=device)) for place in reading.places]
    decision = decide(
        places, deciding.config, cooccurrence=deciding.cooccurrence, seen_BV=seen_RV, penalty=deciding.penalty
    )
    orders: list[int] = decision.order_B.tolist()
    return orders


def score(reading: Reading, walks: Sequence[Walk]) -> list[tuple[float, int, int]]:
    """For each block the sum of log p, the tokens and the decisions of its walk."""
    logs = reading.log_sums_RN
    return [
        (sum(float(logs[reading.row(b, t), n - 1]) for t, n in steps), sum(n for _, n in steps), len(steps))
        for b, steps in enumerate(walks)
    ]


def summarize(threshold: float, scores: Sequence[tuple[float, int, int]], texts: Sequence[int]) -> DynamicPerplexity:
    """One point of the sweep, from the scores of all blocks."""
    sums, tokens, decisions = zip(*scores, strict=True)
    return DynamicPerplexity(
        threshold=threshold,
        perplexity=Estimate.of(sums, tokens, texts),
        tokens_per_pass=sum(tokens) / sum(decisions),
    )
