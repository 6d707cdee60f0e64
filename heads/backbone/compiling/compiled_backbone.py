"""Passes as compiled graphs of fixed shapes: `heads.TreeDecoding(token_heads, compile=True)`.

A plain pass grows by a few slots each time, so no two passes have the same shape. Here the cache's buffers have the
size of a bucket (buffers.py), keys and values are written at a position that is a tensor, and nodes are padded to a
multiple of 4. On CUDA every pass attends to the whole bucket under a mask, so one CUDA graph serves each bucket and
number of nodes. Elsewhere a pass attends to the slots that exist, a dimension that the graph leaves open, so one graph
serves each number of nodes.

A graph is compiled for the batch that a text begins with. When rows end, dead rows that repeat the last one take their
places, until all rows have ended or a smaller graph, compiled for another batch, holds the remaining ones.

The plain reference is `heads.backbone.Backbone`: the text is the same, and logits differ by the order of operations
alone (tests/heads/backbone/test_compiled.py compares them).
"""
# B batch, X row of a graph, dead ones included, N tree node, P tree node, padding included, C slot that a graph attends
# to, S committed slot, D model width

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.backbone.cache import TreeCache
from heads.backbone.compiling.buffers import BufferPool, bucket_for, fill_up, fill_up_square, first_slots, repeat_last
from heads.backbone.compiling.graph import Buffers, Graph, leave_slots_open, what_stops_compiling
from heads.backbone.model import Backbone
from heads.backbone.state import BackboneState, Pass, StackTap, Tap, hidden_taps
from heads.backbone.support import read_hooks

NODE_STEP = 4
OPEN = 0
"""Stands for the number of slots in the key of a graph that serves any number of them."""


