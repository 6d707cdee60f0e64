"""The demo's backbone and heads in larger shapes are the same functions: same logits, drafts and acceptance."""

from __future__ import annotations

import functools
import weakref
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matrices import covering

import heads
from benchmarks.budget import Budget
from benchmarks.shared import held_out, write_block
from benchmarks.speed.real_costs import __main__ as command
from benchmarks.speed.real_costs import cells, methods
from benchmarks.speed.real_costs.cells import MethodSpeed, Speeds
from benchmarks.speed.real_costs.methods import make_method
from benchmarks.speed.real_costs.report import figures, markdown, verdicts
from benchmarks.speed.real_costs.shapes import SHAPES, WideShape, what_stops
from benchmarks.speed.real_costs.wide_backbone import wide_config, widen_backbone
from benchmarks.speed.real_costs.wide_heads import widen_heads
from benchmarks.speed.real_costs.widened import open_widened
from heads.backbone.model import Backbone
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.methods import GreedySettings, SampledSettings

# One with more layers and a width that is no power of 4 of the demo's; one whose attention heads share keys and values.
SMALL = [
    WideShape(name="deeper", hidden=384, layers=10, intermediate=768, key_value_heads=12),
    WideShape(name="grouped", hidden=512, layers=8, intermediate=512, key_value_heads=8),
]
FAMILIES = ["medusa", "grounded", "gru", "eagle", "dynamo"]


@functools.cache
def opened(family: str) -> Opened:
    return open_heads([f"checkpoints/demo/{family}"])


@functools.cache
def widened(family: str, shape: WideShape) -> Any:
    return widen_backbone(opened(family).model, shape, torch.float32)


@covering(family=FAMILIES, shape=SMALL)
@torch.no_grad()
def test_a_widened_backbone_is_the_same_function(family: str, shape: WideShape) -> None:
    prompts_PT = torch.cat(held_out(opened(family), 3))
    logits, found = opened(family).model(prompts_PT).logits, widened(family, shape)(prompts_PT).logits
    torch.testing.assert_close(found, logits, atol=1e-4, rtol=0)  # float32 sums in another order; seen were 1.2e-5
    assert torch.equal(found.argmax(-1), logits.argmax(-1))


@covering(family=FAMILIES, shape=SMALL)
def test_widened_heads_draft_the_same_and_as_much_is_accepted(family: str, shape: WideShape) -> None:
    own = opened(family)
    narrow = own.token_heads[family]
    model = widened(family, shape)
    wide = widen_heads(narrow, Backbone(model))
    for prompt_1T in held_out(own, 2):
        ours, theirs = (
            one.generate(
                prompt_1T,
                custom_generate=heads.TreeDecoding(token_heads, 8, lookup=0),
                return_dict_in_generate=True,
                max_new_tokens=24,
                do_sample=False,
            )
            for one, token_heads in ((model, wide), (own.model, narrow))
        )
        assert torch.equal(ours.sequences, theirs.sequences)
        assert ours.stats.drafted == theirs.stats.drafted
        assert ours.stats.tokens_per_pass > 1


def test_all_that_is_widened_is_dense_but_for_what_must_be_zero() -> None:
    """Nothing that a product could skip: each matrix that reads the stream is random where it meets zeros."""
    model = widened("medusa", SMALL[0])
    width = opened("medusa").model.config.hidden_size
    for layer in model.model.layers:
        for matrix in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert (matrix.weight[:, width:] != 0).float().mean() > 0.999  # a normal draw is rarely zero
    tiny = torch.finfo(torch.float32).tiny
    assert all(((p == 0) | (p.abs() >= tiny)).all() for p in model.parameters()), "denormal numbers are slow"


def test_a_smaller_shape_and_an_unknown_field_are_refused_in_a_sentence() -> None:
    small = WideShape(name="small", hidden=128, layers=8, intermediate=512, key_value_heads=6)
    with pytest.raises(ValueError, match="small has hidden_size 128; a model of 192 cannot be widened"):
        wide_config(opened("medusa").model.config, small)
    own = opened("medusa")
    deep = heads.create("grounded", own.model, num_heads=1, prefix_layers=1)
    with pytest.raises(ValueError, match="prefix_layers=1 cannot be widened; allowed is 0"):
        widen_heads(deep, Backbone(widened("medusa", SMALL[0])))


def test_a_shape_that_does_not_fit_says_how_much_memory_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**30))
    assert what_stops(SHAPES["0.16B"], torch.bfloat16, torch.device("cpu")) == ""
    assert (
        what_stops(SHAPES["7B"], torch.bfloat16, torch.device("cpu"))
        == "it needs about 18.1 GiB of memory and 1.0 are free"
    )


