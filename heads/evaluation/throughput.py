"""Measure the speed of decoding methods side by side in one run, as ratios to the first method.

Tokens per second are of whole `generate` calls, the prompt's pass included. In each repeat all methods decode every
prompt one after another, in an order that rotates, so that a slow moment of the machine falls on all of them. For each
prompt and method the median over the repeats counts; the ratio's range over single repeats stands beside it.
"""
# T prompt position

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from heads.evaluation.generated_text import Ruling, Verdict, repeated_ngrams
from heads.evaluation.methods import Method, Outcome

Item = TypeVar("Item")


@dataclass(kw_only=True)
class Record:
    """Measurements of one method on one prompt: seconds of each repeat, and its phases where the method tells them."""

    outcome: Outcome
    passes: int
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """What `compare` found for one method; speeds are of whole `generate` calls on a batch of one.

    Attributes:
        ratio: tokens per second over the first method's; `ratio_low` and `ratio_high` are its range over repeats.
        repeated_4grams: share of 4-grams of new tokens that repeat an earlier one of the same text, mean over prompts.
        same_text: compared with the first method: "yes", "yes (n ties)", with a float32 judge "yes (n excused)", or
            "no: prompt i, token j", both counted from 1; "lossy" for methods that do not promise it.
        rulings: what a float32 judge says about each difference from the first method's text, where one was asked.
        milliseconds: of one pass by phase, "other" included; empty if the method does not tell its phases.
    """

    name: str
    tokens: int
    tokens_per_second: float
    ratio: float
    ratio_low: float
    ratio_high: float
    tokens_per_pass: float
    repeated_4grams: float
    same_text: str
    rulings: tuple[Ruling, ...] = ()
    milliseconds: dict[str, float] = field(default_factory=dict)


def compare(
    methods: Sequence[Method],
    prompts: Sequence[Tensor],
    *,
    repeats: int = 3,
    verdict: Callable[[Tensor, list[int], list[int]], Verdict],
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[], Any] = lambda: None,
) -> list[MethodResult]:
    """Measure all methods on all prompts; ratios and texts are compared with the first method's.

    Args:
        verdict: compares (prompt, the first method's tokens, a method's tokens); `SameText(…)` asks the model.
        clock: seconds; must wait for an accelerator to finish (`clock_of`).
        advance: called after each of the `count_runs(…)` runs, for a progress bar.
    """
    if repeats < 1 or not prompts or not methods:
        raise ValueError(f"{repeats} repeats of {len(prompts)} prompts were asked for; at least one of each is needed.")
    records: dict[tuple[str, int], Record] = {}
    for method in methods:
        method.run(prompts[0])  # warm-up: the first call of a method pays for allocations and kernel choice
        advance()
    for repeat in range(repeats):
        for p, prompt_1T in enumerate(prompts):
            for method in rotated(methods, p + repeat):
                start = clock()
                outcome = method.run(prompt_1T)
                seconds = clock() - start
                if repeat == 0:
                    records[method.name, p] = Record(outcome=outcome, passes=passes_of(method, outcome, prompt_1T))
                records[method.name, p].seconds.append(seconds)
                if outcome.seconds is not None:
                    records[method.name, p].phases.append(outcome.seconds)
                advance()
    by_method = [[records[method.name, p] for p in range(len(prompts))] for method in methods]
    return [
        summarise(method, rs, by_method[0], prompts, verdict) for method, rs in zip(methods, by_method, strict=True)
    ]


def count_runs(methods: Sequence[Method], prompts: Sequence[Tensor], repeats: int) -> int:
    """How often `compare` calls `advance`."""
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
    records: Sequence[Record],
    plain_records: Sequence[Record],
    prompts: Sequence[Tensor],
    verdict: Callable[[Tensor, list[int], list[int]], Verdict],
) -> MethodResult:
    """One method's result from its records, one for each prompt."""
    speed, plain_speed = median_speed(records), median_speed(plain_records)
    repeats = range(len(records[0].seconds))
    ratios = [speed_in(records, r) / speed_in(plain_records, r) for r in repeats]
    verdicts = [
        verdict(prompt_1T, base.outcome.tokens, record.outcome.tokens)
        for prompt_1T, base, record in zip(prompts, plain_records, records, strict=True)
        if not method.lossy
    ]
    tokens = count_tokens(records)
    return MethodResult(
        name=method.name,
        tokens=tokens,
        tokens_per_second=speed,
        ratio=speed / plain_speed,
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        tokens_per_pass=tokens / sum(record.passes for record in records),
        repeated_4grams=statistics.mean(repeated_ngrams(record.outcome.tokens) for record in records),
        same_text="lossy" if method.lossy else describe_verdicts(verdicts),
        rulings=tuple(replace(ruling, prompt=n) for n, v in enumerate(verdicts, start=1) for ruling in v.rulings),
        milliseconds=milliseconds_per_pass(records),
    )


def milliseconds_per_pass(records: Sequence[Record]) -> dict[str, float]:
    """By phase: each prompt's median over repeats, summed over prompts; "other" is the rest of the wall time."""
    if not all(record.phases for record in records):
        return {}
    passes = sum(record.passes for record in records)
    found = {
        phase: 1000 * sum(statistics.median(run[phase] for run in record.phases) for record in records) / passes
        for phase in records[0].phases[0]
    }
    wall = 1000 * sum(statistics.median(record.seconds) for record in records) / passes
    return found | {"other": max(0.0, wall - sum(found.values()))}


def count_tokens(records: Sequence[Record]) -> int:
    return sum(len(record.outcome.tokens) for record in records)


def median_speed(records: Sequence[Record]) -> float:
    """Tokens per second: all tokens over the sum of each prompt's median seconds."""
    return count_tokens(records) / sum(statistics.median(record.seconds) for record in records)


def speed_in(records: Sequence[Record], repeat: int) -> float:
    return count_tokens(records) / sum(record.seconds[repeat] for record in records)


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
    judged = any(found.rulings for found in verdicts)
    return f"yes ({ties} excused)" if judged else f"yes ({ties} tie{'s' * (ties > 1)})"


def clock_of(device: torch.device) -> Callable[[], float]:
    """A wall clock in seconds that waits until the device has finished its work."""
    if device.type != "cuda":
        return time.perf_counter

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return read
