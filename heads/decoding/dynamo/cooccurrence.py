"""Counted n-grams for DynaMo's co-occurrence masks (section 3.2.1): a table's interface, and how one is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from heads.ngrams.device import DeviceTable
from heads.ngrams.table import NgramTable


class Cooccurrence(Protocol):
    """A table of counted n-grams (heads/ngrams/table.py and device.py), or any object with the same methods."""

    @property
    def order(self) -> int:
        """The length of the longest n-grams that were counted."""

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ValueError if the table was counted with a tokenizer of another vocabulary."""

    def cooccurrence(self, candidates: Sequence[Tensor]) -> Tensor:
        """(B, k, …, k): p̂(x_1 … x_n) / Π p̂(x_i) for all combinations of the places' candidates (B, k)."""


def open_cooccurrence(table: Cooccurrence | str | Path | None, order: int, vocab_size: int) -> Cooccurrence | None:
    """A table, or the table in a folder, checked for n-grams of `order` tokens of this vocabulary.

    Raises:
        ValueError: something else than a table, shorter n-grams, or another vocabulary.
    """
    if table is None:
        return None
    if isinstance(table, str | Path):
        table = NgramTable.open(table)
    if not hasattr(table, "cooccurrence"):
        raise ValueError(
            f"cooccurrence={table!r} was given; give a table that headway count-ngrams made, its folder, or None."
        )
    table.check_vocab(vocab_size)
    if table.order < order:
        raise ValueError(
            f"The co-occurrence table counts n-grams of {table.order} tokens but the heads make joint distributions "
            f"of {order}; count it again with order={order} or more."
        )
    return table


def on_device(table: Cooccurrence | None, order: int, device: torch.device) -> Cooccurrence | None:
    """The table, copied to the device if it is an `NgramTable` and the device is no CPU."""
    return DeviceTable(table, order, device) if isinstance(table, NgramTable) and device.type != "cpu" else table
