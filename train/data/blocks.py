"""Lay documents end to end and cut them into blocks of one fixed size, without padding.

Every block_size tokens make one row {input_ids, loss_mask, document_ids}. A document that does not fit continues in the
next block; only the last tokens, which do not fill a block, are dropped.
"""
# D document, T position in a document or block

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset
from datasets.fingerprint import Hasher

from heads.data.documents import cache_file
from train.data.report import DataReport, Filling

BLOCK_SCHEMA = pa.schema(
    {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.bool_()), "document_ids": pa.list_(pa.int32())}
)
BLOCK_FEATURES = datasets.Features.from_arrow_schema(BLOCK_SCHEMA)

BLOCKS_PER_WRITE = 256

Document = tuple[np.ndarray, np.ndarray]  # token ids and loss mask
Block = dict[str, np.ndarray]


@dataclass(kw_only=True)
class PackedData:
    """Blocks to train and evaluate on, with columns as in BLOCK_SCHEMA."""

    train: Dataset | IterableDataset
    eval: Dataset | None
    report: DataReport


def pack(documents: Iterable[Document], block_size: int) -> Iterator[Block]:
    """Lay documents end to end and cut them into blocks; `document_ids` number the documents within each block.

    ids [1 2 3], [4 5], [6 7], block_size 4  ->  input_ids [1 2 3 4], document_ids [0 0 0 1]; 5 6 7 are dropped
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


def fill(lengths_D: Sequence[int], block_size: int) -> Filling:
    """What `pack` makes of documents of these lengths.

    >>> fill([3, 2, 9, 1], block_size=4)
    Filling(blocks=3, cut=2, padding=0, dropped=3)
    """
    ends_D = np.cumsum(lengths_D)
    starts_D = ends_D - np.asarray(lengths_D)
    blocks, dropped = divmod(int(ends_D[-1]), block_size)
    cut = int(((starts_D // block_size) != ((ends_D - 1) // block_size)).sum())
    return Filling(blocks=blocks, cut=cut, padding=0, dropped=dropped)


def join_pieces(pieces: list[Document]) -> Block:
    lengths = [len(ids_T) for ids_T, _ in pieces]
    return {
        "input_ids": np.concatenate([ids_T for ids_T, _ in pieces]),
        "loss_mask": np.concatenate([mask_T for _, mask_T in pieces]),
        "document_ids": np.repeat(np.arange(len(pieces), dtype=np.int32), lengths),
    }


def cached_blocks(key: tuple[Any, ...], make: Callable[[], Iterator[Mapping[str, Any]]]) -> Dataset:
    """The blocks that `make` gives, written to the cache, or read from it if a run has written blocks with this key."""
    path = cache_file("blocks", Hasher.hash(key))
    if not path.is_file():
        write_blocks(path, make())
    return Dataset.from_file(str(path))


def write_blocks(path: Path, blocks: Iterator[Mapping[str, Any]]) -> None:
    """Write an Arrow file under a temporary name and rename it, so that processes may write the same file."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, BLOCK_SCHEMA) as writer:
            for chunk in iter(lambda: list(islice(blocks, BLOCKS_PER_WRITE)), []):
                writer.write_table(to_table(chunk))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def to_table(blocks: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns = {}
    for field_ in BLOCK_SCHEMA:
        rows = [block[field_.name] for block in blocks]
        offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
        columns[field_.name] = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(rows), field_.type.value_type))
    return pa.table(columns, schema=BLOCK_SCHEMA)
