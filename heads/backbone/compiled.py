"""Passes as compiled graphs of fixed shapes: `heads.TreeDecoding(token_heads, compile=True)`.

A plain pass grows by a few slots each time, so no two passes have the same shape. Here the cache's buffers have the
size of a bucket (256 slots, then twice as many, …), keys and values are written at a position that is a tensor, and
nodes are padded to a multiple of 4. On CUDA every pass attends to the whole bucket under a mask, so one CUDA graph
serves every pass of one bucket and one number of nodes. Elsewhere a pass attends to the slots that exist, a dimension
that the graph leaves open: one graph for each number of nodes, however long the text gets.

A graph is compiled for the batch that a text begins with. Where rows end, dead rows that repeat the last one take their
places, until all rows have ended or a smaller graph, compiled for another batch, holds the remaining ones.

The plain reference is `heads.backbone.Backbone`, whose states these are; text is the same, logits are those of the same
operations in another order (tests/heads/backbone/test_compiled.py compares them).
"""
# B batch, X row of a graph with dead ones, N tree node, P node with those that fill up, C slot that a graph attends to,
# S committed slot, D model width

from __future__ import annotations

import importlib.util
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.graph import Buffers, Graph, leave_slots_open
from heads.backbone.model import Backbone
from heads.backbone.state import BackboneState, Pass, StackTap, Tap, hidden_taps
from heads.backbone.support import read_hooks

FIRST_BUCKET = 256
NODE_STEP = 4
OPEN = 0
"""In place of a graph's slots, where it takes any number of them."""


