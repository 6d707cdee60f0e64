"""Names from downloaded files stay inside their folder, and nothing is written or removed through links.

Folders of heads, n-gram tables and runs may be downloaded, and so may the names in their JSON files. With `..`, an
absolute path or a planted link, a load could read other files of the user, and a save overwrite or remove them. Links
of the hub's cache (snapshots/… to blobs/…) stay within it and are followed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, BinaryIO


def is_one_name(name: Any) -> bool:
    """
    >>> [is_one_name(name) for name in ("backbone-1f", "..", "a/b", "/etc", "a\\\\b", "", None)]
    [True, False, False, False, False, False, False]
    """
    return isinstance(name, str) and name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")


def find_inside(folder: str | Path, name: Any) -> Path:
    """The file or folder of that name, whether or not it exists.

    Raises:
        ValueError: the name is a path of several names, or a link.
    """
    if not is_one_name(name):
        raise ValueError(
            f"{folder} refers to {name!r}; allowed are names of files and folders inside it: do not use a folder that "
            f"asks for others."
        )
    path = Path(folder) / name
    if is_foreign_link(path):
        raise ValueError(
            f"{path} is a link to {path.readlink()}; allowed are files and folders themselves: put a copy in its place "
            f"if you trust what it leads to."
        )
    return path


def is_foreign_link(path: Path) -> bool:
    """Whether a path is a link, other than one of the hub's cache: snapshots/COMMIT/… to blobs/HASH beside it."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    is_blob = target.is_file() and target.parent.name == "blobs"
    return not (is_blob and target.parent.parent / "snapshots" in path.parent.resolve().parents)


def links_out(folder: Path) -> list[Path]:
    """Links below a folder that lead out of it."""
    root = folder.resolve()
    return [path for path in sorted(folder.rglob("*")) if path.is_symlink() and root not in path.resolve().parents]


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link itself; failures are ignored."""
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder
        shutil.rmtree(path, ignore_errors=True)


def open_new(path: Path) -> BinaryIO:
    """A new file for writing; an old file or link of that name is removed first, so nothing is written through it."""
    path.unlink(missing_ok=True)
    return path.open("xb")
