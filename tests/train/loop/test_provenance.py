"""A checkpoint's recipe names the packages that it was trained with, as far as they are installed."""

from __future__ import annotations

from dataclasses import dataclass

from train.loop import provenance


@dataclass
class Config:
    rate: float = 0.5


def test_a_package_that_is_missing_is_said_to_be(monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGES", ("torch", "never-installed"))
    found = provenance.recipe(Config())
    assert found["config"] == {"rate": 0.5}
    assert found["versions"]["never-installed"] == "not installed"
