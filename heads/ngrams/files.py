"""The files of an n-gram table: arrays of little-endian numbers, and `ngrams.json`, which describes them.

ngrams.json holds the format version, the order, the tokenizer's fingerprint, the number of n-grams and of distinct
n-grams of each order, the sources, and the type, length and checksum of every array.
"""
# N n-grams of one order

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heads.inside import open_new

FORMAT_VERSION = 2  # 1 had numbers of 4 and 8 bytes alone
DESCRIPTION = "ngrams.json"
MAX_ORDER = 6
MAX_VOCAB = 1 << 20
CHECKED_BYTES = 1 << 24  # one read for a checksum
NUMBERS = ("|u1", "<u2", "<i4", "<u4", "<i8")
HOW_TO_COUNT = "count it again with the backbone's tokenizer: headway count-ngrams --tokenizer BACKBONE"


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 over a tokenizer's tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def array_names(order: int) -> list[str]:
    """The arrays of a table, in the order of the trie.

    >>> array_names(2)
    ['order1.counts', 'order2.tokens', 'order2.counts', 'order2.starts']
    """
    return ["order1.counts"] + [
        f"order{n}.{part}" for n in range(2, order + 1) for part in ("tokens", "counts", "starts")
    ]


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Within the context, the error of a full disk names the file and the free space.

    NumPy raises an OSError without errno there, which says only how many numbers it wrote.

    Raises:
        OSError: with that sentence, or any other error as it was.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (None, errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"{path} could not be written ({error}); its disk has {free / 1e6:,.1f} MB free. Free some space and give "
            f"the same command again: what was counted stays."
        ) from error


def write_array(path: Path, kind: str, pieces: Iterable[NDArray[Any]]) -> dict[str, Any]:
    """Write pieces one after the other; returns the file's entry in ngrams.json."""
    length, crc = 0, 0
    with explained(path), open_new(path) as file:
        for piece in pieces:
            content = np.ascontiguousarray(piece, dtype=kind).data
            file.write(content)
            length, crc = length + len(piece), zlib.crc32(content, crc)
    return {"kind": kind, "length": length, "crc32": crc}


def open_array(path: Path, file: dict[str, Any]) -> NDArray[Any]:
    """Map an array that `write_array` wrote into memory; raises ValueError where it is missing or has another size."""
    expected = file["length"] * np.dtype(file["kind"]).itemsize
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"holds {found:,} bytes in place of {expected:,}"
        raise ValueError(f"{path} {state}; the n-gram table was damaged: copy the folder again or recount.")
    if not expected:  # a file of no bytes cannot be mapped
        return np.zeros(0, file["kind"])
    return np.asarray(np.memmap(path, file["kind"], mode="r"))


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while content := file.read(CHECKED_BYTES):
            crc = zlib.crc32(content, crc)
    return crc


