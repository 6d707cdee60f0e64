"""What benchmarks share."""

from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool

import pytest

from benchmarks.shared import in_own_process


def test_a_process_that_dies_without_an_answer_ends_in_an_error() -> None:
    """A check once waited for a dead process for ever."""
    assert in_own_process(abs, -3) == 3
    with pytest.raises(BrokenProcessPool):
        in_own_process(os._exit, 1)
