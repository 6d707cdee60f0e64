"""A source whose rows are tokenised when they are read, without a copy on disk.

Whether a row belongs to a sampled share, or to the evaluation, depends only on its number and the seed, so a stream
needs no state for it and rows that nobody asks for are not tokenised.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from heads.data.rows import DOCUMENT_FEATURES, RowTokenizer
from heads.extras import needs_extra

with needs_extra("train", "Rows of data are to be read"):
    from datasets import IterableDataset

FOR_FRACTION, FOR_EVAL = 0, 1  # what a row is sampled for; each purpose has random numbers of its own
ROWS_PER_BATCH = 64  # a few megabytes of text at most


@dataclass(frozen=True, kw_only=True)
class DocumentStream:
    """
    Attributes:
        rows: the source's rows.
        columns: names of their columns.
        fraction: share of the rows to use, sampled with the seed.
    """

    rows: IterableDataset
    columns: list[str]
    tokenize: RowTokenizer
    fraction: float
    seed: int

    def documents(self, keep: Callable[[int], bool] | None = None) -> IterableDataset:
        """Documents, columns as in DOCUMENT_FEATURES.

        Args:
            keep: whether to use the row with this number in the source; None uses all that `fraction` samples.
        """
        rows = self.rows.map(number_rows, with_indices=True, batched=True)
        sampled = partial(is_sampled, share=self.fraction, purpose=FOR_FRACTION, seed=self.seed)
        for chosen in (sampled if self.fraction < 1 else None, keep):
            if chosen is not None:
                rows = rows.filter(chosen, input_columns=["row_number"])
        return rows.map(
            self.tokenize,
            batched=True,
            batch_size=ROWS_PER_BATCH,
            remove_columns=self.columns,
            features=DOCUMENT_FEATURES,
        )

    def identity(self) -> tuple[Any, ...]:
        """What the documents depend on, beside the source's rows."""
        return self.tokenize.identity(), self.fraction, self.seed


def number_rows(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
    return {"row_number": indices}


def is_sampled(row_number: int, *, share: float, purpose: int, seed: int) -> bool:
    """Whether a row belongs to a random share. It depends only on the arguments, so a stream needs no state for it."""
    return bool(np.random.default_rng((seed, purpose, row_number)).random() < share)


def is_held_out(row_number: int, *, share: float, seed: int) -> bool:
    """Whether a run that streams sets a row aside for its evaluation."""
    return is_sampled(row_number, share=share, purpose=FOR_EVAL, seed=seed)
