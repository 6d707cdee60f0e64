"""build/llamacpp-env: an environment of its own with a prebuilt llama.cpp, made once; nothing of it enters Headway's.

xllamacpp is llama.cpp with its server as a Python package, built by others for CPUs, so it is no dependency of ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.shared import ROOT

FOLDER = ROOT / "build/llamacpp-env"
PACKAGE = "xllamacpp==2026.10.11549"


def python() -> Path:
    """Its interpreter, after making what is missing.

    Raises:
        ValueError: pip could not install the package.
    """
    interpreter, ready = FOLDER / "bin/python", FOLDER / ".ready"
    if not ready.is_file() or ready.read_text(encoding="utf-8") != PACKAGE:
        print(f"installing {PACKAGE} into {FOLDER.relative_to(ROOT)}", flush=True)
        run([sys.executable, "-m", "venv", str(FOLDER)])
        run([str(interpreter), "-m", "pip", "install", "--quiet", PACKAGE])
        ready.write_text(PACKAGE, encoding="utf-8")
    return interpreter


def variables() -> dict[str, str]:
    """The variables of a process in it: ours without what would lead to Headway's own packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables())
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ValueError(f"{' '.join(command[1:4])} … failed: {' '.join(said)}. Look at {FOLDER}, or remove it.")
