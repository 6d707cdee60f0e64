"""Checks of a data config and of its counted sources before training.

Data that must not be trained on raises a ValueError, which names the source, the number and what to do. Rows that are
only skipped or dropped are warned of.
"""

import logging
from collections.abc import Sequence

from heads.data.documents import DataConfig
from train.data.report import SourceReport

logger = logging.getLogger(__name__)

BAD_SHARE = 0.01  # of a source's rows; more bad ones stop the run


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
    """Raise ValueError for a source that must not be trained on."""
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
