"""How accurate each head was through the run that trained it: a section of every report, where the run is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads.evaluation.pictures import draw_accuracy, new_figure, read_metrics
from heads.evaluation.report.sections import Picture, Section
from heads.evaluation.report.svg import as_picture

METRICS = "metrics.jsonl"


def training_sections(heads: Path) -> list[Section]:
    """One section, or none: heads that lie in no run's folder, or whose run evaluated nothing, have no curve.

    Args:
        heads: a folder of heads; a run writes `last/` and `best/` beside its metrics.jsonl.
    """
    found = [folder / METRICS for folder in (heads, heads.resolve().parent) if (folder / METRICS).is_file()]
    if not found or not (lines := evaluations(found[0])):
        return []
    text = (
        f"{len(lines)} evaluations on held-out text, up to step {lines[-1]['step']:,} of the run that trained these "
        f"heads; dashed: the backbone's own next token."
    )
    return [Section(title="Accuracy through training", text=text, pictures=[draw_curves(lines)])]


def evaluations(metrics: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(metrics)
    except ValueError:  # a run without held-out data
        return []


def draw_curves(lines: list[dict[str, Any]]) -> Picture:
    figure = new_figure(4.4, 5.6)
    upper, lower = figure.subplots(2, 1)
    draw_accuracy(upper, lines, "top1", "top-1 accuracy")
    draw_accuracy(lower, lines, "top5", "top-5 accuracy")
    return as_picture(figure, "Accuracy of each head on held-out text by training step.")
