"""How many tokens a draft model proposes for one pass: a fixed number, or the one that measured times favour.

A pass over a chain of K drafted tokens, each accepted with probability α given those before it, emits

    E(K) = 1 + α + … + α^K = (1 − α^{K+1}) / (1 − α)        tokens, the backbone's own included, in
    S(K) = K · c_draft + c_verify(K)                         seconds.

`AdaptiveLength` takes the K from 1 to 16 with the greatest E(K) / S(K). This is theorem 3.8 of Leviathan, Kalman and
Matias (2023), who take c_verify for constant; here it is a line in K, since a pass over more nodes takes longer, on a
CPU and in large batches much longer. α is the share of accepted drafts among those that were compared with a token of
the backbone (drafts after a rejected one, or after the end of a row, are not). Seconds are recorded for each batch
size. Older passes weigh less in both averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

DEFAULT_K, MAX_K = 7, 16
PROBES = (DEFAULT_K, DEFAULT_K, 3)
"""K of a batch size's first passes. The first warms up and is not timed, the others give two points of a line."""
PRIOR_COMPARED, PRIOR_ACCEPTED = 10.0, 6.0
FORGETTING = 0.98


def expected_tokens(alpha: float, k: int) -> float:
    """E(K), the backbone's own token included.

    >>> expected_tokens(0.5, 2), expected_tokens(0.0, 7), expected_tokens(1.0, 7)
    (1.75, 1.0, 8.0)
    """
    return sum(alpha**i for i in range(k + 1))


@dataclass(kw_only=True)
class Seconds:
    """S(K) of one batch size: the mean seconds of a drafted token, and a least-squares line for the rest of a pass.

    >>> seconds = Seconds()
    >>> seconds.observe(k=4, draft=4.0, verify=10.0)
    >>> seconds.observe(k=2, draft=2.0, verify=8.0)
    >>> round(seconds(3), 6)                             # 3 drafted tokens of 1 s, and a pass of 6 + 1 · 3 s
    12.0
    """

    passes: int = 0
    lengths: set[int] = field(default_factory=set)  # a line needs two; near a text's end the probes may give one
    drafted: float = 0.0
    draft: float = 0.0
    weight: float = 0.0
    sum_k: float = 0.0
    sum_kk: float = 0.0
    sum_verify: float = 0.0
    sum_k_verify: float = 0.0

    def observe(self, *, k: int, draft: float, verify: float) -> None:
        """Add a pass: seconds of drafting k tokens, and of the rest of the pass."""
        self.lengths.add(k)
        seen = {"drafted": k, "draft": draft, "weight": 1.0, "sum_k": k, "sum_kk": k * k}
        for name, value in (seen | {"sum_verify": verify, "sum_k_verify": k * verify}).items():
            setattr(self, name, FORGETTING * getattr(self, name) + value)

    def __call__(self, k: int) -> float:
        """S(K); a slope below 0, which only noise can give, counts as 0."""
        variance = self.weight * self.sum_kk - self.sum_k**2
        covariance = self.weight * self.sum_k_verify - self.sum_k * self.sum_verify
        slope = max(0.0, covariance / variance) if variance > 1e-9 * self.sum_kk else 0.0
        verify = (self.sum_verify - slope * self.sum_k) / self.weight + slope * k
        return k * self.draft / self.drafted + verify


class DraftLength(Protocol):
    """Chooses K before each pass."""

    @property
    def longest(self) -> int:
        """No K is above this."""
        ...

    def choose(self, batch: int) -> int:
        """K for the next pass over `batch` rows."""
        ...

    def observe(self, *, k: int, draft: float, verify: float, accepted: Sequence[int], compared: Sequence[int]) -> None:
        """Learn from a pass over k drafts a row.

        Args:
            draft, verify: seconds of drafting them, and of the rest of the pass.
            accepted: for each row the number of accepted drafts.
            compared: for each row how many drafts were compared with a token of the backbone: the accepted ones, and
                the first one that was rejected.
        """
        ...


@dataclass(frozen=True)
class FixedLength:
    """Always the same K."""

    longest: int

    def choose(self, batch: int) -> int:
        return self.longest

    def observe(self, *, k: int, draft: float, verify: float, accepted: Sequence[int], compared: Sequence[int]) -> None:
        """Nothing is adapted."""


@dataclass
class AdaptiveLength:
    """K from the acceptance and the seconds so far, of all calls of a decoding object.

    >>> length = AdaptiveLength()
    >>> for k in [7, 7, 3]:                              # a drafted token takes 1 s, a pass 30 s whatever its length
    ...     length.observe(k=k, draft=1.0 * k, verify=30.0, accepted=[k], compared=[k])
    >>> length.choose(batch=1)                           # α is 0.855 now: E(K) / (K + 30) is greatest at 12
    12
    """

    compared: float = PRIOR_COMPARED
    accepted: float = PRIOR_ACCEPTED
    seconds: dict[int, Seconds] = field(default_factory=dict)

    longest = MAX_K

    @property
    def alpha(self) -> float:
        return self.accepted / self.compared

    def choose(self, batch: int) -> int:
        seconds = self.seconds.setdefault(batch, Seconds())
        if seconds.passes < len(PROBES) or len(seconds.lengths) < 2:
            return PROBES[seconds.passes % len(PROBES)]
        return max(range(1, MAX_K + 1), key=lambda k: expected_tokens(self.alpha, k) / seconds(k))

    def observe(self, *, k: int, draft: float, verify: float, accepted: Sequence[int], compared: Sequence[int]) -> None:
        self.compared = FORGETTING * self.compared + sum(compared)
        self.accepted = FORGETTING * self.accepted + sum(accepted)
        seconds = self.seconds.setdefault(len(accepted), Seconds())
        seconds.passes += 1
        if seconds.passes > 1:
            seconds.observe(k=k, draft=draft, verify=verify)


def build_length(k: int | Literal["adaptive"]) -> DraftLength:
    """The object that chooses K, for the `k` of `DraftModelDecoding`.

    Raises:
        ValueError: neither "adaptive" nor a length that is allowed.
    """
    if k == "adaptive":
        return AdaptiveLength()
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise ValueError(f'k={k!r} was given; allowed are 1 to {MAX_K} drafted tokens, or "adaptive".')
    return FixedLength(k)
