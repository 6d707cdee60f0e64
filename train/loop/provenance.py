"""The recipe of a checkpoint: the resolved config, package versions, the commit and the command."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from heads.evaluation.tables import version_of

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "peft")


def recipe(config: Any) -> dict[str, Any]:
    """The run's recipe as plain values, stored in heads.json."""
    return {
        "config": dataclasses.asdict(config),
        "versions": {name: version_of(name) for name in PACKAGES} | {"python": platform.python_version()},
        "commit": commit(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
