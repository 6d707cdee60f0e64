"""In which dtype further nodes of a pass cost little on this machine: products of few rows with one large matrix.

A pass over N nodes reads every weight once, as a plain step does, and multiplies N rows with it. bfloat16 halves the
time of both on a processor with instructions for it. On one without, each row of a bfloat16 product costs as much as
the first, and a tree of eight nodes can take eight plain steps. This does not depend on the heads, so timing matrix
products is enough: the rows of 1 to 16 nodes are multiplied with copies of the last layer's largest matrix, so many
that no cache holds them.
"""
# R rows, O outputs, I inputs

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import unpacked
from heads.tuning.search import Choice
from heads.tuning.timing import Clock, interleaved_medians

DTYPES = (torch.float32, torch.bfloat16)
NODES = (1, 2, 4, 8, 16)
BEYOND_CACHES = 64 * 2**20
"""Bytes that a round of float32 products reads at least, unless that takes more matrices than there are layers."""
REPEATS = 5

DtypeCosts = Mapping[torch.dtype, Mapping[int, float]]
"""Seconds of a pass's products by dtype and number of nodes."""


@torch.no_grad()
def measure_dtypes(backbone: Backbone, batch: int, clock: Clock) -> DtypeCosts:
    """Seconds by dtype and number of nodes for a batch of `batch` rows: medians of interleaved rounds."""
    largest = max((p for p in backbone.layers[-1].parameters() if p.ndim == 2), key=lambda p: p.numel())
    weight_OI = unpacked(largest.detach())
    copies = min(backbone.num_layers, math.ceil(BEYOND_CACHES / (4 * weight_OI.numel())))
    tasks: dict[tuple[torch.dtype, int], Callable[[], float]] = {}
    for dtype in DTYPES:
        weights = [weight_OI.to(dtype, copy=True) for _ in range(copies)]
        tasks |= {(dtype, nodes): timed(weights, batch * nodes, clock) for nodes in NODES}
    found = interleaved_medians(tasks, REPEATS)
    return {dtype: {nodes: found[dtype, nodes] for nodes in NODES} for dtype in DTYPES}


def timed(weights: Sequence[Tensor], rows: int, clock: Clock) -> Callable[[], float]:
    """A function that multiplies `rows` rows with each weight, and returns the seconds that it took."""
    x_RI = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)

    @torch.no_grad()
    def run() -> float:
        start = clock()
        for weight_OI in weights:
            nn.functional.linear(x_RI, weight_OI)
        return clock() - start

    return run


def advise(costs: DtypeCosts, dtype: torch.dtype, choices: Sequence[Choice]) -> str:
    """What 8 nodes cost in each dtype, and which dtype would emit most tokens per second, in words.

    Args:
        dtype: the dtype of the tuning.
        choices: the trees of the search; their tokens per pass hardly depend on the dtype.

    >>> flat, steep = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.5, 16: 2.0}, {1: 0.5, 2: 1.0, 4: 2.0, 8: 4.0, 16: 8.0}
    >>> advise({torch.float32: flat, torch.bfloat16: steep}, torch.float32, [])
    'By matrix products alone a pass of 8 nodes costs 1.5 (float32) and 8.0 (bfloat16) plain steps; bfloat16 would be \
2.00 × as fast as float32, which was tuned here: try --dtype bfloat16.'
    """
    told = [f"{one[8] / one[1]:.1f} ({name_of(each)})" for each, one in costs.items()]
    text = f"By matrix products alone a pass of 8 nodes costs {', '.join(told[:-1])} and {told[-1]} plain steps; "
    speeds = {each: most_tokens(one, choices) for each, one in costs.items()}
    best = max(speeds, key=lambda each: speeds[each])
    if best == dtype or dtype not in speeds:
        return text + f"{name_of(best)} would be the fastest here."
    gain = speeds[best] / speeds[dtype]
    return text + (
        f"{name_of(best)} would be {gain:.2f} × as fast as {name_of(dtype)}, which was tuned here: try --dtype "
        f"{name_of(best)}."
    )


def most_tokens(seconds: Mapping[int, float], choices: Sequence[Choice]) -> float:
    """Tokens per second of a row, by plain steps or by the best tree of a measured size, whichever is more."""
    trees = [one.tokens_per_pass / seconds[one.nodes] for one in choices if one.nodes in seconds]
    return max([1 / seconds[1], *trees])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
