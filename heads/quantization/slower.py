"""One warning where packed weights make a token slower than 16-bit weights would: measured, on the machine at hand.

Which is faster at one row depends on a processor's bandwidth, on its vector units and on whether it multiplies bfloat16
itself, so no table of processors would stay true. The first product of one row with a layer too large for the nearest
caches is therefore timed beside bfloat16's, once for each format, dtype and kind of device (a quarter of a second).
Before each product the caches are filled with other numbers, as the other layers of a model fill them. The fastest of
five rounds is taken, and three tries have to agree, so that a busy machine does not make a warning.
"""
# N rows of x (1 here), I inputs, O outputs

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heads.quantization.codec import Packed, unpack
from heads.quantization.formats import Format

SMALLEST = 1 << 22  # weights of a layer from which reading them is the cost: 8 MiB of bfloat16
MOST = 1 << 22  # weights that are measured
ROUNDS = 5
CLEARLY = 1.1  # times as long; smaller ratios are noise
TRIES = 3  # that have to agree
CACHES = 1 << 26  # bytes that are read between two products

measured: set[tuple[str, torch.dtype, str]] = set()


def warn_once_where_slower(multiply: Callable[..., Tensor], x_NI: Tensor, packed: Packed, format: Format) -> None:
    """Warn if one row takes clearly longer with the packed weight than with a bfloat16 one; once a kind of weight.

    Args:
        multiply: the kernel, of x, codes, scales and format.
        x_NI: one row, in the dtype that the model computes in.
    """
    outputs, inputs, kind = len(packed.codes), x_NI.shape[1], (format.name, x_NI.dtype, x_NI.device.type)
    if outputs * inputs < SMALLEST or kind in measured or is_captured(x_NI.device):
        return
    measured.add(kind)
    ratio = float("inf")
    for _ in range(TRIES):
        if (ratio := min(ratio, times_as_long(multiply, x_NI, packed, format))) <= CLEARLY:
            break
    else:
        warnings.warn(
            f"with {format.name} weights one row on a layer of {inputs:,} × {outputs:,} takes {ratio:.1f} × as long "
            f"as with bfloat16 weights on this machine: here packed weights save memory, and no time.",
            stacklevel=5,
        )


def times_as_long(multiply: Callable[..., Tensor], x_NI: Tensor, packed: Packed, format: Format) -> float:
    """Seconds of a product with the packed weight, as a multiple of those with the same weight in bfloat16."""
    outputs = min(len(packed.codes), max(1, MOST // x_NI.shape[1]))
    some = Packed(packed.codes[:outputs], packed.scales[:outputs])
    x_NI = x_NI.detach().clone()
    narrow_NI, narrow_OI = x_NI.to(torch.bfloat16), unpack(some, format, torch.bfloat16)
    others = torch.ones(CACHES // 4, device=x_NI.device)
    both: tuple[Callable[[], Any], ...] = (
        lambda: multiply(x_NI, *some, format),
        lambda: nn.functional.linear(narrow_NI, narrow_OI),
    )
    best = [float("inf")] * 2
    with torch.no_grad():
        for run in both:
            run()  # compiled, tuned, and brought in
        for _ in range(ROUNDS):
            for i, run in enumerate(both):
                others.sum()
                best[i] = min(best[i], seconds_of(run, x_NI.device))
    return best[0] / best[1]


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, where nothing can be timed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
