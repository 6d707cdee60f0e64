"""Where rows come from when no library reader fits: files on disk, read tolerantly, and the Python standard library.

JSON lines are handed on one by one with the file and line they stand in, so that a malformed one can be named, skipped
and counted instead of failing the file. The standard library's own source is the demo corpus: present wherever Python
is, and split into training and held-out files by a list of names, never by chance.
"""

import glob
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet", ".arrow")
TEXT_PIECE = 1 << 20  # characters; a longer text file is cut at line ends into documents of about this size
SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "heldout": "heldout", "eval": "eval"}
SPLIT_WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")

STDLIB = "python-stdlib"
STDLIB_SKIP = {"lib2to3", "encodings", "pydoc_data", "site-packages"}
STDLIB_MAX_BYTES = 200_000


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


def stdlib_files(split: str, heldout_files: Sequence[str]) -> list[Path]:
    """This interpreter's library files of one split, sorted; `heldout` is what the list names, `train` the rest."""
    if split not in ("train", "heldout"):
        raise ValueError(f"{STDLIB} has the splits 'train' and 'heldout', not {split!r}; set split to one of the two.")
    root, heldout = stdlib_root(), set(heldout_files)
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not STDLIB_SKIP & set(file.relative_to(root).parts)
        and file.stat().st_size < STDLIB_MAX_BYTES
        and (file.relative_to(root).as_posix() in heldout) == (split == "heldout")
    ]
    if not files:
        raise ValueError(f"No file of split {split!r} of {STDLIB} is under {root}; check the names in heldout_list.")
    return files


def stdlib_documents(split: str, heldout_files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name (POSIX, relative to the library's root) and text of each file of a split, in sorted order.

    next(stdlib_documents("heldout", ["copyreg.py"]))  ->  ("copyreg.py", '\"\"\"Helper to provide extensibility ...')
    """
    root = stdlib_root()
    for file in stdlib_files(split, heldout_files):
        yield file.relative_to(root).as_posix(), file.read_text(encoding="utf-8", errors="ignore")


def find_files(path: str, split: str) -> list[Path]:
    """The readable files a path stands for, sorted: itself, what a glob matches, or what lies in a directory.

    In a directory whose file names say train, test, validation ... only those of `split` are taken, so that a
    test file is never trained on by accident. An empty list means: no such path here, perhaps a dataset on the hub.
    """
    if glob.has_magic(path):
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


def files_of_split(directory: Path, split: str) -> list[Path]:
    """Data files below a directory that belong to a split, judged by the words in their names."""
    files = sorted(file for file in directory.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES)
    files = [file for file in files if file.name not in ("dataset_info.json", "dataset_infos.json", "state.json")]
    if not files:
        raise FileNotFoundError(f"The directory {str(directory)!r} holds no file that ends in {', '.join(SUFFIXES)}.")
    splits = {file: split_in_name(file.relative_to(directory).as_posix()) for file in files}
    if not any(splits.values()) and split == "train":
        return files
    chosen = [file for file in files if splits[file] == SPLIT_WORDS.get(split, split)]
    if not chosen:
        found = sorted({name for name in splits.values() if name}) or ["train"]
        raise ValueError(f"{str(directory)!r} has no files of split {split!r}; its file names say {', '.join(found)}.")
    return chosen


def split_in_name(name: str) -> str | None:
    """The split that a file name speaks of: "data/train-00000-of-00002.parquet" -> "train", "notes.txt" -> None."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def read_texts(files: Sequence[str]) -> Iterator[dict[str, str]]:
    """One row per text file; a file of more than TEXT_PIECE characters is cut at line ends into several rows."""
    for name in files:
        pieces: list[str] = []
        with open(name, encoding="utf-8", errors="replace") as file:
            for line in file:
                pieces.append(line)
                if file.tell is not None and sum_exceeds(pieces):
                    yield {"place": name, "text": "".join(pieces)}
                    pieces = []
        if pieces:
            yield {"place": name, "text": "".join(pieces)}


def read_lines(files: Sequence[str]) -> Iterator[dict[str, str]]:
    """Each line of JSON-lines files as it stands, with its place; a .json file that is one list gives its items.

    The second line of a.jsonl  ->  {"place": "a.jsonl line 2", "line": '{"text": "..."}'}
    """
    for name in files:
        with open(name, "rb") as file:
            if name.endswith(".json") and first_byte(file.peek(4096)) == b"[":
                yield from read_list(name, file.read())
                continue
            for number, line in enumerate(file, start=1):
                yield {"place": f"{name} line {number}", "line": line.decode("utf-8", errors="surrogateescape").strip()}
