"""The time of a pass: the model by hand, and the measurements on a clock that counts its readings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from throwaway_families import fitted_heads
from tiny import random_tokens
from tuning_cases import (
    counting_clock,
    some_times,
)

import heads
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.tuning import timing
from heads.tuning.timing import PassTimer, interleaved_medians, measure_times


def test_the_seconds_of_a_pass_by_hand():
    times = some_times()
    tree = heads.Tree([[0], [1], [0, 0], [1, 0], [0, 0, 0]])  # levels expand 1, 2 and 1 nodes
    drafting = (0.2 + 0.1) + (0.2 + 0.2) + (0.2 + 0.1)
    assert times.static(tree) == pytest.approx(drafting + 1.6 + 0.05)
    assert replace(times, grounded=False).static(tree) == pytest.approx(3 * 0.3 + 1.6 + 0.05), "one row serves all"
    assert times.step_at(2, 8) == pytest.approx(2 * 0.6), "above what was timed in proportion"
    assert times.dynamic(DynamicTree(nodes=5, depth=2, width=2)) == pytest.approx(0.6 + 1.5 + 0.07)


def test_recurrent_layers_cost_time_by_levels():
    times, tree, dynamic = some_times(level=0.25), Tree([[0], [0, 0], [1]]), DynamicTree(nodes=5, depth=3, width=2)
    assert times.static(tree) == pytest.approx(some_times().static(tree) + 0.25)
    assert times.dynamic(dynamic) == pytest.approx(some_times().dynamic(dynamic) + 2 * 0.25)
    assert times.scaled(2.0).static(tree) == pytest.approx(2 * times.static(tree))


def test_times_of_a_slower_machine():
    times, tree, dynamic = some_times(), Tree([[0], [0, 0], [1]]), DynamicTree(nodes=5, depth=2, width=2)
    assert times.scaled(2.0).static(tree) == pytest.approx(2 * times.static(tree))
    assert times.scaled(2.0).dynamic(dynamic) == pytest.approx(2 * times.dynamic(dynamic))
    assert times.scaled(2.0).plain == 2 * times.plain
    assert times.scaled(2.0).grounded == times.grounded


def test_medians_are_interleaved():
    calls: list[str] = []

    def task(name: str) -> Callable[[], float]:
        def run() -> float:
            calls.append(name)
            return float(len(calls))

        return run

    found = interleaved_medians({name: task(name) for name in "abc"}, repeats=3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert found == {"a": 9.0, "b": 7.0, "c": 8.0}


@pytest.mark.parametrize(("family", "batch"), [("medusa", 1), ("grounded", 3)])
def test_every_part_of_a_pass_is_timed(family, batch):
    """On a clock that counts its readings each part takes one second, and a pass one for each row's tokens."""
    token_heads = fitted_heads(family, "llama")
    tokens_BS = torch.cat([random_tokens(1, 9, seed=70 + n) for n in range(batch)])
    times = measure_times(token_heads, tokens_BS, settings={}, repeats=1, clock=counting_clock())
    assert set(times.verify) == set(timing.NODES)
    assert set(times.verify.values()) == set(times.step.values()) == set(times.grow.values()) == {1.0}
    grounded = token_heads.grounded
    assert set(times.grow) == set(itertools.product((1, 2, 3), timing.WIDTHS if grounded else [1]))
    assert set(times.step) == {(k, m) for k in (1, 2, 3) for m in (timing.EXPANDING if grounded and k > 1 else [1])}
    assert (times.plain, times.batch, times.context) == (1.0, batch, 9)


def test_a_step_is_timed_over_all_its_nodes(monkeypatch):
    token_heads = fitted_heads("grounded", "llama")
    seen: list[tuple[int, int]] = []
    plain_step = token_heads.step
    monkeypatch.setattr(
        token_heads, "step", lambda k, level, t, p: (seen.append((k, len(t))), plain_step(k, level, t, p))[1]
    )
    timer = PassTimer(token_heads, random_tokens(2, 9, seed=1), counting_clock(), {})
    for k, expanding in ((1, 1), (2, 4), (3, 4)):
        run = timer.step(k, expanding)
        seen.clear()
        run()
        assert seen == [(k, 2 * expanding)]


def test_nodes_that_are_timed_are_different_tokens(monkeypatch):
    """One token at every node would wake the same experts of a mixture, and a wide tree would look cheap."""
    token_heads, tokens_BS = fitted_heads("grounded", "llama"), random_tokens(2, 9, seed=1)
    timer = PassTimer(token_heads, tokens_BS, counting_clock(), {})
    seen, verify = [], token_heads.backbone.verify
    monkeypatch.setattr(
        token_heads.backbone,
        "verify",
        lambda state, nodes_BN, *more: (seen.append(nodes_BN), verify(state, nodes_BN, *more))[1],
    )
    timer.verify(12)()
    assert torch.equal(seen[0], torch.cat([tokens_BS.flip(1), tokens_BS.flip(1)[:, :3]], dim=1))
