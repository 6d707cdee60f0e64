"""Whether a file of results is older than what it measures: the command differs, or a file changed since its commit.

A file of results has the lines `- command:`, `- measured:`, which ends in the commit, and perhaps `- since then:`,
which says how the benchmark has changed since.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNCOMMITTED = ", with changes that are not committed"
"""Stands behind the commit in a file of results."""


def git(*arguments: str) -> str | None:
    """The output of a git command; None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def changed_since(commit: str, paths: Sequence[str]) -> list[str] | None:
    """The files under these paths that have changed since a commit; None if the repository lacks the commit.

    Measurements that lie beside heads are results themselves, which no other result is made of.
    """
    found = git("diff", "--name-only", commit, "HEAD", "--", *paths)
    return None if found is None else [file for file in found.splitlines() if Path(file).name != "measured.json"]


def why_stale(
    text: str,
    commands: Sequence[str],
    paths: Sequence[str],
    changed: Callable[[str, Sequence[str]], list[str] | None] = changed_since,
) -> str:
    """Why results are stale, in one sentence; empty if they are those of the present code and checkpoints.

    Args:
        text: the file of results.
        commands: the commands that write it today.
        paths: files and folders that it measures.
        changed: returns the files under some paths that have changed since a commit.

    >>> why_stale("- command: `python -m x`", ["python -m y"], [])
    'was measured as `python -m x`'
    """
    if since := found_in(text, r"^- since then: (.*)$"):
        return since
    command = found_in(text, r"^- command: `(.*?)`")
    if command not in commands:
        return f"was measured as `{command}`"
    if found_in(text, rf"^- measured: (.*), commit [0-9a-f]+{UNCOMMITTED}$"):
        return "was measured on files that no commit holds"
    commit = found_in(text, r"^- measured: .*, commit ([0-9a-f]+)$")
    files = None if commit is None else changed(commit, paths)
    if files is None:
        return "does not name a commit of this repository at which it was measured"
    return f"changed since: {', '.join(files)}" if files else ""


def found_in(text: str, pattern: str) -> str | None:
    """The first group of the first match; None without a match."""
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else None
