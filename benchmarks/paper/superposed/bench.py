"""What every part of the measurement needs: models, n-grams, prefixes, and the stored rows of finished parts.

Prefixes are windows of held-out files, one after another; every third file is the validation split, on which α, τ and
δ are tuned (section 4.1), all others are the test split. A finished part is a JSON file, named by a fingerprint of the
plan, the models and the code that it depends on, so a changed decoder is measured anew.
"""
# B prefix, L token of a window

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.paper.superposed.other_judge import open_other_judge
from benchmarks.shared import ROOT
from heads.checkpoint.opening import open_backbone
from heads.checkpoint.save_load import write_whole
from heads.cli.ngrams import count_ngrams_command
from heads.data.standard_library import load_heldout_files, stdlib_documents
from heads.ngrams.table import NgramTable

Row = dict[str, Any]
WINDOW = 64
BETWEEN = WINDOW
"""Least distance in tokens between the beginnings of two windows, so that they do not overlap."""
HERE = "benchmarks/paper/superposed"
PER_FILE = 12
"""The most windows of one file, spread over it, so that long files of like lines do not weigh too much."""
CODE = tuple(f"{HERE}/{name}.py" for name in ("bench", "methods", "scores", "tuning"))
DECODER = ("heads/decoding/superposed", "heads/ngrams")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured; the paper's sizes where these are affordable.

    Attributes:
        prefixes, validation: prefixes of the test and the validation split (the paper: 5,000 documents each).
        long_prefixes: prefixes of the texts of 200 tokens.
        linear_batches: batches of ten prefixes for the cosines of figures 3 and 15 (the paper: ten).
        judge_steps: training steps of the judge with another tokenizer.
    """

    prefixes: int = 300
    validation: int = 100
    ks: tuple[int, ...] = (2, 3, 4, 5, 6, 8, 10)
    prefix_lengths: tuple[int, ...] = (5, 15, 25, 40)
    lengths: tuple[int, ...] = (5, 10, 15, 20)
    prefix: int = 15
    length: int = 10
    k: int = 3
    alphas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.35, 0.54, 0.75)
    temperatures: tuple[float, ...] = (0.06, 0.1, 0.2, 0.4, 0.7, 1.0)
    penalties: tuple[float, ...] = (1e-30, 1e-9, 1e-3, 0.03, 1.0)
    long_prefixes: int = 24
    long_length: int = 200
    reset_every: int = 10
    linear_batches: int = 10
    linear_steps: int = 20
    judge_steps: int = 300


QUICK = Plan(
    prefixes=60,
    validation=24,
    ks=(2, 3, 8),
    prefix_lengths=(5, 40),
    lengths=(5, 20),
    alphas=(0.0, 0.2, 0.54),
    temperatures=(0.06, 0.4, 1.0),
    penalties=(1e-30, 1e-3),
    long_prefixes=6,
    linear_batches=2,
    judge_steps=100,
)


@dataclasses.dataclass(kw_only=True)
class SuperposedBench:
    """One measurement: the decoding backbone, its judges, n-grams, and the folder of rows.

    Attributes:
        backbone: the model that decodes.
        second: another model with the same tokenizer, under which the first one's drafts are scored; in tables 2 and 5
            the two change places.
    """

    plan: Plan
    backbone: str
    second: str
    folder: Path
    ngrams_folder: Path

    @functools.cached_property
    def opened(self) -> Any:
        return open_backbone(self.backbone)

    @functools.cached_property
    def opened_second(self) -> Any:
        return open_backbone(self.second)

    @property
    def tokenizer(self) -> Any:
        return self.opened.tokenizer

    @property
    def heldout_list(self) -> str:
        return str(Path(self.backbone) / "training.json")

    @functools.cached_property
    def ngrams(self) -> NgramTable:
        """N-grams to order 6 of the training files, which are counted if the folder does not exist."""
        if not self.ngrams_folder.is_dir():
            count_ngrams_command(
                tokenizer=self.backbone,
                data=["python-stdlib"],
                out=self.ngrams_folder,
                heldout_list=self.heldout_list,
                order=6,
            )
        return NgramTable.open(self.ngrams_folder, self.tokenizer)

    @functools.cached_property
    def other_judge(self) -> tuple[Any, Any]:
        """A judge with another tokenizer, and that tokenizer."""
        return open_other_judge(self.folder / "judge", self.heldout_list, self.plan.judge_steps)

    @functools.cached_property
    def windows(self) -> Tensor:
        """Windows of the test split, spread over its files."""
        return self.read_windows(validation=False, count=self.plan.prefixes)

    @functools.cached_property
    def validation_windows(self) -> Tensor:
        return self.read_windows(validation=True, count=self.plan.validation)

    def read_windows(self, *, validation: bool, count: int) -> Tensor:
        """(count, WINDOW) windows that begin at line starts.

        Raises:
            ValueError: the held-out files are too short for so many.
        """
        files = list(stdlib_documents("heldout", load_heldout_files(self.heldout_list)))
        chosen = [text for i, (_, text) in enumerate(files) if (i % 3 == 0) == validation]
        by_file = [windows_of(self.tokenizer(text)["input_ids"], self.line_ends) for text in chosen]
        found = [window for windows in by_file for window in spread(windows, PER_FILE)]
        if len(found) < count:
            raise ValueError(
                f"{count} prefixes were requested, but the held-out files have {len(found)} windows; request fewer."
            )
        return torch.tensor(spread(found, count))

    @functools.cached_property
    def line_ends(self) -> frozenset[int]:
        """Tokens that end in a line break and spaces: a window after one begins with a line's text."""
        tokens = range(len(self.tokenizer))
        return frozenset(token for token in tokens if self.tokenizer.decode([token]).rstrip(" \t").endswith("\n"))

    def row(self, part: str, measure: Callable[[SuperposedBench], Row], *needs: Any) -> Row:
        """The stored row of a part, or else the one that `measure` returns, which is stored.

        Args:
            needs: results of other parts that it depends on.
        """
        path = self.folder / "rows" / f"{part}-{self.fingerprint(measure, needs)}.json"
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        print(f"measuring {part} …", file=sys.stderr, flush=True)
        found = measure(self)
        write_whole(path.parent, {path.name: json.dumps(found).encode()})
        return json.loads(path.read_text(encoding="utf-8"))

    def fingerprint(self, measure: Any, needs: Any) -> str:
        """A digest of all that a row depends on: plan, models, the decoder's code, and that of the part."""
        plan = json.dumps([dataclasses.asdict(self.plan), self.backbone, self.second, needs], default=str)
        digest = hashlib.sha256(plan.encode())
        for model in (self.backbone, self.second):
            digest.update(weights_digest(model).encode())
        own = inspect.getsourcefile(measure.func if isinstance(measure, functools.partial) else measure)
        decoder = [file for folder in DECODER for file in sorted((ROOT / folder).glob("*.py"))]
        for file in [*(ROOT / name for name in CODE), *decoder, Path(str(own))]:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:12]


@functools.cache
def weights_digest(folder: str) -> str:
    """The checksums of a local model's weights; for any other name, the name itself."""
    files = sorted(Path(folder).glob("*.safetensors"))
    return "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files) or folder


def spread(found: list[Any], count: int) -> list[Any]:
    """At most `count` of some things, at even distances.

    >>> spread(list("abcdef"), 3), spread(list("ab"), 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    many = min(count, len(found))
    return [found[i * len(found) // many] for i in range(many)]


def windows_of(tokens: list[int], line_ends: frozenset[int]) -> list[list[int]]:
    """Windows that follow line ends, at least `BETWEEN` tokens apart.

    They begin after a third of the file, so that imports and licences are left out.

    >>> [window[:2] for window in windows_of(list(range(300)), frozenset({120, 150, 220}))]
    [[121, 122], [221, 222]]
    """
    found, free_from = [], len(tokens) // 3
    for i in range(len(tokens) - WINDOW):
        if i + 1 >= free_from and tokens[i] in line_ends:
            found.append(tokens[i + 1 : i + 1 + WINDOW])
            free_from = i + 1 + BETWEEN
    return found
