"""A corpus of some million tokens that every machine has: the Python files of the installed packages.

Files are read in the order of a hash of their names, so that the first N tokens are a sample of all. They are tokenised
once, with the demo's tokenizer, and the ids are stored under checkpoints/runs/.
"""
# T token of the corpus, L document

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from heads.backbone.loading import BackboneConfig, load_tokenizer

FOLDER = Path("checkpoints/runs/ngram-corpus")
BACKBONE = "checkpoints/demo/base"
FILES_AT_ONCE = 200
LARGEST_FILE = 1 << 19  # bytes: what is larger is mostly tables


def corpus_file(tokens: int) -> Path:
    """The file of at least so many tokens, written when it does not exist: `tokens_T` and `lengths_L`.

    Raises:
        ValueError: the installed packages hold fewer.
    """
    if (kept := kept_file(tokens)) is not None:
        return kept
    path = FOLDER / f"{tokens}.npz"
    tokenizer = load_tokenizer(BackboneConfig(name_or_path=BACKBONE))
    documents: list[NDArray[np.uint16]] = []
    counted = 0
    files = installed_files()
    batches = [files[i : i + FILES_AT_ONCE] for i in range(0, len(files), FILES_AT_ONCE)]
    for batch in track(batches, "tokenising installed packages", transient=True):
        found = [np.array(ids, np.uint16) for ids in tokenise(tokenizer, batch) if ids]
        documents += found
        counted += sum(map(len, found))
        if counted >= tokens:
            break
    else:
        raise ValueError(f"{tokens:,} tokens were asked for; the installed packages hold {counted:,}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{tokens}.unfinished.npz")
    np.savez(unfinished, tokens_T=np.concatenate(documents), lengths_L=np.array([len(ids) for ids in documents]))
    unfinished.replace(path)
    return path


def kept_file(tokens: int) -> Path | None:
    """The smallest stored file of at least so many tokens."""
    found = sorted(int(path.stem) for path in FOLDER.glob("*.npz") if path.stem.isdecimal())
    return next((FOLDER / f"{size}.npz" for size in found if size >= tokens), None)


def installed_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["purelib"])
    found = [path for path in root.rglob("*.py") if path.is_file() and 0 < path.stat().st_size <= LARGEST_FILE]
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())


def tokenise(tokenizer: Any, files: Sequence[Path]) -> list[list[int]]:
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return found
