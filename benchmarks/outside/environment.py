"""An environment of its own for another engine, made once below build/; nothing of it enters Headway's.

The packages are builds by others for CPUs, so they are no dependencies of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shared import ROOT


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What is installed into it, and how an engine runs in it.

    Attributes:
        engine: the name of the engine, for people.
        folder: below build/.
        packages: with their versions; where these change, the environment is completed anew.
        removed: packages that these bring and that cannot be imported here.
        plugin: a folder of ours that is installed on every call, as it stands.
        variables: what its processes have set.
    """

    engine: str
    folder: Path
    packages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    plugin: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin/python"

    def install(self) -> None:
        """Install what is missing.

        Raises:
            ValueError: pip could not install the packages.
        """
        ready, wanted = self.folder / ".ready", "\n".join(self.packages)
        pip = [str(self.interpreter), "-m", "pip"]
        if not ready.is_file() or ready.read_text(encoding="utf-8") != wanted:
            print(f"installing {' '.join(self.packages)} into {self.folder.relative_to(ROOT)}", flush=True)
            self.run([sys.executable, "-m", "venv", str(self.folder)])
            self.run([*pip, "install", "--quiet", *self.packages, "setuptools>=77"])
            if self.removed:
                self.run([*pip, "uninstall", "--quiet", "--yes", *self.removed])
            ready.write_text(wanted, encoding="utf-8")
        if self.plugin is not None:
            self.run([*pip, "install", "--no-deps", "--no-build-isolation", "--quiet", "--editable", str(self.plugin)])

    def all_variables(self) -> dict[str, str]:
        """The variables of a process in it: ours without what would lead to Headway's own packages."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {**ours, **self.variables}

    def run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.all_variables())
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ValueError(f"{' '.join(command[1:4])} … failed: {' '.join(said)}. Look at {self.folder}.")

    def run_job(self, script: Path, place: Path, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """What a script writes that runs in it, with a job as JSON.

        Args:
            place: a folder for the job, NAME.json, and what is written, NAME.out.json.

        Raises:
            ValueError: the engine failed; the last lines of what it said.
        """
        print(f"{self.engine}: {name}", flush=True)
        out = place / f"{name}.out.json"
        (place / f"{name}.json").write_text(json.dumps({**job, "out": str(out)}), encoding="utf-8")
        command = [str(self.interpreter), "-P", str(script), str(place / f"{name}.json")]
        done = subprocess.run(command, capture_output=True, check=False, env=self.all_variables())
        if done.returncode or not out.is_file():
            said = (done.stdout + done.stderr).decode(errors="replace")
            raise ValueError(f"{self.engine} failed on {name}:\n{said[-3000:]}")
        return dict(json.loads(out.read_text(encoding="utf-8")))
