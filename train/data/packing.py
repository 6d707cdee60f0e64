"""From a config's data to blocks for training and evaluation, with a report on their sources.

Stored documents are shuffled by the seed, mixed by the sources' weights and packed once. Blocks are cached beside the
tokenised documents under `$HF_DATASETS_CACHE/headway`; a second run with the same data reads them from there.
"""

import logging
from collections.abc import Iterator
from itertools import islice

import datasets
import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from heads.data.documents import (
    CACHE_VERSION,
    DataConfig,
    SourceConfig,
    load_documents,
    split_held_out,
)
from heads.data.rows import DOCUMENT_FEATURES
from train.data.blocks import Document, PackedData, cached_blocks
from train.data.refusals import check_config, refuse, refuse_no_block, refuse_unlabelled, warn
from train.data.report import CHECKED_ROWS, CountedSource, DataReport, PackReport, SourceReport, count_rows
from train.data.streaming import pack_streamed
from train.data.whole_documents import PACKINGS

logger = logging.getLogger(__name__)


def build_datasets(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, num_heads: int, vocab_size: int
) -> PackedData:
    """Blocks for training and evaluation, and a report on their sources.

    With `config.streaming`, `train` is an IterableDataset of one shard, and every pass over it has the same order.

    Raises:
        ValueError: the data must not be trained on: too many rows are bad, a head has no label, every token of a
            chat source is supervised, the backbone lacks a token id, or the data fills no block.
    """
    train, evaluated = read_sources(config, tokenizer, num_heads=num_heads)
    for source in train + evaluated:
        allowed = config.max_bad_fraction
        refuse(source.report, num_heads=num_heads, vocab_size=vocab_size, max_bad_fraction=allowed)
        warn(source.report, num_heads=num_heads)
    if config.streaming:
        return pack_streamed(train, evaluated, config, num_heads=num_heads, vocab_size=vocab_size)
    packed = pack_stored(train, evaluated, config)
    for split, blocks in (("training", packed.train), ("evaluation", packed.eval)):
        if blocks is not None:
            refuse_unlabelled(blocks.with_format("numpy"), num_heads=num_heads, split=split)
    return packed


def read_sources(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, num_heads: int
) -> tuple[list[CountedSource], list[CountedSource]]:
    """Tokenised and counted sources for training and for evaluation.

    Raises:
        ValueError: the config contradicts itself. Bad data does not raise here, so that it can be inspected.
    """
    check_config(config, num_heads)

    def read(source: SourceConfig) -> CountedSource:
        documents = load_documents(source, config, tokenizer, streaming=config.streaming)
        rows = documents.rows
        if isinstance(rows, IterableDataset):
            rows = Dataset.from_list(list(rows.take(CHECKED_ROWS)), features=DOCUMENT_FEATURES)
        report, used = count_rows(documents, rows, num_heads=num_heads, block_size=config.block_size)
        return CountedSource(documents=documents, report=report, used=None if config.streaming else used)

    return [read(source) for source in config.train], [read(source) for source in config.eval]


def pack_stored(train: list[CountedSource], evaluated: list[CountedSource], config: DataConfig) -> PackedData:
    """Split off evaluation documents, mix the sources and pack them; the next run reuses what is on disk."""
    parts, eval_parts = [], []
    for source in train:
        held_out, part = split_off(source, config.eval_fraction, config.seed)
        if not len(part):
            raise ValueError(
                f"{source.report.name!r} has {len(held_out)} documents, and eval_fraction "
                f"{config.eval_fraction} leaves none to train on; give more documents or eval sources."
            )
        parts.append(part)
        eval_parts += [held_out] if len(held_out) else []
    eval_parts += [split_off(source, 0.0, config.seed)[1] for source in evaluated]

    mixed = mix(parts, [source.report for source in train], [source.documents.weight for source in train], config.seed)
    report = DataReport(train=[source.report for source in train], eval=[source.report for source in evaluated])
    blocks, report.packed_train = pack_cached(mixed, config, None, "training")
    eval_blocks = None
    if eval_parts:
        joined = datasets.concatenate_datasets(eval_parts).shuffle(seed=config.seed)
        limit = config.max_eval_blocks
        eval_blocks, report.packed_eval = pack_cached(joined, config, limit, "evaluation")
    return PackedData(train=blocks, eval=eval_blocks, report=report)


def split_off(source: CountedSource, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """A source's used rows, shuffled by the seed: the share that is held out, and the others."""
    assert source.used is not None
    held_out, others = split_held_out(source.used, share, seed)
    return source.documents.rows.select(held_out), source.documents.rows.select(others)


def mix(parts: list[Dataset], reports: list[SourceReport], weights: list[float], seed: int) -> Dataset:
    """Mix the sources: each next document comes from a source that is sampled by the weights.

    Sampling ends once every document was used. A source that runs out earlier starts again, so a weight is a share of
    documents whatever the sizes of the sources.
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
            message = "%s: with its weight, each document is used about %.1f times"
            logger.warning(message, report.name, report.repeats)
    return mixed


def pack_cached(
    documents: Dataset, config: DataConfig, max_blocks: int | None, split: str
) -> tuple[Dataset, PackReport]:
    """The blocks of documents in the given order, from the cache if they were packed before."""
    block_size, (pack, fill) = config.block_size, PACKINGS[config.packing]
    lengths_D = documents.select_columns(["num_tokens"]).with_format("numpy")[:]["num_tokens"].tolist()
    filling = fill(lengths_D, block_size)
    if not filling.blocks:
        refuse_no_block(split, sum(lengths_D), block_size)
    named = () if config.packing == "cut" else (config.packing,)  # so that blocks of earlier versions are found
    key = (CACHE_VERSION, documents._fingerprint, block_size, max_blocks, *named)
    blocks = cached_blocks(key, lambda: islice(pack(read_documents(documents), block_size), max_blocks))
    return blocks, PackReport(
        documents=len(documents),
        tokens=sum(lengths_D),
        blocks=len(blocks),
        unused_blocks=filling.blocks - len(blocks),
        dropped_tokens=filling.dropped,
        cut=filling.cut,
        padding=filling.padding,
    )


def read_documents(documents: Dataset) -> Iterator[Document]:
    for table in documents.select_columns(["input_ids", "loss_mask"]).with_format("arrow").iter(batch_size=64):
        for ids, mask in zip(table["input_ids"], table["loss_mask"], strict=True):
            yield ids.values.to_numpy(), mask.values.to_numpy(zero_copy_only=False)
