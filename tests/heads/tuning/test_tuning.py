"""Tuning's arithmetic by hand and by brute force, its replay against real decoding, and the command on a fake clock."""

from __future__ import annotations

import functools
import io
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from rich.console import Console
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import PAD, random_tokens, tiny_model
from typer.testing import CliRunner

import heads
from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.checkpoint import save_load as checkpoint
from heads.cli import measure as tune_command
from heads.cli.main import app
from heads.decoding import tree_decoding
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import read_tree_file
from heads.families import create
from heads.tuning import acceptance, beside_lookup, search, timing
from heads.tuning import tune as tuning_steps
from heads.tuning.acceptance import RankCounts, accepted, best_nodes, count_passes, places_of, tokens_per_pass
from heads.tuning.config import TuneConfig
from heads.tuning.outcome import tuned_tree
from heads.tuning.replay import NEVER, RANKS, Replay, replay, write_texts
from heads.tuning.report import draw_tuning, show, verdict
from heads.tuning.speeds import Speed, measure_speeds
from heads.tuning.timing import Bench, PassTimes, interleaved_medians, measure_times
from heads.tuning.tune import Tuning, check, context_of, time_finalists, tune, whole_over_modelled

MISS = RANKS
Ticks = Callable[[], float]


def counting_clock() -> Ticks:
    """A clock that goes on by a second each time it is read."""
    return functools.partial(next, map(float, itertools.count()))


def some_ranks(seed: int, places: int = 60, depth: int = 3, ranks: int = 3) -> np.ndarray:
    """Ranks that depend on the whole path before them, so that no product of marginals describes them."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(places):
        row: list[int] = []
        for _ in range(depth):
            odds = np.random.default_rng([seed, len(row), *row]).dirichlet(np.ones(ranks + 1))
            rank = int(rng.choice(ranks + 1, p=odds))
            row += [rank] if rank < ranks else [MISS] * (depth - len(row))
        rows.append(row[:depth])
    return np.array(rows)


# --- conditional acceptance ------------------------------------------------------------------------------------------


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


def probability(counts: RankCounts, path: tuple[int, ...]) -> float:
    return float(np.prod([counts.conditional(path[:d], path[d]) for d in range(len(path))]))


def expected_length(counts: RankCounts, paths: Any) -> float:
    return sum(probability(counts, path) for path in paths)


def all_trees(depth: int, ranks: int, nodes: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every tree of so many nodes below the root."""
    universe = [path for d in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=d)]
    for chosen in itertools.combinations(universe, nodes):
        known = {(), *chosen}
        if all(path[:-1] in known for path in chosen):
            yield chosen


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


# --- tokens per pass -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_tokens_per_pass_are_those_of_decoding(family):
    """Static and dynamic trees, on ragged prompts, some texts ending early: exactly, in float64."""
    token_heads = fitted_heads(family, "llama")
    model = token_heads.backbone.model
    prompts = [random_tokens(1, n, seed=70 + n) for n in (3, 9, 6, 5)]
    free = model.generate(prompts[0], max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=PAD)
    eos = int(free[0, 3 + 15])
    request = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": eos, "pad_token_id": PAD}
    before, model.generation_config.eos_token_id = model.generation_config.eos_token_id, eos
    try:
        texts = write_texts(model, prompts, request, rows=3, advance=lambda: None)
    finally:
        model.generation_config.eos_token_id = before
    replays = [
        one for text in texts for one in replay(token_heads, text, widths=[1, 3], nodes=16, advance=lambda: None)
    ]
    assert [len(text.lengths) for text in texts] == [3, 1]
    assert min(length for text in texts for length in text.lengths) < 24, "a text ended early"
    nodes = best_nodes(RankCounts([one.ranks_PK for one in replays]), nodes=15, depth=3)
    trees: list[tuple[Any, list[np.ndarray], int]] = [
        (heads.Tree([path for _, path in nodes[: size - 1]]), [places_of(nodes, r.ranks_PK) for r in replays], size)
        for size in (2, 6, 1 + len(nodes))
    ]
    trees += [
        (DynamicTree(nodes=size, depth=depth, width=width), [r.dynamic[width][:, depth - 1] for r in replays], size)
        for size, depth, width in itertools.product((2, 7, 16), (1, 3), (1, 3))
    ]
    found = set()
    for tree, places, size in trees:
        decoding = heads.TreeDecoding(token_heads, tree, lookup=0)
        outputs = [
            model.generate(p, custom_generate=decoding, return_dict_in_generate=True, **request) for p in prompts
        ]
        tokens = sum(out.stats.tokens - 1 for out in outputs)
        passes = sum(out.stats.row_passes - 1 for out in outputs)
        assert tokens_per_pass(places, size) == tokens / passes, tree
        found.add(tokens / passes)
    assert len(found) > 2, "trees differ, and some accept"


