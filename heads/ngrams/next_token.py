"""How likely the table's n-gram models of each order find some next tokens: what superposed decoding interpolates.

p_n(x | last n − 1 tokens) is the count of the n-gram over the counts of all n-grams with the same beginning, for n = 2
to the table's order (superposed decoding, equation 5); 0 where the beginning was never seen.

All (text, order, token) questions of a step are answered together. The end of a text of c tokens is walked down the
trie for every c at once: step j of each walk lies in the same order, and so do the next tokens of ends that are walked.
"""
# N text, C context, O order from 2 on, M next token asked for, Q question

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from heads.ngrams.trie import Counts, TrieOrder

Probabilities = NDArray[np.float64]
UNSEEN = -1


def next_token_probabilities(
    orders: Sequence[TrieOrder], vocab_size: int, contexts_NC: Counts, tokens_NM: Counts
) -> Probabilities:
    """(N, O, M): p_n of each token after each text.

    Args:
        orders: of the trie, from 2 on.
        contexts_NC: the last tokens of each text, -1 where a text is shorter.
        tokens_NM: the next tokens asked for.
    """
    found_NOM = np.zeros((len(contexts_NC), len(orders), tokens_NM.shape[1]))
    # The end of c tokens begins at place C − c; its walk begins at its first token, which is its number in order 1.
    lengths = range(1, min(len(orders), contexts_NC.shape[1]) + 1)
    nodes = {c: in_vocabulary(contexts_NC[:, -c], vocab_size) for c in lengths}
    for j in lengths:
        order = orders[j - 1]
        found_NOM[:, j - 1] = share_of_each(order, nodes[j], tokens_NM)
        for c in range(j + 1, len(nodes) + 1):
            nodes[c] = extend(order, nodes[c], contexts_NC[:, j - c])
    return found_NOM


def in_vocabulary(tokens_N: Counts, vocab_size: int) -> Counts:
    return np.where((tokens_N >= 0) & (tokens_N < vocab_size), tokens_N, UNSEEN)


def extend(order: TrieOrder, nodes_Q: Counts, tokens_Q: Counts) -> Counts:
    """The n-grams that extend each of some n-grams by a token; `UNSEEN` where there is none."""
    starts_Q, ends_Q = ranges(order, nodes_Q)
    return find_in_ranges(order.tokens_N, starts_Q, ends_Q, tokens_Q)


def share_of_each(order: TrieOrder, nodes_N: Counts, tokens_NM: Counts) -> Probabilities:
    """(N, M): the share of each token among all that were counted after an n-gram."""
    starts_N, ends_N = ranges(order, nodes_N)
    many = tokens_NM.shape[1]
    places = find_in_ranges(order.tokens_N, starts_N.repeat(many), ends_N.repeat(many), tokens_NM.reshape(-1))
    seen = places != UNSEEN
    counts = np.zeros(len(places))
    counts[seen] = order.counts_N[places[seen]]
    spans = zip(starts_N.tolist(), ends_N.tolist(), strict=True)
    totals = np.array([order.counts_N[start:end].sum(dtype=np.int64) for start, end in spans])
    return counts.reshape(tokens_NM.shape) / np.maximum(1, totals)[:, None]


def ranges(order: TrieOrder, nodes_Q: Counts) -> tuple[Counts, Counts]:
    """Where the n-grams that extend each of some n-grams begin and end; an empty range for those never seen."""
    known_Q = nodes_Q != UNSEEN
    starts_Q, ends_Q = order.ranges(np.where(known_Q, nodes_Q, 0))
    return starts_Q, np.where(known_Q, ends_Q, starts_Q)


def find_in_ranges(sorted_N: NDArray[np.int32], low_Q: Counts, high_Q: Counts, tokens_Q: Counts) -> Counts:
    """The place of each token in its own sorted range, by one binary search for all; `UNSEEN` where it is not there.

    >>> find_in_ranges(np.array([2, 5, 9, 1, 5]), np.array([0, 3, 3]), np.array([3, 5, 5]), np.array([9, 5, 7]))
    array([ 2,  4, -1])
    """
    low_Q, end_Q = low_Q.astype(np.int64), high_Q.astype(np.int64)
    high_Q = end_Q
    last = max(0, len(sorted_N) - 1)
    for _ in range(int((high_Q - low_Q).max(initial=0)).bit_length()):
        middle_Q = (low_Q + high_Q) >> 1
        below_Q = (sorted_N[np.minimum(middle_Q, last)] < tokens_Q) & (low_Q < high_Q)
        low_Q = np.where(below_Q, middle_Q + 1, low_Q)
        high_Q = np.where(below_Q, high_Q, middle_Q)
    if not len(sorted_N):
        return np.full(len(low_Q), UNSEEN)
    hit_Q = (low_Q < end_Q) & (sorted_N[np.minimum(low_Q, last)] == tokens_Q)
    return np.where(hit_Q, low_Q, UNSEEN)
