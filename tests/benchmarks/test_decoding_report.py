"""Whether a target is met is decided from rows as they were measured; limits add up."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny import shared_model

from benchmarks.shared import held_out
from benchmarks.speed.decoding import __main__ as command
from benchmarks.speed.decoding import measuring as decoding
from benchmarks.speed.decoding import stored
from benchmarks.speed.decoding.__main__ import QUICK, read_options, settings_of
from benchmarks.speed.decoding.measuring import Measured, build_methods, compiled_methods
from benchmarks.speed.decoding.report import headlines, passes_allow, say_targets, scaled, what_limits
from benchmarks.speed.decoding.time_by_part import Parts
from benchmarks.speed.decoding.trees import Fitted, as_tuned, read_trees
from benchmarks.stale import UNCOMMITTED
from heads.checkpoint.opening import Opened
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import TunedTree
from heads.evaluation.methods import GreedySettings, Method
from heads.evaluation.throughput import MethodResult
from heads.families import create


def a_row(name: str, speed: float, **more: Any) -> MethodResult:
    fields: dict[str, Any] = {"tokens_per_pass": 1.0, "same_text": "yes"} | more
    return MethodResult(
        name=name, tokens=10, tokens_per_second=speed, ratio=speed / 100, ratio_low=speed / 110,
        ratio_high=speed / 90, interval=(speed / 110, speed / 90), repeated_4grams=0.0, **fields,
    )  # fmt: skip


SPENT = {"prefill": 1.0, "draft": 2.0, "verify": 7.0, "accept": 1.0, "commit": 0.5, "other": 0.0}
PLAIN = a_row("plain", 100.0)
MEDUSA = a_row("medusa, heads alone", 200.0, tokens_per_pass=2.5, milliseconds=SPENT)
GROUNDED = a_row("grounded, heads alone", 240.0, tokens_per_pass=3.0, milliseconds=SPENT)
LOOKUP = a_row("lookup without heads", 220.0, tokens_per_pass=2.8, milliseconds=SPENT)
BOTH = a_row("grounded, heads with lookup", 300.0, tokens_per_pass=4.0, milliseconds=SPENT)
LOSSY = a_row("grounded, heads alone, typical acceptance", 900.0, same_text="lossy", perplexity=20.0)
ROWS = [PLAIN, MEDUSA, GROUNDED, LOSSY, LOOKUP, BOTH]
REST = {"plain": 0.5, "medusa, heads alone": 0.4, "grounded, heads alone": 0.6}
PARTS = [Parts(name=name, backbone=1.0, heads=1.0, rest=rest) for name, rest in REST.items()]


def said(*, counts: bool) -> str:
    console = Console(file=io.StringIO(), width=400)
    say_targets(console, ROWS, PARTS, counts=counts)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_passes_allow_counts_forwards_alone():
    assert passes_allow(GROUNDED, PLAIN) == pytest.approx(3.0)  # 3 tokens in 10 ms where a step takes 10 ms
    assert "3.00 tokens a pass, a pass costs 0.80 plain steps" in what_limits(GROUNDED, PLAIN)
    assert "so 3.75 × with all else free" in what_limits(GROUNDED, PLAIN)


def test_each_target_has_its_line_and_its_verdict():
    text = said(counts=True)
    assert "best lossless (grounded, heads alone) ≥ 2.33 × plain: 2.40, reached" in text
    assert "best lossless (grounded, heads with lookup) ≥ 2.33 × plain: 3.00, reached" in text
    assert "limit of medusa" in text
    assert "limit of grounded" not in text
    assert "grounded, heads alone ≥ 1.07 × medusa, heads alone: 1.20, reached" in text
    assert "grounded, heads alone: ratio ≥ 0.9 × what its passes allow: 0.80 (2.40 of 3.00), not reached" in text
    assert "medusa, heads alone: time outside forwards ≤ plain's: 0.40 against 0.50 ms, reached" in text
    assert "grounded, heads alone: time outside forwards ≤ plain's: 0.60 against 0.50 ms, not reached" in text
    assert "2.33" not in said(counts=False)


def test_headlines_lead_with_heads_alone_and_name_lookup_without_heads_beside_lookup():
    alone, with_lookup = headlines("greedy", ROWS)
    found = "2.40 × plain (2.18–2.67 over prompts, 2.18–2.67 over repeats) at 3.00 tokens a pass"
    assert alone == f"greedy: grounded, heads alone {found}"
    assert "grounded, heads with lookup 3.00 × plain" in with_lookup
    assert "; lookup without heads 2.20 × plain" in with_lookup


def test_compiled_rows_lead_no_headline_and_are_held_against_compiled_plain():
    compiled = [
        a_row("plain, compiled static cache", 160.0, milliseconds=SPENT),
        a_row("grounded, heads alone, compiled", 400.0, milliseconds=SPENT),
        a_row("lookup without heads, compiled", 320.0, milliseconds=SPENT),
        a_row("grounded, heads with lookup, compiled", 480.0, milliseconds=SPENT),
    ]
    lines = headlines("greedy", [*ROWS, *compiled])
    assert lines[:2] == headlines("greedy", ROWS)
    assert lines[2] == "greedy: grounded, heads alone, compiled 2.50 × plain, compiled static cache, 4.00 × plain"
    assert lines[3] == "greedy: grounded, heads with lookup, compiled 3.00 × plain, compiled static cache, 4.80 × plain"
    assert lines[4] == "greedy: lookup without heads, compiled 2.00 × plain, compiled static cache, 3.20 × plain"
    console = Console(file=io.StringIO(), width=400)
    say_targets(console, [*ROWS, *compiled], [], counts=True)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "best lossless (grounded, heads alone) ≥ 2.33 × plain: 2.40, reached" in text
    assert "(grounded, heads alone, compiled) ≥ 2.33 × plain, compiled static cache: 2.50, reached" in text


def test_heads_alone_are_held_against_plain_of_their_own_kind():
    compiled = [a_row("plain, compiled static cache", 160.0), a_row("grounded, heads alone, compiled", 250.0)]

    def said_of(rows: list[MethodResult], **more: bool) -> str:
        console = Console(file=io.StringIO(), width=400)
        say_targets(console, rows, [], counts=False, **more)
        return console.file.getvalue()  # type: ignore[attr-defined]

    slower = [PLAIN, a_row("medusa, heads alone", 150.0, milliseconds=SPENT), LOSSY, BOTH]
    compiled = [replace(row, milliseconds=SPENT) for row in compiled]
    assert "target medusa, heads alone ≥ 1.6 × plain: 1.50, not reached" in said_of(slower, alone=True)
    assert "target heads alone, compiled ≥ 1.6 × plain, compiled static cache: not measured" in said_of(
        slower, alone=True
    )
    both = said_of([*ROWS, *compiled], alone=True)
    assert "target grounded, heads alone ≥ 1.6 × plain: 2.40, reached" in both
    assert "target grounded, heads alone, compiled ≥ 1.6 × plain, compiled static cache: 1.56, not reached" in both
    assert "1.6 ×" not in said_of(ROWS)


def test_a_method_has_one_speed_in_all_tables():
    for p, row in zip(scaled(PARTS, ROWS), (PLAIN, MEDUSA, GROUNDED), strict=True):
        assert p.total == pytest.approx(1000 / row.tokens_per_second)
        assert p.rest / p.total == pytest.approx(REST[p.name] / (2 + REST[p.name]))


def test_every_table_has_lookup_without_heads_and_sampled_ones_typical_acceptance():
    model = shared_model("llama")
    token_heads = {name: create("medusa", model, num_heads=2).to(model.dtype) for name in ("a", "b")}
    opened = Opened(source="", model=model, tokenizer=None, token_heads=token_heads)
    ours = Measured(opened=opened, fitted={}, prompts=[], repeats=1, other_model=None)
    names = {
        table: [method.name for method in build_methods(ours, settings, None)]
        for table, settings in settings_of(read_options([])).items()
    }
    lossless = ["a, heads alone", "b, heads alone", "lookup without heads", "prompt lookup"]
    lossless += ["a, heads with lookup", "b, heads with lookup"]
    typical = [f"{name}, heads alone, typical acceptance" for name in "ab"]
    assert [set(found) for found in names.values()] == [{"plain", *lossless}] * 2 + [{"plain", *lossless, *typical}]
    assert all(found[0] == "plain" for found in names.values())


def test_heads_with_lookup_use_their_heads_where_tuning_chose_lookup_alone(monkeypatch):
    monkeypatch.setattr(decoding, "tree", lambda model, heads, settings, label, shape, lookup, compile: (shape, lookup))
    model, fitted = shared_model("llama"), Tree.product([3])
    token_heads = {name: create("medusa", model, num_heads=2).to(model.dtype) for name in ("a", "b")}
    chosen = {"a": TunedTree(kind="plain", lookup=10), "b": TunedTree(kind="static", paths=((0,),), lookup=10)}
    opened = Opened(source="", model=model, tokenizer=None, token_heads=token_heads)
    trees = {name: Fitted(chosen=one, alone=fitted) for name, one in chosen.items()}
    ours = Measured(opened=opened, fitted=trees, prompts=[], repeats=1, other_model=None)
    shapes = [method for _, method in decoding.tree_methods(ours, GreedySettings(), decoding.WITH_LOOKUP)]
    assert [(shape.paths, lookup) for shape, lookup in shapes] == [  # type: ignore[attr-defined,misc]
        (fitted.paths, DEFAULT_LOOKUP),
        (chosen["b"].tree.paths, DEFAULT_LOOKUP),  # type: ignore[union-attr]
    ]


def test_every_row_of_heads_drafts_with_them_so_that_no_headline_of_heads_is_lookups_alone():
    """Where tuning chose lookup alone, or found no tree at all, rows of heads still verify a tree of more than a root.

    A headline of heads takes rows by their names; so a name must say what was decoded.
    """
    model = shared_model("llama")
    token_heads = {name: create("medusa", model, num_heads=2).to(model.dtype) for name in ("a", "b", "c")}
    opened = Opened(source="", model=model, tokenizer=None, token_heads=token_heads)
    copied, alone = TunedTree(kind="plain", lookup=10), {"a": Tree.product([3]), "b": None}
    trees = {name: Fitted(chosen=copied, alone=shape) for name, shape in alone.items()}
    ours = Measured(opened=opened, fitted=trees, prompts=[], repeats=1, other_model=None)
    for kind in (decoding.ALONE, decoding.WITH_LOOKUP):
        for _, method in decoding.tree_methods(ours, GreedySettings(new_tokens=6), kind):
            counted = count_nodes(model, method)
            assert min(counted) > 1, method.name


def count_nodes(model: Any, method: Method) -> list[int]:
    """The tokens of each backbone call of a method behind its prompt's."""
    found: list[int] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda module, given: found.append(given[0].shape[1]))
    method.run(torch.randint(model.config.vocab_size, (1, 9)))
    hook.remove()
    return found[1:]


