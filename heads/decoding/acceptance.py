"""Which drafted tokens stay. The rules, stated before the code.

p is the backbone's distribution at a node after all logits processors, with that node's own prefix.

Exact rule: at the root, and then at each node reached, one token is chosen from p exactly as plain generation chooses
it (argmax for greedy, one multinomial draw for sampling). If a child holds that token, the child is accepted and the
walk goes on from it; if not, the walk ends there and the token is the next root. So every emitted token was chosen from
p given the tokens before it, and the drafts only decide how many are chosen in one pass: the output is p's, exactly.
"""
# N tree node, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heads.decoding.tree import Shape

Choose = Callable[[Tensor], int]
"""One token from processed scores (1, V)."""


def walk(shape: Shape, tokens: Sequence[int], choose_at: Callable[[int], int], ended: Callable[[], bool]) -> list[int]:
    """The accepted nodes, root first.

    Several branches may begin with the same tokens (a chain that was looked up, beside the heads' tree); they are one
    text so far, so all are followed, and the path is that of a branch which goes on longest.

    Args:
        tokens: the token of each node.
        choose_at: chooses and emits the token after a node.
        ended: has the row ended with the token just emitted?

    >>> shape = Shape((-1, 0, 1, 0))                     # root 7, its children 3 and 5, and 4 below 3
    >>> chosen = {0: 3, 1: 4, 2: 9}                      # what the backbone says after each node
    >>> walk(shape, [7, 3, 4, 5], lambda node: chosen[node], lambda: False)
    [0, 1, 2]
    """
    reached = [0]
    while True:
        token = choose_at(reached[0])
        followed = [child for node in reached for child in shape.children[node] if tokens[child] == token]
        reached = followed or reached
        if not followed or ended():
            return shape.ancestors(reached[0])


def choose_best(scores_1V: Tensor) -> int:
    """Greedy: the most likely token; of equals the first, as torch.argmax says and `generate` does."""
    return int(scores_1V.argmax(dim=-1))


def choose_by_lot(generator: torch.Generator | None) -> Choose:
    """Sampling: one draw from softmax(scores), the same call that `generate` makes."""

    def choose(scores_1V: Tensor) -> int:
        probs_1V = torch.softmax(scores_1V, dim=-1)
        return int(torch.multinomial(probs_1V, num_samples=1, generator=generator))

    return choose


def best_at_nodes(logits_BNV: Tensor) -> list[list[int]]:
    """The greedy choice at every node at once, for requests without processors: one synchronisation a pass.

    Logits are judged in float32 at most, as `generate` judges them; float16 and bfloat16 keep their order.
    """
    if logits_BNV.dtype == torch.float64:
        logits_BNV = logits_BNV.float()
    return logits_BNV.argmax(dim=-1).tolist()
