"""What is counted in the sources and their blocks, and what is refused before anything is trained on it.

Counts come from columns of the cached documents, so that a second run, which tokenises nothing, reports the same.
What must not be trained on raises a ValueError that names the source, the number and the way out; what is only skipped
or dropped is warned of.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset

from heads.data.documents import DataConfig, Documents

logger = logging.getLogger(__name__)

CHECKED_ROWS = 256  # rows of each streamed source that are counted and checked before training starts
BAD_SHARE = 0.01  # of a source's rows; more bad ones stop the run
SHOWN_PROBLEMS = 5


@dataclass(kw_only=True)
class SourceReport:
    """Counts over the rows of one source, of a stream over its first CHECKED_ROWS.

    Attributes:
        rows: Rows read, after `fraction`.
        bad: Rows that are malformed or lack their fields; `problems` says where and why for the first of them.
        empty: Rows without text, ids or a reply.
        too_short: Documents of fewer than K + 2 tokens, dropped.
        documents: Documents that are left.
        split: Those among them longer than a block, which go on in the next one.
        tokens: Tokens of the documents that are left.
        supervised_tokens: Those among them that heads learn to predict.
        max_id: Largest token id; -1 without tokens.
        repeats: About how often each document is used while the mixture is gone through once.
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
    """What became of the documents of one split: tokens = (blocks + unused_blocks) * block_size + dropped_tokens."""

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
class Source:
    """One source's documents with their counts; `kept` are the numbers of the rows that are used, None for a stream."""

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


def check_config(config: DataConfig, num_heads: int) -> None:
    if not config.train:
        raise ValueError("data.train lists no source; give at least one path.")
    if num_heads >= config.block_size - 1:
        raise ValueError(
            f"{num_heads} heads need blocks of at least {num_heads + 2} tokens and block_size is {config.block_size}; "
            "raise block_size or train fewer heads."
        )
    if not 0 <= config.eval_fraction < 1 or (config.eval and config.eval_fraction):
        raise ValueError(
            f"eval_fraction is {config.eval_fraction} beside {len(config.eval)} eval sources; "
            "give a share from 0 up to 1 (1 excluded), and either eval sources or a share."
        )
    if config.streaming and config.eval_fraction and config.max_eval_blocks is None:
        raise ValueError("eval_fraction of a stream needs max_eval_blocks, for a stream may have no end; set it.")
    if config.max_eval_blocks is not None and config.max_eval_blocks < 1:
        raise ValueError(f"max_eval_blocks is {config.max_eval_blocks}; give at least 1, or null for all blocks.")


def refuse(report: SourceReport, *, num_heads: int, vocab_size: int) -> None:
    """Raises ValueError for a source that must not be trained on."""
    refuse_bad_rows(report.name, report.rows, report.bad, report.problems)
    if not report.documents:
        raise ValueError(
            f"{report.name!r} has no document of at least {num_heads + 2} tokens (heads + 2): of {report.rows} rows, "
            f"{report.empty} are empty and {report.too_short} too short; give longer documents or train fewer heads."
        )
    refuse_foreign_ids(report.name, report.max_id, vocab_size)
    if not report.supervised_tokens:
        raise ValueError(
            f"Nothing is supervised in the {report.tokens:,} tokens of {report.name!r}; check the chat template's "
            "generation markers with inspect-data, or set chat_template."
        )
    if report.is_chat and report.supervised_tokens == report.tokens:
        raise ValueError(
            f"Everything is supervised in the chats of {report.name!r}, the users' words too; check the template's "
            "generation markers with inspect-data, or set chat_template."
        )


def refuse_bad_rows(name: str, rows: int, bad: int, problems: Sequence[str]) -> None:
    if bad > BAD_SHARE * rows:
        raise ValueError(
            f"{bad} of {rows} rows of {name!r} are bad, more than {BAD_SHARE:.0%}: {'; '.join(problems)}; "
            "repair them or set format and column."
        )


def refuse_foreign_ids(name: str, max_id: int, vocab_size: int) -> None:
    if max_id >= vocab_size:
        raise ValueError(
            f"Tokenizer and backbone disagree: {name!r} holds token id {max_id} and the backbone has {vocab_size} "
            "tokens; use the backbone's own tokenizer."
        )


def refuse_no_block(split: str, num_tokens: int, block_size: int) -> None:
    if num_tokens < block_size:
        raise ValueError(
            f"The {split} data holds {num_tokens} tokens and one block takes block_size {block_size}; "
            "give more data or a smaller block_size."
        )


def warn(report: SourceReport, *, num_heads: int) -> None:
    if report.bad:
        problems = "; ".join(report.problems)
        logger.warning("%s: %d of %d rows are bad and skipped: %s", report.name, report.bad, report.rows, problems)
    if report.too_short:
        message = "%s: %d documents of fewer than %d tokens (heads + 2) are dropped"
        logger.warning(message, report.name, report.too_short, num_heads + 2)
