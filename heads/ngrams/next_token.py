"""Probabilities of next tokens under a table's n-gram model of each order, which superposed decoding interpolates.

p_n(x | last n − 1 tokens) is the n-gram's count over the counts of all n-grams with the same beginning (its first n − 1
tokens), for n = 2 to the table's order (superposed decoding, equation 5). It is 0 if the beginning was never seen.

One call answers for all texts, orders and tokens of a step. Where the extensions of a beginning lie is cached between
calls: a beginning of one step is one of the step before with one more token, so each takes one search. A beginning that
was never seen ends a text's search, since longer ones that end with it were not seen either.
"""
# N text, C context token, O order from 2 on, M next token asked for, F beginning found

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from heads.ngrams.trie import Counts, TrieOrder, as_type_of

Probabilities = NDArray[np.float64]
Span = tuple[int, int, int]
"""Where the n-grams that extend a beginning start and end, and the sum of their counts."""
NOTHING: Span = (0, 0, 0)
KEPT = 1 << 16
"""The most beginnings that are cached, about 20 MB; then the cache is cleared."""


class NextTokens:
    """Answers from a table's orders from 2 on."""

    def __init__(self, orders: Sequence[TrieOrder], vocab_size: int) -> None:
        self.orders, self.vocab_size = orders, vocab_size
        self.spans: dict[tuple[int, ...], Span] = {}

    def probabilities(self, contexts_NC: Counts, tokens_NM: Counts) -> Probabilities:
        """(N, O, M): p_n of each token after each text.

        Args:
            contexts_NC: the last tokens of each text, -1 where a text is shorter.
            tokens_NM: the next tokens asked for.
        """
        found_NOM = np.zeros((len(contexts_NC), len(self.orders), tokens_NM.shape[1]))
        if not tokens_NM.size:
            return found_NOM
        rows: list[list[int]] = [[] for _ in self.orders]
        spans: list[list[Span]] = [[] for _ in self.orders]
        for row, context in enumerate(contexts_NC.tolist()):
            for length in range(1, min(len(self.orders), len(context)) + 1):
                span = self.span(tuple(context[-length:]))
                if not span[2]:
                    break
                rows[length - 1].append(row)
                spans[length - 1].append(span)
        unknown_NM = (tokens_NM < 0) | (tokens_NM >= self.vocab_size)
        asked_NM = np.where(unknown_NM, 0, tokens_NM)
        for i, order in enumerate(self.orders):
            if rows[i]:
                found_NOM[rows[i], i] = share_of_each(order, spans[i], asked_NM[rows[i]])
        found_NOM.transpose(0, 2, 1)[unknown_NM] = 0
        return found_NOM

    def span(self, beginning: tuple[int, ...]) -> Span:
        """Where a beginning's extensions lie; `NOTHING` where it was never seen with a next token."""
        found = self.spans.get(beginning)
        if found is None:
            found = self.find_span(beginning)
            if len(self.spans) >= KEPT:
                self.spans.clear()
            self.spans[beginning] = found
        return found

    def find_span(self, beginning: tuple[int, ...]) -> Span:
        token = beginning[-1]
        if not 0 <= token < self.vocab_size:
            return NOTHING
        node = token
        if len(beginning) > 1:
            start, end, total = self.span(beginning[:-1])
            if not total:
                return NOTHING
            tokens = self.orders[len(beginning) - 2].tokens_N
            node = start + int(tokens[start:end].searchsorted(tokens.dtype.type(token)))
            if node == end or tokens[node] != token:
                return NOTHING
        order = self.orders[len(beginning) - 1]
        start, end = order.range_of(node)
        return start, end, int(order.counts_N[start:end].sum(dtype=np.int64))


def share_of_each(order: TrieOrder, spans: Sequence[Span], tokens_FM: Counts) -> Probabilities:
    """(F, M): the share of each token among all that were counted after a beginning."""
    asked_FM = as_type_of(order.tokens_N, tokens_FM)
    searches = zip(spans, asked_FM, strict=True)
    found = np.concatenate([order.tokens_N[start:end].searchsorted(asked) for (start, end, _), asked in searches])
    starts_F, ends_F, totals_F = np.array(spans).T
    places_FM = found.reshape(asked_FM.shape) + starts_F[:, None]
    np.minimum(places_FM, ends_F[:, None] - 1, out=places_FM)
    counts_FM = order.counts_N.take(places_FM) * (order.tokens_N.take(places_FM) == asked_FM)
    shares_FM: Probabilities = counts_FM / totals_F[:, None]
    return shares_FM