# --- times and search ------------------------------------------------------------------------------------------------


def some_times(**changed: Any) -> PassTimes:
    fields: dict[str, Any] = {
        "batch": 1,
        "context": 9,
        "plain": 1.0,
        "verify": {n: 1.0 + 0.1 * n for n in range(1, 7)},
        "step": {(k, m): 0.2 + 0.1 * m for k in (1, 2, 3) for m in (1, 4)},
        "grow": {(k, 2): 0.3 * k for k in (1, 2, 3)},
        "rest_static": 0.05,
        "rest_dynamic": 0.07,
        "grounded": True,
    }
    return PassTimes(**fields | changed)


def test_the_seconds_of_a_pass_by_hand():
    times = some_times()
    tree = heads.Tree([[0], [1], [0, 0], [1, 0], [0, 0, 0]])  # levels expand 1, 2 and 1 nodes
    drafting = (0.2 + 0.1) + (0.2 + 0.2) + (0.2 + 0.1)
    assert times.static(tree) == pytest.approx(drafting + 1.6 + 0.05)
    assert replace(times, grounded=False).static(tree) == pytest.approx(3 * 0.3 + 1.6 + 0.05), "one row serves all"
    assert times.step_at(2, 8) == pytest.approx(2 * 0.6), "above what was timed in proportion"
    assert times.dynamic(DynamicTree(nodes=5, depth=2, width=2)) == pytest.approx(0.6 + 1.5 + 0.07)


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


def test_trees_are_judged_on_texts_that_they_were_not_grown_on():
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
    bench = Bench(fitted_heads("grounded", "llama"), random_tokens(1, 9), counting_clock(), {})
    monkeypatch.setattr(Bench, "whole_pass", lambda self, tree: lambda: whole[tree.num_nodes])
    monkeypatch.setattr(Bench, "seconds_per_pass", lambda self, tree: whole[tree])
    lucky = [choice(chain(nodes), seconds=0.1 * nodes) for nodes in (2, 3, 4)]
    advanced: list[int] = []
    finalists, plain = time_finalists(bench, search.leaders(lucky), [], 2, lambda: advanced.append(1))
    assert {kind: (one.nodes, one.seconds_per_pass) for kind, one in finalists.items()} == {"static": (3, 0.5)}
    assert (plain, len(advanced)) == (1.0, 3)
    assert whole_over_modelled(lucky, finalists) == pytest.approx(0.5 / 0.3)
    assert whole_over_modelled(lucky, {}) == 1.0


def test_times_of_a_slower_machine():
    token_heads = fitted_heads("grounded", "llama")
    times = measure_times(token_heads, random_tokens(1, 9), settings={}, repeats=1, clock=counting_clock())
    tree, dynamic = Tree([[0], [0, 0], [1]]), DynamicTree(nodes=8, depth=2, width=2)
    assert times.scaled(2.0).static(tree) == 2 * times.static(tree)
    assert times.scaled(2.0).dynamic(dynamic) == 2 * times.dynamic(dynamic)
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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["medusa", "grounded"])
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
    bench = Bench(token_heads, random_tokens(2, 9, seed=1), counting_clock(), {})
    for k, expanding in ((1, 1), (2, 4), (3, 4)):
        run = bench.step(k, expanding)
        seen.clear()
        run()
        assert seen == [(k, 2 * expanding)]


# --- the whole -------------------------------------------------------------------------------------------------------


@functools.cache
def tuned_tiny() -> Tuning:
    """On a clock on which every pass of a single row takes a second, whatever the tree."""
    prompts = [random_tokens(1, 5, seed=seed) for seed in range(50, 54)]
    config = TuneConfig(new_tokens=24, repeats=1)
    return tune(fitted_heads("grounded", "llama"), prompts, config, clock=counting_clock())


