"""The dtype that is advised is the one whose products, with the trees at hand, emit most tokens a second."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from tuning_cases import counting_clock

from heads.backbone.model import Backbone
from heads.decoding.trees.static import Tree
from heads.tuning.dtype_costs import DTYPES, NODES, advise, measure_dtypes, most_tokens
from heads.tuning.search import Choice

FLAT = {1: 2.0, 2: 2.0, 4: 2.0, 8: 2.0, 16: 3.0}
STEEP = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}


def choice(tokens_per_pass: float) -> Choice:
    tree = Tree([[rank] for rank in range(7)])
    return Choice(tree=tree, nodes=8, depth=1, tokens_per_pass=tokens_per_pass, seconds_per_pass=1.0, batch=1)


def test_every_dtype_and_size_is_measured_as_often() -> None:
    costs = measure_dtypes(Backbone(tiny_model("llama", dtype=torch.float32)), 2, counting_clock())
    assert {dtype: tuple(found) for dtype, found in costs.items()} == dict.fromkeys(DTYPES, NODES)
    assert len({seconds for found in costs.values() for seconds in found.values()}) == 1, "a tick for each product"


@pytest.mark.parametrize(("tokens_per_pass", "best"), [(1.8, "bfloat16"), (2.5, "float32")])
def test_a_flat_dtype_wins_only_where_enough_is_accepted(tokens_per_pass: float, best: str) -> None:
    """A plain step in the steep dtype takes half as long, so trees in the flat one must emit more than two."""
    costs = {torch.float32: FLAT, torch.bfloat16: STEEP}
    choices = [choice(tokens_per_pass)]
    assert most_tokens(STEEP, choices) == 1.0
    assert f"{best} would be" in advise(costs, torch.float32, choices)


def test_a_dtype_that_was_not_measured_gets_no_ratio() -> None:
    said = advise({torch.float32: FLAT, torch.bfloat16: STEEP}, torch.float64, [])
    assert said.endswith("bfloat16 would be the fastest here.")
