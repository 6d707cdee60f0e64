"""The search finds the fastest tree, against all trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from throwaway_families import fitted_heads
from tiny import random_tokens
from tuning_cases import (
    all_trees,
    counting_clock,
    expected_length,
    some_ranks,
    some_times,
)

import heads
from heads.decoding.trees.dynamic import DynamicTree
from heads.tuning import search
from heads.tuning.acceptance_rates import RankCounts
from heads.tuning.pass_times import PassTimes
from heads.tuning.replay import Replay
from heads.tuning.timing import PassTimer
from heads.tuning.tune import time_finalists, whole_over_modelled


@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_tree_of_most_tokens_a_second(seed):
    """Against all trees of up to 5 nodes, where drafting costs by depth: deeper is not always better."""
    ranks = [some_ranks(seed, places=80), some_ranks(seed + 9, places=80)]
    counts = RankCounts(ranks)
    replays = [Replay(ranks_PK=ranks_PK, dynamic={}) for ranks_PK in ranks]
    chosen_depths = set()
    for cost in (0.02, 0.2, 0.6):
        verify = {n: 1.0 + 0.1 * n for n in range(1, 6)}
        times = some_times(grounded=False, verify=verify, step={(k, 1): cost for k in (1, 2, 3)})

        def speed(tree: Any, times: PassTimes = times) -> float:
            return (1 + expected_length(counts, tree.paths[1:])) / times.static(tree)

        found = max((choice.tree for choice in search.static_choices(replays, times)), key=speed)
        everything = (heads.Tree(paths) for size in range(1, 5) for paths in all_trees(3, 3, size))
        assert speed(found) == pytest.approx(max(map(speed, everything)), rel=1e-12)
        chosen_depths.add(found.depth)
    assert len(chosen_depths) > 1


def test_trees_are_measured_on_texts_that_they_were_not_grown_on():
    """Two texts that share nothing: what is grown on one accepts nothing of the other."""
    one, other = np.full((30, 2), 3), np.full((30, 2), 7)
    replays = [Replay(ranks_PK=ranks_PK, dynamic={}) for ranks_PK in (one, other)]
    times = some_times(step={(k, m): 0.1 for k in (1, 2) for m in (1, 4)})
    assert {choice.tokens_per_pass for choice in search.static_choices(replays, times)} == {1.0}


def choice(tree: Any, *, per_pass: float = 2.0, seconds: float = 1.0) -> search.Choice:
    nodes = tree.nodes if isinstance(tree, DynamicTree) else tree.num_nodes
    return search.Choice(tree=tree, nodes=nodes, depth=1, tokens_per_pass=per_pass, seconds_per_pass=seconds, batch=1)


def chain(nodes: int) -> heads.Tree:
    return heads.Tree([[0] * depth for depth in range(1, nodes)])


def test_leaders_are_the_fastest_of_different_trees_that_have_drafts_accepted():
    seconds = {2: 1.0, 3: 0.8, 4: 0.7, 5: 0.9}
    choices = [choice(chain(nodes), seconds=at) for nodes, at in seconds.items()]
    twice = choice(chain(4), seconds=0.75)
    idle = choice(DynamicTree(nodes=2), per_pass=1.0, seconds=0.01)
    assert [one.nodes for one in search.leaders([*choices, twice, idle])] == [4, 3, 5]
    assert search.leaders([idle]) == []


def test_whole_passes_overrule_the_model_of_times(monkeypatch):
    """The tree that looked fastest was a lucky figure: of three that are timed whole another is faster."""
    whole = {2: 4.0, 3: 0.5, 4: 2.0, None: 1.0}
    timer = PassTimer(fitted_heads("grounded", "llama"), random_tokens(1, 9), counting_clock(), {})
    monkeypatch.setattr(PassTimer, "whole_pass", lambda self, tree: lambda: whole[tree.num_nodes])
    monkeypatch.setattr(PassTimer, "seconds_per_pass", lambda self, tree: whole[tree])
    lucky = [choice(chain(nodes), seconds=0.1 * nodes) for nodes in (2, 3, 4)]
    advanced: list[int] = []
    finalists, plain = time_finalists(timer, search.leaders(lucky), [], 2, lambda: advanced.append(1))
    assert {kind: (one.nodes, one.seconds_per_pass) for kind, one in finalists.items()} == {"static": (3, 0.5)}
    assert (plain, len(advanced)) == (1.0, 3)
    assert whole_over_modelled(lucky, finalists) == pytest.approx(0.5 / 0.3)
    assert whole_over_modelled(lucky, {}) == 1.0
