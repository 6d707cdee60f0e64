"""Stores what `benchmarks.speed.decoding` measures, part by part, so that a divided or interrupted run goes on.

A part is the fitted trees, or one setting's tables. It is used again on the same machine, with the same packages,
options and trees, as long as neither the benchmark nor the demo's folders have changed since its commit. Each part
has its commit, machine, packages, day and minutes, which the page prints; it says so if commits differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.stale import UNCOMMITTED, changed_since
from benchmarks.stored_rows import StoredRow
from benchmarks.verify import head
from heads.evaluation.tables import describe_machine, versions
from heads.evaluation.throughput import MethodResult

MEASURED = ("benchmarks/speed/decoding", "checkpoints/demo")
"""Folders whose changes make a part stale, by the rules of `benchmarks.verify --stale`."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One stored part; `found` holds its figures as JSON has them."""

    what: str
    commit: str
    machine: Mapping[str, Any]
    packages: Mapping[str, str]
    day: str
    minutes: float
    found: Mapping[str, Any]

    def describe(self) -> str:
        named = ", ".join(f"{name} {self.packages[name]}" for name in ("torch", "transformers"))
        return (
            f"{self.what}: measured {self.day}, {self.minutes:.1f} minutes, {self.machine['cpu']}, "
            f"{self.machine['threads']} threads, {named}, commit {self.commit}"
        )

    def why_unusable(self) -> str:
        """Why this checkout would measure something else; empty if it would not."""
        if self.commit.endswith(UNCOMMITTED):
            return "it was measured on files that no commit holds"
        files = changed_since(self.commit, MEASURED)
        if files is None:
            return f"this repository lacks its commit {self.commit}"
        return f"changed since its commit {self.commit}: {', '.join(files)}" if files else ""


@dataclass(frozen=True, kw_only=True)
class Store:
    """A folder of parts; `options` are all that the figures depend on beside the machine."""

    folder: Path
    options: Mapping[str, Any]
    device: torch.device
    say: Callable[[str], None]

    def row(self, what: str, **more: Any) -> StoredRow:
        here = {"machine": describe_machine(self.device), "packages": versions()}
        return StoredRow(folder=self.folder, name=what, settings={**here, **self.options, **more})

    def read(self, what: str, **more: Any) -> Part | None:
        """The stored part; None if there is none, or if it cannot be used, for a reason that is printed."""
        found = self.row(what, **more).read()
        if found is None:
            return None
        part = Part(**found)
        if reason := part.why_unusable():
            self.say(f"{what}: the stored figures are not used: {reason}")
            return None
        return part

    def measure(self, what: str, run: Callable[[], Mapping[str, Any]], **more: Any) -> Part:
        """Run and store a part; the commit is that at its beginning."""
        commit, started = head(), time.monotonic()
        found = run()
        part = Part(
            what=what,
            commit=commit,
            machine=describe_machine(self.device),
            packages=versions(),
            day=datetime.now(tz=UTC).strftime("%Y-%m-%d %H:%M"),
            minutes=(time.monotonic() - started) / 60,
            found=found,
        )
        row = self.row(what, **more)
        row.write(asdict(part))
        stored = row.read()
        return part if stored is None else Part(**stored)  # as a later call reads it


def say_commits(parts: Sequence[Part]) -> list[str]:
    """Where and when each part was measured, and whether they are of several commits."""
    lines = [part.describe() for part in parts]
    commits = list(dict.fromkeys(part.commit for part in parts))
    if len(commits) > 1:
        lines.append(f"These parts are of {len(commits)} commits; ratios are within a part, never across parts.")
    return lines


def read_row(found: Mapping[str, Any]) -> MethodResult:
    """A row as it was measured, from JSON, which has lists for tuples."""
    intervals = {name: found[name] and tuple(found[name]) for name in ("interval", "perplexity_interval")}
    return MethodResult(**{**found, **intervals, "rulings": ()})