def read_description(folder: str | Path) -> dict[str, Any]:
    """The content of ngrams.json, checked.

    Raises:
        ValueError: the file is missing, of a newer format, or not one that `count_ngrams` writes.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        raise ValueError(f"{folder} holds no {DESCRIPTION}; give a folder that headway count-ngrams wrote.")
    try:
        description = json.loads(path.read_text(encoding="utf-8-sig"))
        version = int(description["format_version"])
        problem = "" if version > FORMAT_VERSION else find_problem(description)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is no description of n-grams ({type(error).__name__}: {error}); it was damaged or cut short: copy "
            "the folder again or recount."
        ) from None
    if version > FORMAT_VERSION:
        raise ValueError(f"{path} has format version {version}; this version of Headway reads up to {FORMAT_VERSION}.")
    if problem:
        raise ValueError(f"{path} does not fit together ({problem}); copy the folder again or recount.")
    return dict(description)


def find_problem(description: dict[str, Any]) -> str:
    """The first thing in a description that `count_ngrams` would not have written; empty where there is none."""
    order, vocab, files = description["order"], description["vocab_size"], description["files"]
    if not are_counts([order, vocab]) or not 1 <= order <= MAX_ORDER or not 1 <= vocab <= MAX_VOCAB:
        return f"order {order}, {vocab} tokens"
    if not all(
        are_counts(description[name]) and len(description[name]) == order for name in ("positions", "num_ngrams")
    ):
        return "positions or num_ngrams are not one number for each order"
    if set(files) != set(array_names(order)):
        return f"files are {', '.join(sorted(map(str, files)))[:200]} in place of {', '.join(array_names(order))}"
    for name in array_names(order):
        n, part = int(name[5]), name[7:]
        length = files[name]["length"]
        if not are_counts([length, files[name]["crc32"]]):
            return f"{name} has length {length!r} and crc32 {files[name]['crc32']!r}"
        wanted = vocab if n == 1 else description["num_ngrams"][n - 1]
        if part == "starts":
            wanted = 1 + (vocab if n == 2 else description["num_ngrams"][n - 2])
        if length != wanted or files[name]["kind"] not in NUMBERS:
            return f"{name} has {length} numbers of kind {files[name]['kind']} in place of {wanted}"
    description["tokenizer_sha256"]
    return ""


def are_counts(values: Any) -> bool:
    """Whether it is a list of whole numbers from 0 that 8 bytes hold.

    >>> are_counts([3, 0]), are_counts([1.5]), are_counts("12"), are_counts([True])
    (True, False, False, False)
    """
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def write_atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """Write a file under a temporary name and rename it when it is complete."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path), open_new(unfinished) as file:
        write(file)
    os.replace(unfinished, path)


def write_table(folder: Path, parts: Sequence[Path], description: dict[str, Any]) -> None:
    """Join the parts into the table's arrays and write ngrams.json."""
    order = description["order"]
    files = {}
    for name in array_names(order):
        files[name] = write_array(
            folder / name, number_type(name, parts, description["vocab_size"]), read_pieces(name, parts)
        )
    description = {
        **description,
        "positions": [sum(int(read_part(part, f"order{n}.positions")) for part in parts) for n in range(1, order + 1)],
        "num_ngrams": [files[f"order{n}.counts"]["length"] for n in range(1, order + 1)],
        "documents": "n-grams lie within one document",
        "files": files,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def number_type(name: str, parts: Sequence[Path], vocab_size: int) -> str:
    """The smallest type that holds an array's largest number; unigrams' counts always take 8 bytes.

    A 6-gram of the demo's 2,048 tokens takes 8 bytes: 2 for its token, 1 or 2 for its count, 4 for where its extensions
    start.
    """
    if name == "order1.counts":
        return "<i8"
    if name.endswith("tokens"):
        return smallest_type(vocab_size - 1, ("<u2", "<i4"))
    if name.endswith("starts"):
        return smallest_type(sum(int(read_part(part, name).sum()) for part in parts), ("<u4", "<i8"))
    largest = max(int(read_part(part, name).max(initial=0)) for part in parts)
    return smallest_type(largest, ("|u1", "<u2", "<u4", "<i8"))


def smallest_type(largest: int, kinds: Sequence[str]) -> str:
    """
    >>> smallest_type(255, ("|u1", "<u2")), smallest_type(256, ("|u1", "<u2"))
    ('|u1', '<u2')
    """
    return next(kind for kind in kinds if largest <= np.iinfo(kind).max)


def read_pieces(name: str, parts: Sequence[Path]) -> Iterator[NDArray[Any]]:
    """An array of the table, part by part; `starts` are the running sums of the parts' numbers of children."""
    if not name.endswith("starts"):
        yield from (read_part(part, name) for part in parts)
        return
    yield np.zeros(1, np.int64)
    behind = 0
    for part in parts:
        ends = behind + np.cumsum(read_part(part, name))
        yield ends
        behind = int(ends[-1]) if len(ends) else behind


def read_part(part: Path, name: str) -> NDArray[Any]:
    with np.load(part) as arrays:
        found: NDArray[Any] = arrays[name]
        return found
