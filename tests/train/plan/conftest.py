"""A folder with the config of a tiny backbone."""

import pytest
from planned_runs import write_backbone


@pytest.fixture
def folder(tmp_path):
    write_backbone(tmp_path)
    return tmp_path
