"""The demo corpus: the Python standard library, which comes with Python.

A list of names splits its files into training and held-out ones, so the split is the same on every machine.
"""

import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

STDLIB = "python-stdlib"
SKIPPED = {"lib2to3", "encodings", "pydoc_data", "site-packages"}
MAX_BYTES = 200_000


def load_heldout_files(path: str | Path) -> list[str]:
    """The names under "heldout_files" of a JSON file, as the demo backbone's training.json has them.

    {"heldout_files": ["copyreg.py", "asyncio/log.py"]}  ->  ["copyreg.py", "asyncio/log.py"]
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"heldout_list is {str(path)!r}, which is not a file; give a JSON file with heldout_files."
        )
    try:
        names = json.loads(Path(path).read_bytes())["heldout_files"]
    except (ValueError, KeyError, TypeError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f'{path} must be JSON with a list of file names, {{"heldout_files": ["copyreg.py"]}}; it is not.'
        )
    return names


def stdlib_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files(split: str, heldout_files: Sequence[str]) -> list[str]:
    """Names of one split's files, POSIX and relative to the library's root, sorted.

    Split `heldout` has the files in the list, and `train` all others. Files of MAX_BYTES and more, and those in the
    folders SKIPPED, are in neither.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"{STDLIB} has the splits 'train' and 'heldout', not {split!r}; set split to one of the two.")
    root, heldout = stdlib_root(), set(heldout_files)
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    small = [file.relative_to(root).as_posix() for file in files if file.stat().st_size < MAX_BYTES]
    chosen = sorted(name for name in small if (name in heldout) == (split == "heldout"))
    if not chosen:
        raise ValueError(f"No file of split {split!r} of {STDLIB} is under {root}; check the names in heldout_list.")
    return chosen


def stdlib_documents(split: str, heldout_files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and text of each file of a split, in sorted order.

    next(stdlib_documents("heldout", ["copyreg.py"]))  ->  ("copyreg.py", '\"\"\"Helper to provide extensibility ...')
    """
    for name in stdlib_files(split, heldout_files):
        yield name, (stdlib_root() / name).read_text(encoding="utf-8", errors="ignore")


def read_stdlib(split: str, heldout_files: Sequence[str]) -> Iterator[dict[str, str]]:
    for name, text in stdlib_documents(split, heldout_files):
        yield {"_place": name, "text": text}
