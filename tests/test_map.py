"""docs/map.md names every folder and module of the two packages once, and no folder has outgrown a reader."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from repository import ROOT

PACKAGES = ("heads", "train")
MAX_MODULES = 12  # of a folder, `__init__` and sub-folders not counted
MAX_BEHIND_TREE_DECODING = 18  # other modules of heads.decoding that it imports, directly or not


def mapped_paths() -> list[str]:
    """Paths of the page's first fenced block, whose lines are indented by two spaces a folder: `name/` or `name.py`."""
    page = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    block = re.split(r"^```.*\n", page, flags=re.MULTILINE)[1]
    return list(read_tree(block))


def read_tree(block: str) -> Iterator[str]:
    """Each line as a path: its name behind those of the folders around it."""
    folders: list[str] = []
    for line in filter(None, block.splitlines()):
        indent = len(line) - len(line.lstrip())
        name = line.split()[0]
        del folders[indent // 2 :]
        yield "/".join([*folders, name.rstrip("/")])
        if name.endswith("/"):
            folders.append(name.rstrip("/"))


def packages() -> list[Path]:
    return [
        folder for name in PACKAGES for folder in (ROOT / name, *sorted((ROOT / name).rglob("*/"))) if modules(folder)
    ]


def modules(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def test_the_map_names_everything_once():
    there = {folder.relative_to(ROOT).as_posix() for folder in packages()}
    there |= {
        file.relative_to(ROOT).as_posix()
        for folder in packages()
        for file in modules(folder)
        if file.stem != "__init__"
    }
    mapped = mapped_paths()
    assert len(mapped) == len(set(mapped))
    assert {"missing in docs/map.md": there - set(mapped), "not there any more": set(mapped) - there} == {
        "missing in docs/map.md": set(),
        "not there any more": set(),
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_holds_at_most_a_dozen_modules(package):
    counts = {
        folder.relative_to(ROOT).as_posix(): len([file for file in modules(folder) if file.stem != "__init__"])
        for folder in packages()
        if folder.relative_to(ROOT).parts[0] == package
    }
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_who_reads_tree_decoding_needs_few_files():
    graph = grimp.build_graph("heads", cache_dir=None)
    behind = graph.find_upstream_modules("heads.decoding.tree_decoding")
    of_decoding = {name for name in behind if name.startswith("heads.decoding.") and not graph.find_children(name)}
    assert "heads.decoding.loop" in of_decoding
    assert len(of_decoding) <= MAX_BEHIND_TREE_DECODING, sorted(of_decoding)


def test_a_folder_of_the_map_is_read():
    block = "heads/\n  data/  rows\n    rows.py  one row\n  extras.py  optional\n"
    assert list(read_tree(block)) == ["heads", "heads/data", "heads/data/rows.py", "heads/extras.py"]