def test_rows_are_measured_once_and_reported_from_where_they_are_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "0.16B", SMALL[1])
    monkeypatch.setattr(command, "ON_BASE", ("grounded",))
    asked = ["--quick", "--batches", "2", "--groups", "1", "--new-tokens", "4", "--rounds", "1", "--no-tuned"]
    asked += ["--out", str(tmp_path)]
    command.main(asked)
    text = capsys.readouterr().out
    assert "a larger model's price" in text
    for method in ("plain", "grounded alone", "grounded with lookup", "lookup without heads", "dynamo alone"):
        assert method in text
    monkeypatch.setattr(command, "open_widened", None)  # nothing is opened for rows that are stored
    command.main(asked)
    assert "plain, dynamo's own backbone" in text
    tables = text[text.index("milliseconds of a pass") :]
    assert capsys.readouterr().out.endswith(tables)
    command.main([*asked, "--report", "--groups", "3"])
    assert "grounded alone" not in capsys.readouterr().out, "a row of other settings is another row"


def test_one_backbone_goes_before_the_next_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With both in memory at once, a shape that fits by its own size would not."""
    before: list[weakref.ref[Any]] = []

    def open_alone(families: Any, shape: WideShape, dtype: torch.dtype) -> Any:
        assert [one() for one in before] == [None] * len(before)
        found = open_widened(families, shape, dtype)
        before.append(weakref.ref(found.model))
        return found

    monkeypatch.setitem(SHAPES, "0.16B", SMALL[1])
    monkeypatch.setattr(command, "ON_BASE", ("grounded",))
    monkeypatch.setattr(command, "open_widened", open_alone)
    asked = ["--quick", "--groups", "1", "--new-tokens", "2", "--rounds", "1", "--no-tuned", "--out", str(tmp_path)]
    command.main(asked)
    assert len(before) == 3  # methods of two backbones, then passes of one


def test_beside_heads_alone_stand_assistant_model_and_what_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked to compile is recorded here, not compiled."""
    asked = []
    monkeypatch.setattr(cells, "packed_twin", lambda widened: None)
    monkeypatch.setattr(methods, "compiled_static_cache", lambda: asked.append("plain") or {})
    monkeypatch.setattr(
        methods,
        "TreeDecoding",
        lambda token_heads, lookup, compile: asked.append(compile) or TreeDecoding(token_heads, lookup=lookup),
    )
    widened = open_widened(["grounded"], SMALL[1], torch.float32)
    settings = GreedySettings(new_tokens=8, repetition_penalty=1.1)
    lines = {x.method: x for x in cells.measure_speeds(widened, settings, 1, 1, repeats=2, tuned=False, compile=True)}
    assert sorted(map(str, asked)) == ["True", "plain"]
    beside = ["assistant_model", "plain, compiled", "grounded alone, compiled"]
    assert list(lines)[-3:] == beside
    assert {line.same_text for line in lines.values()} == {"yes"}
    assert lines["grounded alone, compiled"].tree == lines["grounded alone"].tree
    assert lines["assistant_model"].tokens_per_pass > 1
    pair = cells.measure_speeds(widened, settings, 2, 1, repeats=1, tuned=False, compile=False)
    assert not {line.method for line in pair} & set(beside), "assisted generation decodes one text at a time"


def test_compiled_heads_are_compared_with_compiled_plain() -> None:
    lines = [line("plain", 1.0, ""), line("plain, compiled", 1.6, ""), line("grounded alone, compiled", 2.0)]
    lines[1] = replace(lines[1], tokens_per_second=0.8)
    (*_, said) = verdicts([speeds("7B", "bfloat16", 4, lines)])
    assert said == "7B bfloat16, batch 4, greedy: grounded alone, compiled is 1.25 × plain, compiled"
    slower = line("grounded alone", 1.4)
    target, compiled = verdicts([speeds("7B", "bfloat16", 1, [*lines, slower])])
    assert target.startswith("7B bfloat16, greedy: grounded alone is 1.40 × plain"), (
        "compiled heads reach no eager bound"
    )
    assert "compiled is 1.25 ×" in compiled


def test_the_share_reached_is_of_plain_generation_of_the_same_kind() -> None:
    lines = [line("plain", 1.0, ""), line("plain, compiled", 1.6, ""), line("plain, packed", 1.2, "")]
    lines += [line("gru alone", 1.4), line("gru alone, packed", 1.8), line("gru alone, compiled", 2.0)]
    cell = speeds("7B", "bfloat16", 1, lines)
    assert [figures(cell, x)[-2] for x in lines] == ["", "", "", "0.70", "0.75", "0.62"]
    assert verdicts([cell])[0] == (
        "7B bfloat16, greedy: gru alone, packed is 1.80 × plain (1.50 × plain, packed) with 2.00 tokens per pass, "
        "0.75 of that bound; target 0.9: not reached"
    )


