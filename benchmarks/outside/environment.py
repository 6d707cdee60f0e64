"""A virtual environment for another engine, made once below build/, apart from Headway's own.

The engines are other people's builds for CPUs, so they are no dependencies of Headway.
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
    """The packages of an environment, and how scripts run in it.

    Attributes:
        engine: the engine's name in messages.
        folder: the environment's folder below build/.
        packages: requirements with versions; `install` runs pip again if they have changed.
        removed: packages that come with these and cannot be imported on this machine.
        plugin: a package of this repository, installed in editable form.
        variables: environment variables of its processes.
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
        """`variables`, and this process's without PYTHONPATH and the like, which lead to Headway's packages."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return {**ours, **self.variables}

    def run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.all_variables())
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
            raise ValueError(f"{' '.join(command[1:4])} … failed: {' '.join(said)}. Look at {self.folder}.")

    def run_job(self, script: Path, place: Path, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run a script in the environment, and return the JSON that it writes.

        Args:
            place: folder for the script's input, NAME.json, and its output, NAME.out.json.
            job: what the script reads.

        Raises:
            ValueError: the engine failed; the error has the end of its output.
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
