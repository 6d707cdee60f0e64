"""Floating-point operations of an answer, as PyTorch's own counter sees them: DynaMo, table 3, FLOPs per token.

Every matrix product and attention of backbone and heads is counted, whatever family they are of, with the prompt's
pass. Dividing by the tokens of the answer gives what a generated token costs; a tree's rejected nodes are in it. The
counter sees operators, so passes that are compiled elsewhere run uncompiled here, and products with microscaling
weights, which are no operators, are not counted at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from heads.evaluation.methods import GreedySettings
from heads.evaluation.speed.speakers import Speaker
from heads.quantization.packed_heads import packed_layers

Result = TypeVar("Result")
Shape = torch.Size


def flops_of(run: Callable[[], Result]) -> tuple[int, Result]:
    """The operations of a call, and what it returns."""
    formulas = more_formulas()
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        found = run()
    return int(counter.get_total_flops()), found


def more_formulas() -> dict[Any, Callable[..., int]]:
    """Of the operators on a CPU that PyTorch's counter has no formulas for: attention, experts, packed products."""
    aten = torch.ops.aten
    found: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._grouped_mm: product_flops,
    }
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        found[torch.ops.mkldnn._linear_pointwise] = product_flops
    return found


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Scores and weighted values; shapes are (batch, heads, positions, width), with fewer heads of keys and values."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def product_flops(x: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    """
    >>> product_flops(torch.Size([2, 5, 8]), out_shape=torch.Size([2, 5, 3]))     # 10 rows, 8 inputs, 3 outputs
    480
    """
    return 2 * math.prod(x) * out_shape[-1]


def why_not_counted(*modules: nn.Module) -> str:
    """Why the operations of these cannot be counted; empty where they can."""
    if not any(map(packed_layers, modules)):
        return ""
    return "the kernels that multiply with microscaling weights are no operators of PyTorch, whose counter they escape"


def count_flops(speaker: Speaker, prompt_1T: Tensor, settings: GreedySettings) -> dict[str, int]:
    """`flops` of an untimed answer without earlier turns, and its `tokens`."""
    speaker.begin()
    flops, answer = flops_of(lambda: speaker.answer(prompt_1T, settings, lambda: 0.0))
    speaker.begin()
    return {"flops": flops, "tokens": len(answer.tokens)}
