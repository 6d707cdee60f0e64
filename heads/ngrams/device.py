"""Compute co-occurrence masks on an accelerator, which finds a table's n-grams as sorted numbers by binary search.

`NgramTable` (heads/ngrams/table.py) reads ranges of n-grams on the CPU, so for each mask the accelerator would wait
until candidates are copied there and the mask of all combinations is copied back. Here nothing leaves the device, and
no shape depends on what is found. On a CPU the table itself is faster, since it only reads n-grams that exist.
"""
# B batch, K candidate of one position, N n-gram of one order, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from heads.ngrams.table import NgramTable


class DeviceTable:
    """The masks of `NgramTable.cooccurrence` with `unseen` 0, up to an order.

    An n-gram is the number `prefix · V + last token`, where a prefix is numbered by its place among the n-grams of the
    order before; numbers are stored in rising order. Each n-gram takes 16 bytes.

    >>> import tempfile
    >>> from heads.ngrams.counting import count_ngrams
    >>> folder = tempfile.TemporaryDirectory()
    >>> table = count_ngrams([[0, 1, 2], [0, 1, 1]], folder=folder.name + "/table", order=2, vocab_size=4)
    >>> DeviceTable(table, 2, "cpu").cooccurrence([torch.tensor([[0, 1]]), torch.tensor([[1, 2]])])
    tensor([[[3., 0.],
             [1., 3.]]])
    >>> folder.cleanup()

    Args:
        order: the longest n-gram that is asked for, at most the table's.
    """

    def __init__(self, table: NgramTable, order: int, device: torch.device | str) -> None:
        self.order = order
        self.table = table
        self.unigrams_V = torch.from_numpy(table.unigrams_V.astype(np.int64)).to(device)
        self.keys: list[Tensor] = []
        self.counts: list[Tensor] = [self.unigrams_V]
        for trie_order in table.orders[: order - 1]:
            prefix_N = np.repeat(np.arange(len(trie_order.starts) - 1), np.diff(trie_order.starts))
            keys_N, counts_N = prefix_N * table.vocab_size + trie_order.tokens_N, trie_order.counts_N.astype(np.int64)
            if not len(keys_N):  # a search needs an entry: one that no n-gram has
                keys_N, counts_N = np.array([-1]), np.array([0])
            self.keys.append(torch.from_numpy(keys_N).to(device))
            self.counts.append(torch.from_numpy(counts_N).to(device))

    def check_vocab(self, vocab_size: int) -> None:
        self.table.check_vocab(vocab_size)

    def cooccurrence(self, candidates: Sequence[Tensor]) -> Tensor:
        """p̂(x_1 … x_n) / Π p̂(x_i) of every combination (B, K_1, …, K_n), float32, of candidates (B, K_i).

        The result is on the candidates' device, which may be another than the table's.
        """
        asked_on = candidates[0].device
        candidates = [ids_BK.to(self.unigrams_V.device) for ids_BK in candidates]
        places, seen = self.find(candidates)
        common = [self.unigrams_V[ids_BK.clamp(max=len(self.unigrams_V) - 1)] for ids_BK in candidates]
        weight = reduce(_outer, [self.table.num_tokens / count_BK.clamp(min=1).double() for count_BK in common])
        weight = weight / max(1, self.table.positions[len(candidates) - 1])
        ratio = self.counts[len(candidates) - 1][places] * weight
        return torch.where(seen, ratio.clamp(max=torch.finfo(torch.float32).max), 0.0).float().to(asked_on)

    def find(self, candidates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """For every combination its n-gram's place among those of its order, and whether it was seen."""
        vocab_size = len(self.unigrams_V)
        places = candidates[0].clamp(max=vocab_size - 1)
        seen = (candidates[0] < vocab_size) & (self.unigrams_V[places] > 0)
        for keys_N, ids_BK in zip(self.keys, candidates[1:], strict=False):
            ids = ids_BK.view(len(ids_BK), *[1] * (places.ndim - 1), -1)
            wanted = places[..., None] * vocab_size + ids
            places = torch.searchsorted(keys_N, wanted).clamp(max=len(keys_N) - 1)
            seen = seen[..., None] & (ids < vocab_size) & (keys_N[places] == wanted)
        return places, seen


def _outer(x: Tensor, y_BK: Tensor) -> Tensor:
    """(B, …) and (B, K) to (B, …, K)."""
    return x[..., None] * y_BK.view(len(y_BK), *[1] * (x.ndim - 1), -1)
