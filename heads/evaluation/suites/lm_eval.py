"""Suite `lm-eval`: downstream tasks of lm-evaluation-harness, base and trained backbone side by side.

Source: DynaMo (Tuli et al., 2024), §4.1, tables 1 and 10 to 14. Rows are the backbone as it was, the backbone trained
further without heads where it is given (table 10), and the backbone as the heads' folder has it, whose texts heads
decode. A frozen backbone has one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.backbone.loading import check_backbone
from heads.checkpoint.opening import find_backbone, open_backbone, open_heads
from heads.checkpoint.schema import read_description
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.report.sections import Section, Table
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.tasks.presets import Preset, read_tasks
from heads.evaluation.tasks.run import make_manager, run_task
from heads.evaluation.tasks.side_by_side import Contender, TaskRun, cut_line, decoded_line, preset_table, run_all
from heads.validation import validated, within

NO_WIN = "▲ ▼: the paired 95 % interval of the difference from the first row lies above or below 0."


@validated
@dataclass(kw_only=True)
class Config:
    """Tasks of lm-evaluation-harness, base and trained backbone side by side.

    Attributes:
        tasks: presets and tasks of the harness, with commas.
        shots: examples in each prompt; None takes the preset's, or the task's own.
        limit: most examples of each task.
        task_folder: folder with YAML files of further tasks.
        without_heads: folder or hub name of the backbone trained further without heads.
        batch_size: rows of a batch for likelihoods.
    """

    tasks: str
    shots: int | None = within(0, default=None)
    limit: int | None = within(1, default=None)
    task_folder: str | None = None
    without_heads: str | None = None
    batch_size: int = within(1, default=8)


def run(task: SuiteTask, config: Config) -> dict[str, Any]:
    """Run the tasks on each row's model; models of finished rows are not loaded.

    Raises:
        ValueError: tasks that do not exist, a folder without heads, or a backbone that is not found.
    """
    presets = read_tasks(config.tasks, config.shots)
    names = [name for preset in presets for name in preset.tasks]
    manager = make_manager(names, None if config.task_folder is None else Path(config.task_folder))
    if config.without_heads is not None:
        check_backbone(config.without_heads)  # before the first model has run all tasks
    contenders = contenders_of(task, config)
    runs = run_all(
        contenders, presets, lambda model, preset, name: run_task(model, preset, name, manager, config.limit), task.rows
    )
    return {
        "tasks": config.tasks,
        "shots": config.shots,
        "rows": [run.as_dict() for run in runs],
        "failed": any(run.decoded is not None and run.decoded["bug"] + run.decoded["unknown"] > 0 for run in runs),
    }


def sections(results: dict[str, Any]) -> list[Section]:
    """A table for each preset; what heads did on the texts of generate-until tasks."""
    runs = [TaskRun.from_dict(row) for row in results["rows"]]
    tables = [as_table(preset, runs) for preset in read_tasks(results["tasks"], results["shots"])]
    lines = [line for run in runs if (line := decoded_line(run))]
    note = NO_WIN if len(runs) > 1 else ""
    return [Section(title="Downstream tasks", text="\n\n".join(filter(None, [note, *lines])), tables=tables)]


def as_table(preset: Preset, runs: Sequence[TaskRun]) -> Table:
    """The preset's table as a report has it."""
    drawn = preset_table(preset, runs)
    columns = [str(column.header) for column in drawn.columns]
    cells = zip(*(column.cells for column in drawn.columns), strict=True)
    rows = [[str(cell) for cell in row] for row in cells]
    return Table(columns=columns, rows=rows, caption=str(drawn.title), note=cut_line(preset, runs))


def contenders_of(task: SuiteTask, config: Config) -> list[Contender]:
    """The rows of the table, the base model first."""
    folder = task.folder
    trained = read_description(folder).trained_backbone is not None and task.backbone is None

    def plain(name: str) -> Any:
        return load_plain(name, task, config.batch_size)

    found = [Contender(name="backbone", load=lambda: plain(find_backbone(folder)))] if trained else []
    if config.without_heads is not None:
        further = config.without_heads
        found.append(Contender(name="backbone, trained further without heads", load=lambda: plain(further)))
    ours = f"backbone, trained with {folder.name} heads" if trained else "backbone"
    ours_with = Contender(name=ours, load=lambda: load_with_heads(task, config.batch_size))
    return [*found, ours_with] if trained else [ours_with, *found]


def load_plain(name: str, task: SuiteTask, batch_size: int) -> Any:
    from heads.evaluation.tasks.harness import HeadsLM  # imports the harness, which takes seconds

    opened = open_backbone(name, task.dtype, pack=task.pack)
    return HeadsLM(opened.model, opened.tokenizer, batch_size=batch_size)


def load_with_heads(task: SuiteTask, batch_size: int) -> Any:
    from heads.evaluation.tasks.harness import HeadsLM

    opened = open_heads([task.folder], task.backbone, task.dtype, pack=task.pack)
    (token_heads,) = opened.token_heads.values()
    return HeadsLM(opened.model, opened.tokenizer, TreeDecoding(token_heads), batch_size=batch_size)
