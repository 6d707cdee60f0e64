"""Acceptance pass by pass: how many tokens were drafted and accepted, and which nodes of a tree."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from heads.decoding.acceptance.rules import ExactRule, VerifiedNodes
from heads.decoding.request.request import Row


@dataclass(kw_only=True)
class Passes:
    """The verifying passes of one text, in order; the prompt's own pass drafts nothing and is not among them.

    Attributes:
        drafted: nodes beside the root that were verified.
        accepted: drafted tokens that were accepted.
        nodes: how often each node was accepted, by the tree's parents.
        verified: how often that tree was verified.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: dict[tuple[int, ...], Counter[int]] = field(default_factory=dict)
    verified: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def times_accepted(self, shape: tuple[int, ...]) -> list[int]:
        """For each node of a tree how often it was accepted; 0 for the root, which was not drafted."""
        return [self.nodes[shape][node] for node in range(len(shape))]


class CountingRule(ExactRule):
    """The exact rule, which also writes down what it accepts.

    Attributes:
        passes: of the current text; `begin` starts the next one's.
    """

    def __init__(self) -> None:
        self.passes = Passes()

    def begin(self) -> None:
        self.passes = Passes()

    def accept(self, row: Row, nodes: VerifiedNodes) -> list[int]:
        path = super().accept(row, nodes)
        shape = nodes.shape.parents
        self.passes.drafted.append(len(nodes.tokens) - 1)
        self.passes.accepted.append(len(path) - 1)
        self.passes.verified[shape] += 1
        self.passes.nodes.setdefault(shape, Counter()).update(path[1:])
        return path


def speculative_decoding(drafted: list[int], accepted: list[int], depth: int) -> dict[str, Any]:
    """A request's counts under the names of vLLM's per-request object `speculative_decoding`.

    `num_draft_tokens` counts all nodes of trees, so `draft_acceptance_rate` of a tree is far below a chain's of the
    same length. `acceptance_histogram` has the passes that accepted 0, 1, … tokens.

    Args:
        depth: the longest chain that may be drafted, which is vLLM's `num_spec_tokens`.

    >>> speculative_decoding([4, 4], [2, 0], depth=2)["mean_acceptance_length"]
    2.0
    """
    steps = len(accepted)
    counts = Counter(accepted)
    return {
        "mean_acceptance_length": 1 + sum(accepted) / max(1, steps),
        "draft_acceptance_rate": sum(accepted) / max(1, sum(drafted)),
        "acceptance_histogram": [counts[n] for n in range(max(depth, *accepted, 0) + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": depth,
    }
