"""pyproject.toml and the code agree: imports are declared, what is declared is used, and extras are named.

The lists are read from pyproject.toml and the imports from the source, so that a new import shows here and not first on
the machine of somebody who installed the wheel.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from packaging.utils import canonicalize_name
from repository import ROOT
from requirements import PROJECT, declared

from heads.extras import MissingExtraError, needs_extra

EXTRAS = {
    "heads": ("cli", "lora", "plots", "eval", "gguf", "train"),
    "train": ("train",),
    "benchmarks": ("train", "eval"),
    "tests": ("train", "eval", "dev"),
}
OURS = {"heads", "train", "benchmarks"} | {file.stem for file in ROOT.glob("tests/**/*.py")}
BEHIND_THE_COMMAND = ("heads/cli/", "heads/tuning/", "heads/evaluation/")  # `headway` asks for [cli] before it runs
OTHER_NAMES = {"yaml": "PyYAML"}  # modules whose distribution is named otherwise
BROUGHT_BY_TORCH = {"triton"}  # where torch is built for CUDA; never imported elsewhere
USED_WITHOUT_AN_IMPORT = {
    "ninja": "DeepSpeed compiles its operators with it",
    "tensorboard": "report_to of the Trainer",
    "setuptools": "builds the wheel",
    "wandb": "report_to of the Trainer",
    "pytest-xdist": "make test",
    "pytest-timeout": "the limit on a test",
    "pytest-cov": "make coverage",
    "ruff": "make lint",
    "mypy": "make lint",
    "import-linter": "make lint",
    "fastapi": "transformers serve",
    "uvicorn": "transformers serve",
}


class Import(NamedTuple):
    file: str
    package: str  # distribution, as pyproject.toml names it
    extra: str | None  # named by the `needs_extra` around it


@functools.cache
def imports_of(folder: str) -> tuple[Import, ...]:
    return tuple(
        found
        for file in sorted((ROOT / folder).rglob("*.py"))
        for found in read_imports(ast.parse(file.read_text(encoding="utf-8")), file.relative_to(ROOT).as_posix())
    )


def read_imports(node: ast.AST, file: str, extra: str | None = None) -> Iterator[Import]:
    """Imports below a node of a module's tree, but for those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        names = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
        if isinstance(child, ast.ImportFrom) and not child.level and child.module:
            names = [child.module]
        for name in {name.partition(".")[0] for name in names} - OURS - BROUGHT_BY_TORCH - sys.stdlib_module_names:
            yield Import(file, canonicalize_name(OTHER_NAMES.get(name, name)), extra)
        yield from read_imports(child, file, extra_asked_for(child) or extra)


def extra_asked_for(node: ast.AST) -> str | None:
    """ "lora" for `with needs_extra("lora", ...):`."""
    calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    for call in calls:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("needs_extra"):
            return str(ast.literal_eval(call.args[0]))
    return None


@pytest.mark.parametrize("folder", EXTRAS)
def test_every_import_is_declared(folder):
    known = declared(*EXTRAS[folder])
    unknown = {(found.file, found.package) for found in imports_of(folder) if found.package not in known}
    assert not unknown, "add these to pyproject.toml, or do without them"


def test_the_library_asks_for_what_is_not_in_the_wheel_s_dependencies():
    """In heads, a package of an extra stands inside `needs_extra` with an extra that brings it."""
    base = declared()
    unasked = set()
    for found in imports_of("heads"):
        extra = found.extra or ("cli" if found.file.startswith(BEHIND_THE_COMMAND) else None)
        if found.package not in (declared(extra) if extra else base) | base:
            unasked.add((found.file, found.package))
    assert not unasked


def test_everything_declared_is_used():
    used = {found.package for folder in EXTRAS for found in imports_of(folder)}
    wanted = set(declared(*PROJECT["optional-dependencies"]))
    assert wanted - used == set(USED_WITHOUT_AN_IMPORT)


def test_everything_declared_has_a_version_that_was_tested():
    """make setup installs the versions of constraints.txt; they are among those that pyproject.toml allows."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    pinned["torch"] = re.findall(r"torch==([\d.]+\d)", lines[0])[0]
    for name, requirement in declared(*PROJECT["optional-dependencies"]).items():
        assert name == "setuptools" or requirement.specifier.contains(pinned[name], prereleases=True), name


def test_a_missing_package_names_its_extra():
    sentence = '^A picture is drawn, which needs the package no_such_package; pip install "headway.plots.".$'
    with pytest.raises(MissingExtraError, match=sentence), needs_extra("plots", "A picture is drawn"):
        importlib.import_module("no_such_package.inner")


def test_a_mistake_of_ours_is_not_a_missing_extra():
    with pytest.raises(ModuleNotFoundError, match="heads"), needs_extra("plots", "A picture is drawn"):
        import heads.no_such_module  # noqa: F401
