"""Does ε₂ > 0 in DynaMo's equation 5 help? `python -m benchmarks.paper.sinkhorn`. The decoder has no ε₂.

ε₂ pulls the joint's marginals back to the heads' own. With the cost c = -log(co-occurrence ratio) the minimiser is

    p ∝ Π f_i · ratio^(1/ε₁) · Π u_i        u_i = (f_i / marginal of the rest)^(ε₂ / (ε₁ + ε₂))

which a Sinkhorn loop finds (unbalanced transport with Kullback-Leibler marginals). Several ways to form the joint
distribution of two tokens are compared, each at many thresholds: how often is the second token right, at equal tokens
per decision?
"""
# B position, k candidate, T threshold, K block, S resample, V speed

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.shared import NGRAMS, figures_table, interpolate, open_ngrams, or_dash, parser_of, run_benchmark, say
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.dynamo.candidates import Candidates, take_candidates
from heads.decoding.dynamo.joint import mask, outer, total
from heads.evaluation.predictions import predict, read_blocks
from heads.evaluation.throughput import RESAMPLES, SHARES, Figures, resample
from heads.ngrams.table import NgramTable

ITERATIONS = 5
SPEEDS = (1.1, 1.25, 1.5, 1.75)
THRESHOLDS = [i / 40 for i in range(41)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to form the joint: α_c = 1/ε₁ of the mask, and pull = ε₂ / ε₁."""

    alpha: float
    pull: float = 0.0

    @property
    def name(self) -> str:
        return f"α_c {self.alpha:g}" + (f", ε₂/ε₁ {self.pull:g}" if self.pull else "")


PAPERS = Way(alpha=1.0)
WAYS = (
    Way(alpha=0.0),
    Way(alpha=0.25),
    Way(alpha=0.5),
    PAPERS,
    Way(alpha=0.5, pull=1.0),
    Way(alpha=1.0, pull=1.0),
    Way(alpha=1.0, pull=3.0),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = Console()
    opened = open_heads([options.heads])
    ngrams = open_ngrams(opened, options.ngrams)
    places, true_B2, blocks = read_positions(opened, options.blocks)
    say(console, f"{options.heads}, {len(true_B2):,} held-out positions in {blocks} blocks, joint of two tokens")
    found = {way.name: count_emitted(form(places, ngrams, way), places, true_B2, blocks) for way in WAYS}
    title = "\nshare of second tokens that are right, at equal tokens per decision"
    table = figures_table(title, "joint", *(f"{speed:g}" for speed in SPEEDS))
    for name, one in found.items():
        table.add_row(name, *map(or_dash, share_at_speeds(one, np.ones(blocks))))
    console.print(table)
    title = f"\nthe same less {PAPERS.name}'s, with 95 % intervals over resampled blocks; * excludes 0"
    table = figures_table(title, "joint", *(f"{speed:g}" for speed in SPEEDS))
    for name, one in found.items():
        if name != PAPERS.name:
            table.add_row(name, *describe_differences(one, found[PAPERS.name]))
    console.print(table)


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.paper.sinkhorn", __doc__)
    parser.add_argument("--heads", default="checkpoints/demo/dynamo", help="folder of heads")
    parser.add_argument("--ngrams", default=NGRAMS, help="table of n-grams")
    parser.add_argument("--blocks", type=int, default=16, help="held-out blocks of 256 tokens")
    return parser


@torch.no_grad()
def read_positions(opened: Opened, count: int) -> tuple[list[Candidates], Tensor, int]:
    """At every position t the candidates of x_{t+1} and x_{t+2} and the true tokens; and the number of blocks."""
    (token_heads,) = opened.token_heads.values()
    tokens_BT = torch.stack(
        [block.tokens_T for block in read_blocks(opened, (), count, 256) if len(block.tokens_T) == 256]
    )
    rows_R = torch.arange(tokens_BT.numel()).view(tokens_BT.shape)[:, :-2].flatten()
    made = list(itertools.islice(predict(token_heads, tokens_BT, [rows_R] * (token_heads.num_heads + 1)), 2))
    places = [
        take_candidates(torch.cat(list(prediction.logits())).softmax(dim=-1), 50, place=i)
        for i, prediction in enumerate(made)
    ]
    return places, torch.stack([tokens_BT.flatten()[rows_R + n] for n in (1, 2)], dim=1), len(tokens_BT)


def form(places: Sequence[Candidates], ngrams: NgramTable, way: Way) -> Tensor:
    """(B, k, k): the joint that one way forms."""
    joint_Bkk = mask(outer(places), places, ngrams, way.alpha)
    return sinkhorn(joint_Bkk, [place.probs_Bk for place in places], way.pull) if way.pull else joint_Bkk


def sinkhorn(joint_Bkk: Tensor, marginals: Sequence[Tensor], pull: float, iterations: int = ITERATIONS) -> Tensor:
    """The minimiser of equation 5 from its minimiser at ε₂ = 0, by scaling one axis after the other.

    Args:
        pull: ε₂ / ε₁; 0 changes nothing, infinity makes the marginals the given ones.

    >>> joint = torch.tensor([[[0.4, 0.1], [0.1, 0.4]]])
    >>> even = sinkhorn(joint, [torch.tensor([[0.8, 0.2]])] * 2, pull=1e6, iterations=50)
    >>> even.sum(dim=2)
    tensor([[0.8000, 0.2000]])
    """
    power = pull / (1 + pull)
    scales = [torch.ones_like(marginal) for marginal in marginals]
    scaled = joint_Bkk
    for _ in range(iterations):
        for axis, wanted in enumerate(marginals):
            others = [i + 1 for i in range(len(marginals)) if i != axis]
            rest = scaled.sum(dim=others) / scales[axis]
            new = torch.where(rest > 0, wanted / rest.clamp(min=1e-30), torch.ones_like(rest)) ** power
            shape = [-1 if i == axis else 1 for i in range(len(marginals))]
            scaled = scaled * (new / scales[axis]).view(len(scaled), *shape)
            scales[axis] = new
        mass = total(scaled).clamp(min=1e-30)  # 0 if no pair was ever counted
        scaled = scaled / mass
        scales[-1] = scales[-1] / mass.flatten(1)
    return scaled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emitted:
    """How many pairs a way emits above each threshold, and how many have the right second token, block by block."""

    emitted_TK: Figures
    right_TK: Figures
    positions_K: Figures


def count_emitted(joint_Bkk: Tensor, places: Sequence[Candidates], true_B2: Tensor, blocks: int) -> Emitted:
    """The best pair is emitted if its probability is above the threshold, else one token."""
    peak_B, cell_B = joint_Bkk.flatten(1).max(dim=1)
    at = torch.unravel_index(cell_B, joint_Bkk.shape[1:])
    second_B = places[1].tokens_Bk.gather(1, at[1][:, None])[:, 0]
    emitted_TKB = (peak_B > torch.tensor(THRESHOLDS)[:, None]).view(len(THRESHOLDS), blocks, -1)
    right_KB = (second_B == true_B2[:, 1]).view(blocks, -1)
    return Emitted(
        emitted_TK=emitted_TKB.sum(dim=-1).double().numpy(),
        right_TK=(emitted_TKB & right_KB).sum(dim=-1).double().numpy(),
        positions_K=np.full(blocks, float(right_KB.shape[1])),
    )


def share_at_speeds(found: Emitted, times_K: Figures) -> list[float | None]:
    """The share of right second tokens at each speed, if block k counts `times_K[k]` times."""
    emitted_T, right_T = found.emitted_TK @ times_K, found.right_TK @ times_K
    speeds_T = 1 + emitted_T / (found.positions_K @ times_K)
    points = [(float(speeds_T[i]), float(right_T[i] / emitted_T[i])) for i in np.flatnonzero(emitted_T)]
    return [interpolate(points, speed) for speed in SPEEDS]


def describe_differences(found: Emitted, other: Emitted) -> list[str]:
    """The difference of two ways' shares at each speed, with a 95 % interval; * marks one that excludes 0.

    The interval is of a bootstrap over blocks, paired: both ways have the same blocks in a resample.
    """
    blocks = len(found.positions_K)
    times_SK = np.concatenate([np.ones((1, blocks)), resample(blocks, RESAMPLES, np.random.default_rng(0))])
    differences_SV = np.array([[less(*two) for two in both(found, other, times_K)] for times_K in times_SK])
    low_V, high_V = np.nanquantile(differences_SV[1:], SHARES, axis=0)
    return [
        "–" if np.isnan(mean) else f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]{'*' if low > 0 or high < 0 else ''}"
        for mean, low, high in zip(differences_SV[0], low_V, high_V, strict=True)
    ]


def both(found: Emitted, other: Emitted, times_K: Figures) -> list[tuple[float | None, float | None]]:
    return list(zip(share_at_speeds(found, times_K), share_at_speeds(other, times_K), strict=True))


def less(share: float | None, other: float | None) -> float:
    return math.nan if share is None or other is None else share - other


if __name__ == "__main__":
    run_benchmark(main)
