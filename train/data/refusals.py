"""Checks of a data config and of its counted sources before training.

Data that must not be trained on raises a ValueError, which names the source, the number and what to do. Rows that are
only skipped or dropped cause a warning.
"""

import logging
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from heads.data.bad_rows import refuse_bad_rows, warn_of_bad_rows
from heads.data.documents import DataConfig
from train.config import check_block_size
from train.data.report import SourceReport

logger = logging.getLogger(__name__)


def check_config(config: DataConfig, num_heads: int) -> None:
    if not config.train:
        raise ValueError("data.train lists no source; give at least one path.")
    check_block_size(num_heads, config.block_size)
    if config.eval and config.eval_fraction:
        raise ValueError(
            f"eval_fraction is {config.eval_fraction} beside {len(config.eval)} eval sources; "
            "give either eval sources or a share."
        )
    if config.streaming and config.eval_fraction and config.max_eval_blocks is None:
        raise ValueError("eval_fraction of a stream needs max_eval_blocks, for a stream may have no end; set it.")


def refuse(report: SourceReport, *, num_heads: int, vocab_size: int, max_bad_fraction: float) -> None:
    """Raise ValueError for a source that must not be trained on."""
    refuse_bad_rows(report.name, report.rows, report.bad, report.problems, max_bad_fraction)
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
    if report.furthest_label < num_heads + 1:
        raise ValueError(
            f"No document of {report.name!r} has a label for head {num_heads}, which predicts the token at place "
            f"{num_heads + 1} and later (from 0): its loss masks are 1 up to place {report.furthest_label} at "
            f"most; give longer answers, other masks or fewer heads."
        )
    if report.is_chat and report.supervised_tokens == report.tokens:
        raise ValueError(
            f"Everything is supervised in the chats of {report.name!r}, the users' words too; check the template's "
            "generation markers with inspect-data, or set chat_template."
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


def labelled_heads(block: Mapping[str, np.ndarray], heads: Iterable[int]) -> set[int]:
    """The heads for which a block has a label: head k at t learns x_{t+1+k}, supervised and of the same document.

    >>> block = {"loss_mask": np.array([1, 1, 1, 0, 1]), "document_ids": np.array([0, 0, 0, 0, 1])}
    >>> labelled_heads(block, [0, 1, 2, 3])
    {0, 1}
    """
    mask_T, document_ids_T = block["loss_mask"].astype(bool), block["document_ids"]
    return {k for k in heads if (mask_T[k + 1 :] & (document_ids_T[k + 1 :] == document_ids_T[: -k - 1])).any()}


def refuse_unlabelled(blocks: Iterable[Mapping[str, np.ndarray]], *, num_heads: int, split: str) -> None:
    """Read blocks until every head has a label.

    Raises:
        ValueError: a head has no label in any block, so that it would learn nothing and its loss would be 0.
    """
    missing = set(range(1, num_heads + 1)) or {0}
    for block in blocks:
        missing -= labelled_heads(block, missing)
        if not missing:
            return
    refuse_missing_labels(missing, split)


def refuse_missing_labels(missing: Collection[int], split: str) -> None:
    if missing:
        who = "the backbone" if 0 in missing else f"head {', '.join(map(str, sorted(missing)))}"
        raise ValueError(
            f"The {split} data has no label for {who} in any block: head k learns the supervised tokens that lie k + 1 "
            f"or more places after the beginning of their document or block; give longer documents, other masks, a "
            f"larger block_size or fewer heads."
        )


def warn(report: SourceReport, *, num_heads: int) -> None:
    warn_of_bad_rows(report.name, report.rows, report.bad, report.problems)
    if report.too_short:
        message = "%s: %d documents of fewer than %d tokens (heads + 2) are dropped"
        logger.warning(message, report.name, report.too_short, num_heads + 2)
