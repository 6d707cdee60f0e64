"""The walk down a tree, and that single choices are `generate`'s."""

from __future__ import annotations

import pytest
import torch

from heads.decoding.acceptance import best_at_nodes, choose_best, choose_by_lot, walk
from heads.decoding.tree import Tree

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


def test_greedy_at_all_nodes_judges_in_float32_as_generate_does():
    """Two logits that float64 tells apart and float32 does not: `generate` takes the first, so must we."""
    logits_BNV = torch.tensor([[[1.0, 2.0, 2.0 + 1e-12], [5.0, 4.0, 3.0]]], dtype=torch.float64)
    assert int(logits_BNV[0, 0].argmax()) == 2
    assert best_at_nodes(logits_BNV) == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_at_all_nodes_equals_greedy_at_each(dtype):
    logits_BNV = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    one_by_one = [[choose_best(logits_NV[n : n + 1].float()) for n in range(5)] for logits_NV in logits_BNV]
    assert best_at_nodes(logits_BNV) == one_by_one


def test_a_draw_is_the_draw_of_generate():
    scores = torch.randn(1, 30, generator=torch.Generator().manual_seed(1))
    ours = choose_by_lot(torch.Generator().manual_seed(2))
    theirs = torch.Generator().manual_seed(2)
    for _ in range(20):
        assert ours(scores) == int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=theirs))


def test_a_draw_without_a_generator_takes_the_global_one():
    scores = torch.zeros(1, 30)
    choose = choose_by_lot(None)
    torch.manual_seed(3)
    first = [choose(scores) for _ in range(10)]
    torch.manual_seed(3)
    assert [choose(scores) for _ in range(10)] == first
    assert len(set(first)) > 1
