"""What a drafter proposes for one pass, and what the loop asks of a drafter."""
# B row that still runs, N node, V vocabulary, R row that stays

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from heads.backbone.model import CommitPlan, Pass, Tap
from heads.decoding.request.request import Row
from heads.decoding.trees.static import Shape


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The nodes that one pass verifies, the root of each row first.

    Attributes:
        tokens_BN: each node's token; the root's is the row's newest, which the backbone has not read yet.
        depth: (N,) or, where rows differ, (B, N).
        sees: (N, N) or (B, N, N): True where a node sees another: itself and its ancestors.
        shapes: each row's nodes; rows may share one object. None: the loop makes them from `parents_BN`.
        parents_BN: each node's parent, 0 for the root. It stays on the device until the chosen tokens are copied to the
            host, so that the host waits once for each pass.
        max_depth: no node is deeper.
        q_BNV: the distributions that drafts were sampled from, up to a factor: a node's children were sampled without
            replacement, in their order. None where drafts are the proposer's best tokens.
        sampled_from: for each node the row of `q_BNV` that it was sampled from, -1 if it was not sampled; None where
            `q_BNV` is None.
    """

    tokens_BN: Tensor
    depth: Tensor
    sees: Tensor
    shapes: Sequence[Shape] | None
    max_depth: int
    parents_BN: Tensor | None = None
    q_BNV: Tensor | None = None
    sampled_from: Sequence[int] | None = None


class Drafter(Protocol):
    """Proposes tokens, and commits the same tokens as the backbone to a state of its own."""

    @property
    def taps(self) -> Sequence[Tap]:
        """The taps that `begin` and `commit` are given."""
        ...

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        """Take in a pass over prompt tokens; a long prompt takes several passes.

        Args:
            rows: all rows of the batch, before their first emitted token.
        """
        ...

    def propose(self, rows: list[Row]) -> Proposal:
        """The nodes to verify next for each running row."""
        ...

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        """Commit what the backbone commits of the pass."""
        ...

    def keep_rows(self, rows_R: Tensor) -> None:
        """Keep these rows; the others have ended."""
        ...
