"""What a training run held out, by its record in heads.json: what heads are measured on where no text is given.

The record is the run's config. Its `data.eval` names sources of their own; with `data.eval_fraction` the rows are those
that the run set aside of each source: usable documents in the order of the seed, the first share of them
(train/data/packing.py). Rows are tokenised as in training, from the datasets cache where it still has them.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.checkpoint.schema import read_description
from heads.data.standard_library import STDLIB
from heads.extras import MissingExtraError, needs_extra


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Token ids of the documents that a run held out, and which they are in words."""

    documents: Sequence[Sequence[int]]
    described: str

    def prompts(self, count: int, num_tokens: int) -> list[Tensor]:
        """The first tokens (1, T) of `count` documents, spread over those that are long enough.

        >>> HeldOut(documents=[[1, 2, 3], [4], [5, 6, 7]], described="").prompts(4, num_tokens=2)
        [tensor([[1, 2]]), tensor([[5, 6]])]

        Raises:
            ValueError: no document is.
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
    """What the run behind a folder of heads held out; or None, and why that is not used.

    Held-out files of the standard library are left to the backbone's own record, which names the same ones; nothing is
    downloaded.
    """
    description = read_description(folder)
    recorded = ((description.recipe or {}).get("config") or {}).get("data")
    if not isinstance(recorded, dict):
        return None, "the heads do not say what their run held out"
    if any(source.get("path") == STDLIB for source in recorded.get("eval") or []):
        return None, "the run held out files of the standard library"
    share = recorded.get("eval_fraction") or 0.0
    if not recorded.get("eval") and (not share or recorded.get("streaming")):
        return None, "the run held out a part of a stream" if share else "the run held nothing out"
    sources = recorded.get("eval") or recorded["train"]
    if away := [source["path"] for source in sources if not glob.glob(source["path"])]:
        return None, f"what the run held out is no file on this machine ({', '.join(away)})"
    try:
        documents = list(read_documents(recorded, tokenizer, share, description.config.get("num_heads", 1)))
    except (ValueError, OSError, TypeError, MissingExtraError) as error:
        return None, f"what the run held out cannot be read here ({str(error).rstrip('.')})"
    paths = ", ".join(source["path"] for source in sources)
    which = f"the run's eval sources, {paths}" if recorded.get("eval") else f"the {share:.1%} held out of {paths}"
    return HeldOut(documents=documents, described=f"{len(documents):,} documents of {which}"), ""


def read_documents(recorded: dict[str, Any], tokenizer: Any, share: float, num_heads: int) -> Iterator[list[int]]:
    """Token ids of each held-out document that heads can be measured on."""
    with needs_extra("train", "Rows that a run held out are to be read"):
        from datasets import Dataset

    from heads.data.documents import DataConfig, SourceConfig, find_usable, load_documents, split_held_out

    known = {field.name for field in fields(DataConfig)} - {"train", "eval", "streaming"}
    config = DataConfig(train=[], **{name: value for name, value in recorded.items() if name in known})
    for source in recorded.get("eval") or recorded["train"]:
        rows = load_documents(SourceConfig(**source), config, tokenizer).rows
        assert isinstance(rows, Dataset)  # it was not asked for as a stream
        columns = rows.select_columns(["status", "num_tokens"]).with_format("numpy")[:]
        _, usable = find_usable(columns["status"], columns["num_tokens"], num_heads)
        kept = np.flatnonzero(usable)
        if not recorded.get("eval"):
            kept, _ = split_held_out(kept, share, config.seed)
        yield from rows.select(kept)["input_ids"]
