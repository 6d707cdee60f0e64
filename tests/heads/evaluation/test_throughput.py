"""Medians, ratios, interleaving and passes by arithmetic, on methods that do nothing and a clock that they move."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import random_tokens, shared_model, tiny_model
from torch import Tensor

from heads.evaluation.generated_text import Ruling, Verdict, first_difference
from heads.evaluation.methods import (
    LOOKUP_ALONE,
    GreedySettings,
    Method,
    Outcome,
    SampledSettings,
    counted_forwards,
    lookup_alone,
    penalty_used,
    plain,
    prompt_lookup,
    tree,
)
from heads.evaluation.same_text import SameText
from heads.evaluation.throughput import RESAMPLES, MethodResult, compare, count_runs, describe_verdicts, ratio_interval
from heads.families import create


class Clock:
    """Seconds that pass only when a method says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timed_method(
    clock: Clock, name: str, seconds: list[float], log: list[str], tokens: Callable[[Tensor], list[int]]
) -> Method:
    """A method whose runs take these seconds one after another; the first is the warm-up."""
    left = iter(seconds)

    def run(prompt_1T: Tensor) -> Outcome:
        log.append(name)
        clock.now += next(left)
        return Outcome(tokens=tokens(prompt_1T), passes=2)

    return Method(name=name, run=run)


def four_tokens(_: Tensor) -> list[int]:
    return [1, 2, 3, 4]


def compare_tokens(_: Tensor, base: list[int], tokens: list[int]) -> Verdict:
    return Verdict(differs_at=first_difference(base, tokens))


def test_rows_are_medians_over_repeats_and_ratios_to_the_first_method() -> None:
    clock, log = Clock(), []
    prompts = [torch.tensor([[0]]), torch.tensor([[1]])]
    # warm-up 99; then repeats of prompt 0 and prompt 1 in turn
    base = timed_method(clock, "plain", [99, 4, 8, 4, 8, 40, 8], log, four_tokens)
    fast = timed_method(clock, "fast", [99, 2, 2, 1, 4, 2, 2], log, four_tokens)
    advanced: list[None] = []
    rows = compare(
        [base, fast],
        prompts,
        repeats=3,
        verdict=compare_tokens,
        clock=clock,
        advance=lambda: advanced.append(None),
    )
    assert [row.name for row in rows] == ["plain", "fast"]
    assert rows[0].tokens == 8
    assert rows[0].tokens_per_second == pytest.approx(8 / (4 + 8))
    assert rows[1].tokens_per_second == pytest.approx(8 / (2 + 2))
    assert rows[1].ratio == pytest.approx(3.0)
    assert (rows[0].ratio, rows[0].ratio_low, rows[0].ratio_high) == (1.0, 1.0, 1.0)
    assert rows[1].ratio_low == pytest.approx((4 + 8) / (1 + 4))
    assert rows[1].ratio_high == pytest.approx((40 + 8) / (2 + 2))
    assert rows[1].tokens_per_pass == pytest.approx(8 / 4)
    assert rows[1].same_text == "yes"
    assert len(advanced) == count_runs([base, fast], prompts, 3) == len(log)


def test_the_interval_is_a_paired_bootstrap_over_prompts() -> None:
    rng = np.random.default_rng(7)
    tokens, plain_tokens = rng.integers(20, 60, 5).astype(float), rng.integers(20, 60, 5).astype(float)
    seconds, plain_seconds = rng.uniform(1, 3, (5, 3)), rng.uniform(2, 5, (5, 3))
    found = ratio_interval(tokens, seconds, plain_tokens, plain_seconds, np.random.default_rng(3))

    samples = np.random.default_rng(3).multinomial(5, [0.2] * 5, size=RESAMPLES)
    medians = []
    for times in samples:  # the definition, prompt by prompt
        drawn = [p for p in range(5) for _ in range(times[p])]
        speeds = [sum(tokens[p] for p in drawn) / sum(seconds[p, r] for p in drawn) for r in range(3)]
        plain_speeds = [sum(plain_tokens[p] for p in drawn) / sum(plain_seconds[p, r] for p in drawn) for r in range(3)]
        medians.append(sorted(ours / base for ours, base in zip(speeds, plain_speeds, strict=True))[1])
    ordered = sorted(medians)
    assert found[0] == pytest.approx(ordered[round(0.025 * (RESAMPLES - 1))], rel=1e-3)
    assert found[1] == pytest.approx(ordered[round(0.975 * (RESAMPLES - 1))], rel=1e-3)


