"""Plain Python beside the joint distribution of dynamic decoding: loops over all cells, and a table of every n-gram."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from heads.decoding.dynamo.threshold import LEVELS

VOCAB = 9


def loop_otsu(values: list[float]) -> float:
    """Every edge between two grey levels is tried; the lowest that separates best wins."""
    step = max(values) / LEVELS
    levels = [min(int(value / step), LEVELS - 1) if step else 0 for value in values]
    best, best_variance = 1, 0.0
    for edge in range(1, LEVELS):
        dark = [level for level in levels if level < edge]
        bright = [level for level in levels if level >= edge]
        if dark and bright:
            apart = sum(dark) / len(dark) - sum(bright) / len(bright)
            variance = len(dark) * len(bright) * apart**2
            if variance > best_variance * (1 + 1e-9):  # the same classes give the same sums up to rounding
                best, best_variance = edge, variance
    return best * step


def loop_blur(picture: dict[tuple[int, ...], float], sizes: list[int], kernel: list[float]) -> dict:
    """The product of the axes' weights, over all cells around each; beyond the border the border."""
    reach = len(kernel) // 2
    blurred = {}
    for cell in picture:
        value = 0.0
        for offsets in itertools.product(range(-reach, reach + 1), repeat=len(sizes)):
            around = tuple(min(max(i + o, 0), size - 1) for i, o, size in zip(cell, offsets, sizes, strict=True))
            value += math.prod(kernel[o + reach] for o in offsets) * picture[around]
        blurred[cell] = value
    return blurred


class DenseTable:
    """Every n-gram's ratio in one array: what a counted table answers, small enough to write down."""

    def __init__(self, vocab: int = VOCAB, order: int = 3, seed: int = 0, zeros: float = 0.1) -> None:
        self.order, self.vocab = order, vocab
        generator = torch.Generator().manual_seed(seed)
        p = torch.rand((vocab,) * order, generator=generator, dtype=torch.float64) + 0.2
        p = p.where(torch.rand(p.shape, generator=generator) > zeros, 0.0)
        self.p = {n: self.marginal(p / p.sum(), n) for n in range(1, order + 1)}
        self.asked: list[int] = []

    @staticmethod
    def marginal(p: Tensor, n: int) -> Tensor:
        return p.sum(dim=tuple(range(n, p.ndim))) if n < p.ndim else p

    def check_vocab(self, vocab_size: int) -> None:
        if vocab_size != self.vocab:
            raise ValueError(f"counted over {self.vocab} tokens, not {vocab_size}: of another tokenizer")

    def ratio(self, *tokens: int) -> float:
        alone = math.prod(float(self.p[1][token]) for token in tokens)
        return float(self.p[len(tokens)][tokens]) / alone if alone else 0.0

    def cooccurrence(self, candidates: Sequence[Tensor]) -> Tensor:
        self.asked.append(len(candidates))
        return torch.stack([self.ratios(row) for row in zip(*candidates, strict=True)])

    def ratios(self, places: Sequence[Tensor]) -> Tensor:
        together = self.p[len(places)][torch.meshgrid(*places, indexing="ij")]
        alone = functools.reduce(lambda x, y: x[..., None] * y, (self.p[1][place] for place in places))
        return torch.where(alone > 0, together / alone, 0.0).float()
