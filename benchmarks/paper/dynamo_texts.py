"""Texts of dynamic decoding, prompt by prompt: tokens per pass, and the likelihood of the text.

A text's score is the mean -log p of its new tokens up to its end, without logits processors, under another model and
under the backbone that wrote it. Averages are weighted by tokens. Intervals are 95 % of a bootstrap over prompts (Efron
and Tibshirani, 1993), paired, since all methods continue the same resampled prompts.
"""
# B prompt, L token of prompt and text, N new token, S resample

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.shared import interpolate
from heads.decoding.dynamo.decoding import DynamicDecoding
from heads.evaluation.generated_text import repeated_ngrams
from heads.evaluation.lossy.other_model import new_token_losses
from heads.evaluation.methods import end_tokens
from heads.evaluation.throughput import SHARES, resample

Figures = npt.NDArray[np.float64]
PAPER_REQUEST = {"do_sample": True, "top_k": 50, "temperature": 0.7, "repetition_penalty": 1.1}
"""Appendix A.1."""
RESAMPLES = 1000
MISSING = 0.05
"""If more than this share of the resamples never reach a speed, there is no interval at it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """One method's texts for each prompt, summed over its draws.

    Attributes:
        tokens_B, passes_B: emitted tokens, and the passes that emitted them.
        scored_B: tokens up to each text's end.
        judged_B, own_B: the sum of their -log p under the other model and under the backbone.
        repeated_B: share of repeated 4-grams, mean over draws.
    """

    tokens_B: list[float]
    passes_B: list[float]
    scored_B: list[float]
    judged_B: list[float]
    own_B: list[float]
    repeated_B: list[float]

    def tokens_per_pass(self, weights_SB: Figures) -> Figures:
        """(S,) for each weighting of the prompts."""
        return np.asarray(weights_SB @ self.tokens_B / (weights_SB @ self.passes_B))

    def loss(self, weights_SB: Figures, judge: str) -> Figures:
        """(S,): mean -log p under a judge, "other model" or "own model"."""
        sums_B = self.judged_B if judge == "other model" else self.own_B
        return np.asarray(weights_SB @ sums_B / (weights_SB @ self.scored_B))

    def repeated(self, weights_SB: Figures) -> Figures:
        return np.asarray(weights_SB @ self.repeated_B / weights_SB.sum(axis=1))


JUDGES = ("other model", "own model")


def write_texts(
    model: Any,
    decoding_of: Callable[[int], DynamicDecoding],
    judge: Any,
    prompts_BT: Tensor,
    new_tokens: int,
    draws: int,
) -> Texts:
    """Write and score one text for each prompt and draw, at the paper's request.

    Args:
        decoding_of: the decoding for the seed of a draw.
        judge: another model with the same tokenizer.
    """
    found = []
    for seed in range(draws):
        output = model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            custom_generate=decoding_of(seed),
            **PAPER_REQUEST,
        )
        found.append(figures_of(output, model, judge, prompts_BT.shape[1]))
    summed = np.sum(found, axis=0)
    summed[-1] /= draws
    names = (field.name for field in dataclasses.fields(Texts))
    return Texts(**dict(zip(names, summed.tolist(), strict=True)))


def figures_of(output: Any, model: Any, judge: Any, prompt_length: int) -> list[list[float]]:
    """The fields of `Texts`, for one draw."""
    new_BN = output.sequences[:, prompt_length:]
    ends_BN = torch.isin(new_BN, new_BN.new_tensor(end_tokens(model)))
    is_text_BN = ends_BN.cumsum(dim=1) - ends_BN.long() == 0
    texts = [row_N[is_text_N].tolist() for row_N, is_text_N in zip(new_BN, is_text_BN, strict=True)]
    losses = [
        (new_token_losses(scorer, output.sequences, prompt_length) * is_text_BN).sum(dim=1).tolist()
        for scorer in (judge, model)
    ]
    drafted = output.stats.drafted
    return [
        [len(row) for row in drafted],
        [len(row) - sum(row) for row in drafted],  # every pass begins with a token of the backbone's own
        [len(text) for text in texts],
        *losses,
        [repeated_ngrams(text) for text in texts],
    ]


def resamples(prompts: int, seed: int = 0) -> Figures:
    """(1 + S, B): how often each prompt counts, first once each, then as in each resample."""
    taken = resample(prompts, RESAMPLES, np.random.default_rng(seed))
    return np.concatenate([np.ones((1, prompts)), taken])


def losses_at_speed(curve: Sequence[Texts], weights_SB: Figures, judge: str, speed: float) -> Figures:
    """(S,): a method's loss at `speed` tokens per pass, interpolated between thresholds; nan if it is never so fast.

    Args:
        curve: the same method at several thresholds.
    """
    speeds = np.stack([texts.tokens_per_pass(weights_SB) for texts in curve], axis=1).tolist()
    losses = np.stack([texts.loss(weights_SB, judge) for texts in curve], axis=1).tolist()
    found = [interpolate(list(zip(*points, strict=True)), speed) for points in zip(speeds, losses, strict=True)]
    return np.array([np.nan if value is None else value for value in found])


def with_interval(values_S: Figures, form: str = ".3f") -> str:
    """The value over all prompts, followed by the interval of the resamples.

    >>> with_interval(np.array([2.0, 1.0, 2.0, 3.0]), ".1f")
    '2.0 [1.1, 3.0]'
    >>> with_interval(np.array([np.nan, 1.0])), with_interval(np.array([2.0, np.nan]), ".1f")
    ('–', '2.0')
    """
    if np.isnan(values_S[0]):
        return "–"
    resampled = values_S[1:]
    if not len(resampled) or np.isnan(resampled).mean() > MISSING:
        return format(values_S[0], form)
    low, high = np.nanquantile(resampled, SHARES)
    return f"{values_S[0]:{form}} [{low:{form}}, {high:{form}}]"
