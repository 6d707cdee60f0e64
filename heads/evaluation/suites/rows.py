"""Rows of a run in a file of JSON lines, one for each unit of work, so that a run that was stopped goes on.

A row is found by its key: a name and all settings that its figures depend on. A row with other settings stays in the
file and is not used; a last line that was cut off is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Rows:
    """
    Attributes:
        path: the file; None keeps rows in memory alone.
        settings: what every figure of this run depends on; values as JSON has them.

    >>> rows = Rows(settings={"limit": 8})
    >>> rows.put("boolq", {"acc": 0.5})
    >>> rows.get("boolq"), rows.get("piqa")
    ({'acc': 0.5}, None)
    """

    path: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                row = read_line(line)
                if row is not None:
                    self._kept[row["key"]] = row["row"]

    def get(self, name: str) -> Mapping[str, Any] | None:
        return self._kept.get(self._key(name))

    def put(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep a row; it is in the file when this returns."""
        key = self._key(name)
        self._kept[key] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = not self.path.is_file() or self.path.read_bytes()[-1:] in (b"\n", b"")
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("" if whole else "\n") + json.dumps({"key": key, "row": row}) + "\n")

    def _key(self, name: str) -> str:
        return json.dumps({"name": name, **self.settings}, sort_keys=True)


def read_line(line: str) -> Mapping[str, Any] | None:
    """
    >>> read_line('{"key": "a", "row": {}}'), read_line('{"key": "a", "ro')
    ({'key': 'a', 'row': {}}, None)
    """
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"key", "row"} <= set(row) else None
