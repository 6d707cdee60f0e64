"""Run the recurrent layers of a backbone over the nodes of a pass, each node from its parent's state.

Attention, norms and feed-forward layers run over all nodes in one call. A recurrent mixer (Mamba-2, gated delta rule,
short convolution) runs level by level: the nodes of one level are a batch of one-token rows that start from their
parents' states, so every node takes the step that plain generation takes along its path. The mixer's own forward runs;
its state is written to the cache before the call and read from there after it.

Most of a mixer's weights are in its projections, and reading them once for each level would cost what a tree pass
saves. So a mixer's first pass finds out which of its linear layers read the mixer's input (times a constant, as in
Falcon-H1) and whether the result is a linear layer's output. These layers run once, over all nodes.
"""
# B row, N node, M node of one level, D model width

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.recurrent.cache import RecurrentCache, RecurrentLayer, select_rows
from heads.backbone.recurrent.levels import Levels

Forward = Callable[..., Any]


@dataclass(kw_only=True)
class Mixer:
    """A recurrent module of a layer.

    Attributes:
        module: what the decoder layer calls.
        reads: linear layers that read the module's input times a factor, as name: factor; None: not found out yet.
        writes: name of the linear layer whose output the module returns; None: it returns something else.
    """

    module: nn.Module
    reads: dict[str, float] | None = field(default=None)
    writes: str | None = None

    @property
    def index(self) -> int:
        """Its layer's place in the cache."""
        return int(self.module.layer_idx)  # type: ignore[arg-type]

    def linear_layers(self) -> dict[str, nn.Module]:
        return {name: child for name, child in self.module.named_children() if hasattr(child, "in_features")}


def find_mixers(layers: nn.Module) -> list[Mixer]:
    """The recurrent modules: those with a layer index and a convolution of their own."""
    return [
        Mixer(module=module)
        for module in layers.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and any(isinstance(child, nn.Conv1d) for child in module.children())
    ]


@contextlib.contextmanager
def over_nodes(mixers: Sequence[Mixer], cache: RecurrentCache, levels: Levels) -> Iterator[None]:
    """A context in which the mixers run level by level, and the cache stores the state after every node."""
    cache.levels = levels
    with contextlib.ExitStack() as stack:
        for mixer in mixers:
            stack.enter_context(_replaced(mixer.module, "forward", _by_level(mixer, cache, levels)))
        yield


@contextlib.contextmanager
def over_whole_rows(mixers: Sequence[Mixer], cache: RecurrentCache, valid_BT: Tensor | None) -> Iterator[None]:
    """A context in which the mixers read whole rows in one call, as for a prompt.

    Args:
        valid_BT: False for padding on the left, which leaves the state as it is; None: there is none.
    """
    cache.levels = None
    with contextlib.ExitStack() as stack:
        for mixer in mixers:
            cache.layer_of(mixer.index).begin_whole_rows()
            if valid_BT is not None:
                masked = _masked(mixer.module.forward, valid_BT)
                stack.enter_context(_replaced(mixer.module, "forward", masked))
        yield


def _masked(forward: Forward, valid_BT: Tensor) -> Forward:
    def call(hidden_states: Tensor, *_: Any, **kwargs: Any) -> Any:
        return forward(hidden_states, **{**kwargs, "attention_mask": valid_BT.to(hidden_states.device)})

    return call


def _by_level(mixer: Mixer, cache: RecurrentCache, levels: Levels) -> Forward:
    forward = mixer.module.forward

    def call(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        layer: RecurrentLayer = cache.layer_of(mixer.index)
        step = _stepping(forward, layer, kwargs)
        rows = hidden_states.flatten(0, 1)[:, None]
        if mixer.reads is None:
            first = levels.levels[0]
            _learn(mixer, lambda rows_M1D: step(rows_M1D, layer.committed, first.parents_M), rows[first.nodes_M])
        return _run(mixer, layer, levels, rows, step).view(*hidden_states.shape[:2], -1)

    return call


Step = Callable[[Tensor, "tuple[Tensor | None, ...]", Tensor], Tensor]


def _stepping(forward: Forward, layer: RecurrentLayer, kwargs: dict[str, Any]) -> Step:
    """The step of one level: one token a row, each from its parent's state in the level above."""

    def step(hidden_M1D: Tensor, above: tuple[Tensor | None, ...], parents_M: Tensor) -> Tensor:
        layer.load(select_rows(above, parents_M))
        output: Tensor = forward(hidden_M1D, **{**kwargs, "attention_mask": None})
        return output

    return step


def _run(mixer: Mixer, layer: RecurrentLayer, levels: Levels, rows: Tensor, step: Step) -> Tensor:
    children = mixer.linear_layers()
    once = {
        name: children[name](rows * factor if factor != 1 else rows) for name, factor in (mixer.reads or {}).items()
    }
    layer.by_level, outputs, above = [], [], layer.committed
    for level in levels.levels:
        stand_ins = {name: StandIn(children[name], _returning(x[level.nodes_M])) for name, x in once.items()}
        if mixer.writes is not None:
            stand_ins[mixer.writes] = StandIn(children[mixer.writes], _unchanged)
        with contextlib.ExitStack() as stack:
            for name, stand_in in stand_ins.items():
                stack.enter_context(_replaced(mixer.module, name, stand_in))
            outputs.append(step(rows[level.nodes_M], above, level.parents_M))
        above = layer.stored()
        layer.by_level.append(above)
    order_M = torch.cat([level.nodes_M for level in levels.levels])
    joined = torch.cat(outputs)
    in_order = torch.empty_like(joined)
    in_order[order_M.to(joined.device)] = joined
    return in_order if mixer.writes is None else children[mixer.writes](in_order)


class StandIn:
    """A linear layer with another forward; all its attributes are the layer's own."""

    def __init__(self, child: nn.Module, forward: Forward) -> None:
        self._child, self._forward = child, forward

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self._forward(x)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)


def _returning(x: Tensor) -> Forward:
    return lambda *_: x


def _unchanged(x: Tensor) -> Tensor:
    return x


def _learn(mixer: Mixer, call: Callable[[Tensor], Tensor], given: Tensor) -> None:
    """Find the linear layers that can run once for all nodes, by one call whose result is dropped."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def recording(name: str, child: nn.Module) -> Forward:
        def record(x: Tensor) -> Tensor:
            y: Tensor = child(x)
            seen[name] = x, y
            return y

        return record

    with contextlib.ExitStack() as stack:
        for name, child in mixer.linear_layers().items():
            stack.enter_context(_replaced(mixer.module, name, StandIn(child, recording(name, child))))
        returned = call(given)
    factors = {name: _factor(given, x) for name, (x, _) in seen.items()}
    mixer.reads = {name: factor for name, factor in factors.items() if factor is not None}
    mixer.writes = next((name for name, (_, y) in seen.items() if y is returned), None)


def _factor(given: Tensor, x: Tensor) -> float | None:
    """c where x = c · given; None where there is no such c."""
    if x is given:
        return 1.0
    if x.shape != given.shape:
        return None
    exact, factor = given.double(), 0.0
    if (square := float(exact.square().sum())) > 0:
        factor = float((exact * x.double()).sum()) / square
    near = torch.isclose(given * factor, x, rtol=4 * torch.finfo(x.dtype).eps, atol=0.0)
    return factor if factor and bool(near.all()) else None


@contextlib.contextmanager
def _replaced(module: nn.Module, name: str, value: Forward) -> Iterator[None]:
    """Hide a module's method or submodule behind an attribute of the same name, until exit."""
    attributes = vars(module)
    before = attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before
