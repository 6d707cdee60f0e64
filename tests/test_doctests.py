"""Every `>>>` example in the code runs and says what it shows; a module that cannot be imported fails here."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import benchmarks
import heads
import train

PACKAGES = (heads, train, benchmarks)


def modules_with_examples() -> list[str]:
    names = [package.__name__ for package in PACKAGES]
    for package in PACKAGES:
        found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=fail)
        names += [module.name for module in found]
    return [name for name in names if ">>>" in source(name)]


def fail(name: str) -> None:
    raise ImportError(f"{name} cannot be imported")


def source(name: str) -> str:
    path = Path(heads.__path__[0]).parent.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0, f"{name} holds >>> but no example that doctest finds"
    assert result.failed == 0


def test_the_core_has_examples():
    core = {"heads.backbone.state", "heads.backbone.masks", "heads.decoding.trees.static", "train.objective.losses"}
    assert core <= set(modules_with_examples())