def test_a_ratio_is_within_the_range_of_its_repeats_though_medians_by_prompt_are_not() -> None:
    clock, log = Clock(), []
    prompts = [torch.tensor([[0]]), torch.tensor([[1]])]
    base = timed_method(clock, "plain", [9, 1, 1, 1, 1, 1, 1], log, four_tokens)
    # each repeat has one slow prompt but the last; the medians of both prompts would be fast
    ours = timed_method(clock, "ours", [9, 1, 9, 9, 1, 1, 9], log, four_tokens)
    row = compare([base, ours], prompts, repeats=3, verdict=compare_tokens, clock=clock)[1]
    assert row.ratio_low <= row.ratio <= row.ratio_high
    assert row.ratio == pytest.approx(0.2)


def test_a_headline_above_its_own_repeats_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="outside the range of its repeats"):
        MethodResult(
            name="ours", tokens=8, tokens_per_second=1.0, ratio=2.88, ratio_low=2.91, ratio_high=2.95,
            interval=(2.0, 3.0), tokens_per_pass=1.0, repeated_4grams=0.0, same_text="yes",
        )  # fmt: skip


def test_texts_are_scored_by_another_model_where_one_is_given() -> None:
    clock, log = Clock(), []
    prompts = [torch.tensor([[0]]), torch.tensor([[1]])]
    methods = [timed_method(clock, "plain", [1.0] * 3, log, four_tokens)]
    scored: list[list[int]] = []

    def log_likelihood(_: Tensor, tokens: list[int]) -> float:
        scored.append(tokens)
        return len(tokens) * float(np.log(0.25 if len(scored) == 1 else 0.5))

    arguments = {"repeats": 1, "verdict": compare_tokens, "clock": clock}
    row = compare(methods, prompts, log_likelihood=log_likelihood, **arguments)[0]
    assert row.perplexity == pytest.approx(8**0.5)
    assert row.perplexity_interval == pytest.approx((2.0, 4.0))  # samples of one text alone are its own perplexity
    assert scored == [[1, 2, 3, 4]] * 2


def test_methods_are_interleaved_and_take_turns_at_going_first() -> None:
    clock, log = Clock(), []
    methods = [timed_method(clock, name, [1.0] * 5, log, four_tokens) for name in "abc"]
    compare(methods, [torch.tensor([[0]]), torch.tensor([[1]])], repeats=2, verdict=compare_tokens, clock=clock)
    assert "".join(log) == "abc" + "abc" + "bca" + "bca" + "cab"


def test_another_text_is_told_by_prompt_and_token_from_1() -> None:
    clock, log = Clock(), []

    def wrong_on_the_second(prompt_1T: Tensor) -> list[int]:
        return [1, 2, 9, 4] if int(prompt_1T) else [1, 2, 3, 4]

    methods = [
        timed_method(clock, "plain", [1.0] * 3, log, four_tokens),
        timed_method(clock, "other", [1.0] * 3, log, wrong_on_the_second),
    ]
    prompts = [torch.tensor([[0]]), torch.tensor([[1]])]
    rows = compare(methods, prompts, repeats=1, verdict=compare_tokens, clock=clock)
    assert rows[1].same_text == "no: prompt 2, token 3"


def test_verdicts_in_words() -> None:
    assert describe_verdicts([Verdict(), Verdict()]) == "yes"
    assert describe_verdicts([Verdict(ties=1), Verdict()]) == "yes (1 tie)"
    assert describe_verdicts([Verdict(ties=1), Verdict(ties=2)]) == "yes (3 ties)"
    excused = Ruling(position=1, plain=3, other=4, gap=0.01, rounding=0.1)
    wrong = Ruling(position=7, plain=3, other=4, gap=0.5, rounding=0.1)
    assert describe_verdicts([Verdict(ties=1, rulings=(excused,)), Verdict()]) == "yes (1 excused)"
    parted = Verdict(ties=1, differs_at=7, rulings=(excused, wrong))
    assert describe_verdicts([Verdict(), parted]) == "no: prompt 2, token 8"


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        compare([], [], verdict=compare_tokens)


def test_passes_of_a_method_that_counts_none_come_from_an_untimed_run() -> None:
    clock = Clock()
    method = Method(name="m", run=lambda _: Outcome(tokens=[1, 2, 3, 4]), count_passes=lambda _: 3)
    clock_step = Method(name="plain", run=timed_method(clock, "p", [1.0] * 2, [], four_tokens).run)
    clock_less = Method(name="m", run=method.run)
    prompts = [torch.tensor([[0]])]

    def ticking() -> float:
        clock.now += 1.0
        return clock.now

    rows = compare([clock_step, method], prompts, repeats=1, verdict=compare_tokens, clock=ticking)
    assert rows[1].tokens_per_pass == pytest.approx(4 / 3)
    with pytest.raises(ValueError, match="count_passes"):
        compare([clock_less], prompts, repeats=1, verdict=compare_tokens, clock=ticking)


