"""docs/paper_to_code.md names all that the four papers number: equations, algorithms, figures; and files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/paper_to_code.md").read_text()
NUMBERED = {
    "Not So Speculative": {"figure": 8},
    "DynaMo": {"equation": 6, "algorithm": 1, "theorem": 1, "table": 14, "figure": 23},
    "Speculative sampling": {"figure": 10},
    "Superposed Decoding": {"equation": 8, "algorithm": 1, "table": 5, "figure": 15},
}


def section(paper):
    return next(part for part in re.split(r"\n(?=\*?[A-Z][^|\n]*\*[^|]*\n\n\|)", PAGE) if paper in part.split("|")[0])


def numbers(kind, text):
    """
    "figures 3, 13 and 15 to 17" -> {3, 13, 15, 16, 17}
    """
    found = set()
    for listed in re.findall(rf"\b{kind}s? (\d+(?:(?:, | and | to )\d+)*)", text, flags=re.IGNORECASE):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", listed):
            found |= set(range(int(first), int(last or first) + 1))
    return found


@pytest.mark.parametrize("paper", NUMBERED)
def test_everything_that_a_paper_numbers_is_named(paper):
    for kind, count in NUMBERED[paper].items():
        assert set(range(1, count + 1)) <= numbers(kind, section(paper)), kind


def test_the_files_are_there():
    paths = re.findall(r"`((?:heads|train|configs|benchmarks|launch|tests)/[^` ]*)`", PAGE)
    assert len(paths) > 50
    assert not [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]
