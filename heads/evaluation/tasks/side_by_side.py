"""Models side by side on the same tasks, with standard errors and paired intervals: DynaMo's tables 1 and 10 to 14.

A value is marked where its difference from the first row lies outside 0 with 95 % (Student's t, paired over examples);
differences inside are no wins and no losses, whatever their sign. Fewer than eight examples get no mark: answers that
are right or wrong can then all differ alike by chance.
"""
# S sample

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from heads.evaluation.runs.ratios import student
from heads.evaluation.tasks.presets import Preset, TaskColumn
from heads.evaluation.tasks.run import TaskResult

LEAST_EXAMPLES = 8
"""Differences are given intervals from so many examples on."""
PERCENT = ("acc", "acc_norm", "exact_match", "pct_stereotype")
"""Metrics that the harness gives as shares, shown in percent as the paper does; others are shown as they are."""


class Kept(Protocol):
    """Rows that a run has finished, by name, so that it can be resumed."""

    def get(self, name: str) -> Mapping[str, Any] | None: ...

    def put(self, name: str, row: Mapping[str, Any]) -> None: ...


@dataclass(kw_only=True)
class TaskRun:
    """One model's results by task.

    Attributes:
        decoded: what heads did on its texts.
        cut: how many requests lost their beginning, by the name that the harness was given.
    """

    name: str
    results: dict[str, TaskResult] = field(default_factory=dict)
    decoded: dict[str, Any] | None = None
    cut: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> TaskRun:
        results = {
            task: TaskResult(
                task=task,
                metrics={name: (value, error) for name, (value, error) in found["metrics"].items()},
                samples=found["samples"],
                shots=found["shots"],
            )
            for task, found in row["results"].items()
        }
        return cls(name=row["name"], results=results, decoded=row["decoded"], cut=row["cut"])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure of the table.

    Attributes:
        difference: 95 % interval of its difference from the first row; None for the first row, or with too few
            samples.
    """

    value: float
    error: float | None
    difference: tuple[float, float] | None = None

    @property
    def mark(self) -> str:
        """
        >>> Cell(value=0.5, error=0.1, difference=(0.01, 0.2)).mark, Cell(value=0.5, error=0.1).mark
        (' ▲', '')
        """
        low, high = self.difference or (0.0, 0.0)
        return " ▲" if low > 0 else " ▼" if high < 0 else ""


def first_metric(result: TaskResult) -> str:
    return next(iter(result.metrics))


def cell_of(column: TaskColumn, run: TaskRun, first: TaskRun) -> Cell | None:
    """None where the harness has no such metric."""
    result, reference = run.results[column.task], first.results[column.task]
    metric = column.metric or first_metric(result)
    if metric not in result.metrics:
        return None
    value, error = result.metrics[metric]
    ours, theirs = result.samples.get(metric), reference.samples.get(metric)
    paired = run is not first and ours is not None and theirs is not None and len(ours) == len(theirs)
    return Cell(value=value, error=error, difference=difference(ours or [], theirs or []) if paired else None)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean difference, paired over samples; None for too few of them.

    >>> difference([1.0] * 8, [0.0] * 8), difference([1.0], [0.0])
    ((1.0, 1.0), None)
    """
    if len(ours) < LEAST_EXAMPLES:
        return None
    apart_S = np.asarray(ours) - np.asarray(theirs)
    mean, half = float(apart_S.mean()), student(len(apart_S) - 1) * float(apart_S.std(ddof=1)) / len(apart_S) ** 0.5
    return mean - half, mean + half


def preset_table(preset: Preset, runs: Sequence[TaskRun]) -> Table:
    """One row for each model, one column for each task and metric."""
    counted = [runs[0].results[task] for task in preset.runs]
    shots = sorted({result.shots for result in counted})
    title = f"{preset.shows}, {' or '.join(map(str, shots))}-shot, {sum(r.num_samples for r in counted)} examples"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in preset.columns:
        table.add_column(column.title, justify="right")
    for run in runs:
        table.add_row(run.name, *(show(cell_of(column, run, runs[0]), column, run) for column in preset.columns))
    return table