def test_the_finalist_of_most_tokens_a_second_wins():
    tuning = tuned_tiny()
    assert {choice.seconds_per_pass for choice in tuning.finalists.values()} == {1.0}
    assert tuning.plain == 1.0
    per_pass = {kind: choice.tokens_per_pass for kind, choice in tuning.finalists.items()}
    assert per_pass[tuning.kind] == max(per_pass.values()) > 1
    for kind, considered in (("static", tuning.static), ("dynamic", tuning.dynamic)):
        timed_whole = search.leaders(considered)
        assert 1 < len(timed_whole) <= search.LEADERS
        assert per_pass[kind] == max(choice.tokens_per_pass for choice in timed_whole), "each takes a second"


def test_the_winner_is_decoded_beside_plain_and_lookup():
    tuning = tuned_tiny()
    assert set(tuning.checked) == {"plain", "lookup alone", "tuned tree", "tree beside lookup"}
    for name, speed in tuning.checked.items():
        assert speed.tokens_per_second == pytest.approx(speed.tokens_per_pass), name
    assert tuning.checked["plain"].tokens_per_pass == 1
    assert tuning.checked["tuned tree"].tokens_per_pass > 1


def test_where_no_tree_pays_it_is_plain():
    tuning = tuned_tiny()
    slow = {kind: replace(choice, seconds_per_pass=50.0) for kind, choice in tuning.finalists.items()}
    without_heads = {name: tuning.checked[name] for name in ("plain", "lookup alone")}
    plain = replace(tuning, finalists=slow, checked=without_heads)
    assert (plain.predicted, plain.kind) == ("plain", "plain")
    assert plain.tree.num_nodes == 1
    assert verdict(plain).startswith("No tree pays at batch 1: the best static tree has 0.0")
    written = tuned_tree(fitted_heads("grounded", "llama"), plain, num_prompts=4)
    assert (written.kind, written.paths, written.dynamic) == ("plain", (), None)
    assert written.prediction["best_tree_ratio_to_plain"] < 0.1


def test_compiled_passes_are_decoded_too_where_that_is_asked_for(monkeypatch):
    """Behind a round that nothing is counted of; what was fastest is written, compiled or not."""
    asked = []
    monkeypatch.setattr(tree_decoding, "compiled", lambda backbone: asked.append(backbone) or backbone)
    monkeypatch.setattr(tree_decoding, "compiled_drafting", lambda _: None)
    prompts, token_heads = [random_tokens(1, 5, seed=seed) for seed in (50, 51)], fitted_heads("grounded", "llama")
    config = TuneConfig(new_tokens=12, repeats=1, checked_prompts=1, compile=True)
    checked = check(token_heads, prompts, Tree([[0]]), None, config, counting_clock(), lambda *_: lambda: None)
    assert asked == [token_heads.backbone] * 3
    ours = {"lookup alone", "tuned tree", "tree beside lookup"}
    assert set(checked) == {"plain", *ours, *(f"{name}, compiled" for name in ours)}
    for name in ours:
        assert checked[f"{name}, compiled"].tokens_per_pass == checked[name].tokens_per_pass, "the same text"
    found = replace(tuned_tiny(), config=config)
    for name, lookup in (("tuned tree, compiled", 0), ("tree beside lookup, compiled", DEFAULT_LOOKUP)):
        fastest = Speed(tokens_per_pass=2.0, tokens_per_second=1e6)
        written = tuned_tree(token_heads, replace(found, checked={**found.checked, name: fastest}), num_prompts=4)
        assert (written.compile, written.lookup, bool(written.paths or written.dynamic)) == (True, lookup, True)
        assert "Compiled passes decoded 1000000.0 tokens/s" in verdict(
            replace(found, checked={**found.checked, name: fastest})
        )
    assert not tuned_tree(token_heads, found, num_prompts=4).compile
    assert ": not used;" in verdict(found)


SPEEDS = ("plain", "lookup alone", "tuned tree", "tree beside lookup")


def with_speeds(*speeds: float) -> Tuning:
    checked = {name: Speed(tokens_per_pass=1.0, tokens_per_second=at) for name, at in zip(SPEEDS, speeds, strict=False)}
    return replace(tuned_tiny(), checked=checked)


