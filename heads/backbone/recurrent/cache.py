"""The cache of a backbone with recurrent layers: the state after every node of a pass, until a commit keeps one.

A recurrent layer has no slots that could be dropped: its state is a running sum over all tokens. So a pass over a tree
leaves the committed state as it is, and stores the states after its nodes beside it (heads/backbone/recurrent/
mixers.py computes them). A commit makes the state after each row's last accepted node the committed one. Rejected
nodes, padding and rows that commit nothing leave no trace.

Each layer is the counterpart of the one that transformers' `DynamicCache` would make from the config, and has the
methods that the model's recurrent layers call to read and write states.
"""
# B row, M node of one level, R remaining row, A accepted slot

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from heads.backbone.cache import TreeCache, TreeCacheLayer
from heads.backbone.recurrent.levels import Levels

State = tuple[Tensor | None, ...]
"""Convolution states, then recurrent ones; each (B, …). None: not used, or nothing was read yet."""


class RecurrentLayer(LinearAttentionLayer):
    """One layer's states: the committed one, and those after the nodes of the last pass.

    Attributes:
        committed: the state after the committed tokens.
        before: the state that the last commit replaced.
        by_level: the states after the nodes of each level of the last pass, (M, …); empty after a pass over whole rows.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.committed: State = (None,) * (2 * number_of_states)
        self.before: State = self.committed
        self.by_level: list[State] = []

    def load(self, state: State) -> None:
        """Give the layer's module a state to start from. The module may change it in place, so it must be a copy."""
        for i in range(self.number_of_states):
            conv, recurrent = state[i], state[self.number_of_states + i]
            self.conv_states[i], self.is_conv_states_initialized[i] = conv, conv is not None
            self.recurrent_states[i], self.is_recurrent_states_initialized[i] = recurrent, recurrent is not None
            self.has_previous_state[i] = conv is not None or recurrent is not None
            if conv is not None:
                self.conv_kernel_size[i] = conv.shape[-1]
                self.dtype, self.device = conv.dtype, conv.device

    def stored(self) -> State:
        """The state as the layer's module left it."""
        return (*self.conv_states.values(), *self.recurrent_states.values())

    def begin_whole_rows(self) -> None:
        """Prepare a pass over whole rows, whose last state the next commit makes the committed one."""
        self.by_level = []
        self.load(tuple(None if x is None else x.clone() for x in self.committed))

    def commit_state(self, places: Sequence[tuple[int, int] | None]) -> None:
        """Commit the state after one node of each row (None: leave the row's state), or what whole rows left."""
        self.before, self.committed = self.committed, self.at(places) if self.by_level else self.stored()

    def roll_back(self, place: tuple[int, int] | None) -> None:
        """In a batch of one, commit the state after another node of the last pass; None: the state before the pass."""
        self.committed = self.before
        self.committed = self.at([place])

    def at(self, places: Sequence[tuple[int, int] | None]) -> State:
        """The state after one node of each row, given by its level and its index there; None: the committed state."""
        sources = [
            (self.committed, b) if place is None else (self.by_level[place[0]], place[1])
            for b, place in enumerate(places)
        ]
        return tuple(_join([(x, i) for state, i in sources if (x := state[s]) is not None]) for s in range(len(self)))

    def __len__(self) -> int:
        return len(self.committed)

    def keep_state_rows(self, rows_R: Tensor) -> None:
        self.by_level = []
        self.committed = self.before = select_rows(self.committed, rows_R)

    # The methods that the cache calls on every layer; this layer has no keys and values to change.

    def commit(self, slots_BA: Tensor | None, num_slots: int) -> None: ...

    def reopen(self, num_slots: int) -> None: ...

    def keep_slots(self, num_slots: int) -> None: ...

    def keep_rows(self, rows_R: Tensor, slots_S: Tensor | None = None) -> None:
        self.keep_state_rows(rows_R)


class HybridLayer(RecurrentLayer, TreeCacheLayer):
    """A layer with a recurrent state and keys and values (Falcon-H1)."""

    def __init__(self, number_of_states: int = 1, room: int = 0) -> None:
        TreeCacheLayer.__init__(self, room=room)
        RecurrentLayer.__init__(self, number_of_states)

    commit = TreeCacheLayer.commit
    reopen = TreeCacheLayer.reopen
    keep_slots = TreeCacheLayer.keep_slots

    def keep_rows(self, rows_R: Tensor, slots_S: Tensor | None = None) -> None:
        self.keep_state_rows(rows_R)
        if self.is_initialized:
            TreeCacheLayer.keep_rows(self, rows_R, slots_S)


class EmptyLayer(DummyLayer):
    """A layer that caches nothing, such as the feed-forward layers of Nemotron-H, which stand alone."""

    def commit(self, slots_BA: Tensor | None, num_slots: int) -> None: ...

    def reopen(self, num_slots: int) -> None: ...

    def keep_slots(self, num_slots: int) -> None: ...

    def keep_rows(self, rows_R: Tensor, slots_S: Tensor | None = None) -> None: ...


