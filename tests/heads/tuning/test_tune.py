"""Tuning as a whole on a clock on which every pass takes a second: what wins, what is written and what is said."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from throwaway_families import fitted_heads
from tiny import PAD, random_tokens, tiny_model
from tuning_cases import (
    counting_clock,
    tuned_tiny,
)

import heads
from heads.backbone.projection import Projection
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import read_tree_file
from heads.families import create
from heads.tuning import search, timing, tuned_tree
from heads.tuning import tune as tune_module
from heads.tuning.config import TuneConfig
from heads.tuning.decoding_speed import Speed, measure_speeds
from heads.tuning.replay import write_texts
from heads.tuning.report import describe_levels, draw_tuning, show, verdict
from heads.tuning.tune import context_of, decode_winner, tune, tune_batches
from heads.tuning.tuned_tree import Tuning, build_tuned_tree


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
    assert set(tuning.decoded) == {"plain", "lookup alone", "tuned tree", "tree with lookup"}
    for name, speed in tuning.decoded.items():
        assert speed.tokens_per_second == pytest.approx(speed.tokens_per_pass), name
    assert tuning.decoded["plain"].tokens_per_pass == 1
    assert tuning.decoded["tuned tree"].tokens_per_pass > 1


def test_where_no_tree_pays_it_is_plain():
    tuning = tuned_tiny()
    slow = {kind: replace(choice, seconds_per_pass=50.0) for kind, choice in tuning.finalists.items()}
    without_heads = {name: tuning.decoded[name] for name in ("plain", "lookup alone")}
    plain = replace(tuning, finalists=slow, decoded=without_heads)
    assert (plain.predicted, plain.kind) == ("plain", "plain")
    assert plain.tree.num_nodes == 1
    assert verdict(plain).startswith("No tree pays at batch 1: the best static tree has 0.0")
    written = build_tuned_tree(fitted_heads("grounded", "llama"), plain, num_prompts=4)
    assert (written.kind, written.paths, written.dynamic) == ("plain", (), None)
    assert written.prediction["best_tree_ratio_to_plain"] < 0.1


def test_compiled_passes_are_decoded_too_where_that_is_asked_for(monkeypatch):
    """What was fastest is written, compiled or not; a first round of the compiled methods is not measured."""
    compiled: list[bool] = []

    def without_compiling(token_heads, tree, *, lookup, compile):
        compiled.append(compile)
        return heads.TreeDecoding(token_heads, tree, lookup=lookup, compile=False)

    monkeypatch.setattr(tune_module, "TreeDecoding", without_compiling)
    prompts, token_heads = [random_tokens(1, 5, seed=seed) for seed in (50, 51)], fitted_heads("grounded", "llama")
    config = TuneConfig(new_tokens=12, repeats=1, checked_prompts=1, compile=True)
    checked = decode_winner(token_heads, prompts, Tree([[0]]), None, config, counting_clock(), lambda *_: lambda: None)
    assert compiled == [False] * 3 + [True] * 3
    ours = {"lookup alone", "tuned tree", "tree with lookup"}
    assert set(checked) == {"plain", *ours, *(f"{name}, compiled" for name in ours)}
    for name in ours:
        assert checked[f"{name}, compiled"].tokens_per_pass == checked[name].tokens_per_pass, "the same text"
    found = replace(tuned_tiny(), config=config)
    for name, lookup in (("tuned tree, compiled", 0), ("tree with lookup, compiled", DEFAULT_LOOKUP)):
        fastest = Speed(tokens_per_pass=2.0, tokens_per_second=1e6)
        written = build_tuned_tree(token_heads, replace(found, decoded={**found.decoded, name: fastest}), num_prompts=4)
        assert (written.compile, written.lookup, bool(written.paths or written.dynamic)) == (True, lookup, True)
        assert "Compiled passes decoded 1000000.0 tokens/s" in verdict(
            replace(found, decoded={**found.decoded, name: fastest})
        )
    assert not build_tuned_tree(token_heads, found, num_prompts=4).compile
    assert ": not used;" in verdict(found)


def test_compiled_passes_are_not_said_to_be_of_packed_weights(monkeypatch):
    monkeypatch.setattr(tuned_tree, "is_packed", lambda model: True)
    token_heads, uncompiled = fitted_heads("grounded", "llama"), tuned_tiny()
    fastest = {"tuned tree, compiled": Speed(tokens_per_pass=2.0, tokens_per_second=1e6)}
    compiled = replace(uncompiled, decoded={**uncompiled.decoded, **fastest})
    assert build_tuned_tree(token_heads, uncompiled, num_prompts=4).packed
    assert not build_tuned_tree(token_heads, compiled, num_prompts=4).packed


def test_it_is_said_how_many_heads_the_tree_uses_and_when_the_others_pay():
    tuning = tuned_tiny()
    console = Console(file=io.StringIO(), width=120)
    show(console, tuning)
    said = console.file.getvalue().splitlines()[-1]
    assert said.startswith(
        f"It uses {tuning.tree.depth} of 3 heads. The fastest static trees, heads alone and predicted"
    )
    for head, nodes in tuning.heads_pay_from.items():
        assert f"head {head} {'at no budget' if nodes is None else f'from {nodes} nodes'}" in said
    fastest = {one.nodes: one.depth for one in search.best_by_size(tuning.static)}
    for head, nodes in tuning.heads_pay_from.items():
        wanted = [size for size in fastest if all(depth >= head for n, depth in fastest.items() if n >= size)]
        assert nodes == min(wanted, default=None)
    written = build_tuned_tree(fitted_heads("grounded", "llama"), tuning, num_prompts=4)
    assert written.prediction["heads_used"] == written.heads_used == tuning.tree.depth
    assert written.prediction["heads_pay_from"] == list(tuning.heads_pay_from.values())


SPEEDS = ("plain", "lookup alone", "tuned tree", "tree with lookup")


def with_speeds(*speeds: float) -> Tuning:
    checked = {name: Speed(tokens_per_pass=1.0, tokens_per_second=at) for name, at in zip(SPEEDS, speeds, strict=False)}
    return replace(tuned_tiny(), decoded=checked)


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
    written = build_tuned_tree(fitted_heads("grounded", "llama"), tuning, num_prompts=4)
    assert tuning.with_lookup is not None
    if lookup and uses_tree:
        assert (written.kind, written.paths) == ("static", tuning.with_lookup.choice.tree.paths[1:])
        assert written.prediction["tokens_per_pass"] == round(tuning.with_lookup.tokens_per_pass, 3)
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


def test_on_recurrent_layers_it_is_said_whether_a_chain_or_a_tree_pays():
    tuning = tuned_tiny()
    assert describe_levels(tuning) == "", "attention reads all levels at once"
    times = replace(tuning.times, level=0.5 * tuning.times.plain)
    costly = replace(tuning, times=times, static=list(search.static_choices(tuning.replays, times)))
    chains = [one for one in costly.static if one.nodes == one.depth + 1]
    assert {one.depth for one in chains} == {1, 2, 3}
    said = describe_levels(costly)
    pays = "chain" if search.fastest(costly.static) in chains else "tree"
    assert "each level beyond the first adds 0.50 plain steps" in said
    assert said.endswith(f"a {pays} pays more here.")


def test_a_hybrid_is_tuned_by_levels():
    """The clock counts its readings, so that a chain takes as long as siblings, and no level costs anything."""
    token_heads = fitted_heads("grounded", "qwen3_5", "sdpa", torch.float32)
    timer = timing.PassTimer(token_heads, random_tokens(1, 9), counting_clock(), {})
    assert ("chain", timing.CHAIN) in timer.tasks()
    llama = timing.PassTimer(fitted_heads("grounded", "llama"), random_tokens(1, 9), counting_clock(), {})
    assert ("chain", timing.CHAIN) not in llama.tasks()


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
    text = build_tuned_tree(token_heads, tuning, num_prompts=4).as_json()
    (tmp_path / "tree.json").write_text(text, encoding="utf-8")
    tuned = read_tree_file(tmp_path / "tree.json")
    assert (tuned.kind, tuned.paths, tuned.prediction["best_tree_ratio_to_plain"]) == ("plain", (), None)
    console = Console(file=io.StringIO(), width=120)
    show(console, tuning)
    draw_tuning(tuning, tmp_path / "picture.png")
    assert "0.0%" in console.file.getvalue()


def test_a_dynamic_tree_may_win_where_no_static_one_has_drafts_accepted(tmp_path):
    tuning = tuned_tiny()
    alone = replace(tuning, finalists={"dynamic": tuning.finalists["dynamic"]}, with_lookup=None)
    (tmp_path / "tree.json").write_text(
        build_tuned_tree(fitted_heads("grounded", "llama"), alone, num_prompts=4).as_json(), encoding="utf-8"
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


def test_a_penalty_of_one_reaches_generate_too_and_what_was_used_is_recorded():
    """A backbone's own settings may have another one."""
    assert TuneConfig(new_tokens=9, repetition_penalty=1.0).request["repetition_penalty"] == 1.0
    tuning, token_heads = tuned_tiny(), fitted_heads("grounded", "llama")
    for given, used in ((None, 1.0), (1.3, 1.3)):
        asked = replace(tuning, config=replace(tuning.config, repetition_penalty=given))
        assert build_tuned_tree(token_heads, asked, num_prompts=4).measured_on["repetition_penalty"] == used