def show(cell: Cell | None, column: TaskColumn, run: TaskRun) -> str:
    """Value ± standard error, in percent where the metric is a share; "–" where there is none."""
    if cell is None:
        return "–"
    metric = column.metric or first_metric(run.results[column.task])
    scale, digits = (100.0, 1) if metric in PERCENT else (1.0, 2)
    error = "" if cell.error is None else f" ± {cell.error * scale:.{digits}f}"
    return f"{cell.value * scale:.{digits}f}{error}{cell.mark}"


def decoded_line(run: TaskRun) -> str:
    """What heads did on generate-until tasks, in a sentence; empty if nothing was decoded."""
    found = run.decoded
    if not found or not found["texts"]:
        return ""
    parted = ", ".join(f"{found[kind]} {kind}" for kind in ("rounding", "bug", "unknown") if found[kind])
    return (
        f"{run.name}: {found['texts']} texts decoded with heads at {found['tokens_per_pass']:.2f} tokens per pass, "
        f"{found['same']} equal to plain greedy" + (f", {parted}" if parted else "")
    )


def cut_line(preset: Preset, runs: Sequence[TaskRun]) -> str:
    """Which models cut how many requests of which tasks, in a sentence; empty if all had room.

    >>> preset = Preset(columns=(TaskColumn(task="squadv2"),), shots=0, shows="table 12")
    >>> cut_line(preset, [TaskRun(name="backbone", cut={"squadv2": 3})])
    'Longer than the context, so without their beginning: backbone, 3 requests of squadv2.'
    """
    found = [
        f"{run.name}, {run.cut[task]} request{'s' * (run.cut[task] > 1)} of {task}"
        for run in runs
        for task in preset.runs
        if run.cut.get(task)
    ]
    return f"Longer than the context, so without their beginning: {'; '.join(found)}." if found else ""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One row: its name and a function that loads a `HeadsLM`."""

    name: str
    load: Callable[[], Any]


def run_all(
    contenders: Sequence[Contender],
    presets: Sequence[Preset],
    run_one: Callable[[Any, Preset, str], list[TaskResult]],
    kept: Kept,
) -> list[TaskRun]:
    """Each model on each task of the presets; a model is loaded only if something of it is missing in `kept`."""
    asked, runs = [(preset, task) for preset in presets for task in preset.runs], []
    for contender in contenders:
        run, load = TaskRun(name=contender.name), cache(contender.load)
        for preset, task in asked:
            row = kept.get(f"{contender.name} on {task}")
            if row is None:
                found = run_contender(contender.name, load(), preset, task, run_one)
                kept.put(f"{contender.name} on {task}", found.as_dict())
            else:
                found = TaskRun.from_dict(row)
            run.results |= found.results
            run.decoded = add_decoded(run.decoded, found.decoded)
            run.cut |= found.cut
        runs.append(run)
    return runs


def run_contender(
    name: str, model: Any, preset: Preset, task: str, run_one: Callable[[Any, Preset, str], list[TaskResult]]
) -> TaskRun:
    results = {result.task: result for result in run_one(model, preset, task)}
    return TaskRun(name=name, results=results, decoded=model.take_decoded(), cut={task: model.take_cut()})


def add_decoded(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Counts of both, and tokens per pass of both together.

    >>> add_decoded(None, {"texts": 1, "tokens": 6, "passes": 3})
    {'texts': 1, 'tokens': 6, 'passes': 3, 'tokens_per_pass': 2.0}
    """
    if first is None and second is None:
        return None
    both = [found for found in (first, second) if found is not None]
    names = [name for name in both[0] if name != "tokens_per_pass"]
    total = {name: sum(found[name] for found in both) for name in names}
    return total | {"tokens_per_pass": total["tokens"] / max(1, total["passes"])}
