"""Documents to blocks of one fixed size, without padding, and the counts of everything left out on the way.

Documents are shuffled by the seed, mixed by the sources' weights and laid end to end; every block_size tokens make one
row {input_ids, loss_mask, document_ids}. A document that does not fit goes on in the next block; only the tail that
fills no last block is dropped. Blocks are cached beside the tokenised documents, under `$HF_DATASETS_CACHE/headway`.
Counts come from columns of the cached documents, so that a second run, which tokenises nothing, reports the same.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from heads.data import (
    CACHE_VERSION,
    DOCUMENT_FEATURES,
    DRAW_EVAL,
    DataConfig,
    Documents,
    SourceConfig,
    cache_file,
    draw_below,
    load_documents,
)

# T position in a document or block
logger = logging.getLogger(__name__)

BLOCK_SCHEMA = pa.schema(
    {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.bool_()), "document_ids": pa.list_(pa.int32())}
)
BLOCK_FEATURES = datasets.Features.from_arrow_schema(BLOCK_SCHEMA)
STREAM_FEATURES = datasets.Features({name: DOCUMENT_FEATURES[name] for name in ("input_ids", "loss_mask")})
BLOCKS_PER_WRITE = 256
SHUFFLE_BUFFER = 1000  # documents that a stream is shuffled among
CHECKED_ROWS = 256  # rows of each streamed source that are counted and checked before training starts
BAD_SHARE = 0.01  # of a source's rows; more bad ones stop the run
SHOWN_PROBLEMS = 5

Document = tuple[np.ndarray, np.ndarray]  # token ids and loss mask
Block = dict[str, np.ndarray]


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
class PackedData:
    """Blocks to train and evaluate on, with columns as in BLOCK_SCHEMA."""

    train: Dataset | IterableDataset
    eval: Dataset | None
    report: DataReport


@dataclass(kw_only=True)
class Source:
    """One source's documents with their counts; `kept` are the numbers of the rows that are used, None for a stream."""

    documents: Documents
    report: SourceReport
    kept: np.ndarray | None = field(repr=False)


def build_datasets(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, num_heads: int, vocab_size: int
) -> PackedData:
    """Blocks for training and evaluation, and a report on the data they came from.

    Raises ValueError where training would be pointless: over 1 % bad rows, nothing supervised, a chat set in which
    everything is, ids the backbone does not have, too little for one block. `train` is an IterableDataset when
    `config.streaming`; it then has one shard, and each pass over it has the same order.
    """
    train, evaluated = read_sources(config, tokenizer, num_heads=num_heads)
    for source in train + evaluated:
        refuse(source.report, num_heads=num_heads, vocab_size=vocab_size)
        warn(source.report, num_heads=num_heads)
    if config.streaming:
        return pack_streamed(train, evaluated, config, num_heads=num_heads, vocab_size=vocab_size)
    return pack_stored(train, evaluated, config)


def read_sources(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, num_heads: int
) -> tuple[list[Source], list[Source]]:
    """Tokenised and counted sources for training and for evaluation; refuses only a config that contradicts itself."""
    check_config(config, num_heads)

    def read(source: SourceConfig) -> Source:
        documents = load_documents(source, config, tokenizer, streaming=config.streaming)
        rows = documents.rows
        if isinstance(rows, IterableDataset):
            rows = Dataset.from_list(list(rows.take(CHECKED_ROWS)), features=DOCUMENT_FEATURES)
        report, kept = count_rows(documents, rows, num_heads=num_heads, block_size=config.block_size)
        return Source(documents=documents, report=report, kept=None if config.streaming else kept)

    return [read(source) for source in config.train], [read(source) for source in config.eval]


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


def warn(report: SourceReport, *, num_heads: int) -> None:
    if report.bad:
        problems = "; ".join(report.problems)
        logger.warning("%s: %d of %d rows are bad and skipped: %s", report.name, report.bad, report.rows, problems)
    if report.too_short:
        message = "%s: %d documents of fewer than %d tokens (heads + 2) are dropped"
        logger.warning(message, report.name, report.too_short, num_heads + 2)


