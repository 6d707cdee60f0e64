"""Pack n-grams into words that sort as they do, count and merge sorted runs of these, and cut a run into a trie.

A symbol is a token or the end of a document, in as many bits as the vocabulary needs. A word of 64 bits holds as many
symbols as fit: one word serves trigrams of any vocabulary up to a million tokens, two serve 6-grams. Every token begins
one n-gram. Those at the end of a document are padded with end symbols, so that the prefixes of one run of n-grams give
the counts of all lower orders too.
"""
# L length of the padded stream, N n-grams, P n-grams of the order before, V vocabulary, W words of an n-gram

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Counts = NDArray[np.int64]
WORD_BITS = 64
BUCKET_BITS = 16  # NumPy sorts numbers of at most this many bits by radix


@dataclass(frozen=True)
class Packing:
    """How n-grams of an order over a vocabulary lie in words.

    >>> packing = Packing(order=2, vocab_size=3)
    >>> words_WN = packing.pack(packing.join([[0, 1], [2]]))
    >>> packing.symbol(words_WN, 0).tolist(), packing.symbol(words_WN, 1).tolist()  # 3 is a document's end
    ([0, 1, 2], [1, 3, 3])
    """

    order: int
    vocab_size: int

    @property
    def end(self) -> int:
        """The symbol for a document's end, which sorts after all tokens."""
        return self.vocab_size

    @property
    def bits(self) -> int:
        return self.vocab_size.bit_length()

    @property
    def groups(self) -> list[range]:
        """Which of the n symbols each word holds."""
        each = WORD_BITS // self.bits
        return [range(first, min(first + each, self.order)) for first in range(0, self.order, each)]

    def join(self, documents: Sequence[Any]) -> NDArray[np.int32]:
        """Documents as one stream with n - 1 ends after each."""
        ends = np.full(self.order - 1, self.end, np.int32)
        return np.concatenate([piece for ids in documents for piece in (np.asarray(ids, np.int32), ends)])

    def pack(self, stream_L: NDArray[np.int32]) -> Words:
        """The n-gram that begins at each token of a joined stream."""
        num_windows = len(stream_L) - self.order + 1
        begins = np.flatnonzero(stream_L[:num_windows] != self.end)
        words_WN = np.empty((len(self.groups), len(begins)), np.uint64)
        for word_N, group in zip(words_WN, self.groups, strict=True):
            window = np.zeros(num_windows, np.uint64)
            for i in group:
                window <<= np.uint64(self.bits)
                window |= stream_L[i : num_windows + i].astype(np.uint64)
            np.take(window, begins, out=word_N)
        return words_WN

    def symbol(self, words_WN: Words, i: int) -> NDArray[np.int64]:
        """Symbol i of every n-gram."""
        word, group = next((word, group) for word, group in enumerate(self.groups) if i in group)
        shift = self.bits * (group.stop - 1 - i)
        return ((words_WN[word] >> np.uint64(shift)) & np.uint64((1 << self.bits) - 1)).astype(np.int64)

    def find_first(self, words_WN: Words, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each token: where in a sorted run the n-grams begin that start with it or a greater one."""
        shift = self.bits * (len(self.groups[0]) - 1)
        return np.searchsorted(words_WN[0], tokens.astype(np.uint64) << np.uint64(shift))


def count_equal(words_WN: Words) -> tuple[Words, Counts]:
    """The different n-grams, sorted, and how often each occurs."""
    if len(words_WN) == 2 and 0 < sum(map(bits_of, words_WN)) - WORD_BITS <= BUCKET_BITS:
        return count_in_buckets(words_WN)
    keys = Keys.of(words_WN)
    sorted_N = np.sort(keys.keys_N)
    first = find_changes(sorted_N)
    return keys.words(sorted_N[first]), np.diff(first, append=len(sorted_N))


def count_in_buckets(words_WN: Words) -> tuple[Words, Counts]:
    """`count_equal` for pairs of words with a few bits more than 64: these choose a bucket, and the others sort in it.

    NumPy sorts 16-bit numbers by radix, and sorts 64-bit numbers several times faster than it ranks them.

    >>> words_WN = np.array([[7 << 56, 2, 7 << 56], [1 << 12, 5, 0]], np.uint64)
    >>> found_WN, counts_N = count_in_buckets(words_WN)
    >>> (found_WN == words_WN[:, [1, 2, 0]]).all().item(), counts_N.tolist()
    (True, [1, 1, 1])
    """
    bits = np.uint64(bits_of(words_WN[1]))
    spare = np.uint64(WORD_BITS) - bits
    bucket_N = (words_WN[0] >> spare).astype(np.uint16)
    order = np.argsort(bucket_N, kind="stable")
    sorted_N = (words_WN[0] << bits | words_WN[1])[order]  # the shift drops the bits of the bucket
    bucket_N = bucket_N[order]
    starts = find_changes(bucket_N)
    for start, stop in zip(starts, [*starts[1:], len(sorted_N)], strict=True):
        sorted_N[start:stop].sort()
    changed_N = np.ones(len(sorted_N), bool)
    changed_N[1:] = (sorted_N[1:] != sorted_N[:-1]) | (bucket_N[1:] != bucket_N[:-1])
    first = np.flatnonzero(changed_N)
    high_N = bucket_N[first].astype(np.uint64) << spare | sorted_N[first] >> bits
    low_N = sorted_N[first] & ((np.uint64(1) << bits) - np.uint64(1))
    return np.stack([high_N, low_N]), np.diff(first, append=len(sorted_N))


def merge(runs: Sequence[tuple[Words, Counts]]) -> tuple[Words, Counts]:
    """The sum of sorted runs."""
    keys = Keys.of(np.concatenate([words for words, _ in runs], axis=1))
    counts_N = np.concatenate([counts for _, counts in runs])
    order = np.argsort(keys.keys_N, kind="stable")  # a stable sort finds the sorted runs and merges them
    sorted_N = keys.keys_N[order]
    first = find_changes(sorted_N)
    return keys.words(sorted_N[first]), np.add.reduceat(counts_N[order], first)


@dataclass(frozen=True, kw_only=True)
class Keys:
    """N-grams of one or two words as 64-bit numbers that sort as they do.

    NumPy sorts numbers many times faster than pairs of them. So a pair's first word is replaced by its rank among the
    different first words, and so is its second where both would not fit into 64 bits.
    """

    keys_N: NDArray[np.uint64]
    bits: int = 0
    ranked: tuple[NDArray[np.uint64] | None, ...] = ()

    @classmethod
    def of(cls, words_WN: Words) -> Keys:
        """
        >>> words_WN = np.array([[7, 2, 7], [1, 5, 0]], np.uint64)
        >>> keys = Keys.of(words_WN)
        >>> keys.keys_N.tolist(), (keys.words(keys.keys_N) == words_WN).all().item()
        ([9, 5, 8], True)
        """
        if len(words_WN) == 1:
            return cls(keys_N=words_WN[0])
        first_N, firsts = dense_ranks(words_WN[0])
        second_N, seconds = words_WN[1], None
        if len(firsts).bit_length() + bits_of(second_N) > WORD_BITS:
            second_N, seconds = dense_ranks(second_N)
        bits = bits_of(second_N)
        return cls(keys_N=first_N << np.uint64(bits) | second_N, bits=bits, ranked=(firsts, seconds))

    def words(self, keys_N: NDArray[np.uint64]) -> Words:
        """The words of some of the keys."""
        if not self.ranked:
            return keys_N[None]
        firsts, seconds = self.ranked
        second_N = keys_N & np.uint64((1 << self.bits) - 1)
        assert firsts is not None, "the first of two words is always ranked"
        return np.stack([firsts[keys_N >> np.uint64(self.bits)], second_N if seconds is None else seconds[second_N]])


def bits_of(word_N: NDArray[np.uint64]) -> int:
    return int(word_N.max(initial=0)).bit_length()


def dense_ranks(word_N: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The rank of each number among the distinct numbers, from 0 on; and the distinct numbers, ascending."""
    order = np.argsort(word_N)
    sorted_N = word_N[order]
    changed_N = np.ones(len(word_N), bool)
    changed_N[1:] = sorted_N[1:] != sorted_N[:-1]
    ranks_N = np.empty(len(word_N), np.uint64)
    ranks_N[order] = np.cumsum(changed_N) - 1
    return ranks_N, sorted_N[changed_N]


def find_changes(sorted_N: NDArray[Any]) -> NDArray[np.int64]:
    """Where a number differs from the one before it.

    >>> find_changes(np.array([3, 3, 8], np.uint64)).tolist()
    [0, 2]
    """
    changed_N = np.ones(len(sorted_N), bool)
    changed_N[1:] = sorted_N[1:] != sorted_N[:-1]
    return np.flatnonzero(changed_N)


@dataclass(frozen=True, kw_only=True)
class NgramsOfOrder:
    """The different n-grams of one order within a range of first tokens.

    Attributes:
        tokens_N: the last token of each, sorted within their prefix.
        counts_N: how often each occurs.
        children_P: how many of them extend each n-gram of the order before.
        positions: the number of places where an n-gram of this order occurs, including those dropped as rare.
    """

    tokens_N: NDArray[np.int32]
    counts_N: Counts
    children_P: Counts
    positions: int


def cut_orders(
    packing: Packing, words_WN: Words, counts_N: Counts, first_tokens: range, min_count: int
) -> tuple[Counts, list[NgramsOfOrder]]:
    """The orders of a trie from a merged run of all n-grams that begin with one of `first_tokens`.

    An n-gram occurs at least as often as those that extend it, so the n-grams seen `min_count` times form a trie too.

    Returns:
        The count of each first token, however rare, and the n-grams of orders 2 to n.
    """
    changed_N = np.zeros(len(counts_N), bool)
    changed_N[:1] = True
    above_N = packing.symbol(words_WN, 0) - first_tokens.start
    unigrams = np.zeros(len(first_tokens), np.int64)
    np.add.at(unigrams, above_N, counts_N)
    changed_N[1:] |= above_N[1:] != above_N[:-1]
    orders, num_above = [], len(first_tokens)
    for i in range(1, packing.order):
        symbols_N = packing.symbol(words_WN, i)
        changed_N[1:] |= symbols_N[1:] != symbols_N[:-1]
        first = np.flatnonzero(changed_N)
        sums = np.add.reduceat(counts_N, first) if len(first) else counts_N
        whole = symbols_N[first] != packing.end
        frequent = whole & (sums >= min_count)
        chosen = first[frequent]
        orders.append(
            NgramsOfOrder(
                tokens_N=symbols_N[chosen].astype(np.int32),
                counts_N=sums[frequent],
                children_P=np.bincount(above_N[chosen], minlength=num_above),
                positions=int(sums[whole].sum()),
            )
        )
        # Extensions of a dropped n-gram get another n-gram's number here, but they are dropped too.
        numbers_N = np.zeros(len(counts_N), np.int64)
        numbers_N[chosen] = 1
        above_N, num_above = np.cumsum(numbers_N) - 1, len(chosen)
    return unigrams, orders
