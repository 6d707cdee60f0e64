"""`headway evaluate HEADS --suite lm-eval`: the options of suites, and what a suite's run prints and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from heads.cli.options import LoadingOptions, print_aside
from heads.evaluation.suites import lm_eval
from heads.evaluation.tables import describe_machine, versions, write_content
from heads.evaluation.tasks.presets import describe_presets

RESULTS = Path("checkpoints/runs/evaluations")


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Suites."""

    suite: Annotated[
        Literal["lm-eval"] | None,
        typer.Option(metavar="NAME", help="lm-eval: downstream tasks of lm-evaluation-harness."),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help=f"Where a suite writes its JSON and keeps finished rows; by default in {RESULTS}. The same call again "
            "goes on where it was stopped.",
        ),
    ] = None
    tasks: Annotated[str | None, typer.Option(metavar="NAMES", help=f"lm-eval, with commas: {describe_presets()}.")] = (
        None
    )
    shots: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="lm-eval: examples in each prompt, for all tasks.")
    ] = None
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="lm-eval: most examples of each task.")] = None
    task_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="lm-eval: folder with YAML files of your own tasks.")
    ] = None
    without_heads: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="lm-eval: the backbone trained further without heads, as another row."),
    ] = None

    def given(self) -> list[str]:
        """Options beside --suite that were given."""
        names = ("out", "tasks", "shots", "limit", "task_folder", "without_heads")
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]

    def check(self) -> None:
        """
        Raises:
            ValueError: options of a suite without --suite, or lm-eval without tasks.
        """
        if self.suite is None and self.given():
            raise ValueError(f"{', '.join(self.given())} belong to a suite; add --suite lm-eval, or leave them out.")
        if self.suite is not None and self.tasks is None:
            raise ValueError(f"--suite lm-eval needs --tasks; give {describe_presets()}.")


def run_suite(heads: Path | None, options: SuiteOptions, loading: LoadingOptions) -> None:
    """Run the suite, print its tables, write its JSON; exit code 1 if heads changed a text."""
    if heads is None:
        raise ValueError("A suite measures heads; give the folder that they were saved to.")
    config = lm_eval.Config(
        tasks=options.tasks or "",
        shots=options.shots,
        limit=options.limit,
        task_folder=None if options.task_folder is None else str(options.task_folder),
        without_heads=options.without_heads,
    )
    out = options.out or RESULTS / heads.resolve().name
    found = lm_eval.run(heads, config, rows=out / "lm-eval.rows.jsonl", backbone=loading.backbone, dtype=loading.dtype)
    show(found)
    write_content(out / "lm-eval.json", found.as_dict() | provenance())
    print_aside(f"figures: {out / 'lm-eval.json'}")
    if found.failed:
        raise typer.Exit(1)


def show(found: lm_eval.Found) -> None:
    console = Console()
    for table in found.tables:
        console.print(table)
    for line in found.lines:
        console.print(line, highlight=False, soft_wrap=True)


def provenance() -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"machine": describe_machine(device), "versions": versions()}