def test_real_methods_agree_with_plain_and_count_their_passes() -> None:
    model = shared_model("llama")
    settings = GreedySettings(new_tokens=12, repetition_penalty=1.1)
    token_heads = create("medusa", model, num_heads=2).to(model.dtype)
    methods = [plain(model, settings), prompt_lookup(model, settings), tree(model, token_heads, settings, "medusa", 4)]
    prompts = [random_tokens(1, 6, seed=seed) for seed in range(2)]
    rows = compare(methods, prompts, repeats=1, verdict=SameText(model=model, settings=settings))
    assert [row.same_text for row in rows] == ["yes", "yes", "yes"]
    assert rows[0].tokens_per_pass == 1.0
    assert all(row.tokens_per_pass >= 1.0 for row in rows)


def test_sampled_texts_are_plains_where_a_token_takes_one_random_number() -> None:
    model = shared_model("llama")
    settings = SampledSettings(new_tokens=12)
    token_heads = create("medusa", model, num_heads=2).to(model.dtype)
    methods = [
        plain(model, settings),
        lookup_alone(model, token_heads, settings),
        tree(model, token_heads, settings, "exact", 4, 0),
        tree(model, token_heads, settings, "typical", 4, 0, rule="typical"),
        prompt_lookup(model, settings),
    ]
    prompts = [random_tokens(1, 6, seed=seed) for seed in range(2)]
    rows = compare(methods, prompts, repeats=1, verdict=SameText(model=model, settings=settings))
    assert [row.same_text for row in rows] == ["yes", "yes", "yes", "lossy", "same distribution"]
    assert rows[1].name == LOOKUP_ALONE
    greedy = plain(model, GreedySettings(new_tokens=12)).run(prompts[0]).tokens
    assert methods[0].run(prompts[0]).tokens == methods[0].run(prompts[0]).tokens != greedy


def penalised() -> Any:
    """A model whose own settings change its distribution."""
    model = tiny_model("llama")
    own = {"repetition_penalty": 2.5, "top_k": 2, "top_p": 0.3, "min_p": 0.5, "typical_p": 0.3, "epsilon_cutoff": 0.3}
    model.generation_config.update(do_sample=True, **own)
    return model


def test_a_penalty_of_one_is_none_and_no_penalty_is_the_backbones_own() -> None:
    model, unchanged, prompt_1T = penalised(), tiny_model("llama"), random_tokens(1, 6)

    def text(model: Any, penalty: float | None) -> list[int]:
        return plain(model, GreedySettings(new_tokens=24, repetition_penalty=penalty)).run(prompt_1T).tokens

    assert text(model, 1.0) == text(unchanged, None) != text(model, None)
    assert text(model, None) == text(unchanged, 2.5)
    assert [penalty_used(model, given) for given in (None, 1.0, 1.3)] == [2.5, 1.0, 1.3]
    assert penalty_used(unchanged, None) == 1.0


@pytest.mark.filterwarnings("error")
def test_samples_are_of_the_whole_distribution_whatever_the_backbones_own_settings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, prompt_1T, settings = penalised(), random_tokens(1, 6), SampledSettings(new_tokens=24)
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    wanted = plain(tiny_model("llama"), SampledSettings(new_tokens=24)).run(prompt_1T).tokens
    token_heads = create("medusa", model, num_heads=2).to(model.dtype)
    methods = [plain(model, settings), tree(model, token_heads, settings, "exact", 4, 0)]
    try:
        assert [method.run(prompt_1T).tokens for method in methods] == [wanted, wanted]
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_plain_generation_runs_one_pass_for_each_token() -> None:
    model = shared_model("llama")
    prompt_1T = random_tokens(1, 6)
    with counted_forwards(model) as calls:
        outcome = plain(model, GreedySettings(new_tokens=7)).run(prompt_1T)
    assert len(calls) == outcome.passes == len(outcome.tokens)
    assert "forward" not in vars(model)  # the class's own method again


def test_same_text_finds_a_wrong_token_on_a_real_model() -> None:
    model = shared_model("llama")
    settings = GreedySettings(new_tokens=8)
    prompt_1T = random_tokens(1, 6)
    tokens = plain(model, settings).run(prompt_1T).tokens
    wrong = [*tokens[:3], (tokens[3] + 1) % 29, *tokens[4:]]
    judged = SameText(model=model, settings=settings)(prompt_1T, tokens, wrong)
    assert judged.differs_at == 3
