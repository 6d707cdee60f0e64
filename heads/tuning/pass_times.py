"""A model that predicts the seconds of a pass with a tree from measured terms (heads/tuning/timing.py).

    seconds of a pass = draft(depth, expanding nodes of each level) + verify(nodes) + level · (depth - 1) + rest

Between measured numbers of nodes time is interpolated linearly; above the largest it grows in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of the parts of a pass, for a batch of `batch` rows after `context` tokens.

    Attributes:
        plain: one step of plain `generate`.
        verify: verifying, by number of nodes, the root included.
        step: one head's step, by (head, expanding nodes of a row).
        grow: drafting a dynamic tree, by (depth, width); heads that read no drafted token have only width 1.
        level: what each level of drafted nodes beyond the first adds to verifying: recurrent layers run level by level,
            while attention reads all levels together and adds 0.
        rest_static, rest_dynamic: the rest of a pass, besides drafting and verifying.
        grounded: whether each expanding node of a level costs a row of the head; otherwise a level costs one row.
    """

    batch: int
    context: int
    plain: float
    verify: Mapping[int, float]
    step: Mapping[tuple[int, int], float]
    grow: Mapping[tuple[int, int], float]
    rest_static: float
    rest_dynamic: float
    grounded: bool
    level: float = 0.0

    def scaled(self, factor: float) -> PassTimes:
        return replace(
            self,
            plain=factor * self.plain,
            verify={nodes: factor * seconds for nodes, seconds in self.verify.items()},
            step={at: factor * seconds for at, seconds in self.step.items()},
            grow={at: factor * seconds for at, seconds in self.grow.items()},
            level=factor * self.level,
            rest_static=factor * self.rest_static,
            rest_dynamic=factor * self.rest_dynamic,
        )

    def draft(self, tree: Tree) -> float:
        """Drafting a static tree: one step of a head for each level."""
        expanding = [len(level.parents) if self.grounded and k else 1 for k, level in enumerate(tree.levels)]
        return sum(self.step_at(k, count) for k, count in enumerate(expanding, start=1))

    def step_at(self, head: int, expanding: int) -> float:
        counts = sorted(count for k, count in self.step if k == head)
        seconds = [self.step[head, count] for count in counts]
        return float(np.interp(expanding, counts, seconds)) * max(1.0, expanding / counts[-1])

    def verify_at(self, nodes: int) -> float:
        counts = sorted(self.verify)
        seconds = float(np.interp(nodes, counts, [self.verify[count] for count in counts]))
        return seconds * max(1.0, nodes / counts[-1])

    def static(self, tree: Tree) -> float:
        return self.draft(tree) + self.verify[tree.num_nodes] + self.deeper(tree.depth) + self.rest_static

    def dynamic(self, tree: DynamicTree) -> float:
        assert tree.depth is not None
        drafted = self.grow[tree.depth, tree.width]
        return drafted + self.verify[tree.nodes] + self.deeper(tree.depth) + self.rest_dynamic

    def deeper(self, depth: int) -> float:
        """Seconds that the levels beyond the first add to verifying."""
        return self.level * max(0, depth - 1)
