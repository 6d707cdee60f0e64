"""Measure the speed of decoding methods side by side in one run, as ratios to the first method.

Tokens per second are those of whole `generate` calls, the prompt's pass included. In each repeat all methods decode
every prompt one after another, in rotating order, so that a slow moment of the machine falls on all of them. Speeds and
ratios are medians over the repeats. The ratio's interval is a paired bootstrap over prompts (Efron and Tibshirani,
1993) and shows how much the ratio depends on the texts.
"""
# T prompt position, P prompt, R repeat, S resample

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from heads.evaluation.generated_text import Ruling, Verdict, repeated_ngrams
from heads.evaluation.methods import Method, Outcome

Item = TypeVar("Item")
Figures = npt.NDArray[np.float64]

RESAMPLES = 2000
SHARES = (0.025, 0.975)  # between them lie 95 % of the resamples


@dataclass(kw_only=True)
class PromptTimes:
    """Measurements of one method on one prompt: seconds of each repeat, and of its phases if the method has them."""

    outcome: Outcome
    passes: int
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """The result of one method in `compare`; speeds are those of whole `generate` calls on a batch of one.

    Attributes:
        ratio: tokens per second over the first method's; `ratio_low` and `ratio_high` are its range over repeats.
        interval: 95 % interval of the ratio, by a paired bootstrap over prompts.
        repeated_4grams: share of 4-grams of new tokens that repeat an earlier one of the same text, mean over prompts.
        same_text: compared with the first method: "yes", "yes (n ties)", with a float32 judge "yes (n excused)", or
            "no: prompt i, token j", both counted from 1; for methods that do not promise the same text, their promise.
        perplexity: perplexity of the new tokens under another model; None without one.
        perplexity_interval: its 95 % interval, by a bootstrap over prompts.
        rulings: a float32 judge's ruling on each difference from the first method's text; empty without a judge.
        milliseconds: milliseconds of one pass by phase, with "other"; empty if the method does not measure phases.

    Raises:
        ValueError: the ratio lies outside the range of its repeats.
    """

    name: str
    tokens: int
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    interval: tuple[float, float]
    tokens_per_pass: float
    repeated_4grams: float
    same_text: str
    perplexity: float | None = None
    perplexity_interval: tuple[float, float] | None = None
    rulings: tuple[Ruling, ...] = ()
    milliseconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ratio_low <= self.ratio <= self.ratio_high:
            raise ValueError(
                f"{self.name}: the ratio {self.ratio} lies outside the range of its repeats, {self.ratio_low} to "
                f"{self.ratio_high}; take it from the repeats."
            )


def compare(
    methods: Sequence[Method],
    prompts: Sequence[Tensor],
    *,
    repeats: int = 3,
    verdict: Callable[[Tensor, list[int], list[int]], Verdict],
    log_likelihood: Callable[[Tensor, list[int]], float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[], Any] = lambda: None,
) -> list[MethodResult]:
    """Measure all methods on all prompts; ratios and texts are compared with the first method's.

    Args:
        verdict: compares (prompt, the first method's tokens, a method's tokens), such as `SameText(…)`.
        log_likelihood: log-likelihood of (prompt, a method's tokens) under another model, in nats; None: no model.
        clock: returns seconds; must wait for an accelerator to finish (`clock_of`).
        advance: called after each of the `count_runs(…)` runs, for a progress bar.
    """
    if repeats < 1 or not prompts or not methods:
        raise ValueError(f"{repeats} repeats of {len(prompts)} prompts were given; give at least one of each.")
    records: dict[tuple[str, int], PromptTimes] = {}
    for method in methods:
        method.run(prompts[0])  # warm-up: a method's first call allocates memory and chooses kernels
        advance()
    for repeat in range(repeats):
        for p, prompt_1T in enumerate(prompts):
            for method in rotated(methods, p + repeat):
                start = clock()
                outcome = method.run(prompt_1T)
                seconds = clock() - start
                if repeat == 0:
                    records[method.name, p] = PromptTimes(outcome=outcome, passes=passes_of(method, outcome, prompt_1T))
                records[method.name, p].seconds.append(seconds)
                if outcome.seconds is not None:
                    records[method.name, p].phases.append(outcome.seconds)
                advance()
    by_method = [[records[method.name, p] for p in range(len(prompts))] for method in methods]
    return [
        summarise(method, records, by_method[0], prompts, verdict, log_likelihood)
        for method, records in zip(methods, by_method, strict=True)
    ]


