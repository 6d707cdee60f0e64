"""The form of weights that is advised is the one whose products, with the trees at hand, emit most tokens a second."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from tuning_cases import counting_clock

from heads.backbone.model import Backbone
from heads.decoding.trees.static import Tree
from heads.products.packed import pack_weights, what_stops_packing
from heads.tuning import dtype_costs
from heads.tuning.dtype_costs import DTYPES, NODES, Form, advise, form_of, measure_forms, most_tokens
from heads.tuning.search import Choice

FLAT = {1: 2.0, 2: 2.0, 4: 2.0, 8: 2.0, 16: 3.0}
STEEP = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}


def choice(tokens_per_pass: float) -> Choice:
    tree = Tree([[rank] for rank in range(7)])
    return Choice(tree=tree, nodes=8, depth=1, tokens_per_pass=tokens_per_pass, seconds_per_pass=1.0, batch=1)


PLAIN, BFLOAT16 = Form(torch.float32), Form(torch.bfloat16)
PACKED = Form(torch.float32, packed=True)


def test_every_form_and_size_is_measured_as_often() -> None:
    costs = measure_forms(Backbone(tiny_model("llama", dtype=torch.float32)), 2, counting_clock())
    forms = [Form(dtype) for dtype in DTYPES]
    forms += [Form(dtype, packed=True) for dtype in DTYPES if not what_stops_packing(torch.ones(1, 1, dtype=dtype))]
    assert {form: tuple(found) for form, found in costs.items()} == dict.fromkeys(forms, NODES)
    assert len({seconds for found in costs.values() for seconds in found.values()}) == 1, "a tick for each product"


def test_a_machine_that_cannot_pack_is_measured_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtype_costs, "what_stops_packing", lambda _: "a reason")
    costs = measure_forms(Backbone(tiny_model("llama", dtype=torch.float32)), 1, counting_clock())
    assert list(costs) == [PLAIN, BFLOAT16]


@pytest.mark.parametrize(("tokens_per_pass", "best"), [(1.8, "bfloat16"), (2.5, "float32")])
def test_a_flat_dtype_wins_only_where_enough_is_accepted(tokens_per_pass: float, best: str) -> None:
    """A plain step in the steep dtype takes half as long, so trees in the flat one must emit more than two."""
    costs = {PLAIN: FLAT, BFLOAT16: STEEP}
    choices = [choice(tokens_per_pass)]
    assert most_tokens(STEEP, choices) == 1.0
    assert f"{best} would be" in advise(costs, PLAIN, choices)


@pytest.mark.parametrize(
    ("tuned", "costs", "said"),
    [
        (PLAIN, {PLAIN: STEEP, PACKED: FLAT}, "flattest in float32 packed; float32 packed would be 2.50 × as fast as "),
        (PLAIN, {PLAIN: STEEP, PACKED: FLAT}, "float32, which was tuned here: try --pack."),
        (BFLOAT16, {BFLOAT16: STEEP, PACKED: FLAT}, "which was tuned here: try --dtype float32 --pack."),
        (PACKED, {PLAIN: FLAT, PACKED: STEEP}, "float32 packed, which was tuned here: try no --pack."),
        (PACKED, {PLAIN: STEEP, PACKED: FLAT}, "float32 packed would be the fastest here."),
    ],
)
def test_the_advice_names_the_form_and_its_options(tuned: Form, costs: dict[Form, dict[int, float]], said: str) -> None:
    assert said in advise(costs, tuned, [choice(5.0)])


def test_the_form_of_a_backbone_says_whether_it_is_packed() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    assert form_of(Backbone(model)) == PLAIN
    pack_weights(model)
    assert form_of(Backbone(model)) == PACKED


def test_a_dtype_that_was_not_measured_gets_no_ratio() -> None:
    said = advise({PLAIN: FLAT, BFLOAT16: STEEP}, Form(torch.float64), [])
    assert said.endswith("bfloat16 would be the fastest here.")
