"""The rules of acceptance as the loop uses them: each walks a row's nodes, emits tokens and returns the accepted nodes.

heads/decoding/acceptance/probability.py states and proves the arithmetic; here it is applied to rows, which have
processors and an end. Where a request is greedy, the text under every rule is that of plain greedy decoding.
"""
# N node, V vocabulary

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.decoding.acceptance.probability import (
    choose_by_rejection,
    typical_threshold,
    walk,
    walk_typical,
)
from heads.decoding.request.request import Row, choose_best, fork
from heads.decoding.trees.static import Shape


@dataclass(frozen=True, kw_only=True)
class VerifiedNodes:
    """One row's verified nodes.

    Attributes:
        logits_NV: the backbone's raw logits after each node.
        chosen: the token after each node, as plain generation chooses it; None: the rule has to choose.
        q_NV, sampled_from: as in `Proposal`.
    """

    shape: Shape
    tokens: Sequence[int]
    logits_NV: Tensor
    chosen: Sequence[int] | None
    q_NV: Tensor | None
    sampled_from: Sequence[int] | None

    def sampled_children(self, node: int) -> tuple[list[int], int]:
        """The sampled tokens among a node's children, in order, and the row of `q_NV` that they came from."""
        rows = self.sampled_from
        assert rows is not None
        sampled = [child for child in self.shape.children[node] if rows[child] >= 0]
        return [self.tokens[child] for child in sampled], rows[sampled[0]] if sampled else -1


class Rule(Protocol):
    """Decides which drafted tokens are accepted."""

    @property
    def argmax_suffices(self) -> bool:
        """Whether a greedy request needs no more than the argmax of the processed scores at each node."""
        ...

    @property
    def sample_suffices(self) -> bool:
        """Whether a sampling request needs no more than one sample of the processed distribution at each node."""
        ...

    @property
    def samples_drafts(self) -> bool:
        """Whether a sampling request has its drafts sampled too, from the distributions in `Proposal.q_BNV`."""
        ...

    def accept(self, row: Row, nodes: VerifiedNodes) -> list[int]:
        """Emit the row's next tokens, at least one, and return the accepted nodes, root first."""
        ...


class ExactRule:
    """Lossless: a token is chosen at each node as plain generation chooses it, and the walk follows it."""

    argmax_suffices = True
    sample_suffices = True
    samples_drafts = False

    def accept(self, row: Row, nodes: VerifiedNodes) -> list[int]:
        def choose_at(node: int) -> int:
            token = nodes.chosen[node] if nodes.chosen is not None else row.choose(nodes.logits_NV[node])
            row.emit(token)
            return token

        return walk(nodes.shape, nodes.tokens, choose_at, lambda: row.done)


class RejectionRule(ExactRule):
    """Lossless: modified rejection sampling, for sampled drafts.

    The sampled children of a node are tried in turn; at a node without any, the token is chosen as in plain generation.
    The walk follows every child that holds the token, looked-up ones too.

    Args:
        generator: source of randomness; None is torch's global one.
    """

    argmax_suffices = True
    sample_suffices = False
    samples_drafts = True

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def accept(self, row: Row, nodes: VerifiedNodes) -> list[int]:
        q_NV = nodes.q_NV
        if q_NV is None or row.request.greedy:
            return super().accept(row, nodes)

        def choose_at(node: int) -> int:
            drafts, source = nodes.sampled_children(node)
            logits_V = nodes.logits_NV[node]
            token = self.choose(row, logits_V, q_NV[source], drafts) if drafts else row.choose(logits_V)
            row.emit(token)
            return token

        return walk(nodes.shape, nodes.tokens, choose_at, lambda: row.done)

    def choose(self, row: Row, logits_V: Tensor, q_V: Tensor, drafts: Sequence[int]) -> int:
        p_V = torch.softmax(row.score(logits_V)[0], dim=-1, dtype=torch.float64)
        return choose_by_rejection(p_V, q_V, drafts, self.generator)


class TypicalRule:
    """LOSSY typical acceptance (Cai et al., 2024): accepts the longest path of drafts that are likely enough.

    A draft x is likely enough where p(x) > min(epsilon, delta · exp(-H(p))), and the token after the path is p's best.
    Where a request is greedy, the text is that of plain greedy decoding.

    Processors are called for drafts that may not be emitted. Those that may keep a state are copied for each path.

    Args:
        epsilon: drafts that are more probable than this are always likely enough.
        delta: factor on exp(-H(p)), which is lower the flatter p is.

    >>> TypicalRule(epsilon=0.09, delta=0.3)
    TypicalRule(epsilon=0.09, delta=0.3)

    Raises:
        ValueError: a number outside 0 to 1; while decoding, a processor that may keep a state and cannot be copied.
    """

    argmax_suffices = True
    sample_suffices = False
    samples_drafts = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        for name, value in (("epsilon", epsilon), ("delta", delta)):
            if not isinstance(value, numbers.Real) or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r} was given; a threshold on probabilities is from 0 to 1.")
        self.epsilon, self.delta = epsilon, delta

    def __repr__(self) -> str:
        return f"TypicalRule(epsilon={self.epsilon}, delta={self.delta})"

    def accept(self, row: Row, nodes: VerifiedNodes) -> list[int]:
        if row.request.greedy:
            return ExactRule().accept(row, nodes)
        processed: dict[int, tuple[Tensor, Tensor]] = {}  # raw logits and scores by node; a node has only one path
        forked: dict[int, LogitsProcessorList] = {}

        def typical(path: list[int]) -> list[tuple[int, float]]:
            ahead = [nodes.tokens[node] for node in path[1:]]
            if ahead and ahead[-1] in row.request.eos_tokens:
                return []
            forked[path[-1]] = fork(forked[path[-2]] if ahead else row.processors)
            processed[path[-1]] = row.process(nodes.logits_NV[path[-1]], ahead, forked[path[-1]])
            return self.likely_children(nodes, path[-1], processed[path[-1]][1])

        path = walk_typical(typical)
        for i, (node, child) in enumerate(itertools.pairwise(path)):
            row.store(*processed[node])
            row.emit(nodes.tokens[child])
            if row.done:
                return path[: i + 2]
        row.processors = forked[path[-1]]
        row.store(*processed[path[-1]])
        row.emit(choose_best(processed[path[-1]][1]))
        return path

    def likely_children(self, nodes: VerifiedNodes, node: int, scores_1V: Tensor) -> list[tuple[int, float]]:
        children = nodes.shape.children[node]
        p_V = torch.softmax(scores_1V[0], dim=-1)
        probs_C = p_V[[nodes.tokens[child] for child in children]]
        threshold, *probs = torch.cat([typical_threshold(p_V, self.epsilon, self.delta)[None], probs_C]).tolist()
        return [(child, p) for child, p in zip(children, probs, strict=True) if p > threshold]


RULES = ("exact", "rejection", "typical")


def read_rule(rule: str | Rule, generator: torch.Generator | None) -> Rule:
    """The rule of a name, or the caller's own object.

    >>> read_rule("typical", None)
    TypicalRule(epsilon=0.09, delta=0.3)

    Raises:
        ValueError: neither a rule nor the name of one.
    """
    if isinstance(rule, ExactRule | TypicalRule):
        return rule
    if rule == "exact":
        return ExactRule()
    if rule == "rejection":
        return RejectionRule(generator)
    if rule == "typical":
        return TypicalRule()
    raise ValueError(
        f"rule={rule!r} was given; allowed are {', '.join(map(repr, RULES))} and heads.TypicalRule(epsilon=…, delta=…)."
    )
