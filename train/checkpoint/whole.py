"""A checkpoint counts once it is whole: its last file lists all others, with their sizes and checksums.

The list is written after all files are on the disk, under a temporary name that is then moved into place. So a process
that dies at any moment leaves either a folder without the list, from which nothing resumes, or a whole checkpoint.
Older checkpoints are removed only after that, their lists first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from heads import inside
from heads.checkpoint.save_load import write_whole

LIST = "whole.json"
READ_WHOLE = 64 * 2**20  # of a larger file only pieces are read, so that a checkpoint of 100 GB is checked in seconds
PIECE = 2**20


def step_of(folder: Path) -> int:
    """
    >>> step_of(Path("runs/a/checkpoint-30"))
    30
    """
    return int(folder.name.removeprefix("checkpoint-"))


def checkpoints(run_folder: str | Path) -> list[Path]:
    """All folders checkpoint-N, whole or not, in the order of their steps."""
    found = [path for path in Path(run_folder).glob("checkpoint-*") if path.name[len("checkpoint-") :].isdigit()]
    return sorted(found, key=step_of)


def mark_whole(folder: Path, facts: dict[str, Any]) -> None:
    """Write the list of files, together with `facts` such as the step and the number of processes.

    Raises:
        OSError: a file cannot be read or the disk is full; the folder then stays without a list.
    """
    files = {str(path.relative_to(folder)): describe(path) for path in files_in(folder)}
    for path in [*files_in(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        to_disk(path)
    write_whole(folder, {LIST: json.dumps(facts | {"files": files}, indent=1).encode()})
    to_disk(folder)
    to_disk(folder.parent)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / LIST)


def to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe(path: Path) -> dict[str, Any]:
    """Size and checksum of a file; of a large one only 64 pieces spread over it are read."""
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= READ_WHOLE:
            return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        for i in range(READ_WHOLE // PIECE):
            file.seek(i * (size - PIECE) // (READ_WHOLE // PIECE - 1))
            found.update(file.read(PIECE))
    return {"bytes": size, "sha256_of_pieces": found.hexdigest()}


def read_facts(folder: Path) -> dict[str, Any]:
    """What `mark_whole` wrote; empty where the folder has no list that can be read."""
    try:
        facts = json.loads((folder / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    files = facts.get("files") if isinstance(facts, dict) else None
    return facts if isinstance(files, dict) and all(isinstance(file, dict) for file in files.values()) else {}


def what_is_wrong(folder: Path) -> str | None:
    """Why a checkpoint cannot be resumed from, in a few words; None for a whole one."""
    listed = read_facts(folder).get("files")
    if listed is None:
        return f"it has no {LIST}, its saving was cut short"
    for name, wanted in listed.items():
        if not all(map(inside.is_one_name, name.split("/"))) or not {"bytes"} <= set(wanted):
            return f"its {LIST} has {name!r} with {wanted!r}, which no run wrote"
        try:
            found = describe(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found["bytes"] != wanted["bytes"]:
            return f"{name} has {found['bytes']} bytes in place of {wanted['bytes']}"
        if found != wanted:
            return f"{name} is not the file that was saved"
    return None


def newest_whole(run_folder: str | Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest whole checkpoint, and what is wrong with each newer one."""
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoints(run_folder)):
        wrong = what_is_wrong(folder)
        if wrong is None:
            return folder, damaged
        damaged[folder] = wrong
    return None, damaged


def remove(folder: Path) -> None:
    """Remove a checkpoint, its list of files first, so that an interrupted removal cannot look complete."""
    if not folder.is_symlink():
        with contextlib.suppress(OSError):
            (folder / LIST).unlink()
    inside.remove(folder)


def rotate(run_folder: str | Path, limit: int | None) -> None:
    """Keep the `limit` newest of those that were marked whole; 0 or None keeps all."""
    marked = [folder for folder in checkpoints(run_folder) if (folder / LIST).is_file()]
    for folder in marked[:-limit] if limit and limit > 0 else []:
        remove(folder)