class CompiledBackbone(Backbone):
    """A backbone whose `verify` runs a compiled graph; `prefill` and `commit` are those of `Backbone`.

    Args:
        backbone: what is compiled; its model and its caches are shared.
        whole_buckets: passes attend to whole buckets, as CUDA graphs have to; None: if the backbone is on CUDA.

    Attributes:
        compile_seconds: seconds of the first call of each graph so far, compiling included, by (taps, rows, nodes,
            slots or `OPEN`, its number): graphs of different heads may agree in all but the number.

    Raises:
        ValueError: this backbone cannot be compiled on this machine; the sentence says why.
    """

    def __init__(self, backbone: Backbone, *, whole_buckets: bool | None = None) -> None:
        if obstacle := what_stops_compiling(backbone):
            raise ValueError(f"compile=True was given, but {obstacle}; change that, or give compile=False.")
        vars(self).update(vars(backbone))
        self.whole_buckets = self.device.type == "cuda" if whole_buckets is None else whole_buckets
        self.compile_seconds: dict[tuple[Any, ...], float] = {}
        self._graphs: weakref.WeakKeyDictionary[Any, dict[Key, Graph]] = weakref.WeakKeyDictionary()
        self._pool = BufferPool(static=self.whole_buckets)
        self._hooks = read_hooks(self.model.modules())

    def refresh(self) -> None:
        """Forget all graphs if hooks were added or removed since the last call: torch's guards do not look at hooks."""
        super().refresh()
        if (hooks := read_hooks(self.model.modules())) != self._hooks:
            self._hooks = hooks
            self._graphs.clear()

    def verify(
        self, state: BackboneState, tokens_BN: Tensor, depth_N: Tensor, sees_NN: Tensor, taps: Sequence[Tap] = ()
    ) -> Pass:
        batch, nodes = tokens_BN.shape
        padded = 1 if nodes == 1 else -(-nodes // NODE_STEP) * NODE_STEP
        committed = state.cache.get_seq_length()
        slots = committed + padded
        # Open slots always leave one slot of the bucket: whole buffers are contiguous, and Inductor would compile
        # another graph for them.
        capacity = bucket_for(slots if self.whole_buckets else slots + 1)
        slots, of_graph = (capacity, capacity) if self.whole_buckets else (slots, OPEN)
        rows = self.rows_for(state.cache, batch, taps, (padded, of_graph))
        buffers = self._pool.fit(state.cache, batch, rows, capacity)
        if not self.whole_buckets:
            buffers = first_slots(buffers, slots)
        inputs = (
            fill_up(tokens_BN, padded),
            fill_up(depth_N.expand(batch, nodes), padded),
            fill_up_square(sees_NN.expand(batch, nodes, nodes), padded),
            state.next_position_B,
            fill_up(state.valid_BS, slots),
            fill_up(state.positions_BS, slots),
        )
        start_1 = torch.full((1,), committed, device=tokens_BN.device)
        final_XPD, positions_XP, recorded = self.run(
            taps, buffers, (rows, padded, of_graph), (*(repeat_last(x, rows) for x in inputs), start_1)
        )
        for layer in state.cache.layers:
            layer.pending = padded
        return Pass(
            tokens_BN=tokens_BN,
            positions_BN=positions_XP[:batch, :nodes],
            taps={tap: x_XPD[:batch, :nodes] for tap, x_XPD in zip(taps, recorded, strict=True)},
            final_BND=final_XPD[:batch, :nodes],
        )

    def run(
        self, taps: Sequence[Tap], buffers: Buffers, shape: tuple[int, int, int], inputs: tuple[Tensor, ...]
    ) -> Any:
        """Run the graph of this shape on these inputs; its first call compiles it and is timed.

        Raises:
            ValueError: torch cannot make one graph of this backbone's passes.
        """
        graphs, key = self.graphs_of(taps), (names_of(taps), *shape)
        if key[-1] == OPEN:
            leave_slots_open(buffers, inputs)
        if key in graphs:
            return graphs[key](tuple(taps), buffers, inputs)
        start, graph = time.perf_counter(), Graph(self, hidden_taps(taps), num_layers=len(buffers))
        try:
            output = graph(tuple(taps), buffers, inputs)
        except torch._dynamo.exc.Unsupported as error:
            raise ValueError(
                f"compile=True was given, but torch makes no graph of passes of {type(self.model).__name__} "
                f"({str(error).splitlines()[0]}); give compile=False."
            ) from error
        graphs[key] = graph
        self.compile_seconds[*key, len(self.compile_seconds)] = time.perf_counter() - start
        return output

    def graphs_of(self, taps: Sequence[Tap]) -> dict[Key, Graph]:
        """The graphs for these taps: those with layers of heads live as long as the heads, others as the backbone."""
        owner = next((tap.heads for tap in taps if isinstance(tap, StackTap)), self)
        return self._graphs.setdefault(owner, {})

    def rows_for(self, cache: TreeCache, batch: int, taps: Sequence[Tap], shape: tuple[int, int]) -> int:
        """Rows of the graph that a batch runs in: those that the text began with, or fewer if such a graph exists."""
        began_with = self._pool.first_batch(cache, batch)
        wanted = names_of(taps), shape
        known = {
            rows
            for names, rows, *rest in self.graphs_of(taps)
            if (names, tuple(rest)) == wanted and batch <= rows <= began_with
        }
        return min(known, default=began_with)


Key = tuple[tuple[Any, ...], int, int, int]
"""The key of a graph: taps, rows, nodes, slots or `OPEN`."""


def names_of(taps: Sequence[Tap]) -> tuple[Any, ...]:
    """Taps without the heads that they belong to, which a key must not keep alive.

    >>> names_of(["final", StackTap(heads=..., index=0, reads=1)])
    ('final', (0, 1))
    """
    return tuple((tap.index, tap.reads) if isinstance(tap, StackTap) else tap for tap in taps)


_COMPILED: weakref.WeakKeyDictionary[Backbone, CompiledBackbone] = weakref.WeakKeyDictionary()


def compiled(backbone: Backbone) -> CompiledBackbone:
    """The backbone's compiled form; all decoders of a backbone share its graphs.

    Raises:
        ValueError: this backbone cannot be compiled on this machine.
    """
    if backbone not in _COMPILED:
        _COMPILED[backbone] = CompiledBackbone(backbone)
    return _COMPILED[backbone]
