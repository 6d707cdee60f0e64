"""Intervals of ratios hold for few questions: simulated methods that are equally fast are rarely called different."""

from __future__ import annotations

import numpy as np
import pytest

from heads.evaluation.judged.win_rates import ratio_with_interval, sum_up
from heads.evaluation.runs.ratios import LEAST_UNITS, ratio_of_ratios, ratio_of_sums, student
from heads.evaluation.speed.comparing import compare
from heads.evaluation.tasks.side_by_side import difference

TRIALS = 1500
MOST = 0.08  # 5 % are aimed at; 1,500 trials are within 1.7 % of a share; unequal questions cost up to 2 %


@pytest.mark.parametrize("questions", [3, 4, 6, 8, 18])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_equally_fast_methods_are_called_different_in_one_trial_of_twenty(questions: int, spread: float):
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(TRIALS):
        length = np.exp(generator.normal(0, spread, questions))
        ours, plain, theirs, their_plain = (
            length * np.exp(generator.normal(0, 0.08, questions)) * factor for factor in (0.4, 1.0, 0.4, 1.0)
        )
        wrong += ratio_of_ratios(plain, ours, their_plain, theirs).verdict != ""
    assert 0.02 < wrong / TRIALS < MOST


def test_rates_of_equal_texts_are_called_different_in_one_trial_of_twenty():
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(TRIALS):
        wins_P = generator.binomial(20, generator.beta(8, 8, size=10)).astype(float)
        _, interval = ratio_with_interval(wins_P, 20 - wins_P)
        assert interval is not None
        wrong += not interval[0] <= 1 <= interval[1]
    assert 0.02 < wrong / TRIALS < MOST


@pytest.mark.parametrize("examples", [8, 20, 100])
def test_equal_models_are_marked_in_at_most_one_trial_of_twenty(examples: int):
    generator = np.random.default_rng(0)
    wrong = 0
    for _ in range(TRIALS):
        found = difference(*generator.integers(0, 2, (2, examples)).astype(float))
        assert found is not None
        wrong += not found[0] <= 0 <= found[1]
    assert wrong / TRIALS < MOST


def test_a_difference_that_is_there_is_found():
    generator = np.random.default_rng(0)
    plain = np.exp(generator.normal(0, 0.5, 6))
    assert ratio_of_sums(plain, plain / 1.5 * np.exp(generator.normal(0, 0.05, 6))).verdict == "more"
    assert ratio_of_sums(plain / 1.5 * np.exp(generator.normal(0, 0.05, 6)), plain).verdict == "less"


def test_fewer_than_three_units_have_neither_interval_nor_verdict():
    few = ratio_of_sums([3.0, 3.1], [1.0, 1.0])
    assert (few.verdict, str(few), few.units < LEAST_UNITS) == ("", "3.05", True)
    three = np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 4.0]])
    assert sum_up(three, three[:, ::-1], 10 + three, 4 + three, most=3)["band"] is None


@pytest.mark.parametrize(
    ("above", "below", "value"),
    [
        ([0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0], 0.0),
        ([5.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0], 0.5),
        ([1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 5.0, 0.0], 2.0),
    ],
    ids=["nothing", "all of one unit", "divided by one unit"],
)
def test_a_sum_of_one_unit_or_none_has_no_interval(above: list[float], below: list[float], value: float):
    found = ratio_of_sums(above, below)
    assert (found.value, found.low, found.high, found.verdict, str(found)) == (value, value, value, "", f"{value:.2f}")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_ratio_that_divides_by_zero_is_refused(zero: int):
    figures = [[1.0, 2.0, 3.0] for _ in range(4)]
    figures[zero] = [0.0] * 3
    with pytest.raises(ValueError, match="A ratio of 3 units would divide by 0"):
        ratio_of_ratios(*figures)


def test_student_is_the_quantile_of_its_density():
    for freedom in (2, 5, 9, 10, 17, 60):
        x = np.linspace(-student(freedom), student(freedom), 200_001)
        density = (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        # ∫ over all x, by the substitution x = √ν tan a
        angle = np.linspace(-np.pi / 2, np.pi / 2, 200_001)
        whole = np.sqrt(freedom) * np.trapezoid(np.cos(angle) ** (freedom - 1), angle)
        assert np.trapezoid(density, x) / whole == pytest.approx(0.95, abs=2e-4)


def run_of(plain_seconds: float, heads_seconds: float) -> dict:
    """A run whose plain generation and heads took so long for 10 tokens of each of six questions."""
    ratio = {"value": 1.0, "low": 1.0, "high": 1.0, "questions": 6}
    methods = ("plain", "heads alone")
    requests = [
        {
            "question_id": str(i),
            "category": "c",
            "methods": {
                "plain": {"tokens": 10, "passes": 10, "seconds": plain_seconds * (1 + i / 100)},
                "heads alone": {"tokens": 10, "passes": 5, "seconds": heads_seconds * (1 + i / 90)},
            },
        }
        for i in range(6)
    ]
    one = {"tokens_per_pass": ratio, "speed_up": ratio, "tokens_per_second": 10 / plain_seconds}
    return {
        "methods": list(methods),
        "new_tokens": 10,
        "form": "text",
        "categories": {name: dict.fromkeys(methods, one) for name in ("overall", "c")},
        "depth": {"heads alone": {"joint": [0.5]}},
        "requests": requests,
    }


@pytest.mark.parametrize(
    ("plain", "heads", "said"),
    [
        (1.0, 0.45, "more"),
        (1.2, 0.54, "within drift"),
        (1.2, 0.3, "more"),
        (0.8, 0.6, "less"),
        (1.2, 0.6, "no difference"),
    ],
)
def test_a_speed_up_within_what_plain_generation_drifted_is_no_win(plain: float, heads: float, said: str):
    section = compare({"first": run_of(1.0, 0.5), "second": run_of(plain, heads)})[1]
    (row,) = [row for row in section.tables[0].rows if row[:2] == ["c", "second"]]
    assert row[-1] == said
    assert "within drift" in section.tables[0].note