def test_quick_changes_defaults_and_obeys_what_is_given_beside_it():
    assert vars(read_options(["--quick"])).items() >= QUICK.items()
    assert read_options(["--new-tokens", "5", "--quick"]).new_tokens == 5
    assert read_options([]).new_tokens == 96


def tiny_command(tmp_path, *more: str) -> list[str]:
    """The command's own flow on the demo with as little as it takes; no tree is fitted, nothing compiles."""
    asked = ["--quick", "--heads", "checkpoints/demo/medusa", "--prompts", "1", "--repeats", "1", "--new-tokens", "4"]
    return [*asked, "--parts-prompts", "1", "--other-model", "", "--out", str(tmp_path), *more]


@pytest.fixture
def committed(monkeypatch) -> dict[str, Any]:
    """A checkout at a commit, with no changes; the test moves it. Pythons without their own tests have few prompts."""
    state: dict[str, Any] = {"head": "aaaaaaa", "changed": []}
    monkeypatch.setattr(command, "held_out", lambda opened, count, length: held_out(opened, 2, length) * (count // 2))
    monkeypatch.setattr(stored, "head", lambda: state["head"])
    monkeypatch.setattr(stored, "changed_since", lambda commit, paths: state["changed"])
    return state


def test_a_divided_run_goes_on_and_says_where_each_setting_was_measured(tmp_path, capsys, committed, monkeypatch):
    command.main(tiny_command(tmp_path, "--settings", "penalty"))
    first = capsys.readouterr().out
    assert "greedy, repetition penalty 1.1: shares of the time" in first
    assert "sampled, temperature 1 is left out: it is not stored; --settings sampled measures it" in first
    committed["head"] = "bbbbbbb"
    command.main(tiny_command(tmp_path))
    whole = capsys.readouterr().out
    begin, end = "greedy, repetition penalty 1.1: shares", "sampled, temperature 1 is left out"
    table = first[first.index(begin) : first.index(end)].strip()
    assert table in whole, "the stored figures are printed, not new ones"
    assert re.search(r"greedy, repetition penalty 1.1: measured .* minutes, .*, commit aaaaaaa", whole)
    assert re.search(r"sampled, temperature 1: measured .* minutes, .*, commit bbbbbbb", whole)
    assert "These parts are of 2 commits" in whole
    monkeypatch.setattr(command, "measure_setting", None)  # all is stored
    command.main(tiny_command(tmp_path))
    assert capsys.readouterr().out == whole


def test_what_has_changed_or_was_never_committed_is_measured_anew(tmp_path, capsys, committed):
    asked = tiny_command(tmp_path, "--settings", "greedy")
    command.main(asked)
    capsys.readouterr()
    committed |= {"changed": ["checkpoints/demo/medusa/heads.json"], "head": "ccccccc" + UNCOMMITTED}
    command.main(asked)
    said = capsys.readouterr().out
    assert "not used: changed since its commit aaaaaaa: checkpoints/demo/medusa/heads.json" in said
    committed["changed"] = []
    command.main(asked)
    assert "not used: it was measured on files that no commit holds" in capsys.readouterr().out
    command.main([*asked, "--offset", "1", "--settings", "sampled"])
    assert "greedy is left out: it is not stored" in capsys.readouterr().out, "other options, another part"


def test_another_machine_has_parts_of_its_own(tmp_path, capsys, committed, monkeypatch):
    command.main(tiny_command(tmp_path, "--settings", "greedy"))
    monkeypatch.setattr(stored, "describe_machine", lambda device: {"cpu": "another", "threads": 64})
    capsys.readouterr()
    command.main(tiny_command(tmp_path, "--settings", "sampled"))
    said = capsys.readouterr().out
    assert "greedy is left out: it is not stored" in said
    assert "another, 64 threads" in said


def test_fitted_trees_are_used_as_they_were_stored():
    model = shared_model("llama")
    token_heads = {name: create("medusa", model, num_heads=2).to(model.dtype) for name in ("a", "b", "c")}
    opened = Opened(source="", model=model, tokenizer=None, token_heads=token_heads)
    trees = {"a": Tree.product([3, 2]), "b": DynamicTree(nodes=5, depth=2, width=1)}
    chosen = TunedTree(kind="static", paths=((0,), (0, 0)), lookup=10).as_dict()
    fitted = {
        name: {"verdict": "", "chosen": chosen, "alone": as_tuned(tree).as_dict()} for name, tree in trees.items()
    }
    fitted["c"] = {"verdict": "none", "chosen": TunedTree(kind="plain", lookup=10).as_dict(), "alone": None}
    found = read_trees(Console(file=io.StringIO()), opened, json.loads(json.dumps(fitted)))
    assert found["b"].alone == trees["b"]
    assert found["a"].alone.paths == trees["a"].paths  # type: ignore[union-attr]
    assert [one.chosen.kind for one in found.values()] == ["static", "static", "plain"]
    assert all(heads.tuned_tree is None for heads in token_heads.values()), "heads are left as they were"


def test_compiled_lookup_without_heads_stands_beside_compiled_heads_with_lookup():
    model = shared_model("llama")
    opened = Opened(
        source="", model=model, tokenizer=None, token_heads={"a": create("medusa", model, num_heads=2).to(model.dtype)}
    )
    ours = Measured(opened=opened, fitted={}, prompts=[], repeats=1, other_model=None)
    names = [method.name for method in compiled_methods(ours, GreedySettings())]
    assert names == [
        "plain, compiled static cache",
        "a, heads alone, compiled",
        "lookup without heads, compiled",
        "a, heads with lookup, compiled",
    ]


def test_compiled_rows_are_measured_only_where_they_are_compared(monkeypatch):
    asked: dict[str, bool] = {}

    def measured(console: Any, ours: Any, own: Any, settings: Any, name: str, compile: bool, *more: Any) -> Any:
        asked[name] = compile
        raise StopIteration

    monkeypatch.setattr(command, "may_compile", lambda *given: True)
    monkeypatch.setattr(command, "measure_setting", measured)
    ours = Measured(opened=None, fitted={}, prompts=[], repeats=1, other_model=None)  # type: ignore[arg-type]
    for key in command.SETTINGS:
        options = read_options(["--settings", key, "--draft-model", ""])
        with pytest.raises(StopIteration):
            command.compare(Console(file=io.StringIO()), ours, None, options, Unstored(), None)  # type: ignore[arg-type]
    assert asked == {"greedy": False, command.PENALISED: True, "sampled, temperature 1": False}


class Unstored:
    """A store that has nothing and keeps nothing."""

    def read(self, what: str, **more: Any) -> None:
        return None

    def measure(self, what: str, run: Any, **more: Any) -> Any:
        return run()
