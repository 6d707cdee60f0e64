"""Look at a report in a real browser: `python -m benchmarks.outside.report_pictures [--report FILE]`.

Chromium draws the page wide and narrow, light and dark, and prints it on paper; pictures and PDF lie in --out, to be
looked at. The command fails where a page is wider than its window, so that a reader would have to scroll sideways
(wide tables scroll inside themselves). Without --report, the shipped questions are answered by --heads first.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared import parser_of, run_benchmark
from benchmarks.speed.compare import headway

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTHS = {"wide": 1280, "tablet": 768, "narrow": 380, "very narrow": 320}
HEIGHT = 2400  # px of a picture; what lies below is not in it
SECONDS = 120
# Headless Chromium has windows of at least 500 px, so the page is measured and drawn in a frame of the asked width.
FRAME = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0; }} iframe {{ border: 0; }}</style>
<iframe id="page" src="report.html" width="{width}" height="{height}"></iframe>
<script>
window.addEventListener("load", () => {{
  const root = document.getElementById("page").contentDocument.documentElement;
  document.body.dataset.measured = `${{root.scrollWidth}} of ${{root.clientWidth}}`;
}});
</script>
"""
MEASURED = re.compile(r'data-measured="(\d+) of (\d+)"')


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.outside.report_pictures", __doc__)
    parser.add_argument("--report", type=Path, help="a report.html; by default one is made")
    parser.add_argument("--heads", default="checkpoints/demo/grounded", help="folder of heads for the report")
    parser.add_argument("--out", type=Path, default=Path("evaluations/report_pictures"), help="folder of the pictures")
    options = parser.parse_args(arguments)
    browser = find_browser()
    options.out.mkdir(parents=True, exist_ok=True)
    report = options.report or make_report(options)
    if not report.is_file():
        raise ValueError(f"{report} does not exist; give a report.html that headway evaluate wrote.")
    too_wide = look(browser, report, options.out)
    print(f"pictures and report.pdf are in {options.out}", flush=True)
    if too_wide:
        raise ValueError(f"The page is wider than its window: {'; '.join(too_wide)}.")


def find_browser() -> str:
    """
    Raises:
        ValueError: there is no Chromium.
    """
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise ValueError(f"No Chromium was found (looked for {', '.join(BROWSERS)}); install one, e.g. with apt-get.")
    return found


def make_report(options: argparse.Namespace) -> Path:
    """One question of each category of the shipped ones."""
    folder = options.out / "run"
    small = ["--per-category", "1", "--repeats", "1", "--max-new-tokens", "24", "--position-tokens", "64"]
    headway("evaluate", options.heads, "--suite", "speed", "--out", str(folder), *small)
    return Path(folder / "report.html")


def look(browser: str, report: Path, out: Path) -> list[str]:
    """Pictures of all widths, light and dark, and a PDF; a line for each width that the page does not fit."""
    too_wide = []
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(report, Path(scratch) / "report.html")
        for name, width in WIDTHS.items():
            frame = Path(scratch) / "frame.html"
            frame.write_text(FRAME.format(width=width, height=HEIGHT), encoding="utf-8")
            needed, there = measure(browser, frame)
            print(f"{name}: {needed} px needed, {there} px there", flush=True)
            if needed > there:
                too_wide.append(f"{name} needs {needed} px of {there}")
            for mode in ("light", "dark"):
                picture = out.resolve() / f"{name.replace(' ', '_')}_{mode}.png"
                colors = [f"--blink-settings=preferredColorScheme={int(mode == 'light')}"]
                run(browser, frame, f"--screenshot={picture}", f"--window-size={max(width, 500)},{HEIGHT}", *colors)
        pdf = f"--print-to-pdf={out.resolve() / 'report.pdf'}"
        run(browser, Path(scratch) / "report.html", pdf, "--no-pdf-header-footer")
    return too_wide


def measure(browser: str, frame: Path) -> tuple[int, int]:
    """How wide the page in the frame is, and how wide the frame.

    Raises:
        ValueError: the browser did not say.
    """
    found = MEASURED.search(run(browser, frame, "--dump-dom", "--virtual-time-budget=5000"))
    if found is None:
        raise ValueError(f"{browser} loaded the page but its width could not be read; try a newer Chromium.")
    return int(found[1]), int(found[2])


def run(browser: str, page: Path, *options: str) -> str:
    """
    Raises:
        ValueError: the browser failed.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--allow-file-access-from-files", f"--user-data-dir={profile}", *options, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise ValueError(f"{browser} failed with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


if __name__ == "__main__":
    run_benchmark(main)
