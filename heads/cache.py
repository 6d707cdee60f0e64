"""A key-value cache that takes a token tree and keeps one path of it, without copying what is already committed.

Hugging Face's DynamicCache concatenates the whole cache at every pass; here each layer owns a buffer with room to grow,
a pass writes behind the committed slots, and a commit moves the few accepted slots to the front of what was written.
All layers keep all slots: windows are the mask's business (heads/masks.py), so rolling back is exact for them too.
"""
# B batch, H key-value head, S cache slot, A accepted slot

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

GROWTH_SLOTS = 256


class TreeCacheLayer(DynamicLayer):
    """Keys and values of one layer: `length` committed slots, `pending` written by the last pass."""

    is_initialized: bool
    keys: Tensor
    values: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
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
        """Keep `slots_BA` of the pending slots, in this order, as committed; None: they are already the first ones."""
        if slots_BA is not None:
            for buffer in (self.keys, self.values):
                pending = buffer[..., self.length : self.length + self.pending, :]
                buffer[..., self.length : self.length + num_slots, :] = _gather_slots(pending, slots_BA)
        self.length += num_slots
        self.pending = 0

    def reopen(self, num_slots: int) -> None:
        """The last committed slots are pending again."""
        self.length -= num_slots
        self.pending = num_slots

    def keep_rows(self, rows_R: Tensor) -> None:
        """Let go of all rows but these."""
        rows_R = rows_R.to(self.keys.device)
        self.keys, self.values = self.keys[rows_R], self.values[rows_R]

    def get_seq_length(self) -> int:
        return self.length

    def _reserve(self, key_states: Tensor, value_states: Tensor, end: int) -> None:
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = _buffer(key_states, end), _buffer(value_states, end)
            self.is_initialized = True
        elif end > self.keys.shape[-2]:
            grown = [_buffer(buffer, 2 * end) for buffer in (self.keys, self.values)]
            for new, old in zip(grown, (self.keys, self.values), strict=True):
                new[..., : self.length, :] = old[..., : self.length, :]
            self.keys, self.values = grown


class TreeCache(Cache):
    """One `TreeCacheLayer` per layer, made as layers ask for it."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=TreeCacheLayer)

    def commit(self, slots_BA: Tensor | None, num_slots: int) -> None:
        for layer in self.layers:
            layer.commit(slots_BA, num_slots)

    def reopen(self, num_slots: int) -> None:
        """Slots that were committed one pass after another become those of one pass, of which a path can be kept."""
        for layer in self.layers:
            layer.reopen(num_slots)

    def keep_rows(self, rows_R: Tensor) -> None:
        for layer in self.layers:
            layer.keep_rows(rows_R)


def _buffer(like_BHSD: Tensor, end: int) -> Tensor:
    batch, kv_heads, _, width = like_BHSD.shape
    return like_BHSD.new_zeros(batch, kv_heads, end + GROWTH_SLOTS, width)


def _gather_slots(pending_BHSD: Tensor, slots_BA: Tensor) -> Tensor:
    if slots_BA.shape[0] == 1:
        return pending_BHSD.index_select(-2, slots_BA[0])
    batch, kv_heads, _, width = pending_BHSD.shape
    index = slots_BA[:, None, :, None].expand(batch, kv_heads, slots_BA.shape[1], width)
    return torch.gather(pending_BHSD, -2, index)
