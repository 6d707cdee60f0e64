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
        sees: (N, N) or (B, N, N): True where a node sees another, itself and its ancestors.
        shapes: each row's nodes; rows may share one object. None: `parents_BN` has them, on the device.
        parents_BN: each node's parent, the root's 0. The host reads it together with the chosen tokens, so that it
            waits for the device once a pass.
        max_depth: no node is deeper.
        q_BNV: where drafts were sampled, the distributions that they were sampled from, up to a factor; the children of
            a node without replacement, in the order of the children. None where drafts are the proposer's best.
        sampled_from: for each node the row of `q_BNV` that it was sampled from, -1 where it was not sampled; None where
            every node was sampled from its parent's row.
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
    """Proposes tokens, and commits to its own state what the backbone commits."""

    @property
    def taps(self) -> Sequence[Tap]:
        """Hidden states of the backbone that `begin` and `commit` are given."""
        ...

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        """Called after each pass over prompt tokens, of which a long prompt takes several.

        Args:
            rows: all rows of the batch, before their first emitted token.
        """
        ...

    def propose(self, rows: list[Row]) -> Proposal:
        """What to verify next for each running row."""
        ...

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        """Keep what the backbone keeps of the pass."""
        ...

    def keep_rows(self, rows_R: Tensor) -> None:
        """Drop the other rows, which have ended."""
        ...