class RecurrentCache(TreeCache):
    """A `TreeCache` some of whose layers are recurrent.

    Args:
        config: the text config, which names the layers.
        room: slots that are known to come.
    """

    def __init__(self, config: Any, room: int = 0) -> None:
        super().__init__(room=room)
        self.layers = [_like(layer, room) for layer in DynamicCache(config=config).layers]
        if not any(type(layer) is TreeCacheLayer for layer in self.layers):
            # Layers of heads come after these. They copy an attention layer, which here has a recurrent state too.
            self.layer_class_to_replicate = functools.partial(HybridLayer, room=room)
        self.levels: Levels | None = None  # of the last pass; None: it read whole rows
        self.path: Sequence[int] = ()  # in a batch of one: the nodes of the last pass that were committed

    @property
    def recurrent_layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self.layer_of(layer_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def layer_of(self, index: int) -> Any:
        """The layer of this index; layers of heads are made when they are first asked for."""
        while len(self.layers) <= index:
            self.layers.append(self.layer_class_to_replicate())
        return self.layers[index]

    def commit_states(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the state after the last accepted node of each row; `commit` does so for keys and values."""
        levels = self.levels
        places = [levels.places[b][path[-1]] if levels and path else None for b, path in enumerate(paths)]
        for layer in self.recurrent_layers:
            layer.commit_state(places)
        self.path = paths[0] if levels and len(paths) == 1 else ()

    def reopen(self, num_slots: int) -> None:
        """Reopen keys and values only; `set_states` sets the states of that time."""
        super().reopen(num_slots)
        self.levels = None

    def nearest(self, num_slots: int) -> int:
        """As in `TreeCache`: any slot of the last pass over nodes; further back no state is stored, so 0."""
        length = self.get_seq_length()
        return min(num_slots, length) if num_slots >= length - len(self.path) else 0

    def keep_slots(self, num_slots: int) -> None:
        dropped = self.get_seq_length() - num_slots
        if dropped > len(self.path):
            raise ValueError(f"A recurrent state cannot be rolled back by {dropped} tokens.")
        if dropped > 0:
            assert self.levels is not None
            kept = self.path[: len(self.path) - dropped]
            for layer in self.recurrent_layers:
                layer.roll_back(self.levels.places[0][kept[-1]] if kept else None)
            self.path = ()
        super().keep_slots(num_slots)

    def keep_rows(self, rows_R: Tensor, slots_S: Tensor | None = None) -> None:
        super().keep_rows(rows_R, slots_S)
        self.path = ()

    def as_dynamic(self, config: Any, num_slots: int) -> DynamicCache:
        """A copy as `generate` returns it, made after this cache was rolled back to the first slots."""
        self.keep_slots(num_slots)
        cache = DynamicCache(config=config)
        for mine, theirs in zip(self.layers, cache.layers, strict=False):
            if isinstance(mine, RecurrentLayer):
                copy_state(mine, theirs)
            if isinstance(mine, TreeCacheLayer) and mine.is_initialized:
                theirs.update(mine.keys[..., :num_slots, :], mine.values[..., :num_slots, :])
        return cache

    def states(self) -> list[State]:
        """The committed states, one a recurrent layer; no pass changes them in place."""
        return [layer.committed for layer in self.recurrent_layers]

    def go_back(self, num_slots: int, states: list[State]) -> None:
        super().keep_slots(num_slots)
        for layer, state in zip(self.recurrent_layers, states, strict=True):
            layer.committed = state
        self.path, self.levels = (), None

    def set_states(self, of_rows: Sequence[list[State]]) -> None:
        """Commit earlier states: row b takes its part of `of_rows[b]`, which `states()` returned at some time."""
        for i, layer in enumerate(self.recurrent_layers):
            rows = [(states[i], b) for b, states in enumerate(of_rows)]
            layer.committed = tuple(
                _join([(x, b) for state, b in rows if (x := state[s]) is not None]) for s in range(len(layer))
            )


def copy_state(mine: RecurrentLayer, theirs: LinearAttentionLayer) -> None:
    for i in range(mine.number_of_states):
        conv, recurrent = mine.committed[i], mine.committed[mine.number_of_states + i]
        if conv is not None:
            theirs.update_conv_state(conv, i)
        if recurrent is not None:
            theirs.update_recurrent_state(recurrent, i)


def keeps_known_states(config: Any) -> bool:
    """Whether transformers' cache for this config holds recurrent states beside keys and values, all of known kinds."""
    try:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    except (AttributeError, KeyError, TypeError):  # the config lacks a name that `DynamicCache` looks for
        return False
    attends = any(issubclass(kind, DynamicLayer) for kind in kinds)
    return attends and kinds <= KNOWN and any(issubclass(kind, LinearAttentionLayer) for kind in kinds)


KNOWN = {DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer}
"""Classes of transformers' layers that have a counterpart here."""


def _like(layer: Cache, room: int) -> Any:
    if isinstance(layer, LinearAttentionAndFullAttentionLayer):
        return HybridLayer(layer.number_of_states, room)
    if isinstance(layer, LinearAttentionLayer):
        return RecurrentLayer(layer.number_of_states)
    return EmptyLayer() if isinstance(layer, DummyLayer) else TreeCacheLayer(room=room)


def _join(rows: Sequence[tuple[Tensor, int]]) -> Tensor | None:
    if not rows:
        return None
    return torch.cat([x_M[i : i + 1] for x_M, i in rows])


def select_rows(state: State, rows_R: Tensor) -> State:
    return tuple(None if x is None else x.index_select(0, rows_R.to(x.device)) for x in state)