@pytest.mark.parametrize(
    ("speeds", "uses_tree", "lookup"),
    [
        ((100, 90, 150, 120), True, 0),
        ((100, 90, 120, 150), True, DEFAULT_LOOKUP),
        ((100, 180, 90, 110), False, DEFAULT_LOOKUP),
        ((100, 180, 150, 170), False, DEFAULT_LOOKUP),
        ((100, 90, 80, 95), False, 0),
        ((100, 100, 100, 100), False, 0),
        ((100, 90), False, 0),
    ],
    ids=["tree", "tree and lookup", "lookup alone", "lookup beats both", "plain", "equal", "no tree decoded"],
)
def test_what_decoded_fastest_is_what_is_written_and_said(speeds, uses_tree, lookup):
    tuning = with_speeds(*speeds)
    assert tuning.predicted != "plain", "the model of times foretells a tree"
    written = tuned_tree(fitted_heads("grounded", "llama"), tuning, num_prompts=4)
    assert tuning.beside is not None
    if lookup and uses_tree:
        assert (written.kind, written.paths) == ("static", tuning.beside.choice.tree.paths[1:])
        assert written.prediction["tokens_per_pass"] == round(tuning.beside.tokens_per_pass, 3)
    else:
        assert written.kind == (tuning.predicted if uses_tree else "plain")
    assert written.lookup == lookup
    assert bool(written.paths) == uses_tree
    assert written.prediction["decoded"] == dict(zip(SPEEDS, speeds, strict=False))
    said = verdict(tuning)
    if uses_tree:
        assert said.startswith(f"Chosen: a {tuning.kind} tree")
        assert f"(lookup={lookup})" in said
    else:
        assert said.startswith("No tree pays at batch 1: a ")
        assert f"plain {speeds[0]:.1f}, lookup alone {speeds[1]:.1f}" in said
        assert said.endswith(f"TreeDecoding decodes {'with prompt lookup alone' if lookup else 'plainly'} here.")


def test_heads_whose_drafts_are_never_accepted_are_tuned_to_plain(monkeypatch, tmp_path):
    """Every candidate of every head is a token that the backbone does not write, whatever the tree."""
    token_heads = create("grounded", tiny_model("llama", vocab_size=512), num_heads=3)
    prompts = [random_tokens(1, 5, seed=seed) for seed in range(50, 54)]
    request = TuneConfig(new_tokens=24).request
    (texts,) = write_texts(token_heads.backbone.model, prompts, request, rows=4, advance=lambda: None)
    written_tokens = texts.tokens_BL.unique()
    projections = {k: token_heads.projection(k) for k in (1, 2, 3)}

    class NeverRight(Projection):
        def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
            return super().__call__(hidden_ND).index_fill(-1, written_tokens, -1e9)

    monkeypatch.setattr(token_heads, "projection", lambda k: NeverRight(**vars(projections[k])))
    tuning = tune(token_heads, prompts, TuneConfig(new_tokens=24, repeats=1), clock=counting_clock())
    assert (tuning.finalists, tuning.kind) == ({}, "plain")
    assert "no drafted token is accepted on these prompts" in verdict(tuning)
    text = tuned_tree(token_heads, tuning, num_prompts=4).as_json()
    (tmp_path / "tree.json").write_text(text, encoding="utf-8")
    tuned = read_tree_file(tmp_path / "tree.json")
    assert (tuned.kind, tuned.paths, tuned.prediction["best_tree_ratio_to_plain"]) == ("plain", (), None)
    console = Console(file=io.StringIO(), width=120)
    show(console, tuning)
    draw_tuning(tuning, tmp_path / "picture.png")
    assert "0.0%" in console.file.getvalue()


def test_a_dynamic_tree_may_win_where_no_static_one_has_drafts_accepted(tmp_path):
    tuning = tuned_tiny()
    alone = replace(tuning, finalists={"dynamic": tuning.finalists["dynamic"]}, beside=None)
    (tmp_path / "tree.json").write_text(
        tuned_tree(fitted_heads("grounded", "llama"), alone, num_prompts=4).as_json(), encoding="utf-8"
    )
    tuned = read_tree_file(tmp_path / "tree.json")
    assert (tuned.kind, tuned.tree, tuned.static_tree) == ("dynamic", alone.finalists["dynamic"].tree, None)
    assert verdict(alone).startswith("Chosen: a dynamic tree")


