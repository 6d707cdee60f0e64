"""Prompt lookup: what followed the last earlier place in a text that reads like its end (Saxena, 2023).

Heads know the backbone's state and guess locally; text that repeats itself is better copied. The chain is one more
branch of the tree, so verification and acceptance treat it like drafted tokens and the output stays the backbone's own.
"""

from __future__ import annotations

LONGEST_MATCH, SHORTEST_MATCH = 3, 2
MAX_LOOKUP = 64


class Lookup:
    """An index over one row's text, grown as the text grows.

    >>> Lookup(4).propose([1, 2, 3, 9, 1, 2])          # the end [1, 2] was there before; behind it stood [3, 9, 1, 2]
    [3, 9, 1, 2]
    >>> Lookup(4).propose([7, 5, 6, 5, 6])             # a loop goes on through what is being copied
    [5, 6, 5, 6]
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._behind: dict[tuple[int, ...], int] = {}  # n tokens -> where the text goes on behind their last occurrence
        self._indexed = 0

    def propose(self, tokens: list[int]) -> list[int]:
        """`length` tokens, or none where the text's last tokens are new."""
        self._index(tokens)
        for size in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            start = self._behind.get(tuple(tokens[-size:]))
            if start is not None and len(tokens) > size:
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(self.length)]
        return []

    def _index(self, tokens: list[int]) -> None:
        """Every run of tokens that has something behind it; the text's own end is not among them."""
        for end in range(max(self._indexed, SHORTEST_MATCH), len(tokens)):
            for size in range(SHORTEST_MATCH, LONGEST_MATCH + 1):
                if size <= end:
                    self._behind[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)


def check_lookup(length: int) -> int:
    if not 0 <= length <= MAX_LOOKUP:
        raise ValueError(f"lookup={length} was given; allowed are 0 (none) to {MAX_LOOKUP} tokens.")
    return length
