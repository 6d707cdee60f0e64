"""The walk down a tree, that single choices are `generate`'s, and modified rejection sampling at its edges.

That the rules are lossless is enumerated in test_lossless.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.decoding.acceptance.probability import (
    best_at_nodes,
    choose_by_rejection,
    reject_in_turn,
    residual,
    settle,
    typical_threshold,
    walk,
    walk_typical,
)
from heads.decoding.request.request import choose_best, choose_sampled
from heads.decoding.trees.static import Tree

TREE = Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0]])  # nodes 1 2 3 4 5 6
TOKENS = [7, 3, 4, 8, 5, 9, 4]


def run(chosen: dict[int, int], end_after: int = 99) -> tuple[list[int], list[int]]:
    """The path, and the tokens emitted."""
    emitted: list[int] = []

    def choose_at(node: int) -> int:
        emitted.append(chosen[node])
        return chosen[node]

    return walk(TREE, TOKENS, choose_at, lambda: len(emitted) >= end_after), emitted


@pytest.mark.parametrize(
    ("chosen", "path", "emitted"),
    [
        ({0: 6}, [0], [6]),  # no child holds it
        ({0: 3, 1: 6}, [0, 1], [3, 6]),
        ({0: 3, 1: 5, 4: 2}, [0, 1, 4], [3, 5, 2]),
        ({0: 3, 1: 4, 2: 8, 3: 1}, [0, 1, 2, 3], [3, 4, 8, 1]),  # a leaf gives one token more
        ({0: 9, 5: 4, 6: 4}, [0, 5, 6], [9, 4, 4]),
        ({0: 4}, [0], [4]),  # held by nodes deeper down, not by a child of the root
    ],
)
def test_walk(chosen, path, emitted):
    assert run(chosen) == (path, emitted)


@pytest.mark.parametrize("end_after", [1, 2, 3])
def test_walk_ends_inside_a_path(end_after):
    path, emitted = run({0: 3, 1: 4, 2: 8, 3: 1}, end_after)
    assert emitted == [3, 4, 8][:end_after]
    assert path == [0, 1, 2, 3][: end_after + 1], "the ending token was drafted and is on the path"


def test_of_branches_that_begin_alike_the_longest_is_taken():
    """Nodes 1 and 2 hold the same token; only what follows node 2 is right."""
    tree = Tree([[0], [1], [1, 0]])
    chosen = {0: 5, 1: 6, 2: 6, 3: 9}
    asked = []

    def choose_at(node):
        asked.append(node)
        return chosen[node]

    assert walk(tree, [7, 5, 5, 6], choose_at, lambda: False) == [0, 2, 3]
    assert len(asked) == 3, "one choice for each emitted token, however many branches hold it"


def test_a_chain_beside_the_tree_is_followed_to_its_end():
    """Tree 7 -> 5 -> 6, chain 7 -> 5 -> 8 -> 9."""
    shape = Tree([[0], [0, 0]]).with_chain(3)
    tokens = [7, 5, 6, 5, 8, 9]
    chosen = {0: 5, 1: 8, 3: 8, 4: 9, 5: 1}
    assert walk(shape, tokens, lambda node: chosen[node], lambda: False) == [0, 3, 4, 5]
    chosen = {0: 5, 1: 6, 3: 6, 2: 1}
    assert walk(shape, tokens, lambda node: chosen[node], lambda: False) == [0, 1, 2]


def test_greedy_takes_the_first_of_equals():
    assert choose_best(torch.tensor([[1.0, 3.0, 3.0, 2.0]])) == 1


def test_greedy_at_all_nodes_compares_in_float32_as_generate_does():
    """Two logits that float64 tells apart and float32 does not: `generate` takes the first, so must we."""
    logits_BNV = torch.tensor([[[1.0, 2.0, 2.0 + 1e-12], [5.0, 4.0, 3.0]]], dtype=torch.float64)
    assert int(logits_BNV[0, 0].argmax()) == 2
    assert best_at_nodes(logits_BNV).tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_at_all_nodes_equals_greedy_at_each(dtype):
    logits_BNV = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    one_by_one = [[choose_best(logits_NV[n : n + 1].float()) for n in range(5)] for logits_NV in logits_BNV]
    assert best_at_nodes(logits_BNV).tolist() == one_by_one


def test_a_draw_is_the_draw_of_generate():
    scores = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    ours = choose_sampled(torch.Generator().manual_seed(2))
    theirs = torch.Generator().manual_seed(2)
    for _ in range(20):
        assert ours(scores) == int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=theirs))


def test_a_draw_without_a_generator_takes_the_global_one():
    scores = torch.zeros(1, 30)
    choose = choose_sampled(None)
    torch.manual_seed(3)
    first = [choose(scores) for _ in range(10)]
    torch.manual_seed(3)
    assert [choose(scores) for _ in range(10)] == first
    assert len(set(first)) > 1


# --- modified rejection sampling -------------------------------------------------------------------------------------


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


P_T, P_D = doubles(0.30, 0.45, 0.10, 0.15), doubles(0.4, 0.3, 0.2, 0.1)  # figure 10 of the paper


@pytest.mark.parametrize(("token", "accepted"), [(0, 0.75), (1, 1.0), (2, 0.5), (3, 1.0)])
def test_figure_10(token, accepted):
    """t₁ is kept with 0.3 / 0.4; t₂ and t₄, for which P_D ≤ P_T, always; the residual is 0.75 on t₂ and 0.25 on t₄."""
    accept_C, rest_V = reject_in_turn(P_T, P_D, [token])
    torch.testing.assert_close(accept_C, doubles(accepted), atol=1e-15, rtol=0.0)
    torch.testing.assert_close(rest_V, doubles(0, 0.75, 0, 0.25), atol=1e-15, rtol=0.0)


def test_a_draft_of_the_backbones_own_distribution_always_stays():
    """Also with float32 drafts, whose sum is not 1: drafts are normalised before they are compared."""
    p_V = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3, dim=-1)
    # A sum of 50 is off by some units in the last place; float32 holds seven digits.
    for q_V, lowest in ((p_V, 1 - 1e-14), (p_V * 0.37, 1 - 1e-14), (p_V.float(), 1 - 1e-6)):
        for token in range(50):
            accept_C, rest_V = reject_in_turn(p_V, q_V, [token])
            assert float(accept_C) >= lowest
            assert rest_V.isfinite().all()
            assert float(rest_V.sum()) == pytest.approx(1, abs=1e-12)


def test_nothing_left_to_draw_from_is_no_division_by_zero():
    """p = q but for rounding upwards in q: the draft may be rejected, and p itself is drawn from."""
    p_V, q_V = doubles(0.25, 0.75, 0.0), doubles(0.25 + 1e-16, 0.75 + 1e-16, 0.0)
    assert residual(p_V, q_V).equal(p_V)
    accept_C, rest_V = reject_in_turn(p_V, p_V, [1, 0])
    assert accept_C.tolist() == [1.0, 0.25], "after the rejection that cannot be, what is left of q is token 0 alone"
    assert rest_V.isfinite().all()
    assert float(rest_V[2]) == 0, "what p forbids is never drawn"


def test_drafts_sampled_on_another_device_than_the_backbones_choice():
    """As with a backbone whose end is on another device than its prompts; a meta device stands for one of them."""
    accept_C, rest_V = reject_in_turn(P_T.to("meta"), P_D.float(), [0, 1])
    assert (accept_C.device.type, rest_V.device.type, rest_V.dtype) == ("meta", "meta", torch.float64)


def test_one_hot_distributions():
    """Greedy on both sides: a draft is kept where it is the backbone's token, else that one is drawn (the paper)."""
    one, other = doubles(0, 1, 0), doubles(0, 0, 1)
    assert reject_in_turn(one, one, [1])[0].tolist() == [1.0]
    accept_C, rest_V = reject_in_turn(one, other, [2])
    assert accept_C.tolist() == [0.0]
    assert rest_V.equal(one)
    # The draft was certain: it stays as often as the backbone would have drawn it.
    accept_C, rest_V = reject_in_turn(doubles(0.2, 0.3, 0.5), other, [2])
    assert accept_C.tolist() == [0.5]
    torch.testing.assert_close(rest_V, doubles(0.4, 0.6, 0), atol=1e-15, rtol=0.0)


