"""The rules of acceptance as the loop uses them: they walk a row's nodes, emit its tokens and say which nodes stay.

heads/decoding/acceptance.py states and proves the arithmetic; here it meets a row with its processors and its end.
"""
# N node, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from heads.decoding.acceptance import walk
from heads.decoding.request import Row
from heads.decoding.tree import Shape


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """One row's verified nodes.

    Attributes:
        logits_NV: the backbone's raw logits after each node.
        best: the greedy choice after each node, where it was judged for all nodes at once.
        q_NV: what each node's children were drawn from, where drafts were sampled.
    """

    shape: Shape
    tokens: Sequence[int]
    logits_NV: Tensor
    best: Sequence[int] | None
    q_NV: Tensor | None


class Rule(Protocol):
    """Which drafted tokens stay."""

    @property
    def takes_best(self) -> bool:
        """A greedy request without processors needs no more than the argmax at each node."""
        ...

    def accept(self, row: Row, nodes: Nodes) -> list[int]:
        """Emit the row's next tokens, at least one; the accepted nodes, root first."""
        ...


class ExactRule:
    """Lossless: a token is chosen at each node as plain generation chooses it, and the walk follows it."""

    takes_best = True

    def accept(self, row: Row, nodes: Nodes) -> list[int]:
        def choose_at(node: int) -> int:
            token = nodes.best[node] if nodes.best is not None else row.choose(nodes.logits_NV[node])
            row.emit(token)
            return token

        return walk(nodes.shape, nodes.tokens, choose_at, lambda: row.done)
