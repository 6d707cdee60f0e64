"""A hub on this machine."""

from __future__ import annotations

import pytest
from fake_hub import running_hub
from huggingface_hub import constants


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on this machine, which huggingface_hub takes for the real one, and an empty cache."""
    with running_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        yield running
