"""The output file of `regenerate-data`: complete lines in the rows' order, and the settings that produced them.

    out.jsonl             one JSON object per line, with its number, from 0, as `line`
    out.jsonl.settings    every setting that the lines depend on, which a resumed run must share; whether it is finished
    out.jsonl.lock        empty; locked by the process that writes

A killed run may end in a partial line. The next run drops that, counts the complete lines and resumes after them.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from heads.checkpoint.save_load import write_whole

VERSION = 2
"""Version of the settings file; raise it when the same settings would write other lines than before."""


class OutputFile:
    """A file of JSON lines that one process appends to; its lock is held until the `with` block or the process ends.

    Raises:
        ValueError: the name does not end in .jsonl; the existing file was not written by this command, was written
            with other settings or was changed since; or another process is writing it.
        OSError: its folder cannot be written.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        if self.path.suffix != ".jsonl":
            raise ValueError(f"--out {path} was given; the file holds JSON lines: give a name that ends in .jsonl.")
        self.beside = beside(self.path)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        with ExitStack() as opened:
            opened.enter_context(locked(self.path))
            self.refuse_other_settings(self.settings)
            if not self.beside.is_file():
                self.write_settings(None)
            self.lines = self.drop_partial_line()
            self.opened = opened.pop_all()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.opened.close()

    def finish(self) -> None:
        """Record that the file is complete, by its size in bytes."""
        self.write_settings(self.path.stat().st_size)

    def write_settings(self, finished_bytes: int | None) -> None:
        content = {"version": VERSION, "finished_bytes": finished_bytes, "settings": self.settings}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.path.parent, {self.beside.name: text.encode()})

    def refuse_other_settings(self, settings: dict[str, Any]) -> None:
        if not self.beside.is_file():
            if self.path.exists():
                raise ValueError(
                    f"{self.path} exists and there is no {self.beside.name} beside it, so this command did not write "
                    f"it; give another --out."
                )
            return
        begun = read_settings(self.path)["settings"]
        other = [name for name in {**begun, **settings} if begun.get(name) != settings.get(name)]
        if other:
            changed = ", ".join(f"{name} {begun.get(name)!r} (now {settings.get(name)!r})" for name in other)
            raise ValueError(
                f"{self.path} was begun with other settings: {changed}; give those again to resume, or another --out."
            )

    def drop_partial_line(self) -> int:
        """Cut off a partial line at the end; returns the number of complete lines.

        Raises:
            ValueError: a line's number is not its place in the file.
        """
        if not self.path.exists():
            return 0
        lines = whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self.refuse_other_line(line, lines)
                    lines, whole = lines + 1, whole + len(line)
        os.truncate(self.path, whole)
        return lines

    def refuse_other_line(self, line: bytes, number: int) -> None:
        """Raise ValueError unless a line has its own number: doubled or moved lines would be taken for others."""
        try:
            found = json.loads(line)["line"]
        except (ValueError, TypeError, KeyError, RecursionError):
            found = None
        if found != number:
            raise ValueError(
                f"{self.path} was changed since it was written: line {number + 1} of the file has the number {found}, "
                f"not {number}; remove it together with {self.beside.name}, or give another --out."
            )

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows as complete lines, all of them or, where the disk is full, none.

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
                f"free space and give the same command again to resume."
            ) from error
        self.lines += len(rows)


def is_finished(path: str | Path) -> bool:
    """Whether `regenerate-data` wrote every line of its data to a file and the file has not changed size since.

    False for a file that is still being written, whose run was killed, that was cut since, or that has only the rows of
    `--limit`; and for one whose settings file is missing or of another version of this command.
    """
    try:
        return bool(read_settings(Path(path))["finished_bytes"] == Path(path).stat().st_size)
    except (ValueError, OSError):
        return False


def beside(path: Path) -> Path:
    return path.with_name(path.name + ".settings")


def read_settings(path: Path) -> dict[str, Any]:
    """The settings file of an output file: `version`, `finished_bytes` and `settings`.

    Raises:
        ValueError: the settings file is damaged, or of another version.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(beside(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{beside(path)} is damaged; remove it together with {path.name}, or give another --out.")
    if content.get("version") != VERSION or not {"finished_bytes", "settings"} <= set(content):
        raise ValueError(
            f"{path} was begun by another version of this command, so with other settings; give another --out."
        )
    if not isinstance(content["settings"], dict):
        raise ValueError(f"{beside(path)} is damaged; remove it together with {path.name}, or give another --out.")
    return content


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other processes of this command; the system releases the lock however the process ends.

    Raises:
        ValueError: another process holds the lock.
        OSError: the lock beside the file cannot be written or held.
    """
    lock = path.with_name(path.name + ".lock")
    with ExitStack() as opened:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(opened.enter_context(lock.open("ab")), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path} is being written by another process; wait until that has ended, or give another --out."
            ) from None
        except OSError as error:
            raise OSError(
                f"{lock} could not be written or locked ({error.strerror or error}); give --out in another folder."
            ) from error
        yield