def test_drafts_beyond_what_q_could_give_count_as_looked_up():
    """q holds two tokens; the third draft fills up the tree and stays as often as what is left of p gives it."""
    p_V, q_V = doubles(0.1, 0.2, 0.3, 0.4), doubles(0.5, 0.5, 0, 0)
    accept_C, rest_V = reject_in_turn(p_V, q_V, [0, 1, 2])
    # (p - q)₊ is (0, 0, 3, 4) / 7; what is left of q, token 1 alone, takes nothing from it; token 2 stays with 3/7.
    torch.testing.assert_close(accept_C, doubles(0.2, 0.0, 3 / 7), atol=1e-15, rtol=0.0)
    torch.testing.assert_close(rest_V, doubles(0, 0, 0, 1), atol=1e-15, rtol=0.0)
    no_q = torch.zeros(4)  # nothing was drawn: one after the other as often as p draws them
    accept_C, _ = reject_in_turn(p_V, no_q, [3, 0])
    torch.testing.assert_close(accept_C, doubles(0.4, 0.1 / 0.6), atol=1e-15, rtol=0.0)


def test_a_token_without_probability_never_stays():
    p_V, q_V = doubles(0.0, 1.0), doubles(0.9, 0.1)
    generator = torch.Generator().manual_seed(0)
    assert {choose_by_rejection(p_V, q_V, [0], generator) for _ in range(50)} == {1}
    zero_coin = torch.zeros(1, dtype=torch.float64)
    assert settle([0], zero_coin, p_V, generator) == 1


def test_the_first_draft_that_stays_is_the_token():
    generator = torch.Generator().manual_seed(0)
    always, never = 1.0, 0.0
    rest_V = doubles(0, 0, 0, 1)
    assert settle([2, 1], doubles(always, always), rest_V, generator) == 2
    assert settle([2, 1], doubles(never, always), rest_V, generator) == 1
    assert settle([2, 1], doubles(never, never), rest_V, generator) == 3


# --- typical acceptance (lossy) --------------------------------------------------------------------------------------


def test_the_typical_threshold():
    """H of (1/2, 1/4, 1/4) is 1.5 ln 2, so exp(-H) = 2^-1.5."""
    p_V = doubles(0.5, 0.25, 0.25, 0.0)
    assert float(typical_threshold(p_V, epsilon=0.9, delta=0.3)) == pytest.approx(0.3 * 2**-1.5, rel=1e-12)
    assert float(typical_threshold(p_V, epsilon=0.09, delta=0.3)) == 0.09


def test_of_typical_paths_the_longest_is_taken_and_of_equal_ones_the_likeliest():
    ways = {0: [(1, 0.9), (4, 0.2)], 1: [(2, 0.1)], 4: [(5, 0.6)], 5: [], 2: []}
    assert walk_typical(lambda path: ways[path[-1]]) == [0, 4, 5]  # 0.12 beats 0.09
    assert walk_typical(lambda path: [] if path[-1] == 4 else ways[path[-1]]) == [0, 1, 2]
    assert walk_typical(lambda path: []) == [0]
