"""Conditional acceptance, best trees and tokens per pass, by hand and against all trees."""

from __future__ import annotations

import numpy as np
import pytest
from tuning_cases import (
    MISS,
    all_trees,
    expected_length,
    some_ranks,
)

import heads
from heads.tuning import acceptance_rates
from heads.tuning.acceptance_rates import RankCounts, accepted, best_nodes, count_passes, places_of, tokens_per_pass
from heads.tuning.replay import NEVER


def test_conditionals_and_their_back_off_by_hand():
    counts = RankCounts([np.array([[0, 0], [0, 0], [0, 1], [1, 0], [1, MISS], [MISS, 0]])], back_off=2)
    assert counts.conditional((), 0) == 3 / 6
    assert counts.conditional((), 1) == 2 / 6
    marginal = 3 / 5  # rank 0 at depth 2, of the five places whose first token was among the first
    last = (2 + 2 * marginal) / (3 + 2)  # behind rank 0: 2 of 3
    assert counts.conditional((0,), 0) == pytest.approx(
        (2 + 2 * last) / (3 + 2)
    )  # at depth 2 path and last rank are one
    assert counts.conditional((7,), 0) == pytest.approx(marginal), "a path that was never seen: the marginal"


def test_a_path_is_told_from_others_that_end_on_the_same_rank():
    """After (0, 0) always 0, after (1, 0) never: the last rank alone would say one half for both."""
    ranks = np.array([[0, 0, 0]] * 40 + [[1, 0, 1]] * 40)
    counts = RankCounts([ranks])
    assert counts.conditional((0, 0), 0) > 0.9
    assert counts.conditional((1, 0), 0) < 0.1
    assert RankCounts([ranks], back_off=10**6).conditional((0, 0), 0) == pytest.approx(0.5, abs=1e-3)


def test_the_expected_length_of_a_small_tree_by_hand():
    counts = RankCounts([np.array([[0, 0], [0, 0], [0, MISS], [1, 1], [MISS, MISS]])], back_off=0)
    # 0: 3 of 5, 0-0: 2 of 3 of those, 1: 1 of 5
    assert expected_length(counts, [(0,), (0, 0), (1,)]) == pytest.approx(3 / 5 + 2 / 5 + 1 / 5)
    assert [path for _, path in best_nodes(counts, nodes=3, depth=2)] == [(0,), (0, 0), (1,)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_first_nodes_are_the_best_tree_of_every_size(seed, depth):
    counts = RankCounts([some_ranks(seed)])
    for nodes in (1, 2, 3, 4):
        if nodes > sum(3**d for d in range(1, depth + 1)):
            continue
        found = [path for _, path in best_nodes(counts, nodes=nodes, depth=depth)]
        assert all(path[:-1] in {(), *found} for path in found), "a tree"
        wanted = max(expected_length(counts, tree) for tree in all_trees(depth, 3, nodes))
        assert expected_length(counts, found) == pytest.approx(wanted, abs=1e-12)


def test_a_limit_on_expanding_nodes_is_kept():
    counts = RankCounts([some_ranks(1, places=400)])
    for width in (1, 2):
        tree = heads.Tree([path for _, path in best_nodes(counts, nodes=20, depth=3, width=width)])
        assert max(len(level.parents) for level in tree.levels) <= width


def test_passes_by_hand():
    assert count_passes(np.array([1, 0, 2, 0, 0])) == 2  # from 0 over 1 to 2, from 2 to the end
    assert count_passes(np.array([0, 0, 0])) == 3
    assert tokens_per_pass([np.array([[1], [NEVER], [1], [NEVER], [NEVER]])], 2) == pytest.approx(5 / 3)


@pytest.mark.parametrize("seed", range(3))
def test_places_tell_how_far_every_tree_comes(seed):
    ranks_PK, counts = some_ranks(seed, places=200), RankCounts([some_ranks(seed)])
    nodes = best_nodes(counts, nodes=20, depth=3)
    places_PK = places_of(nodes, ranks_PK)
    for size in (2, 5, 12, 21):
        paths = {path for _, path in nodes[: size - 1]}
        wanted = [next((d for d in (3, 2, 1) if tuple(place[:d]) in paths), 0) for place in ranks_PK.tolist()]
        assert accepted(places_PK, size).tolist() == wanted


def test_the_back_off_is_what_the_docs_say():
    assert acceptance_rates.BACK_OFF == 8
