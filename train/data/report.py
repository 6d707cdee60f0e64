"""Counts of rows, documents and tokens in the data's sources and blocks.

They come from columns of the cached documents, so that a second run, which tokenises nothing, reports the same numbers.
"""

from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset

from heads.data.documents import Documents

CHECKED_ROWS = 256  # rows of each streamed source that are counted and checked before training starts
SHOWN_PROBLEMS = 5


@dataclass(kw_only=True)
class SourceReport:
    """Counts over the rows of one source; of a stream, over its first CHECKED_ROWS rows.

    Attributes:
        rows: Rows read, after `fraction`.
        bad: Rows that are malformed or lack a field; `problems` names the first of them and the reasons.
        empty: Rows without text, ids or a reply.
        too_short: Documents of fewer than K + 2 tokens, which are dropped.
        documents: Documents that are used.
        split: Used documents that are longer than a block and continue in the next one.
        tokens: Tokens of the used documents.
        supervised_tokens: Tokens of the used documents that are targets of the heads.
        max_id: Largest token id; -1 without tokens.
        repeats: About how often each document is used in one pass over the mixture.
    """

    name: str
    is_chat: bool
    rows: int
    bad: int
    problems: list[str]
    empty: int
    too_short: int
    documents: int
    split: int
    tokens: int
    supervised_tokens: int
    max_id: int
    repeats: float = 1.0

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / max(self.tokens, 1)


@dataclass(kw_only=True)
class PackReport:
    """Counts of one packed split: tokens = (blocks + unused_blocks) * block_size + dropped_tokens."""

    documents: int
    tokens: int
    blocks: int
    unused_blocks: int
    dropped_tokens: int


@dataclass(kw_only=True)
class DataReport:
    """Counts per source and of the packing; `packed_train` is None for a stream, whose end is not known."""

    train: list[SourceReport]
    eval: list[SourceReport]
    packed_train: PackReport | None = None
    packed_eval: PackReport | None = None


@dataclass(kw_only=True)
class CountedSource:
    """One source's documents with their counts; `kept` holds the numbers of the rows in use, None for a stream."""

    documents: Documents
    report: SourceReport
    kept: np.ndarray | None = field(repr=False)


def count_rows(
    documents: Documents, rows: Dataset, *, num_heads: int, block_size: int
) -> tuple[SourceReport, np.ndarray]:
    """The counts of one source, and the numbers of the rows that are good and long enough."""
    columns = rows.select_columns(["status", "num_tokens", "num_supervised", "max_id"]).with_format("numpy")[:]
    status, num_tokens = np.asarray(columns["status"]), columns["num_tokens"]
    bad, good, long_enough = np.flatnonzero(status == "bad"), status == "ok", num_tokens >= num_heads + 2
    kept = np.flatnonzero(good & long_enough)
    report = SourceReport(
        name=documents.name,
        is_chat=documents.is_chat,
        rows=len(rows),
        bad=len(bad),
        problems=list(rows.select(bad[:SHOWN_PROBLEMS])["problem"]),
        empty=int((status == "empty").sum()),
        too_short=int((good & ~long_enough).sum()),
        documents=len(kept),
        split=int((num_tokens[kept] > block_size).sum()),
        tokens=int(num_tokens[kept].sum()),
        supervised_tokens=int(columns["num_supervised"][kept].sum()),
        max_id=int(columns["max_id"][kept].max(initial=-1)),
    )
    return report, kept
