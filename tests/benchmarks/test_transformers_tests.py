"""The check that runs the tests of transformers is left out, or ends in a sentence, where their files are not had."""

from __future__ import annotations

import sys

import pytest

from benchmarks import verify
from benchmarks.outside import transformers_tests


def test_without_the_files_the_check_is_left_out(monkeypatch, capsys):
    monkeypatch.delenv("HEADWAY_TRANSFORMERS", raising=False)
    monkeypatch.setattr(sys, "argv", ["verify", "transformers_tests"])
    verify.main()
    assert capsys.readouterr().out == ("transformers_tests is skipped: it needs HEADWAY_TRANSFORMERS (see --help)\n")
    assert "HEADWAY_TRANSFORMERS=FOLDER" in str(verify.__doc__)


def test_a_folder_without_the_tests_ends_in_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["transformers_tests", "--files", str(tmp_path)])
    with pytest.raises(
        SystemExit, match=r"holds no tests/generation/test_utils.py; set HEADWAY_TRANSFORMERS or --files"
    ):
        transformers_tests.main()
