"""One compiled graph: a pass of a fixed shape, with the hooks that record its taps and the cache that it writes to.

A graph covers the masks, the decoder, its taps and the layers of heads that read the taps. compiled_backbone.py decides
which graph runs, buffers.py lends it the buffers.
"""
# B row of a graph, P tree node, padding included, C slot that a graph attends to, D model width

from __future__ import annotations

import contextlib
import importlib.util
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from heads.backbone.model import Backbone
from heads.backbone.state import HiddenTap, HiddenTaps, Tap, recording
from heads.quantization.quantizer import METHOD

Buffers = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, each (rows, key-value heads, slots, head width)."""


class Graph:
    """A compiled pass of one shape.

    The hooks that record taps become part of the graph, so they are registered before each call and removed after it.
    torch's guards look at no other hooks: `CompiledBackbone.refresh` does.
    """

    def __init__(self, backbone: Backbone, taps: tuple[HiddenTap, ...], num_layers: int) -> None:
        self.backbone = backbone
        self.recorded, self.hooks = make_hooks(backbone, taps)
        self.cache = FixedCache(num_layers)
        self.on_cuda = backbone.device.type == "cuda"
        self.run_pass = compile_apart(run_pass, self.on_cuda)

    def __call__(
        self, taps: tuple[Tap, ...], buffers: Buffers, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        for mine, (keys, values) in zip(self.cache.layers, buffers, strict=True):
            mine.keys, mine.values = keys, values
        if self.on_cuda:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            with self.hooks_in_place():
                final_BPD, positions_BP, recorded = self.run_pass(
                    self.backbone, self.cache, taps, self.recorded, *inputs
                )
        finally:
            for mine in self.cache.layers:  # a graph outlives the caches whose buffers it used
                mine.keys = mine.values = None
        if self.on_cuda:  # the next replay writes over what this one returned
            return final_BPD.clone(), positions_BP.clone(), [x_BPD.clone() for x_BPD in recorded]
        return final_BPD, positions_BP, recorded

    @contextlib.contextmanager
    def hooks_in_place(self) -> Iterator[None]:
        for registry, hooks in self.hooks:
            registry.update(hooks)
        try:
            yield
        finally:
            for registry, hooks in self.hooks:
                for number in hooks:
                    registry.pop(number, None)


Hooks = list[tuple[dict[int, Any], dict[int, Any]]]
"""Pairs of a layer's registry of hooks, and the hooks to put into it."""


def make_hooks(backbone: Backbone, taps: Sequence[HiddenTap]) -> tuple[HiddenTaps, Hooks]:
    """The hooks that `recording` makes, taken out of the layers again, and the dict that they write to."""
    layers = [backbone.layers[max(0, backbone.num_layers - 1 - tap)] for tap in taps if tap != "final"]
    registries = [
        registry
        for layer in layers
        for registry in (layer._forward_hooks, layer._forward_pre_hooks, layer._forward_pre_hooks_with_kwargs)
    ]
    others = [set(registry) for registry in registries]
    with recording(backbone.layers, taps, backbone.heads_device) as recorded:
        hooks = [
            (registry, {number: hook for number, hook in registry.items() if number not in known})
            for registry, known in zip(registries, others, strict=True)
        ]
    return recorded, hooks


def run_pass(
    backbone: Backbone,
    cache: FixedCache,
    taps: tuple[Tap, ...],
    recorded: HiddenTaps,
    tokens_BP: Tensor,
    depth_BP: Tensor,
    sees_BPP: Tensor,
    next_position_B: Tensor,
    valid_BC: Tensor,
    slot_positions_BC: Tensor,
    start_1: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The function that is compiled: masks, decoder, taps and stacks. No shape depends on how much is committed."""
    batch, nodes = tokens_BP.shape
    slots_P = start_1 + torch.arange(nodes, device=tokens_BP.device)
    positions_BP = next_position_B[:, None] + depth_BP
    may_attend_BPC = valid_BC[:, None, :].expand(batch, nodes, -1).index_copy(2, slots_P, sees_BPP)
    slot_positions_BC = slot_positions_BC.index_copy(1, slots_P, positions_BP)
    mask = backbone.mask_style.finish(may_attend_BPC, positions_BP, slot_positions_BC, backbone.dtype)
    for layer in cache.layers:
        layer.slots_P = slots_P
    output = backbone.decoder(
        input_ids=tokens_BP, attention_mask=mask, position_ids=positions_BP, past_key_values=cache, use_cache=True
    )
    recorded["final"] = output.last_hidden_state
    found = backbone.run_stacks(taps, recorded, positions_BP, mask, cache)
    recorded.clear()
    return output.last_hidden_state, positions_BP, [found[tap] for tap in taps]


def compile_apart(function: Callable[..., Any], on_cuda: bool) -> Callable[..., Any]:
    """Compile a copy with its own code object: `torch.compile` gives up after a few shapes of one code object."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    mode = "reduce-overhead" if on_cuda else None
    return torch.compile(own, dynamic=False, fullgraph=True, mode=mode)


class FixedLayer(DynamicLayer):
    """Whole buffers of one layer; a pass writes at `slots_P` and attends to all of them."""

    slots_P: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slots_P, key_states)
        self.values.index_copy_(2, self.slots_P, value_states)
        return self.keys, self.values


class FixedCache(Cache):
    """The cache that a graph is called with: the buffers of a `TreeCache`, for one pass."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[FixedLayer() for _ in range(num_layers)])
        for layer in self.layers:
            layer.is_initialized = True


def leave_slots_open(buffers: Buffers, inputs: tuple[Tensor, ...]) -> None:
    """Let graphs take any number of slots, in the buffers and in the masks and positions that `verify` makes."""
    *_, valid_XS, positions_XS, _ = inputs
    for x, dim in ((valid_XS, 1), (positions_XS, 1), *((x, 2) for pair in buffers for x in pair)):
        torch._dynamo.mark_dynamic(x, dim)


def what_stops_compiling(backbone: Backbone) -> str:
    """Why passes of this backbone cannot be compiled here; empty where they can."""
    if backbone.recurrence is not None:
        return "the backbone's recurrent layers run level by level over a tree, which is no graph of a fixed shape"
    if len(set((getattr(backbone.model, "hf_device_map", None) or {}).values())) > 1:
        return "the backbone is spread over several devices"
    if getattr(backbone.model, "is_quantized", False) and not has_products_for_graphs(backbone.model):
        return "the backbone is quantised, and not in a microscaling format of Headway's"
    if backbone.device.type == "cpu":
        return "" if has_cpp_compiler() else "torch.compile found no C++ compiler"
    return "" if importlib.util.find_spec("triton") else "torch.compile needs triton, which is not installed"


def has_products_for_graphs(model: Any) -> bool:
    """Whether a quantised model's products can be part of a graph, as those of `heads.quantization.multiply` can."""
    settings = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return getattr(settings, "quant_method", None) == METHOD


def has_cpp_compiler() -> bool:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return False
    return True
