"""The folder of one evaluation: results.json, report.html and the finished rows; and how `headway compare` reads it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.checkpoint.opening import find_backbone
from heads.checkpoint.save_load import write_whole
from heads.evaluation.report.page import render_page
from heads.evaluation.report.sections import Section
from heads.evaluation.runs.task import SuiteTask
from heads.evaluation.tables import describe_machine, versions

RESULTS, REPORT, ROWS = "results.json", "report.html", "rows.jsonl"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One evaluation as its results.json has it."""

    name: str
    suite: str
    results: dict[str, Any]
    machine: dict[str, Any]


def describe_run(task: SuiteTask, suite: str, config: Any, results: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json: figures, and all that is needed to repeat them."""
    return {
        "suite": suite,
        "heads": task.folder.resolve().name,
        "backbone": task.backbone or find_backbone(task.folder),
        "dtype": task.dtype,
        "pack": task.pack,
        "config": dataclasses.asdict(config),
        "results": results,
        "machine": describe_machine(task.device),
        "versions": versions(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def write_run(folder: Path, content: dict[str, Any], sections: Sequence[Section]) -> None:
    """Write results.json and report.html, both or none."""
    facts = {
        "heads": content["heads"],
        "backbone": content["backbone"],
        "dtype": content["dtype"] + ", packed for a CPU" * content["pack"],
        "machine": "{device}, {cpu}, {threads} threads".format(**content["machine"]),
        "versions": ", ".join(f"{name} {version}" for name, version in content["versions"].items()),
        "command": " ".join(content["command"]),
    }
    page = render_page(f"{content['heads']}: {content['suite']}", facts, sections)
    write_whole(folder, {RESULTS: (json.dumps(content, indent=1) + "\n").encode(), REPORT: page.encode()})


def read_run(path: Path) -> Run:
    """A run from its folder or its results.json.

    Raises:
        ValueError: no such run, or a file that is no result of `headway evaluate --suite`.
    """
    file = path / RESULTS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} holds no {RESULTS}; give a folder that headway evaluate --suite wrote with --out.")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Run(
            name=str(found["heads"]),
            suite=str(found["suite"]),
            results=dict(found["results"]),
            machine=found["machine"],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} is no result of headway evaluate --suite ({type(error).__name__}: {error}); run it again."
        ) from None


def read_runs(paths: Sequence[Path]) -> dict[str, Run]:
    """Runs by name; where names repeat, the path takes the name's place.

    Raises:
        ValueError: fewer than two, or runs of different suites.
    """
    if len(paths) < 2:
        raise ValueError(f"{len(paths)} run was given; give at least two to compare.")
    found = [read_run(path) for path in paths]
    suites = sorted({run.suite for run in found})
    if len(suites) > 1:
        raise ValueError(f"The runs are of the suites {' and '.join(suites)}; compare runs of one suite.")
    names = [run.name for run in found]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    if len(set(labels)) < len(labels):
        raise ValueError("A run was given twice; give each once.")
    return dict(zip(labels, found, strict=True))