class CompiledBackbone(Backbone):
    """The same backbone; `verify` runs a compiled graph, `prefill` and `commit` are the plain ones.

    Args:
        backbone: what is compiled; its model and its caches are shared.
        whole_buckets: passes attend to whole buckets, as CUDA graphs have to; None: on CUDA.

    Attributes:
        compile_seconds: seconds of the first call of each graph so far, compiling included, by (what it records, rows,
            nodes, slots or `OPEN`, its number): graphs of different heads may agree in all but the number.

    Raises:
        ValueError: nothing here can compile it; the sentence says what is missing.
    """

    def __init__(self, backbone: Backbone, *, whole_buckets: bool | None = None) -> None:
        if obstacle := what_stops_compiling(backbone):
            raise ValueError(f"compile=True was given, but {obstacle}; change that, or give compile=False.")
        vars(self).update(vars(backbone))
        self.whole_buckets = self.device.type == "cuda" if whole_buckets is None else whole_buckets
        self.compile_seconds: dict[tuple[Any, ...], float] = {}
        self._graphs: weakref.WeakKeyDictionary[Any, dict[Key, Graph]] = weakref.WeakKeyDictionary()
        self._free: dict[Size, list[Buffers]] = {}
        self._loans: weakref.WeakKeyDictionary[TreeCache, Loan] = weakref.WeakKeyDictionary()
        self._hooks = read_hooks(self.model.modules())

    def refresh(self) -> None:
        """Forget the graphs where hooks were added or removed since: torch's guards do not look at them."""
        super().refresh()
        if (hooks := read_hooks(self.model.modules())) != self._hooks:
            self._hooks = hooks
            self._graphs.clear()

    def verify(
        self, state: BackboneState, tokens_BN: Tensor, depth_N: Tensor, sees_NN: Tensor, taps: Sequence[Tap] = ()
    ) -> Pass:
        """One pass over the nodes of a token tree, as `Backbone.verify` states it."""
        batch, nodes = tokens_BN.shape
        padded = 1 if nodes == 1 else -(-nodes // NODE_STEP) * NODE_STEP
        committed = state.cache.get_seq_length()
        slots = committed + padded
        # Open slots never fill a bucket: whole buffers are contiguous, for which Inductor makes a graph of its own.
        capacity = bucket_for(slots if self.whole_buckets else slots + 1)
        slots, of_graph = (capacity, capacity) if self.whole_buckets else (slots, OPEN)
        rows = self.rows_for(state.cache, batch, taps, (padded, of_graph))
        buffers = self.fit(state.cache, batch, rows, capacity)
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
        """The graph of this shape on these inputs; its first call compiles it and is timed.

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
        """Graphs that run layers of heads live as long as those heads; the others as long as the backbone."""
        owner = next((tap.heads for tap in taps if isinstance(tap, StackTap)), self)
        return self._graphs.setdefault(owner, {})

    def rows_for(self, cache: TreeCache, batch: int, taps: Sequence[Tap], shape: tuple[int, int]) -> int:
        """Rows of the graph that a batch runs in: the batch at its beginning, or fewer where such a graph exists."""
        began_with = self._loans[cache].began_with if cache in self._loans else batch
        wanted = names_of(taps), shape
        known = {
            rows
            for names, rows, *rest in self.graphs_of(taps)
            if (names, tuple(rest)) == wanted and batch <= rows <= began_with
        }
        return min(known, default=began_with)

    def fit(self, cache: TreeCache, batch: int, rows: int, capacity: int) -> Buffers:
        """Buffers of a bucket's size; afterwards the cache's tensors are views of their first rows.

        Committed slots are copied once for each bucket and whenever rows are removed. CUDA graphs record addresses, so
        buffers are reused: by their cache while they have the right size, and by other caches after it is gone.
        """
        loan = self._loans.get(cache)
        if loan is None:
            loan = self._loans[cache] = Loan(began_with=batch)
            weakref.finalize(cache, give_back, self._free, loan)
        size = rows, capacity, len(cache.layers)
        if loan.size != size:
            give_back(self._free, loan)
            free = self._free.get(size)
            loan.buffers = free.pop() if free else [self.make_buffers(layer, rows, capacity) for layer in cache.layers]
            loan.size = size
        for layer, (keys, values) in zip(cache.layers, loan.buffers, strict=True):
            if layer.keys.data_ptr() == keys.data_ptr():
                continue  # already these buffers: no row was removed, and the cache did not grow elsewhere
            keys[:batch, :, : layer.length] = layer.keys[:, :, : layer.length]
            values[:batch, :, : layer.length] = layer.values[:, :, : layer.length]
            layer.keys, layer.values = keys[:batch], values[:batch]
        return loan.buffers

    def make_buffers(self, layer: Any, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Zeros: what a mask hides must still be finite.

        A pass writes to them, and Inductor makes no CUDA graph of one that writes to tensors which may move. The mark
        that they stay is on these very objects: a slice, even of all slots, has none.
        """
        made = [
            buffer.new_zeros(rows, buffer.shape[1], capacity, buffer.shape[-1]) for buffer in (layer.keys, layer.values)
        ]
        for buffer in made if self.whole_buckets else ():
            torch._dynamo.mark_static_address(buffer)
        return made[0], made[1]


Key = tuple[tuple[Any, ...], int, int, int]
"""Of a graph: what it records, rows, nodes, slots or `OPEN`."""

Size = tuple[int, int, int]
"""Rows, slots and layers of buffers; the layers may include those of heads, after the backbone's."""


@dataclass(kw_only=True)
class Loan:
    """The buffers that a cache uses for now, their size, and the rows of its first compiled pass."""

    began_with: int
    size: Size = (0, 0, 0)
    buffers: Buffers = field(default_factory=list)


def names_of(taps: Sequence[Tap]) -> tuple[Any, ...]:
    """Taps without the heads that they belong to.

    >>> names_of(["final", StackTap(heads=..., index=0, reads=1)])
    ('final', (0, 1))
    """
    return tuple((tap.index, tap.reads) if isinstance(tap, StackTap) else tap for tap in taps)


def give_back(free: dict[Size, list[Buffers]], loan: Loan) -> None:
    """Those of CUDA wait for the next cache of their size; others are freed."""
    if loan.buffers and loan.buffers[0][0].is_cuda:
        free.setdefault(loan.size, []).append(loan.buffers)
    loan.buffers = []


_COMPILED: weakref.WeakKeyDictionary[Backbone, CompiledBackbone] = weakref.WeakKeyDictionary()


def compiled(backbone: Backbone) -> CompiledBackbone:
    """The backbone's compiled form; all decoders of a backbone share its graphs.

    Raises:
        ValueError: nothing here can compile it.
    """
    if backbone not in _COMPILED:
        _COMPILED[backbone] = CompiledBackbone(backbone)
    return _COMPILED[backbone]


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
    """(B, …) to (rows, …): dead rows see what the last one sees, since a row that sees nothing is NaN."""
    batch = x_BN.shape[0]
    return x_BN if batch == rows else torch.cat([x_BN, x_BN[-1:].expand(rows - batch, *x_BN.shape[1:])])


def fill_up(x_BN: Tensor, length: int) -> Tensor:
    """(B, N) to (B, length), with zeros: token 0 at depth 0, a slot that is not valid."""
    return nn.functional.pad(x_BN, (0, length - x_BN.shape[1]))


def fill_up_square(sees_BNN: Tensor, nodes: int) -> Tensor:
    """Nodes that fill up see what is committed and nothing else, and no other node sees them."""
    more = nodes - sees_BNN.shape[1]
    return nn.functional.pad(sees_BNN, (0, more, 0, more))


def what_stops_compiling(backbone: Backbone) -> str:
    """Why passes of this backbone cannot be compiled here; empty where they can."""
    if backbone.recurrence is not None:
        return "the backbone's recurrent layers run level by level over a tree, which is no graph of a fixed shape"
    if len(set((getattr(backbone.model, "hf_device_map", None) or {}).values())) > 1:
        return "the backbone is spread over several devices"
    if getattr(backbone.model, "is_quantized", False):
        return "the backbone is quantised"
    if backbone.device.type == "cpu":
        return "" if has_cpp_compiler() else "torch.compile found no C++ compiler"
    return "" if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"


def has_cpp_compiler() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True