def pack_stored(train: list[Source], evaluated: list[Source], config: DataConfig) -> PackedData:
    """Splits off evaluation documents, mixes, packs; everything on disk and reused by the next run."""
    parts, eval_parts = [], []
    for source in train:
        rows, kept = shuffled(source, config.seed)
        num_eval = max(1, round(len(kept) * config.eval_fraction)) if config.eval_fraction else 0
        if num_eval >= len(kept):
            raise ValueError(
                f"{source.report.name!r} has {len(kept)} documents, and eval_fraction "
                f"{config.eval_fraction} leaves none to train on; give more documents or eval sources."
            )
        parts.append(rows.select(kept[num_eval:]))
        eval_parts += [rows.select(kept[:num_eval])] if num_eval else []
    eval_parts += [rows.select(kept) for rows, kept in (shuffled(source, config.seed) for source in evaluated)]

    mixed = mix(parts, [source.report for source in train], [source.documents.weight for source in train], config.seed)
    report = DataReport(train=[source.report for source in train], eval=[source.report for source in evaluated])
    blocks, report.packed_train = pack_cached(mixed, config.block_size, None, "training")
    eval_blocks = None
    if eval_parts:
        joined = datasets.concatenate_datasets(eval_parts).shuffle(seed=config.seed)
        limit = config.max_eval_blocks
        eval_blocks, report.packed_eval = pack_cached(joined, config.block_size, limit, "evaluation")
    return PackedData(train=blocks, eval=eval_blocks, report=report)


def shuffled(source: Source, seed: int) -> tuple[Dataset, np.ndarray]:
    """A source's rows, and the numbers of those to use in the seed's order."""
    assert source.kept is not None
    return source.documents.rows, np.random.default_rng(seed).permutation(source.kept)


def mix(parts: list[Dataset], reports: list[SourceReport], weights: list[float], seed: int) -> Dataset:
    """One order over all sources, each drawn with its weight's share until every document was used at least once.

    Sources that run out earlier start again, so that a weight is a share of documents whatever the sources' sizes.
    """
    if len(parts) == 1:
        return parts[0]
    shares = np.array(weights) / sum(weights)
    mixed = datasets.interleave_datasets(
        parts, probabilities=shares.tolist(), seed=seed, stopping_strategy="all_exhausted"
    )
    for part, report, share in zip(parts, reports, shares, strict=True):
        report.repeats = len(mixed) * float(share) / len(part)
        if report.repeats >= 2:
            message = "%s: its weight has each document used about %.1f times"
            logger.warning(message, report.name, report.repeats)
    return mixed


def pack_cached(documents: Dataset, block_size: int, max_blocks: int | None, split: str) -> tuple[Dataset, PackReport]:
    """The blocks of documents in their order, from the cache where they were packed before."""
    num_tokens = int(documents.select_columns(["num_tokens"]).with_format("numpy")[:]["num_tokens"].sum())
    refuse_no_block(split, num_tokens, block_size)
    path = cache_file("blocks", Hasher.hash((CACHE_VERSION, documents._fingerprint, block_size, max_blocks)))
    if not path.is_file():
        write_blocks(path, islice(pack(read_documents(documents), block_size), max_blocks))
    blocks = Dataset.from_file(str(path))
    return blocks, PackReport(
        documents=len(documents),
        tokens=num_tokens,
        blocks=len(blocks),
        unused_blocks=num_tokens // block_size - len(blocks),
        dropped_tokens=num_tokens % block_size,
    )


def refuse_no_block(split: str, num_tokens: int, block_size: int) -> None:
    if num_tokens < block_size:
        raise ValueError(
            f"The {split} data holds {num_tokens} tokens and one block takes block_size {block_size}; "
            "give more data or a smaller block_size."
        )


def pack(documents: Iterable[Document], block_size: int) -> Iterator[Block]:
    """Documents end to end, cut into blocks; a piece of another document has another number within its block.

    ids [1 2 3], [4 5], [6 7], block_size 4  ->  input_ids [1 2 3 4], document_ids [0 0 0 1]; then 5 6 7 is the tail
    """
    pieces: list[Document] = []
    filled = 0
    for ids_T, mask_T in documents:
        start = 0
        while start < len(ids_T):
            end = start + block_size - filled
            pieces.append((ids_T[start:end], mask_T[start:end]))
            filled += len(pieces[-1][0])
            start = end
            if filled == block_size:
                yield join_pieces(pieces)
                pieces, filled = [], 0


def join_pieces(pieces: list[Document]) -> Block:
    lengths = [len(ids_T) for ids_T, _ in pieces]
    return {
        "input_ids": np.concatenate([ids_T for ids_T, _ in pieces]),
        "loss_mask": np.concatenate([mask_T for _, mask_T in pieces]),
        "document_ids": np.repeat(np.arange(len(pieces), dtype=np.int32), lengths),
    }


def read_documents(documents: Dataset) -> Iterator[Document]:
    for table in documents.select_columns(["input_ids", "loss_mask"]).with_format("arrow").iter(batch_size=64):
        for ids, mask in zip(table["input_ids"], table["loss_mask"], strict=True):
            yield ids.values.to_numpy(), mask.values.to_numpy(zero_copy_only=False)


