"""Trees: what they say about their nodes, what they refuse, and that growth finds the best tree of a size."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
import torch
from repository import ROOT

from heads.decoding.trees.static import MAX_NODES, TYPICAL_ACCURACY, Tree, grow_tree
from heads.decoding.tuned_file import read_tree_file

TREES = ROOT / "configs" / "trees"


def random_tree(seed: int, nodes: int = 20) -> Tree:
    rng = random.Random(seed)
    paths: set[tuple[int, ...]] = {()}
    while len(paths) < nodes:
        parent = rng.choice(sorted(paths))
        if len(parent) < 5:
            paths.add((*parent, rng.randrange(4)))
    return Tree(sorted(paths - {()}))


def test_paths_come_in_depth_first_order_whatever_order_they_are_given_in():
    paths = [[1], [0, 1], [0], [0, 0, 2], [0, 0], [1]]
    assert Tree(paths).paths == ((), (0,), (0, 0), (0, 0, 2), (0, 1), (1,))
    assert Tree(paths[::-1]).paths == Tree(paths).paths


@pytest.mark.parametrize("seed", range(5))
def test_parents_children_depths_and_sight_agree(seed):
    tree = random_tree(seed)
    sees_NN = tree.sees_NN()
    for node, path in enumerate(tree.paths):
        assert tree.depths[node] == len(path)
        assert [tree.paths[child] for child in tree.children[node]] == [
            other for other in tree.paths if other[:-1] == path and len(other) == len(path) + 1
        ]
        if node:
            assert tree.paths[tree.parents[node]] == path[:-1]
            assert tree.parents[node] < node, "a parent's slot lies before its children's"
        for other, other_path in enumerate(tree.paths):
            assert bool(sees_NN[node, other]) == (path[: len(other_path)] == other_path)
    assert tree.depth_tensor("cpu").tolist() == list(tree.depths)
    assert tree.depth == max(tree.depths)
    assert tree.num_nodes == len(tree.paths)


@pytest.mark.parametrize("seed", range(5))
def test_levels_draft_every_node_once_and_in_order(seed):
    """Play the levels by hand with paths in place of tokens: each node must receive its own path."""
    tree = random_tree(seed)
    drafted: list[tuple[int, ...]] = [()]
    above: list[tuple[int, ...]] = []
    for depth, level in enumerate(tree.levels):
        nodes = [()] if depth == 0 else [(*above[p], r) for p, r in zip(level.parents, level.ranks, strict=True)]
        drafted += [(*nodes[p], r) for p, r in zip(level.child_parents, level.child_ranks, strict=True)]
        assert level.num_candidates == 1 + max(level.child_ranks)
        above = nodes
    assert len(drafted) == tree.num_nodes
    assert tuple(drafted[i] for i in tree.draft_order) == tree.paths


def test_levels_hold_only_nodes_that_have_children():
    tree = Tree([[0], [1], [1, 0], [2], [2, 3]])
    first, second = tree.levels
    assert first.num_candidates == 3
    assert (second.parents, second.ranks, second.num_candidates) == ((0, 0), (1, 2), 4)
    assert (second.child_parents, second.child_ranks) == ((0, 1), (0, 3))


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        ([], "0 paths"),
        ([[]], "ranks from 0 on"),
        ([[0], [-1]], "ranks from 0 on"),
        ([[0], [1, 0]], r"path \[1, 0\] but not its parent \[1\]"),
        ([[0, 0, 0], [0]], r"not its parent \[0, 0\]"),
        ([[i] for i in range(MAX_NODES)], f"{MAX_NODES} paths"),
    ],
)
def test_malformed_trees_are_refused(paths, said):
    with pytest.raises(ValueError, match=said):
        Tree(paths)


def test_the_largest_tree_is_allowed():
    assert Tree([[i] for i in range(MAX_NODES - 1)]).num_nodes == MAX_NODES


def test_a_product_combines_all_candidates():
    """Counts of Cai et al., figure 2: 2 candidates of head 1 and 3 of head 2 make 6 continuations."""
    tree = Tree.product([2, 3])
    assert (tree.num_nodes, tree.depth, [tree.depths.count(depth) for depth in (1, 2)]) == (1 + 2 + 6, 2, [2, 6])
    assert tree.paths == Tree([*itertools.product(range(2)), *itertools.product(range(2), range(3))]).paths
    assert Tree.product([1] * 4).paths == read_tree_file(TREES / "chain_4.json").tree.paths
    assert Tree.product([31, 32]).num_nodes == MAX_NODES


@pytest.mark.parametrize("candidates", [[], [0], [3, -1], [32, 32], [2.5], 4, [10**9] * 9], ids=str)
def test_products_of_nothing_and_of_too_much_are_refused(candidates):
    with pytest.raises(
        ValueError, match=rf"Tree.product\({re.escape(repr(candidates))}\) was given; allowed is a list"
    ):
        Tree.product(candidates)


def test_medusas_tree_has_its_63_drafted_nodes():
    """mc_sim_7b_63 of the Medusa repository (medusa/model/medusa_choices.py), which Hydra's code has too."""
    tree = read_tree_file(TREES / "medusa_63.json").tree
    assert (tree.num_nodes, tree.depth) == (1 + 63, 4)
    assert [tree.depths.count(depth) for depth in range(5)] == [1, 10, 28, 23, 2]
    assert max(rank for path in tree.paths for rank in path) == 9, "of ten candidates of each head"


