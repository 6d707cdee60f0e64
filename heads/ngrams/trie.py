"""One order of an n-gram table: which n-grams extend those found so far by one of some candidates.

The n-grams that extend one prefix are a range, sorted by their last token. Most ranges are narrow; these are read
completely, joined into one array, and each token is looked up among the candidates. In a wide range each candidate is
searched for.
"""
# F n-grams found, K candidates of one position, N n-grams of one order, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
Counts: TypeAlias = NDArray[np.int64]
Found: TypeAlias = tuple[Counts, NDArray[Any], Counts]

SEARCH_FROM = 8  # n-grams per candidate in a range, above which searching is faster than reading the range
BLOCK_NGRAMS = 1 << 15
NOTHING: Found = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, kw_only=True)
class TrieOrder:
    """The n-grams of one order above 1.

    Attributes:
        tokens_N: the last token of each.
        counts_N: how often each was seen.
        starts: where the n-grams that extend each n-gram of the order before begin, and N after the last.
    """

    tokens_N: NDArray[Any]
    counts_N: NDArray[Any]
    starts: NDArray[Any]

    def range_of(self, node: int) -> tuple[int, int]:
        """Where the n-grams that extend n-gram `node` of the order before begin and end."""
        start, end = self.starts[node : node + 2].tolist()
        self._check(start >= 0 and start <= end <= len(self.tokens_N))
        return start, end

    def ranges(self, nodes_F: Counts) -> tuple[Counts, Counts]:
        """`range_of` of many.

        Raises:
            ValueError: one is no range. Only those in use are checked, since the file may be larger than memory.
        """
        starts_F, ends_F = self.starts[nodes_F].astype(np.int64), self.starts[nodes_F + 1].astype(np.int64)
        wrong = len(nodes_F) and (starts_F.min() < 0 or (ends_F < starts_F).any() or ends_F.max() > len(self.tokens_N))
        self._check(not wrong)
        return starts_F, ends_F

    def _check(self, fits: bool) -> None:
        if not fits:
            raise ValueError(
                "The n-gram table's starts are no places in its arrays; it was damaged: copy the folder again or "
                "count it again."
            )

    def find(self, nodes_F: Counts, candidates_K: Ids, vocab_size: int) -> Found:
        """The n-grams that extend some n-grams of the order before by one of sorted, different candidates.

        Returns:
            for each n-gram found: which of `nodes_F` it extends, by which candidate, and its own number.
        """
        starts_F, ends_F = self.ranges(nodes_F)
        wide_F = ends_F - starts_F > SEARCH_FROM * len(candidates_K)
        narrow, wide = np.flatnonzero((ends_F > starts_F) & ~wide_F), np.flatnonzero(wide_F)
        read = self._read(starts_F[narrow], ends_F[narrow], candidates_K, vocab_size)
        searched = self._search(starts_F[wide], ends_F[wide], candidates_K)
        above = np.concatenate([narrow.take(read[0]), wide.take(searched[0])])
        return above, np.concatenate([read[1], searched[1]]), np.concatenate([read[2], searched[2]])

    def _read(self, starts_F: Counts, ends_F: Counts, candidates_K: Ids, vocab_size: int) -> Found:
        """Look each n-gram of narrow ranges up among the candidates."""
        if not len(starts_F):
            return NOTHING
        rank_V = np.full(vocab_size, -1, np.int32)
        known_K = candidates_K[: np.searchsorted(candidates_K, vocab_size)]
        rank_V[known_K] = np.arange(len(known_K))
        behind_F = np.cumsum(ends_F - starts_F)
        # Joining slices is several times faster than one index over all, and a block of them stays in the CPU's cache.
        ranges = [self.tokens_N[start:end] for start, end in zip(starts_F.tolist(), ends_F.tolist(), strict=True)]
        blocks = [0, *(np.flatnonzero(np.diff(behind_F // BLOCK_NGRAMS)) + 1).tolist(), len(ranges)]
        hits, ranks = [], []
        for first, last in pairwise(blocks):
            ranks_here = rank_V.take(np.concatenate(ranges[first:last]), mode="clip")
            hits_here = np.flatnonzero(ranks_here >= 0)
            ranks.append(ranks_here.take(hits_here))
            hits.append(hits_here + (behind_F[first] - len(ranges[first])))
        found = np.concatenate(hits)
        hits_F = np.diff(np.searchsorted(found, behind_F), prepend=0)
        found += np.repeat(ends_F - behind_F, hits_F)
        return np.repeat(np.arange(len(starts_F)), hits_F), np.concatenate(ranks), found

    def _search(self, starts_F: Counts, ends_F: Counts, candidates_K: Ids) -> Found:
        """Search each wide range for each candidate."""
        if not len(starts_F):
            return NOTHING
        bounds = zip(starts_F.tolist(), ends_F.tolist(), strict=True)
        wanted_K = as_type_of(self.tokens_N, candidates_K)
        found = np.concatenate([self.tokens_N[start:end].searchsorted(wanted_K) for start, end in bounds])
        places_FK = found.reshape(len(starts_F), len(candidates_K)) + starts_F[:, None]
        np.minimum(places_FK, ends_F[:, None] - 1, out=places_FK)
        hits = np.flatnonzero(self.tokens_N.take(places_FK) == candidates_K)
        above, ranks = np.divmod(hits, max(1, len(candidates_K)))
        return above, ranks, places_FK.reshape(-1).take(hits)


def as_type_of(tokens_N: NDArray[Any], wanted: NDArray[Any]) -> NDArray[Any]:
    """Tokens to search for, in the type of what is searched: with another one each search would copy its range.

    A token too large for it becomes the largest, which is not equal to what was wanted.

    >>> as_type_of(np.array([3, 5], np.uint16), np.array([5, 70_000]))
    array([    5, 65535], dtype=uint16)
    """
    return np.minimum(wanted, np.iinfo(tokens_N.dtype).max).astype(tokens_N.dtype)
