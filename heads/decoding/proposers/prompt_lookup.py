"""Prompt lookup: copy the tokens that followed the last earlier occurrence of a text's last tokens (Saxena, 2023).

Text that repeats itself is copied more accurately than heads predict it. The copied chain is one more branch of the
tree, so it is verified and accepted like drafted tokens, and the output is still the backbone's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heads.decoding.request.request import Row
from heads.decoding.trees.static import Shape

LONGEST_MATCH, SHORTEST_MATCH = 3, 2
DEFAULT_LOOKUP, MAX_LOOKUP = 10, 64
MAX_GROWTH = 4
"""While whole chains are accepted, they double, up to this many times the configured length: a text that copies tends
to go on copying, and further nodes of a pass cost less than further passes."""


class Lookup:
    """Chains for one row, from an index of its text that grows with the text.

    >>> Lookup(4).propose([1, 2, 3, 9, 1, 2])          # the end [1, 2] occurred before, followed by [3, 9, 1, 2]
    [3, 9, 1, 2]
    >>> Lookup(4).propose([7, 5, 6, 5, 6])             # the copied text may overlap the end
    [5, 6, 5, 6]

    Attributes:
        copying: whether the last chain and the token predicted after it were all emitted, and a new chain was found.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.copying = False
        self._predicted: list[int] = []
        self._length_then = 0
        self._followers: dict[tuple[int, ...], int] = {}  # n tokens -> the index after their last occurrence
        self._indexed = 0

    def find(self, tokens: list[int]) -> int:
        """The length of the next chain; 0 if the text's last tokens have not occurred before."""
        self._index(tokens)
        continued = bool(self._predicted) and tokens[self._length_then :] == self._predicted
        found = bool(self._copy(tokens, 1))
        self.copying = continued and found
        if not found:
            self._predicted = []
            return 0
        doubled = 2 * (len(self._predicted) - 1)
        return min(doubled, MAX_GROWTH * self.length) if self.copying else self.length

    def take(self, tokens: list[int], length: int) -> list[int]:
        """A chain of `length` tokens after the text that `find` was just called with; empty if `length` is 0."""
        self._predicted, self._length_then = self._copy(tokens, length + 1) if length else [], len(tokens)
        return self._predicted[:length]

    def propose(self, tokens: list[int]) -> list[int]:
        """The next chain, of the length that `find` returns."""
        return self.take(tokens, self.find(tokens))

    def _copy(self, tokens: list[int], length: int) -> list[int]:
        """`length` tokens from after the last earlier occurrence of the text's end; the longest matching end counts."""
        for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            start = self._followers.get(tuple(tokens[-size:]))
            if start is not None and len(tokens) > size:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(length)]
        return []

    def _index(self, tokens: list[int]) -> None:
        """Index every new run of tokens that is followed by a token, so not the text's own end."""
        for end in range(max(self._indexed, SHORTEST_MATCH), len(tokens)):
            for size in range(SHORTEST_MATCH, LONGEST_MATCH + 1):
                if size <= end:
                    self._followers[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)


class RowLookups:
    """The looked-up chains of a batch: one `Lookup` for each row, and chains of one length for all rows of a pass.

    Args:
        length: tokens of a chain; 0: nothing is looked up.
        reach: depth of the drafts beside the chain; while all rows copy, chains longer than this are verified alone.
    """

    def __init__(self, length: int, reach: int) -> None:
        self.length = length
        self.reach = reach
        self.by_row: dict[int, Lookup] = {}  # by `Row.index`

    def begin(self, rows: Sequence[Row]) -> None:
        self.by_row = {row.index: Lookup(self.length) for row in rows} if self.length else {}

    def find(self, rows: Sequence[Row]) -> list[list[int]] | None:
        """Chains of one length, one for each row; None if no row's last tokens have occurred in its text before.

        A row without such an occurrence gets a chain of zeros. Chains grow only while they are verified alone.
        """
        if not self.by_row:
            return None
        worth = [self.by_row[row.index].find(row.tokens) for row in rows]
        length = min(worth) if self.alone(rows) else self.length
        chains = [
            self.by_row[row.index].take(row.tokens, length if n else 0) for row, n in zip(rows, worth, strict=True)
        ]
        return [chain or [0] * length for chain in chains] if any(worth) else None

    def alone(self, rows: Sequence[Row]) -> bool:
        """Whether chains are verified alone: every row copies, and chains are longer than drafts are deep."""
        return self.length > self.reach and all(self.by_row[row.index].copying for row in rows)


class ChainIndex:
    """The indices of a pass over the root and a looked-up chain alone."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.shape = Shape((-1,)).with_chain(length)
        self.depth_N = self.shape.depth_tensor(device)
        self.sees_NN = self.shape.sees_NN(device)


def check_lookup(length: int) -> int:
    if not 0 <= length <= MAX_LOOKUP:
        raise ValueError(f"lookup={length} was given; allowed are 0 (none) to {MAX_LOOKUP} tokens.")
    return length


def count_shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> count_shared([5, 6, 7], [5, 6, 9, 7]), count_shared([5], []), count_shared([5, 6], [5, 6, 7])
    (2, 0, 2)
    """
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))
