"""Caches that outlive a `generate` call, for conversations: the next call reads only what is new in its prompt.

What the last call committed is rolled back to the longest prefix that it shares with the new prompt. The prompt's last
token is always read anew: its pass gives the first logits and what heads draft from. The text is a fresh call's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from heads.backbone.model import BackboneState


class Rollable(Protocol):
    """A drafter whose state can be rolled back."""

    def keep_slots(self, num_slots: int) -> None: ...


D = TypeVar("D", bound=Rollable)


@dataclass(frozen=True, kw_only=True)
class Kept(Generic[D]):
    """What a call left: the committed tokens, one cache slot each, and the two states over them."""

    tokens: Sequence[int]
    state: BackboneState
    drafter: D


class KeptCaches(Generic[D]):
    """At most one call's caches. A call takes them out and puts its own in when it ends: one that fails leaves none."""

    def __init__(self) -> None:
        self._kept: Kept[D] | None = None

    @property
    def length(self) -> int:
        """Tokens of the call before."""
        return 0 if self._kept is None else len(self._kept.tokens)

    def take(self, tokens: Sequence[int]) -> Kept[D] | None:
        """What was kept, rolled back to the prefix that it shares with these tokens; None where it shares none."""
        kept, self._kept = self._kept, None
        shared = 0 if kept is None else count_shared(kept.tokens, tokens[:-1])
        if kept is None or not shared:
            return None
        kept.drafter.keep_slots(shared)
        return Kept(tokens=kept.tokens[:shared], state=kept.state.keep_slots(shared), drafter=kept.drafter)

    def put(self, kept: Kept[D]) -> None:
        self._kept = kept

    def forget(self) -> None:
        """Free the memory; after the backbone's weights have changed, this is a must."""
        self._kept = None


def count_shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common prefix.

    >>> count_shared([5, 6, 7], [5, 6, 9, 7]), count_shared([5], []), count_shared([5, 6], [5, 6, 7])
    (2, 0, 2)
    """
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))
