"""Stores answers and verdicts on disk, so that an interrupted `headway verify-lossless` goes on where it stopped.

The command removes them when it has finished, and its next call asks every prompt anew: a server may have changed
without a sign of it, and an old verdict must not stand for a new one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.evaluation.lossless.answers import Answer, Asked
from heads.evaluation.lossless.verdicts import Finding, Margins
from heads.evaluation.runs.rows import FinishedRow, Rows
from heads.evaluation.runs.task import fingerprint


def keep_answer(rows: Rows, number: int, ask: Callable[[], Answer]) -> Answer:
    """The reference's answer to a prompt: the stored one, or else the one that `ask` returns, which is stored."""
    name = f"reference's answer to prompt {number}"
    row = rows.get(name)
    if row is not None:
        return Answer(**row)
    answer = ask()
    rows.put(name, dataclasses.asdict(answer))
    return answer


def keep_finding(rows: Rows, source: str, number: int, examine: Callable[[], Finding]) -> Finding:
    """The verdict on a source's answer: the stored one, or else the one that `examine` returns, which is stored."""
    name = f"verdict on prompt {number} of {source}"
    row = rows.get(name)
    if row is not None:
        return read_finding(row)
    finding = examine()
    rows.put(name, dataclasses.asdict(finding))
    return finding


def read_finding(row: FinishedRow) -> Finding:
    """The inverse of `dataclasses.asdict`.

    >>> finding = Finding(prompt=1, verdict="bug", margins=Margins(gap=3.0, behind_best=0.0, rounding=0.1))
    >>> read_finding(dataclasses.asdict(finding)) == finding
    True
    """
    margins = None if row["margins"] is None else Margins(**row["margins"])
    return Finding(**{**row, "margins": margins, "texts": tuple(row["texts"])})


def describe_prompts(asked: Sequence[Asked]) -> list[Any]:
    """Each prompt's text or messages, and its token ids, as values for JSON: other prompts, other values."""
    return [(one.prompt, None if one.prompt_1T is None else one.prompt_1T[0].tolist()) for one in asked]


def describe_files(paths: Sequence[str | Path | None]) -> Mapping[str, str]:
    """For each path a string that changes with its content; empty for a name that is no path, such as a hub's."""
    return {str(path): describe_file(Path(path)) for path in paths if path is not None}


def describe_file(path: Path) -> str:
    if os.path.isdir(path):  # unlike Path's own, false for a name that is too long for a path, such as many tasks
        return fingerprint(path)
    return hashlib.sha256(path.read_bytes()).hexdigest() if os.path.isfile(path) else ""


def as_folder(name: str) -> str:
    """A name as one that a folder can have.

    >>> as_folder("org/Model-7B"), as_folder("medusa+grounded"), as_folder("../")
    ('org-Model-7B', 'medusa+grounded', 'unnamed')
    """
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "unnamed"