def test_a_prediction_without_lookup_does_not_say_that_none_is_used():
    """As for batches above 1, where lookup may win and no tree is fitted beside it."""
    alone = with_speeds(100, 90, 150, 120)
    assert build_tuned_tree(fitted_heads("grounded", "llama"), alone, num_prompts=4).prediction["lookup"] == 0
    tuning = replace(with_speeds(100, 90, 120, 150), with_lookup=None)
    written = build_tuned_tree(fitted_heads("grounded", "llama"), tuning, num_prompts=4)
    assert written.lookup == DEFAULT_LOOKUP
    assert "lookup" not in written.prediction
    heads_alone = tuning.finalists[tuning.predicted].tokens_per_pass
    assert written.prediction["tokens_per_pass"] == round(heads_alone, 3)


def test_a_context_is_half_of_what_was_written_with_rows_for_the_batch():
    model = fitted_heads("grounded", "llama").backbone.model
    request = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    prompts = [random_tokens(1, n, seed=n) for n in (3, 5)]
    texts = write_texts(model, prompts, request, rows=2, advance=lambda: None)
    context_BS = context_of(texts, batch=5)
    assert context_BS.shape == (5, 5 + 4)
    assert torch.equal(context_BS[0], context_BS[2])
    assert torch.equal(context_BS[1, :5], prompts[1][0])


