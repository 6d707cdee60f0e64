"""Repetition by hand; a text beside plain generation's: a difference is found, a tie excused, nothing after a tie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.evaluation.generated_text import Verdict, compare_texts, excuse_ties, first_difference, repeated_ngrams


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([1, 2, 3, 4, 5, 6], 0.0),  # 3 different 4-grams
        ([7] * 8, 0.8),  # 5 times the same: 1 - 1/5
        ([1, 2, 1, 2, 1, 2, 1], 0.5),
        ([1, 2, 3], 0.0),  # too short to have any
        ([], 0.0),
    ],
)
def test_repeated_4grams_are_counted_as_by_hand(tokens: list[int], share: float) -> None:
    assert repeated_ngrams(tokens) == pytest.approx(share)


def test_first_difference_counts_the_end_of_the_shorter_text() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def scores(**by_token: float) -> Tensor:
    """Scores over a vocabulary of 10, 0 where nothing is said: scores(t3=10.0)."""
    found_V = torch.zeros(10)
    for name, value in by_token.items():
        found_V[int(name[1:])] = value
    return found_V


def never(_: list[int]) -> list[int]:
    raise AssertionError("plain generation was asked to go on without need")


def test_a_real_difference_is_told_with_its_place() -> None:
    found = compare_texts([5, 3, 1], [5, 4, 1], excuse_ties(lambda _: scores(t3=10.0, t4=9.9), torch.float32), never)
    assert found == Verdict(differs_at=1)


def test_a_token_that_is_no_runner_up_is_no_tie_though_two_others_are() -> None:
    found = compare_texts([5, 3], [5, 6], excuse_ties(lambda _: scores(t3=10.0, t4=10.0), torch.float32), never)
    assert found == Verdict(differs_at=1)


def test_a_shorter_text_is_a_difference() -> None:
    assert compare_texts([5, 3], [5], excuse_ties(lambda _: scores(t3=1.0), torch.float32), never).differs_at == 1


def test_a_tie_is_excused_and_the_rest_is_held_against_plain_from_there() -> None:
    nearly = scores(t3=10.0, t4=10.0 - 1e-5)  # 8 units of float32's eps at 10
    asked: list[list[int]] = []

    def go_on(new: list[int]) -> list[int]:
        asked.append(new)
        return [*new, 8]

    assert compare_texts([5, 3, 1], [5, 4, 8], excuse_ties(lambda _: nearly, torch.float32), go_on) == Verdict(ties=1)
    assert asked == [[5, 4]]


def test_a_tie_does_not_excuse_what_follows_it() -> None:
    def scores_at(new: list[int]) -> Tensor:
        return scores(t3=10.0, t4=10.0) if len(new) == 1 else scores(t8=10.0)

    found = compare_texts([5, 3, 1], [5, 4, 9], excuse_ties(scores_at, torch.float32), lambda new: [*new, 8])
    assert found == Verdict(differs_at=2, ties=1)


def test_what_is_a_tie_in_float32_is_none_in_float64() -> None:
    def nearly(_: list[int]) -> Tensor:
        return scores(t3=10.0, t4=10.0 - 1e-5)

    assert compare_texts([3], [4], excuse_ties(nearly, torch.float32), lambda new: new).ties == 1
    assert compare_texts([3], [4], excuse_ties(nearly, torch.float64), lambda new: new).differs_at == 0


def test_masked_scores_do_not_widen_the_tolerance() -> None:
    masked = scores(t3=10.0, t4=9.9)
    masked[0] = -torch.inf
    assert compare_texts([3], [4], excuse_ties(lambda _: masked, torch.float32), never).differs_at == 0
