"""Blocks of streamed sources, which are read and packed during training without a copy on disk.

Documents are shuffled within a buffer of SHUFFLE_BUFFER and mixed by the sources' weights; every pass over the stream
has the same order. Faults that cannot be counted before training end the run where they are read: too many bad rows,
and token ids that the backbone does not have.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import datasets
import numpy as np
from datasets import IterableDataset

from heads.data.bad_rows import BadRows
from heads.data.documents import CACHE_VERSION, DataConfig
from heads.data.rows import DOCUMENT_FEATURES
from heads.data.sources import identity_of
from heads.data.streams import DocumentStream, is_held_out
from train.data.blocks import BLOCK_FEATURES, Document, PackedData, cached_blocks
from train.data.refusals import (
    labelled_heads,
    refuse_foreign_ids,
    refuse_missing_labels,
    refuse_no_block,
)
from train.data.report import CHECKED_ROWS, CountedSource, DataReport
from train.data.whole_documents import PACKINGS

STREAM_FEATURES = datasets.Features({name: DOCUMENT_FEATURES[name] for name in ("input_ids", "loss_mask")})
SHUFFLE_BUFFER = 1000  # documents
CHECKED_BLOCKS = 256  # at the beginning of a stream, one of which must have a label


def pack_streamed(
    train: list[CountedSource], evaluated: list[CountedSource], config: DataConfig, *, num_heads: int, vocab_size: int
) -> PackedData:
    """Training blocks that are packed on demand, and evaluation blocks that are read now, or from the cache."""

    def stream(source: CountedSource, of_eval: bool) -> IterableDataset:
        keep = partial(is_in_split, of_eval=of_eval, share=config.eval_fraction, seed=config.seed)
        options = {
            "name": source.documents.name,
            "rows": stream_of(source).documents(keep if config.eval_fraction else None),
            "min_tokens": num_heads + 2,
            "vocab_size": vocab_size,
            "max_bad_fraction": config.max_bad_fraction,
        }
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
    options = {"documents": mixed, "config": config, "num_heads": num_heads}
    blocks = IterableDataset.from_generator(stream_blocks, features=BLOCK_FEATURES, gen_kwargs=options)
    held_out = evaluated or (train if config.eval_fraction else [])
    eval_blocks = None
    if held_out:
        parts = [stream(source, True) for source in held_out]
        joined = datasets.interleave_datasets(parts, stopping_strategy="all_exhausted_without_replacement")
        found = stream_blocks(joined, config, num_heads, "evaluation")
        key = (*identify(held_out, config), num_heads, vocab_size)
        eval_blocks = cached_blocks(key, lambda: islice(found, config.max_eval_blocks))
    report = DataReport(train=[source.report for source in train], eval=[source.report for source in evaluated])
    return PackedData(train=blocks, eval=eval_blocks, report=report)


def stream_of(source: CountedSource) -> DocumentStream:
    assert source.documents.stream is not None, "a source of a config that streams"
    return source.documents.stream


def identify(held_out: list[CountedSource], config: DataConfig) -> tuple[Any, ...]:
    """What evaluation blocks and the refusals of their documents depend on, beside the heads and the vocabulary."""
    sources = [
        (identity_of(source.path, source.name, source.split, config.heldout_list), stream_of(counted).identity())
        for source, counted in zip(config.eval or config.train, held_out, strict=True)
    ]
    packing = (config.packing, config.block_size, config.max_eval_blocks)
    return ("streamed", CACHE_VERSION, sources, config.eval_fraction, config.seed, config.max_bad_fraction, *packing)


def is_in_split(row_number: int, *, of_eval: bool, share: float, seed: int) -> bool:
    return is_held_out(row_number, share=share, seed=seed) == of_eval


def stream_documents(
    name: str, rows: IterableDataset, min_tokens: int, vocab_size: int, max_bad_fraction: float
) -> Iterator[dict[str, Any]]:
    """The usable documents of a stream.

    Raises:
        ValueError: too many rows are bad (tested after CHECKED_ROWS rows, and at the end), or a token id that
            the backbone does not have.
    """
    num_rows, bad = 0, BadRows(name, max_bad_fraction)
    for num_rows, row in enumerate(every_row(rows), start=1):
        if row["status"] == "bad":
            bad.add(row["problem"], num_rows)
            if num_rows > CHECKED_ROWS:
                bad.refuse(num_rows)
        elif row["status"] == "ok" and row["num_tokens"] >= min_tokens:
            refuse_foreign_ids(name, row["max_id"], vocab_size)
            yield {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"]}
    bad.end(num_rows)


def every_row(rows: IterableDataset) -> Iterator[dict[str, Any]]:
    """All rows. In a DataLoader worker, `for row in rows` would divide the source's files among workers again."""
    for batch in rows.iter(batch_size=64):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def stream_blocks(
    documents: IterableDataset, config: DataConfig, num_heads: int, split: str = "training"
) -> Iterator[dict[str, list[int]]]:
    """Blocks of documents, packed as the documents arrive.

    Raises:
        ValueError: the documents fill no block, no head has a label in CHECKED_BLOCKS blocks, or a head has none in
            any block.
    """
    num_blocks = num_tokens = 0
    heads = set(range(1, num_heads + 1)) or {0}
    missing = set(heads)

    def arrays() -> Iterator[Document]:
        nonlocal num_tokens
        for row in every_row(documents):
            num_tokens += len(row["input_ids"])
            yield np.asarray(row["input_ids"], np.int32), np.asarray(row["loss_mask"], bool)

    pack, _ = PACKINGS[config.packing]
    for num_blocks, block in enumerate(pack(arrays(), config.block_size), start=1):
        missing -= labelled_heads(block, missing)
        if num_blocks >= CHECKED_BLOCKS and missing == heads:
            break
        yield {name: column.tolist() for name, column in block.items()}
    if not num_blocks:
        refuse_no_block(split, num_tokens, config.block_size)
    refuse_missing_labels(missing, split)
