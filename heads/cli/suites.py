"""`headway evaluate HEADS --suite NAME`, whose own options follow, and `headway compare RUN RUN …` of its runs.

Figures, report and finished rows are written to the folder --out.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from heads.checkpoint.opening import name_folders
from heads.checkpoint.save_load import write_whole
from heads.checkpoint.schema import read_description
from heads.cli.option_groups import given_options, read_config
from heads.cli.options import LoadingOptions, print_aside
from heads.evaluation.lossless.stored_answers import describe_files
from heads.evaluation.pictures import new_figure
from heads.evaluation.report.page import render_page
from heads.evaluation.report.sections import Section
from heads.evaluation.report.training import training_sections
from heads.evaluation.runs.folder import REPORT, RESULTS, ROWS, describe_run, read_runs, write_run
from heads.evaluation.runs.rows import Rows
from heads.evaluation.runs.task import SuiteTask, fingerprint, settings_of
from heads.evaluation.suites import suite_module, suites
from heads.evaluation.tables import describe_machine, versions
from heads.validation import members

SHARED = ("heads", "suite", "suite_help", "out", "fresh", "backbone", "dtype", "pack", "revision")
"""Parameters that a suite takes too; all others are about held-out text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """Suites."""

    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Of {', '.join(suites())}; the suite's own options follow: --suite-help lists them."
        ),
    ] = None
    suite_help: Annotated[bool, typer.Option("--suite-help", help="List the options of --suite NAME.")] = False
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Folder for {RESULTS}, {REPORT} and finished rows; by default evaluations/HEADS/NAME.",
        ),
    ] = None
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure anew what an earlier call of the same settings has finished.")
    ] = False


def run_suite(context: typer.Context, heads: Path | None, options: SuiteOptions, loading: LoadingOptions) -> None:
    """Run a suite on heads, show its tables, and write its figures and its report."""
    name = (options.suite or "").replace("_", "-")
    module = suite_module(name)
    typed = f"{context.command_path} HEADS --suite {name}", "--suite-help"
    if options.suite_help:
        read_config(module.Config, ["--suite-help"], *typed)
    if heads is None or str(heads).startswith("-"):
        raise ValueError(
            f"--suite {name} needs a folder of heads; give it first: headway evaluate HEADS --suite {name}."
        )
    refuse_held_out(context, name)
    config = read_config(module.Config, context.args, *typed)
    new_figure(1, 1)  # without matplotlib nothing is measured
    task = suite_task(heads, options, loading, config, name)
    if task.rows.resumed:
        print_aside(f"{task.rows.resumed} rows of an earlier call are kept; --fresh measures them anew")
    try:
        results = module.run(task, config)
    except KeyboardInterrupt:
        print_aside(f"finished rows are kept in {task.rows.path}; the same command goes on")
        raise
    sections = [*module.sections(results), *training_sections(heads)]
    described = describe_run(task, name, config, results)
    print_sections(Console(), f"{described['heads']}: {name}", sections)
    assert task.rows.path is not None
    write_run(task.rows.path.parent, described, sections)
    print_aside(f"report: {task.rows.path.parent / REPORT}, figures: {RESULTS} beside it")
    if results.get("failed"):
        raise typer.Exit(1)


def suite_task(heads: Path, options: SuiteOptions, loading: LoadingOptions, config: Any, name: str) -> SuiteTask:
    """The heads, and the rows that earlier calls of the same settings have finished.

    Raises:
        ValueError: the folder holds no heads.
    """
    read_description(heads)
    task = SuiteTask(folder=heads, backbone=loading.backbone, dtype=loading.dtype, pack=loading.pack)
    out = options.out or Path("evaluations") / name_folders([heads])[0] / name
    settings = {
        "suite": name,
        "config": settings_of(config),
        "files": describe_files([loading.backbone, *texts_of(config)]),
        "heads": fingerprint(heads),
        "backbone": loading.backbone,
        "dtype": loading.dtype,
        **({"pack": True} if loading.pack else {}),
        "machine": describe_machine(task.device),
        "versions": versions(),
    }
    task.rows = Rows(out / ROWS, settings)
    if options.fresh:
        task.rows.forget()
    return task


def texts_of(config: Any) -> list[str]:
    """The values of a Config that may be names of files: all texts, but for a choice between words."""
    hints = get_type_hints(type(config))
    return [value for name, value in vars(config).items() if isinstance(value, str) and str in members(hints[name])]


def refuse_held_out(context: typer.Context, suite: str) -> None:
    """Options about held-out text do nothing with a suite."""
    given = given_options(context, [name for name in context.params if name not in SHARED])
    if given:
        raise ValueError(f"{', '.join(given)} is about held-out text and not about --suite {suite}; leave it out.")


def refuse_words(context: typer.Context, suite: SuiteOptions) -> None:
    """Without a suite there are no options but the command's own, and nothing to write to --out."""
    given = given_options(context, ["suite_help", "out", "fresh"])
    if given:
        raise ValueError(f"{', '.join(given)} is about a suite; give --suite NAME, of {', '.join(suites())}.")
    if context.args:
        raise ValueError(
            f"{context.args[0]} is no option of headway evaluate; headway evaluate --help lists them, and with "
            f"--suite NAME its own follow."
        )


def print_sections(console: Console, title: str, sections: Sequence[Section]) -> None:
    """The report's title, sentences and tables; what pictures alone show is in the report."""
    console.print(Text(title, style="bold"))
    for section in sections:
        if not section.text and not section.tables:
            continue
        console.print(f"\n[bold]{section.title}[/bold]", highlight=False)
        say(console, section.text)
        for table in section.tables:
            console.print(table.as_rich())
            say(console, table.note)


def say(console: Console, sentences: str) -> None:
    if sentences:
        console.print(sentences, highlight=False, markup=False, soft_wrap=True)


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders that headway evaluate --suite NAME wrote, of one suite."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the comparison as one self-contained HTML file.")
    ] = None,
) -> None:
    """Compare runs of one suite with the first, with paired 95 % intervals; what one leaves open is no difference."""
    if out is not None:
        new_figure(1, 1)  # without matplotlib there are no pictures
    found = read_runs(runs)
    suite = next(iter(found.values())).suite
    module = suite_module(suite)
    if not hasattr(module, "compare"):
        raise ValueError(f"Runs of the suite {suite} cannot be compared; its own report has models side by side.")
    sections = module.compare({name: run.results for name, run in found.items()})
    machines = {str(sorted(run.machine.items())) for run in found.values()}
    if len(machines) > 1:
        print_aside("The runs come from different machines or threads: only ratios to their own plain can be compared.")
    title = f"{suite}: {', '.join(found)}"
    print_sections(Console(), title, sections)
    if out is not None:
        facts = {"runs": ", ".join(map(str, runs)), "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])}
        page = render_page(title, facts, sections)
        write_whole(out.parent, {out.name: page.encode()})
        print_aside(f"report: {out}")