def test_sampling_settings_reach_generate():
    assert TuneConfig(new_tokens=9).request == {"do_sample": False, "max_new_tokens": 9}
    assert TuneConfig(new_tokens=9, temperature=0.7, repetition_penalty=1.1).request == {
        "do_sample": True,
        "max_new_tokens": 9,
        "temperature": 0.7,
        "repetition_penalty": 1.1,
    }


def test_a_context_is_half_of_what_was_written_with_rows_for_the_batch():
    model = fitted_heads("grounded", "llama").backbone.model
    request = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    prompts = [random_tokens(1, n, seed=n) for n in (3, 5)]
    texts = write_texts(model, prompts, request, rows=2, advance=lambda: None)
    context_BS = context_of(texts, batch=5)
    assert context_BS.shape == (5, 5 + 4)
    assert torch.equal(context_BS[0], context_BS[2])
    assert torch.equal(context_BS[1, :5], prompts[1][0])


def test_one_prompt_is_too_few():
    with pytest.raises(ValueError, match="1 prompts were given"):
        tune(fitted_heads("grounded", "llama"), [random_tokens(1, 5)], TuneConfig(), clock=counting_clock())


@pytest.mark.parametrize("batch", [1, 2])
def test_checked_prompts_whose_texts_end_at_once_are_refused(batch, monkeypatch):
    token_heads = fitted_heads("grounded", "llama")
    model, prompts = token_heads.backbone.model, [random_tokens(1, 5, seed=seed) for seed in (50, 51)]
    first = [int(model.generate(prompt_1T, max_new_tokens=1, do_sample=False)[0, -1]) for prompt_1T in prompts]
    monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    monkeypatch.setattr(model.generation_config, "pad_token_id", PAD)
    config = TuneConfig(new_tokens=8, batch=batch, checked_prompts=2)
    decodings = {"plain": None, "tree": heads.TreeDecoding(token_heads, 4)}
    with pytest.raises(ValueError, match="texts behind the prompts end at once"):
        measure_speeds(model, decodings, prompts, config, counting_clock())


@pytest.mark.parametrize("name", ["new_tokens", "batch", "repeats"])
def test_numbers_have_ranges(name):
    with pytest.raises(ValueError, match=f"{name}=0 was given"):
        TuneConfig(**{name: 0})


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS
    model.config._name_or_path = str(folder / "base")
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    (folder / "prompts.txt").write_text("def main\n\nclass Stack\n\nimport os\n", encoding="utf-8")
    for family in ("medusa", "grounded"):
        checkpoint.save(create(family, model, num_heads=2), folder / family)
    return folder


def run_command(folder: Path, family: str, *more: Any) -> Any:
    asked = ["tune-tree", folder / family, "--prompts", folder / "prompts.txt", "--new-tokens", 16, "--repeats", 1]
    return CliRunner().invoke(app, [str(argument) for argument in (*asked, *more)])


def test_a_temperature_that_overflows_is_one_sentence(folder):
    result = run_command(folder, "medusa", "--temperature", "1e-45")
    assert result.exit_code == 1
    assert result.output.strip().splitlines()[-1].endswith("give 1e-06 or more, or 0 for greedy text.")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", ["medusa", "grounded"])
def test_the_command_leaves_a_tree_that_decoding_uses_by_itself(folder, family, batch, monkeypatch):
    monkeypatch.setattr(tune_command, "clock_of", lambda _: counting_clock())
    result = run_command(folder, family, "--batch", batch, "--picture", folder / "picture.png")
    assert result.exit_code == 0, result.output
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((folder / family / "tree.json").read_text())
    (said,) = [line for line in result.output.splitlines() if line.startswith(("Chosen: ", "No tree pays"))]
    if written["kind"] == "plain":
        assert said.startswith(f"No tree pays at batch {batch}: ")
        assert said.endswith(f"decodes {'with prompt lookup alone' if written['lookup'] else 'plainly'} here.")
    else:
        assert said.startswith(f"Chosen: a {written['kind']} tree of ")
        assert said.endswith(f"(lookup={written['lookup']}).")
    assert written["measured_on"]["batch"] == batch
    assert {"tokens_per_pass", "tokens_per_second", "ratio_to_plain"} <= set(written["prediction"])
    model, token_heads = heads.load_with_backbone(folder / family)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoding = heads.TreeDecoding(token_heads)
    tuned = read_tree_file(folder / family / "tree.json")
    assert decoding.lookup == tuned.lookup
    if tuned.kind == "dynamic":
        assert decoding.tree == tuned.dynamic
    else:
        assert decoding.tree.paths == tuned.tree.paths
    prompt = torch.tensor([byte_tokenizer()("def main")["input_ids"]])
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt, custom_generate=decoding, **options), model.generate(prompt, **options))


