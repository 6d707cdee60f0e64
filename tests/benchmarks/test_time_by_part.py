"""Parts of a token's time add up to the wall time, on both sides, and what was wrapped for it is put back."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny import random_tokens, shared_model

from benchmarks.speed.decoding.time_by_part import (
    Parts,
    Stopwatch,
    measure_once,
    measure_parts,
    summarise,
    watch_heads,
    watch_plain,
)
from heads.evaluation.methods import GreedySettings, plain, tree
from heads.families import create


class Ticks:
    """A clock that goes one second further at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_stopwatch_adds_up_calls_and_errors_alike() -> None:
    watch = Stopwatch(Ticks())
    assert watch.wrap(lambda x: x + 1)(1) == 2
    with pytest.raises(ZeroDivisionError):
        watch.wrap(lambda: 1 / 0)()
    assert watch.seconds == 2.0


def test_parts_are_sums_of_medians_by_token() -> None:
    by_prompt = [
        [(2.0, 1.0, 0.5, 10), (4.0, 1.0, 0.7, 10), (3.0, 9.0, 0.6, 10)],
        [(1.0, 0.0, 0.2, 30)] * 3,
    ]
    found = summarise("m", by_prompt)
    assert (found.backbone, found.heads, found.rest) == pytest.approx((100.0, 25.0, 20.0))
    assert found.total == pytest.approx(145.0)


def test_every_forward_of_plain_generation_is_counted_as_the_backbones() -> None:
    model, request = shared_model("llama"), GreedySettings(new_tokens=5)
    watch = functools.partial(watch_plain, model)
    backbone, heads, rest, tokens = measure_once(plain(model, request), watch, random_tokens(1, 6), Ticks())
    # A reading of the clock is a second: each forward takes one, and generate's own time is what lies around them.
    assert (backbone, heads, tokens) == (5.0, 0.0, 5)
    assert rest == 11 - 5


def test_head_and_backbone_forwards_of_tree_decoding_are_told_apart_and_put_back() -> None:
    model, request = shared_model("llama"), GreedySettings(new_tokens=6)
    token_heads = create("medusa", model, num_heads=2).to(model.dtype)
    ours = tree(model, token_heads, request, "medusa", 4)
    watched = [(plain(model, request), functools.partial(watch_plain, model))]
    watched.append((ours, functools.partial(watch_heads, token_heads)))
    found = measure_parts(watched, [random_tokens(1, 6)], 2, torch.device("cpu"))
    assert [p.name for p in found] == ["plain", "medusa"]
    assert found[0].heads == 0.0
    assert min(found[1].backbone, found[1].heads, found[1].rest, found[0].rest) > 0
    assert isinstance(found[1], Parts)
    for wrapped, name in ((model, "forward"), (token_heads.backbone, "forward"), (token_heads, "projection")):
        assert name not in vars(wrapped)


def test_layers_that_heads_run_in_a_pass_are_head_forwards() -> None:
    model = shared_model("llama")
    token_heads = create("grounded", model, num_heads=1, prefix_layers=1).to(model.dtype)
    ours = tree(model, token_heads, GreedySettings(new_tokens=6), "grounded", 4, 0)
    watch = functools.partial(watch_heads, token_heads)
    backbone, heads, _, _ = measure_once(ours, watch, random_tokens(1, 6), Ticks())
    passes = backbone / 2  # a forward and an unembedding each
    assert heads == passes + 2 * (passes - 1), "a stack in each pass; a step and a projection behind all but the last"
    assert "run_stack" not in vars(token_heads)
