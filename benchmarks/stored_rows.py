"""Stores each finished row of a long benchmark with all its settings, so that an interrupted call goes on behind it.

A row's folder is named by the row and a fingerprint of its settings, so a call with other settings neither reads nor
overwrites it. A config may have gained fields since a row was stored. The row still counts as long as they have their
defaults, since new options are added so that their defaults train and decode as before.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.stale import head
from heads.checkpoint.save_load import write_whole

RowKind = TypeVar("RowKind")
STARTED_AT = head()
"""The commit whose code this process runs; another one may be made before a row is finished."""


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """The files of one finished row.

    Attributes:
        settings: everything that the row depends on, as values for JSON.
        defaults: the defaults of settings that a stored row may lack, nested as `settings` are.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """The folder of the row and of its training's output."""
        made = self.folder / f"{self.name}-{fingerprint(self.settings)}"
        earlier = sorted(self.folder.glob(f"{self.name}-*/row.json")) if self.defaults else []
        return made if (made / "row.json").is_file() else next((f.parent for f in earlier if self.made_by(f)), made)

    def made_by(self, file: Path) -> bool:
        """Whether the row in this file was made with these settings."""
        return agrees(json.loads(file.read_text(encoding="utf-8"))["settings"], plain(self.settings), self.defaults)

    def read(self) -> dict[str, Any] | None:
        """The finished row; None if there is none."""
        file = self.place / "row.json"
        return json.loads(file.read_text(encoding="utf-8"))["row"] if file.is_file() else None

    def made(self) -> str:
        """The commit and the versions that made the finished row."""
        content = json.loads((self.place / "row.json").read_text(encoding="utf-8"))
        return str(content.get("made", "not recorded"))

    def write(self, row: Mapping[str, Any]) -> None:
        made = f"commit {STARTED_AT}, torch {torch.__version__}"
        content = json.dumps({"settings": self.settings, "made": made, "row": row}, indent=2, default=str) + "\n"
        place = self.place
        place.mkdir(parents=True, exist_ok=True)
        write_whole(place, {"row.json": content.encode()})


def load_or_measure(row: StoredRow, kind: type[RowKind], measure: Callable[[Path], RowKind]) -> RowKind:
    """The stored row, or else the one that `measure` returns, given the row's folder; that one is stored."""
    if (found := row.read()) is not None:
        return kind(**found)
    print(f"{row.name} …", file=sys.stderr, flush=True)
    made = measure(row.place)
    row.write(dataclasses.asdict(made))  # type: ignore[call-overload]
    return made


def fingerprint(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:10]


def agrees(stored: Any, now: Any, defaults: Any) -> bool:
    """Whether a stored row has these settings, or lacks some of them that have their defaults now.

    Args:
        stored, now: settings of the row and of this call.
        defaults: as in `StoredRow`.

    >>> agrees({"rate": 0.1}, {"rate": 0.1, "packing": "cut"}, {"rate": 1.0, "packing": "cut"})
    True
    >>> agrees({"rate": 0.1}, {"rate": 0.1, "packing": "whole"}, {"rate": 1.0, "packing": "cut"})
    False
    >>> agrees({}, {"rate": 1.0}, {})  # a field without a default was always there
    False
    """
    if isinstance(stored, dict) and isinstance(now, dict):
        known = defaults if isinstance(defaults, Mapping) else {}
        return stored.keys() <= now.keys() and all(
            agrees(stored[name], value, known.get(name)) if name in stored else name in known and value == known[name]
            for name, value in now.items()
        )
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        inner = defaults if isinstance(defaults, list) and len(defaults) == len(now) else [None] * len(now)
        return all(agrees(*three) for three in zip(stored, now, inner, strict=True))
    return bool(stored == now)


def defaults_of(config: Any) -> dict[str, Any]:
    """The defaults of a config's fields and of the configs within it, as values for JSON.

    >>> @dataclass
    ... class Inner:
    ...     rate: float = 0.5
    >>> @dataclass
    ... class Outer:
    ...     name: str
    ...     inner: list[Inner]
    ...     steps: int = 3
    >>> defaults_of(Outer(name="run", inner=[Inner(rate=2.0)]))
    {'inner': [{'rate': 0.5}], 'steps': 3}
    """
    found: dict[str, Any] = {}
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        if is_dataclass(value):
            found[one.name] = defaults_of(value)
        elif isinstance(value, list) and any(map(is_dataclass, value)):
            found[one.name] = [defaults_of(inner) if is_dataclass(inner) else None for inner in value]
        elif one.default is not MISSING:
            found[one.name] = one.default
        elif one.default_factory is not MISSING:
            found[one.name] = one.default_factory()
    return dict(plain(found))


def plain(settings: Mapping[str, Any]) -> Any:
    """Settings as a JSON file returns them: tuples become lists, and what JSON does not know becomes its text."""
    return json.loads(json.dumps(settings, default=str))
