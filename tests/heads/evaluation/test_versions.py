"""What figures were measured with: versions of packages, headway's own as far as it is installed."""

import importlib.metadata

import pytest

from heads.evaluation import tables
from heads.evaluation.tables import version_of, versions


def test_versions_are_the_installed_ones():
    assert versions()["torch"] == importlib.metadata.version("torch")


def test_a_package_that_runs_from_its_folder_is_said_to_be_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tables, "PACKAGES", ["torch", "never-installed"])
    assert version_of("never-installed") == "not installed"
    assert versions()["never-installed"] == "not installed"
