"""Rows that a suite has finished, one JSON line each, so that a call that was interrupted goes on where it ended.

A row belongs to the settings that it was measured under: the same command finds it again, and another one does not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads.checkpoint.save_load import write_whole

FinishedRow = Mapping[str, Any]


class Rows:
    """A file of finished rows, of which those of the same settings are read.

    Args:
        path: created with its folder at the first row; None keeps rows in memory alone.
        settings: everything that the figures depend on; plain values that JSON can hold.

    Raises:
        ValueError: a line that is no row. The last line may be torn: an interrupted call leaves it so.

    >>> rows = Rows(None, {"new_tokens": 8})
    >>> rows.put("question 1", {"tokens": 8})
    >>> rows.get("question 1"), rows.get("question 2")
    ({'tokens': 8}, None)
    """

    def __init__(self, path: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.key = key_of(settings or {})
        self.resumed = 0
        self._rows: dict[str, FinishedRow] = {}
        if path is not None and path.is_file():
            self._read(path)
            self.resumed = len(self._rows)

    def get(self, name: str) -> FinishedRow | None:
        """The row of this name and of these settings; None where it is not finished."""
        return self._rows.get(name)

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, name: str, row: FinishedRow) -> None:
        """Add a finished row; it is on disk when this returns."""
        self._rows[name] = row
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": self.key, "name": name, "row": row}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self) -> None:
        """Remove the rows of these settings, from the file too; those of other settings stay.

        >>> rows = Rows(None, {})
        >>> rows.put("question 1", {"tokens": 8})
        >>> rows.forget()
        >>> rows.get("question 1") is None
        True
        """
        self._rows.clear()
        self.resumed = 0
        if self.path is None or not self.path.is_file():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        if others := [line for line in lines if json.loads(line)["key"] != self.key]:
            write_whole(self.path.parent, {self.path.name: b"".join(others)})
        else:
            self.path.unlink()

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        if torn:  # the next row would be appended to it
            os.truncate(path, len(content) - len(torn))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                found = json.loads(line)
                key, name, row = found["key"], found["name"], found["row"]
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{path} line {number} is no row of an evaluation; remove the line, or give another --out."
                ) from None
            if key == self.key:
                self._rows[name] = row


def key_of(settings: Mapping[str, Any]) -> str:
    """A short name of settings, the same for the same values in any order.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
