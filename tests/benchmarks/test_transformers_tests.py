"""The check that runs the tests of transformers is left out, or ends in a sentence, where their files are not had."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

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


def test_where_no_file_of_tests_can_be_imported_the_check_fails(monkeypatch, tmp_path, capsys):
    (tmp_path / "tests/generation").mkdir(parents=True)
    (tmp_path / "tests/generation/test_utils.py").write_text("")
    case = '<testcase classname="" name="tests.models.llama.test_modeling_llama">'
    report = f"<testsuite>{case}<error message='collection failure'/></testcase></testsuite>"
    monkeypatch.setattr(transformers_tests, "run", lambda *_: ElementTree.fromstring(report))
    monkeypatch.setattr(transformers_tests.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(sys, "argv", ["transformers_tests", "--files", str(tmp_path), "--methods", "draft"])
    with pytest.raises(SystemExit, match="No test ran: the checkout does not fit the installed transformers"):
        transformers_tests.main()
    assert "|draft|0|0|0|0|" in (said := capsys.readouterr().out)
    assert "0 tests ran; 1 files of tests could not be imported here: test_modeling_llama" in said
