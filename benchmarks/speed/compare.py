"""The shipped heads on the same questions: `python -m benchmarks.speed.compare`.

Runs `headway evaluate --suite speed` for each family of shipped heads, and `headway compare` of the runs.
Rows that an earlier call finished are read from the folder --out.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.shared import ON_BASE, OWN_BACKBONE, shipped
from heads.cli.main import app

HEADS = (*ON_BASE, *OWN_BACKBONE)
COLUMNS = "180"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("evaluations/compare"), help="folder of the runs")
    parser.add_argument("--quick", action="store_true", help="one question of each category, one repeat")
    options = parser.parse_args()
    out = options.out / "quick" if options.quick else options.out
    small = ["--per-category", "1", "--repeats", "1", "--max-new-tokens", "24", "--position-tokens", "64"]
    if kept := [name for name in HEADS if (out / name).exists()]:
        print(f"An earlier call had begun these runs, and its minutes are not counted above: {', '.join(kept)}.\n")
    for name, folder in zip(HEADS, shipped(*HEADS), strict=True):
        suite = ["--suite", "speed", "--out", str(out / name)]
        headway("evaluate", folder, *suite, *(small if options.quick else []))
    headway("compare", *(str(out / name) for name in HEADS), "--out", str(out / "compare.html"))


def headway(*words: str) -> None:
    """Run a command as a user types it; its tables are printed at full width."""
    os.environ.setdefault("COLUMNS", COLUMNS)
    if code := app(list(words), standalone_mode=False):
        sys.exit(code)


if __name__ == "__main__":
    main()
