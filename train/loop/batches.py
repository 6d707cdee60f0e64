"""Collate stored or streamed blocks into batches. Each block carries its number, so that errors can name it."""
# B batch, T position, D model width

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset as StoredBlocks
from datasets import IterableDataset
from torch import Tensor
from torch.utils.data import Dataset

BLOCK = "block"


class NumberedBlocks(Dataset):
    """Stored blocks; row i also has the entry "block": i.

    >>> NumberedBlocks([{"input_ids": [7]}])[0]
    {'input_ids': [7], 'block': 0}
    """

    def __init__(self, blocks: Any) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {**self.blocks[number], BLOCK: number}

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        many = getattr(self.blocks, "__getitems__", None)
        rows = [self.blocks[number] for number in numbers] if many is None else many(numbers)
        return [{**row, BLOCK: number} for row, number in zip(rows, numbers, strict=True)]


def numbered(blocks: Any) -> Any:
    """Stored or streamed blocks with their numbers, which a stream counts from its start."""
    if isinstance(blocks, IterableDataset):
        return blocks.map(lambda row, number: {**row, BLOCK: number}, with_indices=True)
    return NumberedBlocks(blocks)


def as_arrays(blocks: Any) -> Any:
    """Stored blocks as NumPy arrays, which are batched without lists of tokens; streamed blocks stay lists."""
    return blocks.with_format("numpy") if isinstance(blocks, StoredBlocks) else blocks


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """(B, T) tensors, (B,) block numbers and (B, taps, T, D) stored hidden states, where rows have these.

    Nothing is padded, since packed blocks have one length.
    """
    batch = {
        "input_ids": stack([row["input_ids"] for row in rows], torch.long),
        "loss_mask": stack([row["loss_mask"] for row in rows], torch.bool),
        "document_ids": stack([row["document_ids"] for row in rows], torch.long),
    }
    if BLOCK in rows[0]:
        batch[BLOCK] = torch.tensor([int(row[BLOCK]) for row in rows])
    if "hidden_states" in rows[0]:
        batch["hidden_states"] = torch.stack([row["hidden_states"] for row in rows])
    return batch


def stack(rows: list[Any], dtype: torch.dtype) -> Tensor:
    """Stack rows, which are arrays, or lists where they come from a stream."""
    return torch.from_numpy(np.stack([np.asarray(row) for row in rows])).to(dtype)
