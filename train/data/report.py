"""Counts of rows, documents and tokens in the data's sources and blocks.

They come from columns of the cached documents, so a second run reports the same numbers without tokenising again.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset

from heads.data.bad_rows import SHOWN_PROBLEMS
from heads.data.documents import Documents, find_usable

CHECKED_ROWS = 256  # rows of each streamed source that are counted and checked before training starts


@dataclass(kw_only=True)
class SourceReport:
    """Counts over the rows of one source; of a stream, over its first CHECKED_ROWS rows.

    Attributes:
        rows: rows read, after `fraction`.
        bad: rows that are malformed or lack a field; `problems` names the first of them, with the reasons.
        empty: rows without text, ids or a reply.
        too_short: documents of fewer than K + 2 tokens for K heads, which are dropped.
        documents: documents that are used.
        split: used documents that are longer than a block.
        tokens: tokens of the used documents.
        supervised_tokens: tokens of the used documents that are targets of the heads.
        furthest_label: the furthest position of a supervised token in its document, counted up to K + 1, where every
            head has a label; -1 without one.
        max_id: largest token id; -1 without tokens.
        leading: replies before the first user's turn, which are dropped.
        joined: turns that are joined to the previous turn of the same role.
        unknown_roles: number of bad rows by the unknown role that they have.
        repeats: about how often each document is used in one pass over the mixture.
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
    furthest_label: int
    max_id: int
    leading: int
    joined: int
    unknown_roles: dict[str, int]
    repeats: float = 1.0

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / max(self.tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Filling:
    """What packing makes of documents, before a limit of blocks.

    Attributes:
        cut: documents that lie in more than one block, so that a part of them has lost its beginning.
        padding: positions that hold no token.
        dropped: tokens behind the last whole block.
    """

    blocks: int
    cut: int
    padding: int
    dropped: int


@dataclass(kw_only=True)
class PackReport:
    """Counts of one packed split: tokens = (blocks + unused_blocks) * block_size + dropped_tokens - padding.

    `cut` and `padding` are those of `Filling`, unused blocks included.
    """

    documents: int
    tokens: int
    blocks: int
    unused_blocks: int
    dropped_tokens: int
    cut: int
    padding: int


@dataclass(kw_only=True)
class DataReport:
    """Counts per source and of the packing; `packed_train` is None for a stream, whose end is not known."""

    train: list[SourceReport]
    eval: list[SourceReport]
    packed_train: PackReport | None = None
    packed_eval: PackReport | None = None


@dataclass(kw_only=True)
class CountedSource:
    """One source's documents with their counts; `used` holds the numbers of the rows in use, None for a stream."""

    documents: Documents
    report: SourceReport
    used: np.ndarray | None = field(repr=False)


def count_rows(
    documents: Documents, rows: Dataset, *, num_heads: int, block_size: int
) -> tuple[SourceReport, np.ndarray]:
    """The counts of one source, and the numbers of the rows that are good and long enough."""
    counted = ["status", "num_tokens", "num_supervised", "max_id", "leading", "joined"]
    columns = rows.select_columns(counted).with_format("numpy")[:]
    status, num_tokens = np.asarray(columns["status"]), columns["num_tokens"]
    good, usable = find_usable(status, num_tokens, num_heads)
    bad, used = np.flatnonzero(status == "bad"), np.flatnonzero(usable)
    report = SourceReport(
        name=documents.name,
        is_chat=documents.is_chat,
        rows=len(rows),
        bad=len(bad),
        problems=list(rows.select(bad[:SHOWN_PROBLEMS])["problem"]),
        empty=int((status == "empty").sum()),
        too_short=int((good & ~usable).sum()),
        documents=len(used),
        split=int((num_tokens[used] > block_size).sum()),
        tokens=int(num_tokens[used].sum()),
        supervised_tokens=int(columns["num_supervised"][used].sum()),
        furthest_label=find_furthest_label(rows, used, enough=num_heads + 1),
        max_id=int(columns["max_id"][used].max(initial=-1)),
        leading=int(columns["leading"].sum()),
        joined=int(columns["joined"].sum()),
        unknown_roles=dict(Counter(role for role in rows.select(bad)["unknown_role"] if role).most_common()),
    )
    return report, used


def find_furthest_label(rows: Dataset, used: np.ndarray, *, enough: int) -> int:
    """The furthest position of a supervised token in its document; reading stops once a position is `enough`."""
    furthest = -1
    for table in rows.select(used).select_columns(["loss_mask"]).with_format("arrow").iter(batch_size=64):
        for mask in table["loss_mask"]:
            places = np.flatnonzero(mask.values.to_numpy(zero_copy_only=False))
            furthest = max(furthest, int(places.max(initial=-1)))
            if furthest >= enough:
                return furthest
    return furthest
