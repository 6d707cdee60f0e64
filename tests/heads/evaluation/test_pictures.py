"""Pictures are drawn for any number of heads and methods; tables and JSON hold every number that was measured."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from heads.evaluation.pictures import (
    draw_accuracy,
    draw_panels,
    draw_report,
    draw_speed_blocks,
    draw_speeds,
    read_metrics,
)
from heads.evaluation.tables import speed_table, write_json
from heads.evaluation.throughput import MethodResult

PNG = b"\x89PNG\r\n\x1a\n"


def result(name: str, ratio: float) -> MethodResult:
    return MethodResult(
        name=name,
        tokens=100,
        tokens_per_second=50 * ratio,
        ratio=ratio,
        ratio_low=ratio - 0.1,
        ratio_high=ratio + 0.1,
        interval=(ratio - 0.2, ratio + 0.2),
        tokens_per_pass=1.25 * ratio,
        repeated_4grams=0.37,
        same_text="yes",
    )


ROWS = [result("plain", 1.0), result("grounded", 1.6)]


def write_metrics(path: Path, num_heads: int, *, with_passes: bool = True) -> Path:
    """A metrics.jsonl as a run leaves it: training lines between evaluations."""
    lines = []
    for step in (0, 10, 20):
        found = {"step": step, "eval_backbone_top1": 0.5, "eval_backbone_top5": 0.7}
        for k in range(1, num_heads + 1):
            found |= {f"eval_head{k}_top1": 0.02 * step / k, f"eval_head{k}_top5": 0.03 * step / k}
        if with_passes:
            found["eval_tokens_per_pass"] = 1 + step / 40
        lines += [found, {"step": step + 5, "loss": 2.0, "head1_loss": 1.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("num_heads", [1, 4, 9])
def test_a_report_is_a_png_for_any_number_of_heads(tmp_path: Path, num_heads: int) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", num_heads, with_passes=num_heads != 9)
    draw_report(metrics, {"greedy": ROWS, "penalty": ROWS}, tmp_path / "new" / "report.png")
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(PNG)


def test_accuracy_curves_hold_the_measured_values_and_name_every_head(tmp_path: Path) -> None:
    axes = Figure().subplots()
    draw_accuracy(axes, read_metrics(write_metrics(tmp_path / "m.jsonl", 2)), "top1", "title")
    curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
    assert curves == [
        ([0, 10, 20], pytest.approx([0.0, 0.2, 0.4])),
        ([0, 10, 20], pytest.approx([0.0, 0.1, 0.2])),
        ([0, 10, 20], [0.5, 0.5, 0.5]),
    ]
    assert {text.get_text() for text in axes.texts} == {"head 1  40%", "head 2  20%", "backbone  50%"}


def test_labels_of_close_lines_do_not_overlap(tmp_path: Path) -> None:
    axes = Figure().subplots()
    lines = [{"step": 1, **{f"eval_head{k}_top1": 0.300 + 0.001 * k for k in range(1, 5)}}]
    draw_accuracy(axes, lines, "top1", "title")
    heights = sorted(text.xy[1] for text in axes.texts)
    assert min(high - low for low, high in itertools.pairwise(heights)) > 0.01


def test_bars_are_speeds_with_ratios(tmp_path: Path) -> None:
    axes = Figure().subplots()
    draw_speeds(axes, ROWS, "title")
    assert [bar.get_width() for bar in axes.patches] == [50.0, 80.0]
    assert [text.get_text() for text in axes.texts] == ["50  (1.00 ×)", "80  (1.60 ×)"]


def test_blocks_of_speeds_are_drawn_side_by_side(tmp_path: Path) -> None:
    draw_speed_blocks({"greedy": ROWS, "penalty": ROWS}, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(PNG)


def test_panels_say_how_much_text_repeats_and_name_the_same_methods_once() -> None:
    figure = Figure()
    draw_panels(figure, {"greedy": ROWS, "penalty": [dataclasses.replace(row, repeated_4grams=0.1) for row in ROWS]})
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "greedy; 37% of 4-grams repeat",
        "penalty; 10% of 4-grams repeat",
    ]
    assert [axes.yaxis.get_tick_params()["labelleft"] for axes in figure.axes] == [True, False]
    other = Figure()
    draw_panels(other, {"greedy": ROWS, "penalty": ROWS[:1]})
    assert [axes.yaxis.get_tick_params()["labelleft"] for axes in other.axes] == [True, True]


def test_a_step_that_was_evaluated_twice_counts_once_and_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5, "eval_head1_top1": 0.1}\n{"step": 5, "eval_head1_top1": 0.2}\n', encoding="utf-8")
    assert read_metrics(path) == [{"step": 5, "eval_head1_top1": 0.2}]


def test_metrics_without_evaluations_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ValueError, match="does not exist"):
        read_metrics(path)
    path.write_text('{"step": 1, "loss": 2.0}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no evaluation of heads"):
        read_metrics(path)


def test_the_table_shows_every_number() -> None:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as printed:
        console.print(speed_table(ROWS, "title"))
    line = next(line for line in printed.get().splitlines() if "grounded" in line)
    assert line.split() == ["grounded", "2.00", "80.0", "1.60", "1.40–1.80", "1.50–1.70", "37%", "yes"]


def test_the_table_shows_another_models_perplexity_where_it_was_asked() -> None:
    found = zip(ROWS, (12.0, 34.0), strict=True)
    rows = [dataclasses.replace(row, perplexity=v, perplexity_interval=(v - 1.5, v + 2)) for row, v in found]
    table = speed_table(rows, "title")
    assert [*table.columns[7].cells] == ["12.0 (10.5–14.0)", "34.0 (32.5–36.0)"]
    assert len(table.columns) == 1 + len(speed_table(ROWS, "title").columns)


def test_json_holds_rows_machine_versions_and_command(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "rows.json", {"greedy": ROWS}, torch.device("cpu"), extra=1)
    content = json.loads((tmp_path / "new" / "rows.json").read_text(encoding="utf-8"))
    assert content["blocks"]["greedy"][1]["ratio"] == 1.6
    assert {"cpu", "cores", "threads", "device"} <= set(content["machine"])
    assert content["versions"]["torch"] == torch.__version__
    assert content["command"]
    assert content["extra"] == 1
