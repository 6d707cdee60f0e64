"""Find results that are stale: their command has changed, or code that they measure has changed since their commit.

Only code counts. Comments and docstrings compute nothing, and what a changed import leads to is measured only if its
own file is named. So a Python file has changed if its syntax tree without them has, a YAML file if what it
holds has; any other file, if its bytes have.

A file of results has the lines `- command:` and `- measured:`, which ends in the commit. A line `- since then:` says by
hand how the benchmark has changed, and makes the results stale too. Rows that an earlier call finished name their own
commits where their page prints them; they depend on what they measure and on the settings they are stored by, not on
how the benchmark prints them.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
UNCOMMITTED = ", with changes that are not committed"
"""Stands behind the commit in a file of results."""


def git(*arguments: str) -> str | None:
    """The output of a git command; None if it fails, or where there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def head() -> str:
    """The abbreviated commit of the checkout, and whether files differ from it; "unknown" outside of a repository.

    Files that checks write may differ: results, pages and README.
    """
    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    written = [f":!{name}" for name in ("benchmarks/results", "docs", "README.md")]
    return commit + UNCOMMITTED * bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", *written))


def changed_since(commit: str, paths: Sequence[str]) -> list[str] | None:
    """The files under these paths that have changed since a commit; None if the repository lacks the commit.

    A measured.json beside heads is left out: no result depends on it.
    """
    if git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    # Without a path git would name every file.
    found = git("diff", "--name-status", "--find-renames", commit, "HEAD", "--", *paths) if paths else ""
    if found is None:
        return None
    names = [line.split("\t")[1:] for line in found.splitlines()]  # a renamed file has two: before and now
    return [
        now
        for before, now in ((files[0], files[-1]) for files in names)
        if Path(now).name != "measured.json"
        and not (Path(now).suffix in (".py", ".yaml") and content_at(commit, before) == content_at("HEAD", now))
    ]


def content_at(commit: str, file: str) -> Any:
    """`code_of` a Python file at a commit, or what a YAML file held; None if there was no such file."""
    source = git("show", f"{commit}:{file}")
    if source is None:
        return None
    return code_of(source) if file.endswith(".py") else list(yaml.safe_load_all(source))


def code_of(source: str) -> str:
    """The syntax tree of a program without comments, docstrings and imports.

    >>> code_of("def f(): return 1") == code_of("def f():  # always\\n    'The first number.'\\n    return 1")
    True
    >>> code_of("def f(): return 1") == code_of("def f(): return 2")
    False
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not is_text(one) and not isinstance(one, (ast.Import, ast.ImportFrom))]  # type: ignore[attr-defined]
    return ast.dump(tree)


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string and nothing else, as docstrings of modules, functions and attributes are."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def why_stale(
    text: str,
    commands: Sequence[str],
    own: Sequence[str],
    measures: Sequence[str],
    changed: Callable[[str, Sequence[str]], list[str] | None] = changed_since,
) -> str:
    """Why results are stale, in one sentence; empty if they are not.

    Args:
        text: the file of results.
        commands: the commands that write it today.
        own: the benchmark's own files.
        measures: files and folders that it measures.
        changed: returns the files under some paths that have changed since a commit.

    >>> why_stale("- command: `python -m x`", ["python -m y"], [], [])
    'was measured as `python -m x`'
    """
    if since := found_in(text, r"^- since then: (.*)$"):
        return since
    command = found_in(text, r"^- command: `(.*?)`")
    if command not in commands:
        return f"was measured as `{command}`"
    if re.search(rf"commit [0-9a-f]+{UNCOMMITTED}(, torch|$)", text, re.MULTILINE):
        return "was measured on files that no commit holds"
    commit = found_in(text, r"^- measured: .*, commit ([0-9a-f]+)$")
    if commit is None or (files := changed(commit, [*own, *measures])) is None:
        return "does not name a commit of this repository at which it was measured"
    if re.search(r"not recorded|commit unknown", text):
        return "has rows of a commit that was not recorded"
    for of_rows in sorted(set(re.findall(r"\bcommit ([0-9a-f]{7,})\b", text)) - {commit}):
        if (since_rows := changed(of_rows, measures)) is None:
            return f"has rows of commit {of_rows}, which is not in this repository"
        files += [f"{file} (rows of commit {of_rows})" for file in since_rows if file not in files]
    return f"changed since: {', '.join(files)}" if files else ""


def found_in(text: str, pattern: str) -> str | None:
    """The first group of the first match; None without a match."""
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else None