def test_texts_are_written_and_replayed_once_for_all_batch_sizes(monkeypatch):
    counted: list[str] = []
    for name in ("write_texts", "replay_all", "measure_times", "fit"):
        monkeypatch.setattr(tune_module, name, lambda *_, name=name, **__: counted.append(name) or [name])
    monkeypatch.setattr(tune_module, "context_of", lambda *_: None)
    token_heads, prompts = fitted_heads("grounded", "llama"), [random_tokens(1, 5)] * 2
    configs = [TuneConfig(batch=batch) for batch in (1, 4)]
    assert tune_batches(token_heads, prompts, configs, clock=counting_clock()) == [["fit"]] * 2
    assert [counted.count(name) for name in ("write_texts", "replay_all", "measure_times", "fit")] == [1, 1, 2, 2]


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
    with pytest.raises(ValueError, match="texts end right after the prompts"):
        measure_speeds(model, decodings, prompts, config, counting_clock())


@pytest.mark.parametrize("name", ["new_tokens", "batch", "repeats"])
def test_numbers_have_ranges(name):
    with pytest.raises(ValueError, match=f"{name}=0 was given"):
        TuneConfig(**{name: 0})


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_infinite_settings_are_refused_and_integers_reach_generate_as_floats(name):
    with pytest.raises(ValueError, match=f"{name}=inf was given; allowed are finite numbers"):
        TuneConfig(**{name: float("inf")})
    assert type(TuneConfig(**{name: 2}).request[name]) is float