@pytest.mark.parametrize(
    ("module", "step"),
    [(tune_command, "tune"), (tuning_steps, "measure_times"), (tuning_steps, "measure_speeds")],
    ids=["at once", "while timing", "in the last step"],
)
def test_ctrl_c_leaves_what_was_there(folder, monkeypatch, module, step):
    path = folder / "grounded" / "tree.json"
    heads.Tree([[1]]).save(path)
    there = path.read_bytes()
    reached: list[str] = []

    def interrupted(*_: Any, **__: Any) -> None:
        reached.append(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_command, "clock_of", lambda _: counting_clock())
    monkeypatch.setattr(module, step, interrupted)
    result = run_command(folder, "grounded")
    assert (result.exit_code, reached) == (130, [step])
    assert "nothing was written" in result.output
    assert path.read_bytes() == there
    assert [file.name for file in path.parent.iterdir() if file.suffix == ".tmp"] == []


def test_the_back_off_is_what_the_docs_say():
    assert acceptance.BACK_OFF == 8


LOOPS = [torch.tensor([[5, 6, 7, 8] * 3 + [5, 6]]), torch.tensor([[9, 3, 9, 3, 9]]), random_tokens(1, 7, seed=8)]


@pytest.mark.parametrize("lookup", [2, 5])
@pytest.mark.parametrize("sharpen", [False, True], ids=["text that loops", "text that wanders"])
def test_what_is_played_beside_lookup_is_what_decoding_does(sharpen, lookup, monkeypatch):
    """Pass by pass: the same number of them, and the nodes of each, for a tree deeper and one shallower than chains."""
    token_heads = make_heads("grounded", Backbone(tiny_model("llama", sharpen=sharpen)), num_heads=3)
    model, tree = token_heads.backbone.model, Tree([[0], [0, 0], [1], [0, 0, 0]])
    request = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": PAD}
    each = write_texts(model, LOOPS, request, rows=1, advance=lambda: None)
    replays = [one for texts in each for one in replay(token_heads, texts, widths=[], nodes=8, advance=lambda: None)]
    times = some_times(
        verify={n: float(n) for n in range(1, 65)},
        step={(k, 1): 0.0 for k in (1, 2, 3)},
        rest_static=0.0,
    )
    choice = search.choice_of(tree, replays, times)
    played = beside_lookup.play(choice, replays, times, lookup)
    read: list[int] = []
    verify = token_heads.backbone.verify
    monkeypatch.setattr(
        token_heads.backbone,
        "verify",
        lambda state, tokens_BN, *a: read.append(tokens_BN.shape[1]) or verify(state, tokens_BN, *a),
    )
    decoding = heads.TreeDecoding(token_heads, tree, lookup=lookup)
    stats = [
        model.generate(prompt, custom_generate=decoding, return_dict_in_generate=True, **request).stats
        for prompt in LOOPS
    ]
    tokens, passes = (sum(getattr(one, name) - 1 for one in stats) for name in ("tokens", "passes"))
    assert len(read) == passes > 20
    assert len(set(read)) > 1, "passes with a chain and without"
    assert played.tokens_per_pass == pytest.approx(tokens / passes)
    assert tokens / played.tokens_per_second == pytest.approx(sum(read)), "a node takes a second, all else nothing"


def test_where_the_chain_alone_is_verified_the_tree_accepts_nothing():
    """The second pass verifies a doubled chain, which breaks off at once; the tree would have come two tokens far."""
    text = [5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 9, 8, 7, 1, 2]
    one = Replay(ranks_PK=np.zeros((10, 2)), dynamic={}, text=text, prompt=4)
    found = beside_lookup.walk(one, np.full(10, 2), lookup=4, depth=2)
    assert found == [(4, 5, True), (8, 1, False), (0, 3, True), (0, 1, True)]
