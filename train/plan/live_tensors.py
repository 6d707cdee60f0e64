"""Which tensors are alive, in bytes and by part, while code runs; and the matrix products that it does.

Works on tensors without memory as on real ones: each operator's outputs are looked at, and a storage counts until the
last tensor on it is gone. What matters of a run is kept: the moments that could be its peak under some engine.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

FROZEN, TRAINED, GRADIENTS = "frozen weights", "trained weights", "gradients"
CASTS, INPUTS, BACKBONE = "weights in another dtype", "mask and inputs", "backbone activations"
HEADS, LOSS, BACKWARD = "heads activations", "loss", "backward's own"
TRANSIENT = (CASTS, INPUTS, BACKBONE, HEADS, LOSS, BACKWARD)

Moment = dict[str, int]
"""Bytes by part at one time: the parts of `TRANSIENT`, and GRADIENTS."""

aten = torch.ops.aten
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten.addmm_: flop_registry[aten.addmm],
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class LiveTensors(TorchDispatchMode):
    """Counts what is alive. `part` names what is being made.

    >>> with LiveTensors() as live:
    ...     live.part = LOSS
    ...     a = torch.zeros(10)
    ...     b = torch.zeros(20)     # 120 bytes are alive, then 40
    ...     del b
    ...     c = torch.zeros(5)
    >>> live.frontier, live.bytes[LOSS]
    ([{'loss': 120}], 60)
    """

    def __init__(self) -> None:
        super().__init__()
        self.part = INPUTS
        self.bytes: Counter[str] = Counter()
        self.flops = 0
        self.frontier: list[Moment] = []
        self._parts: dict[int, str] = {}
        self._watched: dict[int, Any] = {}

    @contextlib.contextmanager
    def making(self, part: str) -> Iterator[None]:
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def label(self, tensor: Tensor, part: str) -> None:
        """Count a tensor under a part, whether it was seen before or not."""
        storage = tensor.untyped_storage()
        if id(storage) in self._parts:
            self._release(id(storage), storage.nbytes())
        key, size = id(storage), storage.nbytes()
        self._parts[key] = part
        self._watched[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self.bytes[part] += size

    def _release(self, key: int, size: int) -> None:
        del self._watched[key]
        self.bytes[self._parts.pop(key)] -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := FLOPS.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        new = [t for t in tree_leaves(out) if isinstance(t, Tensor) and id(t.untyped_storage()) not in self._parts]
        for tensor in new:
            self.label(tensor, CASTS if self._casts_a_weight(func, args) else self.part)
        if new:
            self._remember()
        return out

    def _casts_a_weight(self, func: Any, args: Any) -> bool:
        weights = (FROZEN, TRAINED)
        return func is aten._to_copy.default and self._parts.get(id(args[0].untyped_storage())) in weights

    def _remember(self) -> None:
        """Keep this moment unless another has at least as much of both, activations and gradients."""
        now = self._height(self.bytes)
        if any(all(a >= b for a, b in zip(self._height(moment), now, strict=True)) for moment in self.frontier):
            return
        self.frontier = [m for m in self.frontier if any(a > b for a, b in zip(self._height(m), now, strict=True))]
        self.frontier.append({part: self.bytes[part] for part in (*TRANSIENT, GRADIENTS) if self.bytes[part]})

    @staticmethod
    def _height(moment: Any) -> tuple[int, int]:
        return sum(moment.get(part, 0) for part in TRANSIENT), moment.get(GRADIENTS, 0)
