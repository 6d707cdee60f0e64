"""The file that is written: whole lines in the rows' order, and beside it the settings that they were written with.

    out.jsonl             one JSON object a line
    out.jsonl.settings    what decides the lines: a run that goes on must have the same

A run that was killed left whole lines and perhaps a part of one, which is dropped; lines are counted, and the run goes
on behind them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.checkpoint import write_whole


class OutputFile:
    """A file of JSON lines that grows.

    Raises:
        ValueError: no .jsonl file; one that is there was not written by this command, or with other settings.
        OSError: its folder cannot be written.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        if self.path.suffix != ".jsonl":
            raise ValueError(f"--out {path} was given; the file holds JSON lines: give a name that ends in .jsonl.")
        self.beside = self.path.with_name(self.path.name + ".settings")
        self.refuse_other_settings(json.loads(json.dumps(settings)))
        if not self.beside.is_file():
            content = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            write_whole(self.path.parent, {self.beside.name: content.encode()})
        self.lines = self.drop_partial_line()

    def refuse_other_settings(self, settings: dict[str, Any]) -> None:
        if not self.beside.is_file():
            if self.path.exists():
                raise ValueError(
                    f"{self.path} exists and there is no {self.beside.name} beside it, so this command did not write "
                    f"it; give another --out."
                )
            return
        try:
            begun = json.loads(self.beside.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(
                f"{self.beside} is damaged; remove it together with {self.path.name}, or give another --out."
            ) from None
        other = [name for name in {**begun, **settings} if begun.get(name) != settings.get(name)]
        if other:
            told = ", ".join(f"{name} {begun.get(name)!r} (now {settings.get(name)!r})" for name in other)
            raise ValueError(
                f"{self.path} was begun with other settings: {told}; give those again to go on, or another --out."
            )

    def drop_partial_line(self) -> int:
        """Lines that are whole; what stands behind the last of them is cut off."""
        if not self.path.exists():
            return 0
        lines = whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    lines, whole = lines + 1, whole + len(line)
        os.truncate(self.path, whole)
        return lines

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows as whole lines; where the disk is full nothing of them stays.

        Raises:
            OSError: they could not be written.
        """
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if self.path.exists():
                os.truncate(self.path, size)
            raise OSError(
                f"{self.path} could not be written ({error.strerror or error}); its {self.lines:,} lines are whole: "
                f"free space and give the same command again to go on."
            ) from error
        self.lines += len(rows)
