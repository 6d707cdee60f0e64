"""The wheel, installed without extras in an environment of its own, decodes from another folder as `generate` does.

The environment is a real one (`venv`) that pip installs the built wheel into. What is emulated is the download: the
packages that the wheel depends on, with what they depend on, are linked from this environment and all others stay
hidden. `make wheel-check` does the same with downloaded packages.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from linked_environment import make_environment
from repository import ROOT
from requirements import declared

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """An environment that holds the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    python = make_environment(environment, declared())
    install = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, str(build_wheel(folder))], check=True)
    return environment


def build_wheel(folder: Path) -> Path:
    """The wheel of a copy of the sources, so that nothing is written beside them."""
    copy = folder / "sources"
    shutil.copytree(ROOT / "heads", copy / "heads", ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, copy)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=copy, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run(environment: Path, *arguments: str, cwd: Path) -> str:
    ran = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(scope="module")
def found(environment, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    script = shutil.copy(ROOT / "tests" / "decode_with_wheel.py", elsewhere)
    # -I, -P: neither PYTHONPATH nor the script's folder is searched for modules
    output = run(environment, str(environment / "bin" / "python"), "-I", "-P", str(script), cwd=elsewhere)
    return json.loads(output.splitlines()[-1])


def test_the_wheel_decodes_as_generate_does(found, environment):
    assert Path(found["heads"]).is_relative_to(environment)
    assert found["optional"] == []
    assert found["decoded"] == found["plain"]
    assert found["passes"] <= 24


def test_a_missing_extra_is_named(found):
    assert 'pip install "headway[lora]"' in found["sentences"]["lora"]
    assert 'pip install "headway[train]"' in found["sentences"]["train"]


def test_the_wheel_holds_the_library_alone(environment):
    (record,) = environment.glob("lib/python*/site-packages/headway-*.dist-info/RECORD")
    tops = {line.partition("/")[0] for line in record.read_text(encoding="utf-8").splitlines()}
    assert {top for top in tops if "headway" not in top and top not in ("..", "__pycache__")} == {"heads"}
