"""Run tasks of lm-evaluation-harness on one model, through its own API, and keep each task's figures and samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heads.evaluation.tasks.presets import Preset, unknown_tasks
from heads.extras import needs_extra

BOOTSTRAPS = 1000  # for standard errors of metrics that are no means
SEED = 0


@dataclass(kw_only=True)
class TaskResult:
    """One task or group of the harness on one model.

    Attributes:
        metrics: value and standard error by metric; None where the harness has no standard error.
        samples: by metric, one number for each example, in the order of the examples.
        shots: examples in the prompt.
    """

    task: str
    metrics: dict[str, tuple[float, float | None]]
    samples: dict[str, list[float]] = field(default_factory=dict)
    shots: int = 0

    @property
    def num_samples(self) -> int:
        return max((len(found) for found in self.samples.values()), default=0)


def make_manager(tasks: Sequence[str], folder: Path | None) -> Any:
    """The harness's index of tasks: of the user's folder alone if it holds all, since its own takes seconds to read.

    Raises:
        ValueError: a task that is in neither, where the sentence names the nearest, or a tag.
    """
    with needs_extra("eval", "Tasks of lm-evaluation-harness were asked for"):
        from lm_eval.tasks import TaskManager
    if folder is not None and not folder.is_dir():
        raise ValueError(f"The folder of tasks {folder} does not exist; give a folder with YAML files of tasks.")
    place = None if folder is None else str(folder)
    manager = TaskManager(include_path=place, include_defaults=folder is None)
    if folder is not None and unknown_tasks(tasks, manager.all_tasks):
        manager = TaskManager(include_path=place)
    if said := unknown_tasks(tasks, manager.all_tasks):
        raise ValueError(said)
    refuse_tags(tasks, manager)
    return manager


def refuse_tags(names: Sequence[str], manager: Any) -> None:
    """Refuse tags such as ai2_arc, for which the harness returns the figures of their tasks and none of their own."""
    for name in names:
        if name in manager.all_tags:
            tagged = sorted(task for task, entry in manager.task_index.items() if name in entry.tags)
            raise ValueError(
                f"{name} is a tag of the harness and no task; give the tasks that have it: {', '.join(tagged)}."
            )


def run_task(model: Any, preset: Preset, name: str, manager: Any, limit: int | None) -> list[TaskResult]:
    """One task or group of the preset on a `HeadsLM`; of a group, the groups in it that the preset shows too.

    Args:
        name: of `preset.runs`.
        limit: most examples of each task; None takes all.
    """
    with needs_extra("eval", "Tasks of lm-evaluation-harness were asked for"):
        import lm_eval
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # what it says of prompts that it cuts, `HeadsLM` counts
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[name],
        num_fewshot=preset.shots,
        task_manager=manager,
        limit=limit,
        bootstrap_iters=BOOTSTRAPS,
        random_seed=SEED,
        numpy_random_seed=SEED,
        torch_random_seed=SEED,
        fewshot_random_seed=SEED,
    )
    return [read_result(task, found) for task in preset.runs[name]]


def read_result(task: str, found: Mapping[str, Any]) -> TaskResult:
    """One task's or group's figures from the harness's results.

    Raises:
        ValueError: a group whose tasks the harness does not sum up.
    """
    parts = leaves(task, found.get("group_subtasks", {}))
    metrics = read_metrics({**found.get("groups", {}), **found["results"]}.get(task, {}))
    if not metrics:
        raise ValueError(f"The harness has no figure for {task} as a whole; give its tasks: {', '.join(parts)}.")
    return TaskResult(
        task=task,
        metrics=metrics,
        samples=read_samples([found["samples"].get(part, []) for part in parts]),
        shots=max((int(found["n-shot"].get(part) or 0) for part in parts), default=0),
    )


def leaves(task: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    """The tasks of a group, of its groups too; a task alone stands for itself.

    >>> leaves("mmlu", {"mmlu": ["stem", "other"], "stem": ["physics"]})
    ['physics', 'other']
    """
    inner = subtasks.get(task)
    return [leaf for part in inner for leaf in leaves(part, subtasks)] if inner else [task]


def read_metrics(figures: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """
    >>> read_metrics({"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,none": 0.2, "f1_stderr,none": "N/A"})
    {'acc': (0.5, 0.1), 'f1': (0.2, None)}
    """
    values: dict[str, tuple[float, float | None]] = {}
    for key, value in figures.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, float | int):
            continue
        error = figures.get(f"{metric}_stderr,{filtered}")
        values.setdefault(metric, (float(value), float(error) if isinstance(error, float | int) else None))
    return values


def read_samples(parts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Numbers of each metric by example; a metric that is no number for some example is left out."""
    rows = [row for part in parts for row in sorted(part, key=lambda row: int(row["doc_id"]))]
    metrics = list(dict.fromkeys(name for row in rows for name in row.get("metrics", [])))
    numbers: dict[str, list[float]] = {}
    for metric in metrics:
        values = [row[metric] for row in rows if metric in row]
        if all(isinstance(value, float | int | bool) for value in values):
            numbers[metric] = [float(value) for value in values]
    return numbers
