"""The commands for a GPU where Python has PyTorch and the wheels that travel, and nothing else.

The environment is a real one, into which `closure(NEEDED)` and `IN_THE_IMAGE` are linked; what they do not bring, such
as matplotlib, PEFT and pytest-xdist, can't be imported there.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
from linked_environment import make_environment
from repository import ROOT

from benchmarks.gpu.__main__ import COMMANDS
from benchmarks.gpu.marked import marked_files
from benchmarks.gpu.wheels import IN_THE_IMAGE, NEEDED

IMPORTED = {
    match[1]
    for program in itertools.chain(*COMMANDS.values())
    for match in re.finditer(r"-m (benchmarks[\w.]+)", f"{program.asked} {program.tiny}")
}
IMPORT_THEM = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return make_environment(tmp_path_factory.mktemp("gpu") / "environment", {*NEEDED, *IN_THE_IMAGE})


def ran(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a program did there, from the repository's root."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [str(python), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_the_environment_lacks_what_does_not_travel(python):
    done = ran(python, "-c", "import matplotlib")
    assert "No module named 'matplotlib'" in done.stderr


def test_every_program_can_be_imported(python):
    modules = [f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name for name in sorted(IMPORTED)]
    assert {"benchmarks.gpu.learn", "benchmarks.speed.real_costs.__main__"} <= set(modules)
    done = ran(python, "-c", IMPORT_THEM, *modules, "train.__main__")
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_tests_that_need_a_gpu_are_found(python):
    chosen = ("-p", "no:cacheprovider", "-m", "cuda", "-ra", "--collect-only")
    done = ran(python, "-m", "pytest", *chosen, *marked_files())
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests/heads/decoding/test_devices.py::" in done.stdout


@pytest.mark.wide
def test_a_model_and_heads_are_trained_and_decoded(python):
    done = ran(python, "-m", "benchmarks.gpu.learn", "--tiny")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "medusa/last with lookup" in done.stdout


def test_with_pytorch_alone_the_commands_say_what_is_missing(tmp_path):
    bare = make_environment(tmp_path / "environment", IN_THE_IMAGE)
    done = ran(bare, "-m", "benchmarks.gpu", "--tiny", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"error: This Python lacks .*; `make gpu-wheels` on a machine with a network fills", done.stderr)
