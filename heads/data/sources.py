"""Open the rows of files, directories, data sets on the hub and the demo corpus.

A JSON line becomes a row with its file and line number and is parsed later, so a malformed line can be named, skipped
and counted, where a parser of whole files would fail.
"""

import codecs
import glob
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from heads.data.standard_library import STDLIB, load_heldout_files, read_stdlib, stdlib_files, stdlib_root
from heads.extras import needs_extra

with needs_extra("train", "Rows of data were requested"):
    import datasets
    import pyarrow.parquet as pq
    from datasets import Dataset, DatasetDict, Features, IterableDataset, Value
    from datasets.exceptions import DatasetGenerationError
    from datasets.fingerprint import Hasher

OpenedRows: TypeAlias = "Dataset | IterableDataset"

logger = logging.getLogger(__name__)

SHOWN_FILES = 5  # of those that are left out
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".arrow")
TEXT_PIECE = 1 << 20  # characters; a longer text file is cut at line ends into documents of about this size
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "heldout": "heldout", "eval": "eval"}
SPLIT_WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")

TEXT_FEATURES = Features({"_place": Value("string"), "text": Value("large_string")})
LINE_FEATURES = Features({"_place": Value("string"), "_json_line": Value("large_binary")})


def open_rows(path: str, name: str | None, split: str, heldout_list: str | None, *, streaming: bool) -> OpenedRows:
    """The rows of a path: columns of a data set, {_place, text}, or {_place, _json_line}, an unparsed line."""
    path = os.path.expanduser(path)
    if path == STDLIB:
        return open_stdlib(split, heldout_list, streaming=streaming)
    if any((Path(path) / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return open_saved(path, split, streaming=streaming)
    files = find_files(path, split)
    if not files:
        return open_hub(path, name, split, streaming=streaming)
    if files[0].suffix.lower() in (".parquet", ".arrow"):
        return open_tables(path, files, streaming=streaming)
    reader, features = (read_texts, TEXT_FEATURES) if files[0].suffix.lower() == ".txt" else (read_lines, LINE_FEATURES)
    return open_generator(path, reader, {"files": [str(file) for file in files]}, features, files, streaming=streaming)


def open_stdlib(split: str, heldout_list: str | None, *, streaming: bool) -> OpenedRows:
    if heldout_list is None:
        raise ValueError(f"{STDLIB} needs heldout_list, the JSON file that names its held-out files; set it in data.")
    heldout_files = load_heldout_files(heldout_list)
    files = [stdlib_root() / name for name in stdlib_files(split, heldout_files)]
    options = {"split": split, "heldout_files": tuple(heldout_files)}
    return open_generator(STDLIB, read_stdlib, options, TEXT_FEATURES, files, streaming=streaming)


def open_saved(path: str, split: str, *, streaming: bool) -> OpenedRows:
    """A folder written by `save_to_disk`."""
    rows = datasets.load_from_disk(path)
    if isinstance(rows, DatasetDict):
        if split not in rows:
            raise ValueError(f"{path!r} has the splits {', '.join(rows)}, not {split!r}; set split to one of them.")
        rows = rows[split]
    return rows.to_iterable_dataset() if streaming else rows


def open_tables(path: str, files: Sequence[Path], *, streaming: bool) -> OpenedRows:
    builder = files[0].suffix.lower().lstrip(".")
    try:
        if builder != "parquet" or pq.read_schema(files[0]).names:
            literal = [glob.escape(str(file)) for file in files]  # the library takes every name as a pattern
            return datasets.load_dataset(builder, data_files=literal, split="train", streaming=streaming)
    except (DatasetGenerationError, ValueError, OSError) as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(f"{path!r} could not be read as {builder}: {reason}; check the files.") from error
    raise ValueError(f"{str(files[0])!r} has no columns; give tables with a column of texts, turns or token ids.")


def open_hub(path: str, name: str | None, split: str, *, streaming: bool) -> OpenedRows:
    if path.startswith(("/", ".")) or path.count("/") > 1 or Path(path).suffix in SUFFIXES:
        raise FileNotFoundError(f"There is no file or directory {path!r}; check the path.")
    try:
        return datasets.load_dataset(path, name, split=split, streaming=streaming)
    except (DatasetGenerationError, ValueError, OSError, RuntimeError) as error:
        raise ValueError(
            f"{path!r} is not a file here, and as a hub dataset it gave: {first_line(error)}; check path, name and "
            f"split."
        ) from error


def open_generator(
    path: str,
    reader: Callable[..., Iterator[dict[str, Any]]],
    options: dict[str, Any],
    features: Features,
    files: Sequence[Path],
    *,
    streaming: bool,
) -> OpenedRows:
    """Rows of a reader, cached under a fingerprint of the files' names, sizes and times unless they are streamed."""
    if streaming:
        return IterableDataset.from_generator(reader, features=features, gen_kwargs=options)
    fingerprint = Hasher.hash((reader.__name__, options, describe_files(files)))
    try:
        return Dataset.from_generator(
            reader,
            features=features,
            gen_kwargs=options,
            fingerprint=fingerprint,
            cache_dir=str(datasets.config.HF_DATASETS_CACHE),
        )
    except (DatasetGenerationError, ValueError) as error:  # ValueError: the reader yielded no row
        reason = first_line(error.__cause__) if error.__cause__ else f"{path!r} holds no rows; give a file with rows."
        raise ValueError(reason) from error


def identity_of(path: str, name: str | None, split: str, heldout_list: str | None) -> tuple[Any, ...]:
    """What the rows of a streamed path depend on: its files' names, sizes and times, or the commit on the hub."""
    path = os.path.expanduser(path)
    if not is_here(path):
        return path, name, split, datasets.load_dataset_builder(path, name).hash
    if path == STDLIB:
        assert heldout_list is not None
        files = [stdlib_root() / file for file in stdlib_files(split, load_heldout_files(heldout_list))]
    else:
        inside = Path(path).rglob("*") if Path(path).is_dir() else [Path(path)]
        found = map(Path, glob.glob(path, recursive=True)) if is_pattern(path) else inside
        files = sorted(file for file in found if file.is_file())
    return path, name, split, describe_files(files)


def describe_files(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def find_files(path: str, split: str) -> list[Path]:
    """The files that a path stands for, sorted: itself, what a glob matches, or what a directory holds.

    If file names in a directory contain train, test, validation …, only those of `split` are returned, so that no run
    trains on a test file by accident. For training, names without any such word count if none contains train. A warning
    names the files that are left out. An empty list means that no such path exists; it may be a dataset on the hub.
    """
    if is_pattern(path):
        files = [Path(name) for name in sorted(glob.glob(path, recursive=True)) if Path(name).is_file()]
        if not files:
            raise FileNotFoundError(f"The pattern {path!r} matches no file; check the path.")
    elif Path(path).is_dir():
        files = files_of_split(Path(path), split)
    elif Path(path).is_file():
        files = [Path(path)]
    else:
        return []
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1 or kinds[0] not in SUFFIXES:
        raise ValueError(
            f"{path!r} holds {', '.join(kinds) or 'no'} files; give files of one kind of {', '.join(SUFFIXES)}."
        )
    return files


def is_pattern(path: str) -> bool:
    """Whether a path is a glob pattern. A file or folder that exists is none, whatever characters its name has."""
    return glob.has_magic(path) and not Path(path).exists()


def is_here(path: str) -> bool:
    """Whether a source is on this machine: a file, a folder, a pattern that matches one, or the standard library."""
    path = os.path.expanduser(path)
    return path == STDLIB or Path(path).exists() or bool(glob.glob(path, recursive=True))


def files_of_split(directory: Path, split: str) -> list[Path]:
    """Data files below a directory that belong to a split by their names."""
    files = sorted(file for file in directory.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES)
    files = [file for file in files if file.name not in ("dataset_info.json", "dataset_infos.json", "state.json")]
    if not files:
        raise FileNotFoundError(f"The directory {str(directory)!r} holds no file that ends in {', '.join(SUFFIXES)}.")
    splits = {file: split_in_name(file.relative_to(directory).as_posix()) for file in files}
    if not any(splits.values()) and split == "train":
        return files
    takes_all = directory / "**" / f"*{files[0].suffix}"
    matching = [file for file in files if splits[file] == SPLIT_WORDS.get(split, split)]
    if not matching and split == "train":
        matching = [file for file in files if splits[file] is None]
    if not matching:
        found = sorted({name for name in splits.values() if name}) or ["train"]
        raise ValueError(
            f"{str(directory)!r} has no files of split {split!r}; by their names it has {', '.join(found)}: set split "
            f"to one of them, or give a pattern such as {str(takes_all)!r}, which takes all."
        )
    if left_out := [file.relative_to(directory).as_posix() for file in files if file not in set(matching)]:
        shown = ", ".join(left_out[:SHOWN_FILES]) + (", …" if len(left_out) > SHOWN_FILES else "")
        message = "%s: split %r by its files' names, so %d others are left out (%s); a pattern such as %s takes all."
        logger.warning(message, directory, split, len(left_out), shown, takes_all)
    return matching


def split_in_name(name: str) -> str | None:
    """The split in a file name, if any.

    >>> split_in_name("data/valid-00000-of-00002.parquet"), split_in_name("notes.txt")
    ('validation', None)
    """
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def read_texts(files: Sequence[str]) -> Iterator[dict[str, str]]:
    """One row per text file; a file of more than TEXT_PIECE characters is cut at line ends into several rows."""
    for name in files:
        with open(name, encoding="utf-8-sig", errors="replace") as file:
            for number, lines in enumerate(iter(lambda: file.readlines(TEXT_PIECE), []), start=1):
                yield {"_place": f"{name} piece {number}", "text": "".join(lines)}


def read_lines(files: Sequence[str]) -> Iterator[dict[str, str | bytes]]:
    """Each line of JSON-lines files, unparsed, with its place; a .json file that is one list gives its items.

    The second line of a.jsonl  ->  {"_place": "a.jsonl line 2", "_json_line": b'{"text": "..."}'}
    """
    for name in files:
        with open(name, "rb") as file:
            if name.lower().endswith(".json") and file.peek(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
                yield from read_list(name, file.read())
                continue
            for number, line in enumerate(file, start=1):
                yield {"_place": f"{name} line {number}", "_json_line": line.strip()}


def read_list(name: str, content: bytes) -> Iterator[dict[str, str | bytes]]:
    """The items of a JSON list, each as a JSON line; a list that is cut short or malformed is an error."""
    try:
        items = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{name} starts as a JSON list but is not one ({error}); repair it or write JSON lines."
        ) from None
    for number, item in enumerate(items, start=1):
        yield {"_place": f"{name} row {number}", "_json_line": json.dumps(item).encode()}
