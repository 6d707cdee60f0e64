"""A key-value cache that takes a token tree and keeps one path of it, without copying what is already committed.

Hugging Face's DynamicCache concatenates the whole cache at every pass. Here each layer owns a buffer with room to grow:
a pass writes after the committed slots, and a commit moves the few accepted slots up to them. Layers with windows store
every slot too, since the mask limits the window (heads/backbone/masks.py); so rolling back is exact for them.

Memory: a slot takes 2 x layers x key-value heads x head width numbers. A buffer begins with the slots that are known to
come plus 256, and grows by half plus 256. So at most a third of it is unused beside the 256, and each slot is copied
twice on average. While a layer's tensor grows, its old and its new buffer both exist.
"""
# B batch, H key-value head, S cache slot, A accepted slot, R remaining row, D head width

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

GROWTH_SLOTS = 256


class TreeCacheLayer(DynamicLayer):
    """Keys and values of one layer: `length` committed slots, `pending` written by the last pass.

    Args:
        room: slots that are known to come.
    """

    is_initialized: bool
    keys: Tensor
    values: Tensor

    def __init__(self, room: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.room = room
        self.length = 0
        self.pending = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.pending = key_states.shape[-2]
        end = self.length + self.pending
        self._reserve(key_states, value_states, end)
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        return self.keys[..., :end, :], self.values[..., :end, :]

    def commit(self, slots_BA: Tensor | None, num_slots: int) -> None:
        """Commit `slots_BA` of the pending slots, in this order; None: the first `num_slots` of them."""
        if slots_BA is not None:
            slots_BA = slots_BA.to(self.keys.device)
            for buffer in (self.keys, self.values):
                pending = buffer[..., self.length : self.length + self.pending, :]
                buffer[..., self.length : self.length + num_slots, :] = _gather_slots(pending, slots_BA)
        self.length += num_slots
        self.pending = 0

    def keep_rows(self, rows_R: Tensor, slots_S: Tensor | None = None) -> None:
        """Drop all rows but these and, where slots are given, all committed slots but those."""
        if slots_S is None:
            slots_S = torch.arange(self.length, device=rows_R.device)
        self.keys, self.values = (
            _rows_and_slots(buffer, rows_R.to(buffer.device), slots_S.to(buffer.device))
            for buffer in (self.keys, self.values)
        )
        self.length, self.pending = len(slots_S), 0

    def keep_slots(self, num_slots: int) -> None:
        """Roll back to the first committed slots; the next pass overwrites what was written after them."""
        self.length, self.pending = min(self.length, num_slots), 0

    def reopen(self, num_slots: int) -> None:
        self.length -= num_slots
        self.pending = num_slots

    def get_seq_length(self) -> int:
        return self.length

    def _reserve(self, key_states: Tensor, value_states: Tensor, end: int) -> None:
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            num_slots = max(end, self.room)
            self.keys, self.values = _buffer(key_states, num_slots), _buffer(value_states, num_slots)
            self.is_initialized = True
        elif end > self.keys.shape[-2]:
            self.keys = _grown(self.keys, self.length, end + end // 2)
            self.values = _grown(self.values, self.length, end + end // 2)


class TreeCache(Cache):
    """One `TreeCacheLayer` per layer, made as layers ask for it, with room for the slots that are known to come."""

    def __init__(self, room: int = 0) -> None:
        super().__init__(layer_class_to_replicate=functools.partial(TreeCacheLayer, room=room))

    def commit(self, slots_BA: Tensor | None, num_slots: int) -> None:
        for layer in self.layers:
            layer.commit(slots_BA, num_slots)

    def reopen(self, num_slots: int) -> None:
        """Make the last committed slots pending, as if one pass had written them, so that a path can be committed."""
        for layer in self.layers:
            layer.reopen(num_slots)

    def keep_rows(self, rows_R: Tensor, slots_S: Tensor | None = None) -> None:
        for layer in self.layers:
            layer.keep_rows(rows_R, slots_S)

    def nearest(self, num_slots: int) -> int:
        """The largest number of slots, at most `num_slots`, that `keep_slots` can roll back to."""
        return num_slots

    def keep_slots(self, num_slots: int) -> None:
        for layer in self.layers:
            layer.keep_slots(num_slots)

    def states(self) -> list[Any]:
        """What `go_back` needs besides the slots: nothing, since every slot has its own keys and values."""
        return []

    def go_back(self, num_slots: int, states: list[Any]) -> None:
        """Keep the first slots; `states` is what `states()` returned for these rows when there were so many slots."""
        self.keep_slots(num_slots)

    def as_dynamic(self, config: Any, num_slots: int) -> DynamicCache:
        """A copy of the first slots as `generate` returns them: without layers of heads, and cut to windows."""
        cache = DynamicCache(config=config)
        for index, layer in enumerate(self.layers[: config.num_hidden_layers]):
            if not layer.is_initialized:  # it reads another layer's keys and values
                continue
            cache.update(layer.keys[..., :num_slots, :], layer.values[..., :num_slots, :], index)
        return cache


def _buffer(like_BHSD: Tensor, num_slots: int) -> Tensor:
    batch, kv_heads, _, width = like_BHSD.shape
    return like_BHSD.new_zeros(batch, kv_heads, num_slots + GROWTH_SLOTS, width)


def _grown(buffer_BHSD: Tensor, length: int, num_slots: int) -> Tensor:
    grown_BHSD = _buffer(buffer_BHSD, num_slots)
    grown_BHSD[..., :length, :] = buffer_BHSD[..., :length, :]
    return grown_BHSD


def _rows_and_slots(buffer_BHSD: Tensor, rows_R: Tensor, slots_S: Tensor) -> Tensor:
    remaining_RHSD = _buffer(buffer_BHSD[: len(rows_R)], len(slots_S))
    for to, row in enumerate(rows_R.tolist()):  # row by row: no second copy of the whole batch
        remaining_RHSD[to, :, : len(slots_S)] = buffer_BHSD[row].index_select(1, slots_S)
    return remaining_RHSD


def _gather_slots(pending_BHSD: Tensor, slots_BA: Tensor) -> Tensor:
    if slots_BA.shape[0] == 1:
        return pending_BHSD.index_select(-2, slots_BA[0])
    batch, kv_heads, _, width = pending_BHSD.shape
    index = slots_BA[:, None, :, None].expand(batch, kv_heads, slots_BA.shape[1], width)
    return torch.gather(pending_BHSD, -2, index)
