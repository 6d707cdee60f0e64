"""The shapes that the demo backbone is widened to, which change what a pass costs and not what it computes.

The width of an attention head and the vocabulary stay the demo's: rotary angles depend on the former, and added tokens
would be sampled. A real model of the same size has fewer and wider attention heads, and a larger vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True, kw_only=True)
class WideShape:
    """Sizes of a Llama; the width of its attention heads is the demo's.

    Attributes:
        key_value_heads: divides the number of attention heads, which is `hidden / head_dim`.
    """

    name: str
    hidden: int
    layers: int
    intermediate: int
    key_value_heads: int

    def parameters(self, vocab: int = 2048, head_dim: int = 32) -> int:
        """Numbers in the backbone, norms left out.

        >>> f"{SHAPES['0.83B'].parameters() / 1e9:.2f} billion"
        '0.83 billion'
        """
        attention = 2 * self.hidden * (self.hidden + self.key_value_heads * head_dim)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * vocab * self.hidden


SHAPES = {
    shape.name: shape
    for shape in (
        WideShape(name="0.16B", hidden=1024, layers=12, intermediate=2816, key_value_heads=32),
        WideShape(name="0.4B", hidden=1536, layers=14, intermediate=4096, key_value_heads=48),
        WideShape(name="0.83B", hidden=2048, layers=16, intermediate=5632, key_value_heads=64),
        WideShape(name="0.96B", hidden=4096, layers=8, intermediate=6144, key_value_heads=32),
        WideShape(name="1.2B", hidden=2048, layers=20, intermediate=8192, key_value_heads=16),
        WideShape(name="7B", hidden=4096, layers=32, intermediate=11008, key_value_heads=128),
    )
}
"""From 0.83B on these are widths and depths of published models of about that size, except 0.96B: a few layers of width
4,096, the width of 7B models."""

BESIDE_WEIGHTS = 1.5
"""Memory that is needed, in times of the backbone's bytes: heads (grounded: 0.1 to 0.3 of it) and what a pass holds."""


def what_stops(shape: WideShape, dtype: torch.dtype, device: torch.device) -> str:
    """Why a shape does not fit the device's free memory; empty if it fits."""
    needed = BESIDE_WEIGHTS * shape.parameters() * dtype.itemsize / 2**30
    free = free_bytes(device) / 2**30
    if needed <= free:
        return ""
    return f"it needs about {needed:.1f} GiB of memory and {free:.1f} are free"


def free_bytes(device: torch.device) -> int:
    """Memory that new weights can have; on a CPU, memory that only caches files counts as free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
