"""Caches that outlive a `generate` call, for conversations: the next call reads only what is new in its prompt.

What the last call committed is rolled back to the longest prefix that it shares with the new prompt. The prompt's last
token is always read anew: its pass gives the first logits and what heads draft from. The text is a fresh call's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from heads.backbone.model import BackboneState


class RollsBack(Protocol):
    """A drafter whose state can be rolled back."""

    def keep_slots(self, num_slots: int) -> None: ...


D = TypeVar("D", bound=RollsBack)


@dataclass(frozen=True, kw_only=True)
class CachedText(Generic[D]):
    """A call's committed tokens, one cache slot each, and the states of backbone and drafter over them."""

    tokens: Sequence[int]
    state: BackboneState
    drafter: D


class ReusableCaches(Generic[D]):
    """The caches of at most one call. A call removes them and stores its own at its end, a failed call none."""

    def __init__(self) -> None:
        self._cached: CachedText[D] | None = None

    @property
    def length(self) -> int:
        """Tokens of the call before."""
        return 0 if self._cached is None else len(self._cached.tokens)

    def take(self, tokens: Sequence[int]) -> CachedText[D] | None:
        """The cached text, rolled back to the prefix that it shares with these tokens; None where it shares none."""
        cached, self._cached = self._cached, None
        shared = 0 if cached is None else count_shared(cached.tokens, tokens[:-1])
        if cached is None or not shared:
            return None
        cached.drafter.keep_slots(shared)
        return CachedText(tokens=cached.tokens[:shared], state=cached.state.keep_slots(shared), drafter=cached.drafter)

    def put(self, cached: CachedText[D]) -> None:
        self._cached = cached

    def forget(self) -> None:
        """Free the memory. After the backbone's weights have changed this has to be called."""
        self._cached = None


def count_shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> count_shared([5, 6, 7], [5, 6, 9, 7]), count_shared([5], []), count_shared([5, 6], [5, 6, 7])
    (2, 0, 2)
    """
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))
