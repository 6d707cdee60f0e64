"""Answers and verdicts of finished prompts, on disk, so that an interrupted comparison asks only what is missing.

They are kept for the call that goes on with them and removed when it is done. A later call asks every prompt again: a
server says nothing of a change in it, and an old verdict must not stand for a new one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heads.evaluation.lossless.answers import Answer, Asked
from heads.evaluation.lossless.verdicts import Finding, Margins
from heads.evaluation.runs.rows import Row, Rows
from heads.evaluation.runs.task import fingerprint


def keep_answer(rows: Rows, number: int, ask: Callable[[], Answer]) -> Answer:
    """The reference's answer to a prompt: the kept one, or one that is asked for now and kept."""
    name = f"reference's answer to prompt {number}"
    row = rows.get(name)
    if row is not None:
        return Answer(**row)
    answer = ask()
    rows.put(name, dataclasses.asdict(answer))
    return answer


def keep_finding(rows: Rows, source: str, number: int, examine: Callable[[], Finding]) -> Finding:
    """The verdict on a source's answer to a prompt: the kept one, or one that is found now and kept."""
    name = f"verdict on prompt {number} of {source}"
    row = rows.get(name)
    if row is not None:
        return read_finding(row)
    finding = examine()
    rows.put(name, dataclasses.asdict(finding))
    return finding


def read_finding(row: Row) -> Finding:
    """
    >>> finding = Finding(prompt=1, verdict="bug", margins=Margins(gap=3.0, behind_best=0.0, rounding=0.1))
    >>> read_finding(dataclasses.asdict(finding)) == finding
    True
    """
    margins = None if row["margins"] is None else Margins(**row["margins"])
    return Finding(**{**row, "margins": margins, "texts": tuple(row["texts"])})


def describe_prompts(asked: Sequence[Asked]) -> list[Any]:
    """The prompts as they are asked, in text or messages and in tokens."""
    return [(one.prompt, None if one.prompt_1T is None else one.prompt_1T[0].tolist()) for one in asked]


def describe_files(paths: Sequence[str | Path | None]) -> Mapping[str, str]:
    """What changes with the content of each folder or file; a name that is neither stands for itself."""
    found = [Path(path) for path in paths if path is not None]
    return {str(path): fingerprint(path) for path in found if path.is_dir()} | {
        str(path): path.read_text(encoding="utf-8") if path.is_file() else "" for path in found if not path.is_dir()
    }


def as_folder(name: str) -> str:
    """
    >>> as_folder("org/Model-7B"), as_folder("medusa+grounded"), as_folder("../")
    ('org-Model-7B', 'medusa+grounded', 'unnamed')
    """
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "unnamed"
