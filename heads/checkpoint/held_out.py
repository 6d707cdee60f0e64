"""The documents that a training run held out, from its record in heads.json: heads are measured on them by default.

The record is the run's config. `data.eval` names separate sources. With `data.eval_fraction` the run held out a share
of each source: the first of its usable documents after a shuffle by the seed (train/data/packing.py), or the rows of a
stream that are chosen by their numbers, as many as the run evaluated on (train/data/streaming.py). Rows are tokenised
as in training, or read from the datasets cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from heads.checkpoint.schema import look_up, read_description
from heads.data.standard_library import STDLIB
from heads.extras import MissingExtraError, needs_extra
from heads.validation import build

if TYPE_CHECKING:
    from heads.data.documents import DataConfig, SourceConfig


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Token ids of the documents that a run held out, and a description of them."""

    documents: Sequence[Sequence[int]]
    described: str

    def prompts(self, count: int, num_tokens: int) -> list[Tensor]:
        """The first tokens (1, T) of `count` documents, spread over those that are long enough.

        >>> HeldOut(documents=[[1, 2, 3], [4], [5, 6, 7]], described="").prompts(4, num_tokens=2)
        [tensor([[1, 2]]), tensor([[5, 6]])]

        Raises:
            ValueError: no document is long enough.
        """
        long_enough = [document for document in self.documents if len(document) >= num_tokens]
        if not long_enough:
            raise ValueError(
                f"None of the {self.described} has the {num_tokens} tokens of a prompt; lower --prompt-tokens, or give "
                f"a file of prompts."
            )
        count = min(count, len(long_enough))
        chosen = [long_enough[i * len(long_enough) // count] for i in range(count)]
        return [torch.tensor([document[:num_tokens]]) for document in chosen]


def find_held_out(folder: str | Path, tokenizer: Any) -> tuple[HeldOut | None, str]:
    """The documents that the run of a folder of heads held out; or None, and why they are not used.

    Held-out files of the standard library are not read here, since the backbone's own record names the same ones.
    Nothing is downloaded.
    """
    description = read_description(folder)
    recorded = look_up(description.recipe, "config", "data")
    if not isinstance(recorded, dict):
        return None, "the heads do not record what their run held out"
    try:
        record = HeldOutData.of(recorded)
        if why := record.why_unread():
            return None, why
        documents = list(read_documents(record, tokenizer, description.config.get("num_heads", 1)))
    except (ValueError, OSError, TypeError, MissingExtraError) as error:
        return None, f"what the run held out cannot be read here ({str(error).rstrip('.')})"
    paths = ", ".join(source.path for source in record.sources)
    which = f"the run's eval sources, {paths}" if record.evaluated else f"the {record.share:.1%} held out of {paths}"
    return HeldOut(documents=documents, described=f"{len(documents):,} documents of {which}"), ""


@dataclass(frozen=True, kw_only=True)
class HeldOutData:
    """The part of a run's config, `data`, that says which rows were held out.

    Attributes:
        evaluated: whether the config names separate sources for the evaluation.
        share: the share of the training rows that is held out if it does not.
    """

    sources: list[SourceConfig]
    config: DataConfig
    evaluated: bool
    share: float

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> HeldOutData:
        """
        Raises:
            ValueError, TypeError: a field that a run's config does not have, or a value of another type.
        """
        with needs_extra("train", "Rows that a run held out are to be read"):
            from heads.data.documents import DataConfig
        known = {field.name for field in fields(DataConfig)}  # a later version may record more
        values = {name: value for name, value in recorded.items() if name in known}
        config = build(DataConfig, {"train": [], **values}, of="data")
        sources = config.eval or config.train
        return cls(sources=sources, config=config, evaluated=bool(config.eval), share=config.eval_fraction)

    def why_unread(self) -> str:
        """Why these rows are not read; empty if they can be."""
        from heads.data.sources import is_here

        if any(source.path == STDLIB for source in self.sources):
            return "the run held out files of the standard library"
        if not self.evaluated and not self.share:
            return "the run held nothing out"
        if away := [source.path for source in self.sources if not is_here(source.path)]:
            return f"what the run held out is not on this machine ({', '.join(away)}), and nothing is downloaded"
        return ""


def read_documents(record: HeldOutData, tokenizer: Any, num_heads: int) -> Iterator[list[int]]:
    """Token ids of each held-out document that heads can be measured on."""
    if not record.config.streaming:
        for source in record.sources:
            yield from read_stored(source, record, tokenizer, num_heads)
        return
    limit, read = record.config.max_eval_blocks, 0
    streams = [read_streamed(source, record, tokenizer, num_heads) for source in record.sources]
    for document in itertools.chain.from_iterable(itertools.zip_longest(*streams)):  # in turn, as training has it
        if limit is not None and read >= limit * record.config.block_size:
            return  # what the run evaluated on; the stream may be long
        if document is not None:
            read += len(document)
            yield document


def read_stored(source: SourceConfig, record: HeldOutData, tokenizer: Any, num_heads: int) -> Iterator[list[int]]:
    from heads.data.documents import find_usable, load_documents, split_held_out

    rows: Any = load_documents(source, record.config, tokenizer).rows
    columns = rows.select_columns(["status", "num_tokens"]).with_format("numpy")[:]
    _, usable = find_usable(columns["status"], columns["num_tokens"], num_heads)
    chosen = np.flatnonzero(usable)
    if not record.evaluated:
        chosen, _ = split_held_out(chosen, record.share, record.config.seed)
    yield from rows.select(chosen)["input_ids"]


def read_streamed(source: SourceConfig, record: HeldOutData, tokenizer: Any, num_heads: int) -> Iterator[list[int]]:
    from heads.data.documents import find_usable, load_documents
    from heads.data.streams import is_held_out

    stream = load_documents(source, record.config, tokenizer, streaming=True).stream
    assert stream is not None, "documents that were asked for as a stream"
    set_aside = partial(is_held_out, share=record.share, seed=record.config.seed)
    for row in stream.documents(None if record.evaluated else set_aside):
        (_, (usable,)) = find_usable([row["status"]], [row["num_tokens"]], num_heads)
        if usable:
            yield row["input_ids"]
