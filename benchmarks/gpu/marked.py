"""The files of tests that need a GPU, found by reading them.

pytest alone would import every file of tests/ to look for marks, and most import what a machine with a GPU may lack.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def marked_files(folder: Path = ROOT / "tests") -> list[str]:
    """Files below a folder that name `mark.cuda`, from the repository's root where they lie in it."""
    found = (file for file in sorted(folder.rglob("test_*.py")) if names_mark(file.read_text(encoding="utf-8")))
    return [str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file) for file in found]


def names_mark(source: str, mark: str = "cuda") -> bool:
    """Whether a program has the expression `….mark.<mark>`, not only its text.

    >>> names_mark("@pytest.mark.cuda\\ndef test(): ..."), names_mark("'pytest.mark.cuda'  # mark.cuda")
    (True, False)
    """
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == mark
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
        for node in ast.walk(ast.parse(source))
    )