def count_runs(methods: Sequence[Method], prompts: Sequence[Tensor], repeats: int) -> int:
    """The number of calls of `advance` in `compare`."""
    return len(methods) * (1 + repeats * len(prompts))


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    at = by % len(items)
    return [*items[at:], *items[:at]]


def passes_of(method: Method, outcome: Outcome, prompt_1T: Tensor) -> int:
    """Backbone passes of a run: the method's own count, or the count of one more, untimed run."""
    if outcome.passes is not None:
        return outcome.passes
    if method.count_passes is None:
        raise ValueError(f"The method {method.name!r} gave no number of passes and has no count_passes; give it one.")
    return method.count_passes(prompt_1T)


def summarise(
    method: Method,
    records: Sequence[PromptTimes],
    plain_records: Sequence[PromptTimes],
    prompts: Sequence[Tensor],
    verdict: Callable[[Tensor, list[int], list[int]], Verdict],
    log_likelihood: Callable[[Tensor, list[int]], float] | None,
) -> MethodResult:
    """One method's result from its records, one for each prompt."""
    ours, plain = arrays(records), arrays(plain_records)
    ratios_R = ratios(*ours, *plain, np.ones(len(prompts)))
    texts, plain_texts = ([record.outcome.tokens for record in found] for found in (records, plain_records))
    same = method.promises == "same text"
    verdicts = [verdict(*texts_of) for texts_of in zip(prompts, plain_texts, texts, strict=True)] if same else []
    scores = [log_likelihood(*text_of) for text_of in zip(prompts, texts, strict=True)] if log_likelihood else None
    lengths = list(map(len, texts))
    tokens = sum(lengths)
    return MethodResult(
        name=method.name,
        tokens=tokens,
        tokens_per_second=float(np.median(tokens / ours[1].sum(axis=0))),
        ratio=float(np.median(ratios_R)),
        ratio_low=float(ratios_R.min()),
        ratio_high=float(ratios_R.max()),
        interval=ratio_interval(*ours, *plain, np.random.default_rng(0)),
        tokens_per_pass=tokens / sum(record.passes for record in records),
        repeated_4grams=statistics.mean(map(repeated_ngrams, texts)),
        same_text=describe_verdicts(verdicts) if same else method.promises,
        perplexity=math.exp(-sum(scores) / tokens) if scores else None,
        perplexity_interval=perplexity_interval(scores, lengths, np.random.default_rng(0)) if scores else None,
        rulings=tuple(replace(ruling, prompt=n) for n, v in enumerate(verdicts, start=1) for ruling in v.rulings),
        milliseconds=milliseconds_per_pass(records),
    )


def arrays(records: Sequence[PromptTimes]) -> tuple[Figures, Figures]:
    """The tokens of each prompt (P,), and the seconds of each prompt and repeat (P, R)."""
    tokens_P = np.array([len(record.outcome.tokens) for record in records], dtype=np.float64)
    return tokens_P, np.array([record.seconds for record in records], dtype=np.float64)


def ratios(
    tokens_P: Figures, seconds_PR: Figures, plain_tokens_P: Figures, plain_seconds_PR: Figures, times: Figures
) -> Figures:
    """Speed over plain generation's in each repeat (…, R), with each prompt counted `times` (…, P) times."""
    ours = (times @ tokens_P)[..., None] / (times @ seconds_PR)
    plain = (times @ plain_tokens_P)[..., None] / (times @ plain_seconds_PR)
    found: Figures = ours / plain
    return found


