"""Training blocks that know their number, so that an error can name the data it came from."""

from __future__ import annotations

from typing import Any

from datasets import IterableDataset
from torch.utils.data import Dataset

BLOCK = "block"


class NumberedBlocks(Dataset):
    """Stored blocks; row i has i under "block".

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
    """Stored or streamed blocks with their numbers; a stream's are counted from its start."""
    if isinstance(blocks, IterableDataset):
        return blocks.map(lambda row, number: {**row, BLOCK: number}, with_indices=True)
    return NumberedBlocks(blocks)