def test_what_does_not_fit_into_the_minutes_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []
    said: list[str] = []
    monkeypatch.setattr(command, "measure", lambda row, say: measured.append(row.stored.name))
    asked = ["--shapes", "1.2B", "7B", "--dtypes", "bfloat16", "--batches", "1", "4", "--out", str(tmp_path)]
    rows = list(command.wanted(command.build_parser().parse_args(asked)))
    clock = iter([0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 35.0, 35.0, 35.0, 42.0, 42.0, 42.0, 42.0, 49.0, 49.0])
    command.measure_all(rows, Budget(1, clock=lambda: next(clock)), said.append)
    assert measured == ["1.2B-bfloat16-batch1", "7B-bfloat16-batch1", "1.2B-bfloat16-batch4", "1.2B-bfloat16-passes"]
    left = ["7B-bfloat16-batch4", "7B-bfloat16-passes"]  # 5.3 times as large: 37 seconds after 42 of 60
    assert said == [f"{name} is left out: its share of the run, 1 minutes, is over" for name in left]


@pytest.mark.parametrize("minutes", [1.0, None])
def test_with_minutes_each_row_is_printed_when_it_is_measured(
    minutes: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = speeds("0.16B", "float32", 1, [line("plain", 1.0, ""), line("gru alone", 1.5)])
    monkeypatch.setattr(command, "measure", lambda row, say: row.stored.write(asdict(cell)))
    asked = ["--shapes", "0.16B", "--dtypes", "float32", "--batches", "1", "--out", str(tmp_path)]
    _, row = command.wanted(command.build_parser().parse_args(asked))
    command.measure_all([row], Budget(minutes), print)
    assert ("gru alone" in capsys.readouterr().out) == (minutes is not None)


def line(method: str, ratio: float, tree: str = "a tree") -> MethodSpeed:
    return MethodSpeed(
        method=method,
        tree=tree,
        tokens_per_pass=2.0,
        tokens_per_second=1.0,
        ratio=ratio,
        interval=(ratio, ratio),
        same_text="yes",
        repeated_4grams=0.14,
    )


def speeds(shape: str, dtype: str, batch: int, lines: list[MethodSpeed]) -> Speeds:
    return Speeds(shape=shape, dtype=dtype, batch=batch, decoding="greedy", lines=lines)


def test_the_readmes_table_has_shapes_side_by_side() -> None:
    first = speeds("0.4B", "float32", 1, [line("plain", 1.0, ""), line("gru alone", 1.5)])
    other = speeds("7B", "bfloat16", 1, [line("plain", 1.0, "")])
    batch = speeds("7B", "bfloat16", 4, [line("medusa alone", 1.0, "")])
    *_, plain, gru, shares = markdown([first, other, batch]).splitlines()
    assert plain == "|plain|2.00|1.0&nbsp;tokens/s|2.00|1.0&nbsp;tokens/s|yes|"
    assert gru == "|gru alone|2.00|1.50&nbsp;(1.50–1.50)|–|–|yes|"
    assert shares == "|*share of repeated 4-grams*|14%| |14%| | |"
    assert "tuned" not in markdown([speeds("7B", "bfloat16", 1, [line("plain", 1.0), line("gru alone, tuned", 1.4)])])


def test_sampled_texts_below_float32_promise_their_distribution() -> None:
    """Rounding moves a random number to another token, so the text is compared in float32 alone."""
    widened = open_widened(["grounded"], SMALL[1], torch.float32)
    settings = SampledSettings(new_tokens=6)
    assert make_method("grounded alone", widened.model, settings, None).promises == "same text"
    found = cells.measure_speeds(widened, settings, 1, 1, repeats=1, tuned=True, compile=False)
    assert {x.same_text for x in found if x.method != "assistant_model"} == {"yes"}
    assert not [x for x in found if "tuned" in x.method], "trees are tuned for greedy texts"
    assert make_method("grounded alone", widened.model.bfloat16(), settings, None).promises == "same distribution"


def test_a_block_goes_between_its_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before <a> old </a> after")
    write_block(page, ("<a>", "</a>"), "new ")
    assert page.read_text() == "before <a>\nnew </a> after"
    with pytest.raises(ValueError, match="has lost the markers <b> and </b>"):
        write_block(page, ("<b>", "</b>"), "new")


def test_the_target_is_said_of_the_fastest_heads_alone() -> None:
    lines = [line("plain", 1.0, ""), line("gru alone", 1.5), line("medusa alone", 1.84), line("gru with lookup", 3.0)]
    cell = speeds("0.4B", "bfloat16", 1, lines)
    (said,) = verdicts([cell])
    assert said.startswith(
        "0.4B bfloat16, greedy: medusa alone is 1.84 × plain with 2.00 tokens per pass, 0.92 of that bound"
    )
    assert said.endswith(": reached")