def resample(prompts: int, count: int, generator: np.random.Generator) -> Figures:
    """(S, P): how often each prompt occurs in each of `count` samples of P prompts with replacement.

    >>> resample(3, 4, np.random.default_rng(0)).sum(axis=1)
    array([3., 3., 3., 3.])
    """
    return generator.multinomial(prompts, np.full(prompts, 1 / prompts), size=count).astype(np.float64)


def ratio_interval(
    tokens_P: Figures,
    seconds_PR: Figures,
    plain_tokens_P: Figures,
    plain_seconds_PR: Figures,
    generator: np.random.Generator,
) -> tuple[float, float]:
    """95 % interval of the median ratio: prompts are sampled with replacement, both methods' figures together.

    >>> tokens, seconds = np.array([8.0, 8.0]), np.array([[4.0], [4.0]])
    >>> ratio_interval(tokens, seconds / 2, tokens, seconds, np.random.default_rng(0))      # each prompt twice as fast
    (2.0, 2.0)
    """
    times_SP = resample(len(tokens_P), RESAMPLES, generator)
    ratios_SR = ratios(tokens_P, seconds_PR, plain_tokens_P, plain_seconds_PR, times_SP)
    low, high = np.quantile(np.median(ratios_SR, axis=-1), SHARES)
    return float(low), float(high)


def perplexity(
    prompts: Sequence[Tensor], texts: Sequence[list[int]], log_likelihood: Callable[[Tensor, list[int]], float]
) -> float:
    """Perplexity over all new tokens of all texts."""
    total = sum(log_likelihood(prompt_1T, text) for prompt_1T, text in zip(prompts, texts, strict=True))
    return math.exp(-total / sum(map(len, texts)))


def perplexity_interval(
    scores: Sequence[float], tokens: Sequence[int], generator: np.random.Generator
) -> tuple[float, float]:
    """95 % interval of the perplexity over all tokens: texts are sampled with replacement.

    Args:
        scores: the log-likelihood of each text, in nats.
        tokens: the number of tokens of each text.

    >>> low, high = perplexity_interval([-math.log(2), -2 * math.log(2)], [1, 2], np.random.default_rng(0))
    >>> round(low, 9), round(high, 9)                                           # one bit a token, whatever the text
    (2.0, 2.0)
    """
    times_SP = resample(len(scores), RESAMPLES, generator)
    low, high = np.quantile(np.exp(-(times_SP @ np.array(scores)) / (times_SP @ np.array(tokens))), SHARES)
    return float(low), float(high)


def milliseconds_per_pass(records: Sequence[PromptTimes]) -> dict[str, float]:
    """Milliseconds by phase: sums over prompts of medians over repeats; "other" is the rest of the wall time."""
    if not all(record.phases for record in records):
        return {}
    passes = sum(record.passes for record in records)
    found = {
        phase: 1000 * sum(statistics.median(run[phase] for run in record.phases) for record in records) / passes
        for phase in records[0].phases[0]
    }
    wall = 1000 * sum(statistics.median(record.seconds) for record in records) / passes
    return found | {"other": max(0.0, wall - sum(found.values()))}


def describe_verdicts(verdicts: Sequence[Verdict]) -> str:
    """The first difference without an excuse, else "yes" with the number of excused ones.

    >>> describe_verdicts([Verdict(ties=2), Verdict()]), describe_verdicts([Verdict(), Verdict(differs_at=4)])
    ('yes (2 ties)', 'no: prompt 2, token 5')
    """
    for number, found in enumerate(verdicts, start=1):
        if found.differs_at is not None:
            return f"no: prompt {number}, token {found.differs_at + 1}"
    ties = sum(found.ties for found in verdicts)
    if not ties:
        return "yes"
    has_judge = any(found.rulings for found in verdicts)
    return f"yes ({ties} excused)" if has_judge else f"yes ({ties} tie{'s' * (ties > 1)})"


def clock_of(device: torch.device) -> Callable[[], float]:
    """A wall clock in seconds that waits until the device has finished its work."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
