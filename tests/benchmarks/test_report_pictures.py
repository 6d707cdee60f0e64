"""A report is drawn in a browser: a page that fits its window passes, one that does not is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.outside import report_pictures
from heads.evaluation.report.page import render_page
from heads.evaluation.report.sections import Section, Table

BROWSER = next((path for name in report_pictures.BROWSERS if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium in this machine")


@needs_browser
def test_a_wide_table_scrolls_in_itself_and_a_wide_line_is_found(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(report_pictures, "WIDTHS", {"narrow": 380})
    table = Table(columns=[f"column {i}" for i in range(30)], rows=[["1.00 (0.90–1.10)"] * 30])
    page = render_page("t", {"command": "x" * 300}, [Section(title="s", text="word " * 50, tables=[table])])
    report = tmp_path / "report.html"
    report.write_text(page, encoding="utf-8")
    report_pictures.main(["--report", str(report), "--out", str(tmp_path / "out")])
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"narrow_light.png", "narrow_dark.png", "report.pdf"}
    light, dark = ((tmp_path / f"out/narrow_{mode}.png").read_bytes() for mode in ("light", "dark"))
    assert light != dark
    report.write_text(page.replace("</main>", '<div style="width: 900px">wide</div></main>'), encoding="utf-8")
    with pytest.raises(ValueError, match=r"wider than its window: narrow needs 9\d\d px of 380"):
        report_pictures.main(["--report", str(report), "--out", str(tmp_path / "out")])


def test_without_a_browser_or_a_report_it_ends_in_a_sentence(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="No Chromium was found"):
        report_pictures.main(["--out", str(tmp_path)])
    monkeypatch.setattr(shutil, "which", lambda name: name)
    with pytest.raises(ValueError, match=r"nowhere.html does not exist; give a report.html"):
        report_pictures.main(["--report", str(tmp_path / "nowhere.html"), "--out", str(tmp_path)])
