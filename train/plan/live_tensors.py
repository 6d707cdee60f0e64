"""Count the bytes of the tensors that are alive while code runs, by purpose, and the FLOPs of its matrix products.

This works on fake and on real tensors: the outputs of each operator are registered, and a storage counts until the last
tensor on it is gone. Of all moments, those that could be the peak under some engine are recorded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from train.objective.losses import LOSS_SCOPE

FROZEN, TRAINED, GRADIENTS = "frozen weights", "trained weights", "gradients"
CASTS, INPUTS, BACKBONE = "weights in another dtype", "mask and inputs", "backbone activations"
HEADS, LOSS, BACKWARD = "heads activations", "loss", "made in backward"
TRANSIENT = (CASTS, INPUTS, BACKBONE, HEADS, LOSS, BACKWARD)

Moment = dict[str, int]
"""Bytes at one time, by purpose: those of `TRANSIENT`, and GRADIENTS."""

aten, profiler = torch.ops.aten, torch.ops.profiler
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten.addmm_: flop_registry[aten.addmm],
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class LiveTensors(TorchDispatchMode):
    """Counts live tensors; new ones count under the present `purpose`.

    `nonzero` of a fake tensor is assumed to return every entry, which is an upper bound.

    >>> with LiveTensors() as live:
    ...     live.purpose = HEADS
    ...     a = torch.zeros(10)
    ...     b = torch.zeros(20)     # 120 bytes are alive, then 40
    ...     del b
    ...     c = torch.zeros(5)
    >>> live.peaks, live.bytes[HEADS]
    ([{'heads activations': 120}], 60)

    Attributes:
        peaks: the Pareto-optimal moments: no other has as many bytes of activations and as many of gradients.
        flops: FLOPs of all matrix products and of attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.purpose = INPUTS
        self.bytes: Counter[str] = Counter()
        self.flops = 0
        self.peaks: list[Moment] = []
        self._outer_purposes: list[str] = []
        self._purposes: dict[int, str] = {}
        self._watched: dict[int, Any] = {}

    @contextlib.contextmanager
    def counting_as(self, purpose: str) -> Iterator[None]:
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def label(self, tensor: Tensor, purpose: str) -> None:
        """Count a tensor's storage under a purpose, and no longer under an earlier one."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._purposes:
            self._release(key, size)
        self._purposes[key] = purpose
        self._watched[key] = weakref.ref(storage, lambda _: self._release(key, size))
        self.bytes[purpose] += size

    def _release(self, key: int, size: int) -> None:
        del self._watched[key]
        self.bytes[self._purposes.pop(key)] -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._follow_scope(func, args)
        if func is aten.nonzero.default and isinstance(args[0], FakeTensor):
            out = args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.long)
        else:
            out = func(*args, **(kwargs or {}))
        if (formula := FLOPS.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        new = [t for t in tree_leaves(out) if isinstance(t, Tensor) and id(t.untyped_storage()) not in self._purposes]
        for tensor in new:
            self.label(tensor, CASTS if self._casts_a_weight(func, args) else self.purpose)
        if new:
            self._remember()
        return out

    def _follow_scope(self, func: Any, args: Any) -> None:
        """Count what is made inside the loss's `record_function` as the loss's."""
        if func is profiler._record_function_enter_new.default:
            self._outer_purposes.append(self.purpose)
            self.purpose = LOSS if args[0] == LOSS_SCOPE else self.purpose
        elif func is profiler._record_function_exit._RecordFunction:
            self.purpose = self._outer_purposes.pop()

    def _casts_a_weight(self, func: Any, args: Any) -> bool:
        weights = (FROZEN, TRAINED)
        return func is aten._to_copy.default and self._purposes.get(id(args[0].untyped_storage())) in weights

    def _remember(self) -> None:
        now = activations_and_gradients(self.bytes)
        before = [(peak, activations_and_gradients(peak)) for peak in self.peaks]
        if any(a >= now[0] and g >= now[1] for _, (a, g) in before):
            return
        self.peaks = [peak for peak, (a, g) in before if a > now[0] or g > now[1]]
        self.peaks.append({name: self.bytes[name] for name in (*TRANSIENT, GRADIENTS) if self.bytes[name]})


def activations_and_gradients(moment: Moment | Counter[str]) -> tuple[int, int]:
    return sum(moment.get(name, 0) for name in TRANSIENT), moment.get(GRADIENTS, 0)