def write_blocks(path: Path, blocks: Iterator[Block]) -> None:
    """An Arrow file, in place only once it is whole: processes that write the same one do not disturb each other."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, BLOCK_SCHEMA) as writer:
        for chunk in iter(lambda: list(islice(blocks, BLOCKS_PER_WRITE)), []):
            writer.write_table(to_table(chunk))
    os.replace(unfinished, path)


def to_table(blocks: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns = {}
    for field_ in BLOCK_SCHEMA:
        rows = [block[field_.name] for block in blocks]
        offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
        columns[field_.name] = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(rows), field_.type.value_type))
    return pa.table(columns, schema=BLOCK_SCHEMA)


def pack_streamed(
    train: list[Source], evaluated: list[Source], config: DataConfig, *, num_heads: int, vocab_size: int
) -> PackedData:
    """Training blocks as they are asked for; evaluation blocks read now and kept in memory."""

    def stream(source: Source, of_eval: bool) -> IterableDataset:
        rows = source.documents.rows
        if config.eval_fraction:
            keep = partial(is_in_split, of_eval=of_eval, share=config.eval_fraction, seed=config.seed)
            rows = rows.filter(keep, input_columns=["row_number"])
        options = {"name": source.documents.name, "rows": rows, "min_tokens": num_heads + 2, "vocab_size": vocab_size}
        return IterableDataset.from_generator(stream_documents, features=STREAM_FEATURES, gen_kwargs=options)

    parts = [stream(source, False).shuffle(seed=config.seed, buffer_size=SHUFFLE_BUFFER) for source in train]
    shares = np.array([source.documents.weight for source in train])
    mixed = parts[0]
    if len(parts) > 1:
        mixed = datasets.interleave_datasets(
            parts,
            probabilities=(shares / shares.sum()).tolist(),
            seed=config.seed,
            stopping_strategy="all_exhausted",
        )
    options = {"documents": mixed, "block_size": config.block_size}
    blocks = IterableDataset.from_generator(stream_blocks, features=BLOCK_FEATURES, gen_kwargs=options)
    eval_parts = [stream(source, True) for source in (evaluated or (train if config.eval_fraction else []))]
    eval_blocks = None
    if eval_parts:
        joined = datasets.interleave_datasets(eval_parts, stopping_strategy="all_exhausted_without_replacement")
        found = list(islice(stream_blocks(joined, config.block_size, "evaluation"), config.max_eval_blocks))
        eval_blocks = Dataset(to_table(found))
    report = DataReport(train=[source.report for source in train], eval=[source.report for source in evaluated])
    return PackedData(train=blocks, eval=eval_blocks, report=report)


def is_in_split(row_number: int, *, of_eval: bool, share: float, seed: int) -> bool:
    return draw_below(row_number, share=share, purpose=DRAW_EVAL, seed=seed) == of_eval


def stream_documents(name: str, rows: IterableDataset, min_tokens: int, vocab_size: int) -> Iterator[dict[str, Any]]:
    """The good documents of a stream, which stops where more than 1 % of over CHECKED_ROWS rows, or of all, are bad."""
    num_rows, problems = 0, []
    for num_rows, row in enumerate(every_row(rows), start=1):
        if row["status"] == "bad":
            problems.append(row["problem"])
            logger.warning("%s: bad row skipped: %s", name, row["problem"])
            if num_rows > CHECKED_ROWS:
                refuse_bad_rows(name, num_rows, len(problems), problems[:SHOWN_PROBLEMS])
        elif row["status"] == "ok" and row["num_tokens"] >= min_tokens:
            refuse_foreign_ids(name, row["max_id"], vocab_size)
            yield {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]}
    refuse_bad_rows(name, num_rows, len(problems), problems[:SHOWN_PROBLEMS])


def every_row(rows: IterableDataset) -> Iterator[dict[str, Any]]:
    """All rows, in a DataLoader's worker too, where `for row in rows` would share out the inner files once more."""
    for batch in rows.iter(batch_size=64):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def stream_blocks(
    documents: IterableDataset, block_size: int, split: str = "training"
) -> Iterator[dict[str, list[int]]]:
    """Packed rows of documents as they come."""
    num_blocks = num_tokens = 0

    def arrays() -> Iterator[Document]:
        nonlocal num_tokens
        for row in every_row(documents):
            num_tokens += len(row["input_ids"])
            yield np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], bool)

    for num_blocks, block in enumerate(pack(arrays(), block_size), start=1):  # noqa: B007 - counted to the end
        yield {name: column.tolist() for name, column in block.items()}
    if not num_blocks:
        refuse_no_block(split, num_tokens, block_size)
