"""Runs the tests that `make test` leaves out (mark `wide`) and counts them by file; fails if one of them fails.

python -m benchmarks.wide_tests [PATH …]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.shared import ROOT, parser_of

ENDINGS = ("passed", "failed", "skipped")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__spec__.name, __doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders of tests; by default all")
    options = parser.parse_args(arguments)
    code, report = run(options.paths)
    table = count(report)
    print("| file | passed | failed | skipped | seconds |\n|---|---|---|---|---|")
    for name, (*counts, seconds) in sorted(table.items()):
        print(f"| {name} | {' | '.join(f'{number:.0f}' for number in counts)} | {seconds:.0f} |")
    totals = [sum(row[i] for row in table.values()) for i in range(len(ENDINGS) + 1)]
    print(f"| all | {' | '.join(f'{number:.0f}' for number in totals)} |")
    if code:
        sys.exit(f"pytest ended with {code}; `pytest -m wide` says more")


def run(paths: list[str]) -> tuple[int, ElementTree.Element]:
    """pytest's exit status and its report in JUnit's format."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        asked = ["-m", "wide", "-n", "2", "--dist", "worksteal", f"--junitxml={report}", *paths]
        done = subprocess.run([sys.executable, "-m", "pytest", *asked], cwd=ROOT, stdout=sys.stderr, check=False)
        return done.returncode, ElementTree.parse(report).getroot()


def count(report: ElementTree.Element) -> dict[str, list[float]]:
    """For each file how many tests passed, failed and were skipped, and their seconds, added over both workers.

    >>> case = '<testcase classname="tests.heads.test_x" name="test_0" time="1.5"/>'
    >>> count(ElementTree.fromstring(f"<testsuite>{case}{case}</testsuite>"))
    {'tests/heads/test_x.py': [2, 0, 0, 3.0]}
    """
    table: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for case in report.iter("testcase"):
        tags = {part.tag for part in case}
        ending = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        row = table[case.get("classname", "").replace(".", "/") + ".py"]
        row[ENDINGS.index(ending)] += 1
        row[-1] += float(case.get("time", 0))
    return dict(table)


if __name__ == "__main__":
    main()
