"""Tables that show heads with lookup also show lookup without heads; lossy rows have quality beside speed."""

from __future__ import annotations

import subprocess
from typing import Any

import torch
from rich.console import Console
from tiny import random_tokens, shared_model

from benchmarks import demo
from benchmarks.demo import FOR_README, markdown, read_options, settings_of
from benchmarks.speed import acceptance_rules, batches, default_tree
from benchmarks.speed.trees import LOOKUP_ALONE, UNPREDICTED, Line, lines_table, pool
from heads.checkpoint.opening import Opened
from heads.evaluation.methods import GreedySettings
from heads.evaluation.throughput import MethodResult
from heads.families import create
from heads.tuning.decoding_speed import Speed


def opened(*names: str) -> Opened:
    model = shared_model("llama")
    found = {name: create("medusa", model, num_heads=2).to(model.dtype) for name in names}
    return Opened(model=model, tokenizer=None, source="", token_heads=found)


def test_the_demo_leads_with_heads_alone_and_shows_lookup_without_heads_before_heads_with_lookup():
    for settings in settings_of(8).values():
        names = [one.name for one in demo.methods_of(opened("new", "a", "b"), settings, compiles=False)]
        assert names[:4] == ["plain", *(f"{name}, heads alone" for name in (demo.TRAINED, "medusa", "grounded"))]
        assert names[4:6] == ["lookup without heads", "prompt lookup"]
        assert names[6:] == ["medusa, heads with lookup", "grounded, heads with lookup"]
        compiled = [one.name for one in demo.methods_of(opened("new", "a", "b"), settings, compiles=True)]
        assert compiled[-2:] == ["lookup without heads, compiled", "grounded, heads with lookup, compiled"]


def test_the_readmes_cells_have_plains_speed_once_and_the_interval_beside_each_ratio():
    def row(name: str, ratio: float) -> MethodResult:
        return MethodResult(
            name=name, tokens=8, tokens_per_second=80 * ratio, ratio=ratio, ratio_low=ratio, ratio_high=ratio,
            interval=(ratio - 0.1, ratio + 0.1), tokens_per_pass=2.0, repeated_4grams=0.5, same_text="yes",
        )  # fmt: skip

    text = markdown({name: [row("plain", 1.0), row("ours", 1.5)] for name in ("greedy", "sampled")})
    lines = text.splitlines()
    assert lines[2] == "|plain|2.00|80&nbsp;tokens/s|2.00|80&nbsp;tokens/s|yes|"
    assert lines[3] == "|ours|2.00|1.50&nbsp;(1.40–1.60)|2.00|1.50&nbsp;(1.40–1.60)|yes|"
    assert {line.count("|") for line in lines} == {7}


def test_what_readme_measures_is_more_and_can_be_overruled():
    assert vars(read_options(["--readme"])).items() >= FOR_README.items()
    assert read_options(["--readme", "--prompts", "2"]).prompts == 2
    assert read_options([]).prompts < FOR_README["prompts"]


def test_heads_of_an_earlier_call_are_measured_and_not_trained_again(tmp_path, monkeypatch, capsys):
    assert not demo.holds_heads(tmp_path, Console())
    (tmp_path / "last").mkdir()
    assert demo.holds_heads(tmp_path, Console(width=400))
    assert "holds the heads of an earlier call, which are measured; remove it to train" in capsys.readouterr().out
    asked = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(demo.subprocess, "run", lambda command, check: asked.append(command) or done)
    demo.train("configs/demo/grounded.yaml", tmp_path / "new", Console())
    demo.train("configs/demo/grounded.yaml", tmp_path, Console())
    assert [command[-2:] for command in asked] == [["--config", "configs/demo/grounded.yaml"], ["--resume", "true"]]


def test_batches_show_lookup_without_heads_and_ratios_within_their_repeats():
    one, request = opened("a"), GreedySettings(new_tokens=6, repetition_penalty=1.1)
    prompts = [random_tokens(1, 20, seed=seed) for seed in range(2)]
    options = batches.build_parser().parse_args(["--trees", "2", "--repeats", "2"])
    rows = batches.measure_size(batches.wide_console(), one, request, prompts, 2, options)
    assert [row.name for row in rows] == ["plain", "heads alone, 2 nodes", "lookup without heads", "heads with lookup"]
    assert all(row.ratio_low <= row.ratio <= row.ratio_high for row in rows)
    assert {row.same_text for row in rows} == {"yes"}
    assert {row.interval for row in rows} == {None}, "a single batch is no sample"
    rows = batches.measure_size(batches.wide_console(), one, request, prompts, 1, options)
    assert rows[0].interval == (1.0, 1.0)
    assert all(row.interval[0] <= row.interval[1] for row in rows)


def test_the_default_tree_stands_among_others_alone_and_with_lookup():
    options = default_tree.build_parser().parse_args(["--nodes", "12", "--dynamic", "6"])
    settings = default_tree.settings_of(6, options.penalty)
    assert list(settings) == ["greedy", "greedy, repetition penalty 1.1", "sampled, temperature 1"]
    trees = ["8 nodes, the default", "12 nodes", "dynamic, 6 nodes"]
    for one in settings.values():
        names = [method.name for method in default_tree.build_methods(opened("a"), one, options)]
        assert names[:4] == ["plain", *(f"heads alone, {name}" for name in trees)]
        assert names[4:] == ["lookup without heads", *(f"with lookup, {name}" for name in trees)]


def test_rules_of_acceptance_have_quality_columns():
    options = acceptance_rules.build_parser().parse_args(["--new-tokens", "8", "--seeds", "1"])
    prompts_BT = torch.cat([random_tokens(1, 6, seed=seed) for seed in range(2)])
    one = opened("a")
    found = acceptance_rules.measure(
        one, "a", one.token_heads["a"], prompts_BT, options, one.model, tree="chain", rule="exact", setting="T 1.0"
    )
    assert 1 < found.perplexity < 1000
    assert 0 <= found.repeated_4grams <= 1
    (cell,) = acceptance_rules.quality_table("a", [found]).columns[2].cells
    assert cell == f"{found.perplexity:.1f}, {found.repeated_4grams:.0%}"


def test_lookup_without_heads_stands_among_trees_without_a_prediction():
    fields: dict[str, Any] = {"heads": "a", "plain_predicted": 100.0, "plain_measured": 100.0}
    measured = Speed(tokens_per_pass=2.0, tokens_per_second=150.0)
    line = Line(decoding=LOOKUP_ALONE, tree="none", predicted=UNPREDICTED, measured=measured, **fields)
    cells = [next(iter(column.cells)) for column in lines_table(pool([line], [line])).columns]
    assert cells == ["a", LOOKUP_ALONE, "–", "2.00", "–", "150.0", "–", "–", "1.50", "–", "–", "–", "–"]
