"""Every `>>>` example in the library runs and says what it shows; a module that cannot be imported fails here."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import heads


def modules_with_examples() -> list[str]:
    names = ["heads", *(module.name for module in pkgutil.walk_packages(heads.__path__, "heads.", onerror=fail))]
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
    assert {"heads.backbone", "heads.masks", "heads.decoding.tree", "heads.families"} <= set(modules_with_examples())
