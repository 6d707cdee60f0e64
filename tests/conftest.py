"""Lets every test import the helpers in tests/, keeps one thread, and puts the repository root before tests/.

tests/ holds folders named `heads` and `train`; without the root in front, `import heads` could find those.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
for folder in (TESTS, TESTS.parent):  # the last one inserted comes first
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skipped = pytest.mark.skip(reason="no GPU is here")
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(skipped)


def pytest_collection_finish() -> None:
    """Classes and functions of what is imported by now stay: no later collection of garbage goes through them again.

    A training run asks for one at its end, and that took a fifth of a short run's time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def folder_of_fitted_heads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Heads that one process of the run has fitted are read by the others; tests/throwaway_families.py."""
    if os.environ.get("PYTEST_XDIST_WORKER"):  # pytest-xdist is not everywhere, and its fixtures neither
        folder = tmp_path_factory.getbasetemp().parent / "fitted_heads"
        folder.mkdir(exist_ok=True)
        os.environ["HEADWAY_TESTS_FITTED"] = str(folder)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled graphs are captured whole and run as they are, without a compiler."""
    from heads.backbone.compiling import graph  # the root is on the path by now

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **{**options, "backend": "eager"}))
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: True)
    yield
    torch._dynamo.reset()
