"""Predictions of trees held against measurements: halves pooled, and the sentence that says whether they hold."""

import dataclasses
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.shared import wide_console
from benchmarks.speed import trees
from benchmarks.speed.trees import Line, lines_table, pool, say_worst
from heads.decoding.trees.static import Tree
from heads.tuning.decoding_speed import BatchTotals, Speed


def line(decoding: str, predicted: float, measured: float, plain_measured: float = 100.0) -> Line:
    return Line(
        heads="grounded",
        decoding=decoding,
        tree="a static tree",
        predicted=Speed(tokens_per_pass=2.0, tokens_per_second=predicted),
        measured=Speed(tokens_per_pass=2.0, tokens_per_second=measured),
        plain_predicted=100.0,
        plain_measured=plain_measured,
    )


def test_a_swap_takes_out_what_one_half_copies_more() -> None:
    """Where the second half decodes twice as fast, either fit is far off and both together are not."""
    [pooled] = pool([line("tuned", 200, 400)], [line("tuned", 400, 200)])
    assert [half.ratio_deviation for half in pooled.halves] == pytest.approx([-0.5, 1.0])
    assert pooled.predicted.tokens_per_second == pytest.approx(2 / (1 / 200 + 1 / 400))
    assert pooled.ratio_deviation == pytest.approx(0)


def test_the_ratios_interval_is_over_the_prompts_of_both_halves() -> None:
    def half(seconds: list[float]) -> Line:
        ours = BatchTotals(tokens=[8.0, 8.0], row_passes=[4.0, 4.0], seconds=seconds)
        plain = BatchTotals(tokens=[8.0, 8.0], row_passes=[8.0, 8.0], seconds=[1.0, 1.0])
        return dataclasses.replace(line("tuned", 200, 200), rounds=((ours, plain),))

    [pooled] = pool([half([0.5, 0.5])], [half([0.5, 0.5])])
    assert pooled.interval == (2.0, 2.0)
    [pooled] = pool([half([0.5, 0.5])], [half([1.0, 1.0])])
    assert pooled.interval == pytest.approx((1.0, 2.0), abs=0.2)
    assert line("tuned", 200, 200).interval is None


def test_a_swap_keeps_what_both_halves_miss() -> None:
    [pooled] = pool([line("tuned", 240, 200)], [line("tuned", 240, 200)])
    assert pooled.ratio_deviation == pytest.approx(0.2)


def test_a_slower_machine_leaves_the_ratio_alone() -> None:
    [pooled] = pool([line("tuned", 200, 160, 80)], [line("tuned", 200, 160, 80)])
    assert pooled.deviation == pytest.approx(0.25)
    assert pooled.ratio_deviation == pytest.approx(0)


def test_trees_of_one_half_alone_are_left_out() -> None:
    assert pool([line("tuned", 200, 200), line("tuned beside lookup", 200, 200)], [line("tuned", 200, 200)])[1:] == []


@pytest.mark.parametrize(("predicted", "verdict"), [(218, "yes"), (222, "no")])
def test_more_than_ten_percent_is_said(predicted: float, verdict: str) -> None:
    console = wide_console()
    with console.capture() as said:
        lines = pool([line("tuned", predicted, 200)], [line("tuned", predicted, 200)])
        say_worst(console, "heads alone", lines)
        console.print(lines_table(lines))
    assert f"within 10% of measured: {verdict} (worst: grounded, tuned" in said.get()
    assert f"{predicted / 200 - 1:+.1%}" in said.get()


def test_the_budget_at_which_each_head_pays_stands_below_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pays = {1: 2, 2: 3, 3: 12, 4: None}
    tuning = SimpleNamespace(
        heads_pay_from=pays, num_heads=4, tree=Tree([[0], [0, 0]]), times=SimpleNamespace(verify={1: 1.0, 64: 2.0})
    )
    monkeypatch.setattr(trees, "verdict", lambda tuning: "Chosen: a static tree")
    console = Console(file=io.StringIO(), width=400)
    trees.say_choice(console, "grounded", tuning)  # type: ignore[arg-type]
    first, second = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert first == "grounded: Chosen: a static tree"
    assert "It uses 2 of 4 heads" in second
    assert "head 3 from 12 nodes, head 4 at no budget" in second