# --- growth ----------------------------------------------------------------------------------------------------------


def expected_length(paths, accuracy) -> float:
    total = 0.0
    for path in paths:
        probability = 1.0
        for depth, rank in enumerate(path):
            probability *= accuracy[min(depth, len(accuracy) - 1)][rank]
        total += probability
    return total


def best_by_brute_force(num_paths: int, num_heads: int, accuracy) -> float:
    """All trees of that size over all ranks, tried one by one."""
    universe = [
        path
        for depth in range(1, num_heads + 1)
        for path in itertools.product(*(range(len(accuracy[min(k, len(accuracy) - 1)])) for k in range(depth)))
    ]
    best = 0.0
    for chosen in itertools.combinations(universe, num_paths):
        known = {(), *chosen}
        if all(path[:-1] in known for path in chosen):
            best = max(best, expected_length(chosen, accuracy))
    return best


@pytest.mark.parametrize(
    ("num_heads", "accuracy"),
    [
        (2, [[0.5, 0.3], [0.7, 0.1]]),
        (2, [[0.4, 0.35, 0.2], [0.9, 0.05, 0.01]]),
        (3, [[0.6, 0.2], [0.5, 0.3], [0.4, 0.1]]),
        (3, [[0.9, 0.05]]),  # one row serves all heads
        (2, [[0.2, 0.5, 0.1], [0.1, 0.6]]),  # measured on few examples: a later rank may be the better one
        (2, [[0.5, 0.0, 0.3], [0.0, 0.4]]),
    ],
)
@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5])
def test_growth_finds_the_best_tree_of_its_size(num_heads, accuracy, num_nodes):
    tree = grow_tree(num_nodes, num_heads, accuracy)
    assert tree.num_nodes == num_nodes
    assert tree.depth <= num_heads
    wanted = best_by_brute_force(num_nodes - 1, num_heads, accuracy)
    # Sums of a few products in another order.
    assert expected_length(tree.paths[1:], accuracy) == pytest.approx(wanted, abs=1e-12)


def test_growth_stops_where_there_is_nothing_left():
    assert grow_tree(50, 2, [[0.5, 0.3], [0.7, 0.1]]).num_nodes == 1 + 2 + 4


@pytest.mark.parametrize("num_nodes", [2, 16, 64, MAX_NODES])
def test_default_growth_fits_its_budget(num_nodes):
    tree = grow_tree(num_nodes, 4)
    assert tree.num_nodes == num_nodes
    assert tree.depth <= 4
    assert len(TYPICAL_ACCURACY[0]) > max(rank for path in tree.paths for rank in path)


@pytest.mark.parametrize("num_nodes", [1, 0, -3, MAX_NODES + 1])
def test_a_budget_has_a_range(num_nodes):
    with pytest.raises(ValueError, match=f"budget of {num_nodes} was given"):
        grow_tree(num_nodes, 2)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_saved_tree_reads_back(tmp_path):
    tree = random_tree(3)
    tree.save(tmp_path / "tree.json")
    assert read_tree_file(tmp_path / "tree.json").tree.paths == tree.paths
    assert json.loads((tmp_path / "tree.json").read_text())["paths"] == [list(path) for path in tree.paths[1:]]


@pytest.mark.parametrize(
    "content", ["", "[1, 2]", '{"path": [[0]]}', '{"paths": 3}', '{"paths": [0, 1]}', '{"paths": [["a"]]}', "{"]
)
def test_a_file_of_something_else_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "tree.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tree\.json must hold"):
        read_tree_file(path)


def test_a_file_with_half_a_rank_is_refused(tmp_path):
    path = tmp_path / "tree.json"
    path.write_text('{"paths": [[0], [0.7]]}')
    with pytest.raises(ValueError, match=r"0\.7"):
        read_tree_file(path)


@pytest.mark.parametrize("paths", [[[0], [0.7]], [["0"]], [0, 1], [None]])
def test_what_is_no_rank_is_refused(paths):
    with pytest.raises(ValueError, match="ranks from 0 on"):
        Tree(paths)


def test_what_is_no_list_of_paths_is_refused():
    with pytest.raises(ValueError, match=r"tree=0\.5 was given; a tree is a list of paths"):
        Tree(0.5)  # type: ignore[arg-type]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_tree_file(tmp_path / "none.json")


def test_sight_is_boolean():
    assert random_tree(0).sees_NN().dtype == torch.bool
