"""The buffers that graphs read and write, lent to the caches of running texts.

A cache's tensors become views of buffers of a bucket's size (256 slots, then twice as many, …). CUDA graphs record
addresses, so buffers are reused: by their cache while they have the right size, and by other caches once it is gone.
"""
# B batch, N tree node

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.compiling.graph import Buffers

FIRST_BUCKET = 256

Size = tuple[int, int, int]
"""Rows, slots and layers of buffers; the layers may include those of heads, after the backbone's."""


@dataclass(kw_only=True)
class Loan:
    """The buffers that a cache uses for now, their size, and the rows of its first compiled pass."""

    began_with: int
    size: Size = (0, 0, 0)
    buffers: Buffers = field(default_factory=list)


class BufferPool:
    """The buffers of all caches of one compiled backbone.

    Args:
        static: mark the buffers as never moving, which CUDA graphs need.
    """

    def __init__(self, *, static: bool) -> None:
        self.static = static
        self.free: dict[Size, list[Buffers]] = {}
        self.loans: weakref.WeakKeyDictionary[TreeCache, Loan] = weakref.WeakKeyDictionary()

    def first_batch(self, cache: TreeCache, batch: int) -> int:
        """The rows that this cache's text began with; `batch` where it begins now."""
        return self.loans[cache].began_with if cache in self.loans else batch

    def fit(self, cache: TreeCache, batch: int, rows: int, capacity: int) -> Buffers:
        """Buffers of a bucket's size; afterwards the cache's tensors are views of their first rows.

        Committed slots are copied once for each bucket and whenever rows are removed.
        """
        loan = self.loans.get(cache)
        if loan is None:
            loan = self.loans[cache] = Loan(began_with=batch)
            weakref.finalize(cache, give_back, self.free, loan)
        size = rows, capacity, len(cache.layers)
        if loan.size != size:
            give_back(self.free, loan)
            free = self.free.get(size)
            loan.buffers = free.pop() if free else [self.make(layer, rows, capacity) for layer in cache.layers]
            loan.size = size
        for layer, (keys, values) in zip(cache.layers, loan.buffers, strict=True):
            if layer.keys.data_ptr() == keys.data_ptr():
                continue  # already these buffers: no row was removed, and the cache did not grow elsewhere
            keys[:batch, :, : layer.length] = layer.keys[:, :, : layer.length]
            values[:batch, :, : layer.length] = layer.values[:, :, : layer.length]
            layer.keys, layer.values = keys[:batch], values[:batch]
        return loan.buffers

    def make(self, layer: Any, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Buffers of zeros for one layer: what a mask hides must still be finite.

        Inductor makes no CUDA graph of a pass that writes to tensors which may move, so static buffers are marked. The
        mark belongs to these tensor objects; a slice, even of all slots, lacks it.
        """
        made = [
            buffer.new_zeros(rows, buffer.shape[1], capacity, buffer.shape[-1]) for buffer in (layer.keys, layer.values)
        ]
        for buffer in made if self.static else ():
            torch._dynamo.mark_static_address(buffer)
        return made[0], made[1]


def give_back(free: dict[Size, list[Buffers]], loan: Loan) -> None:
    """End a loan: CUDA buffers wait for the next cache of their size, others are freed."""
    if loan.buffers and loan.buffers[0][0].is_cuda:
        free.setdefault(loan.size, []).append(loan.buffers)
    loan.buffers = []


def first_slots(buffers: Buffers, slots: int) -> Buffers:
    return [(keys[:, :, :slots], values[:, :, :slots]) for keys, values in buffers]


def bucket_for(slots: int) -> int:
    """The smallest bucket that holds so many slots.

    >>> [bucket_for(slots) for slots in (1, 256, 257, 1025)]
    [256, 256, 512, 2048]
    """
    bucket = FIRST_BUCKET
    while bucket < slots:
        bucket *= 2
    return bucket


def repeat_last(x_BN: Tensor, rows: int) -> Tensor:
    """(B, …) to (rows, …): dead rows repeat the last row, since a row that attends to nothing would be NaN."""
    batch = x_BN.shape[0]
    return x_BN if batch == rows else torch.cat([x_BN, x_BN[-1:].expand(rows - batch, *x_BN.shape[1:])])


def fill_up(x_BN: Tensor, length: int) -> Tensor:
    """(B, N) to (B, length), padded with zeros: token 0 at depth 0, or a slot that is not valid."""
    return nn.functional.pad(x_BN, (0, length - x_BN.shape[1]))


def fill_up_square(sees_BNN: Tensor, nodes: int) -> Tensor:
    """(B, N, N) to (B, nodes, nodes): padding nodes see the committed slots alone, and no node sees them."""
    more = nodes - sees_BNN.shape[1]
    return nn.functional.pad(sees_BNN, (0, more, 0, more))
