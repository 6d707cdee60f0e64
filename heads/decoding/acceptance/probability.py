"""Which drafted tokens are accepted: the rules, stated before the code.

p is the backbone's distribution at a node after all logits processors, with that node's own prefix (P_T in the paper on
speculative decoding and MX formats); q is the distribution that a draft was sampled from (P_D there); f₊ is
max(0, f) / Σ max(0, f).

Exact rule: at the root, and then at each node reached, one token is chosen from p exactly as plain generation chooses
it (argmax or one multinomial sample). If a child holds that token, the walk continues there; if not, the walk ends and
the token is the next root. So every emitted token was chosen from p given the tokens before it.

Modified rejection sampling (figure 9 of that paper; Chen et al., 2023), for sampled drafts: a draft t from q is the
token with probability min{1, p(t) / q(t)}; if it is rejected, the token is sampled from (p - q)₊. Either way the token
is a sample of p: t comes out with probability min(q(t), p(t)) + Σ max(0, q - p) · (p - q)₊(t) = p(t). A draft t with
q(t) > p(t) may be rejected, one with q(t) ≤ p(t) never is. The sentence below figure 10 has the two the wrong way round
("t₁ and t₃ have the property P_D(t) ≤ P_T(t)"); the cases in the figure are right.

Several drafts x₁, x₂, … of one node, sampled from q without replacement, are tried in the order in which they were
sampled. Let r = p and q₁ = q. For each i: x_i is the token with probability min{1, r(x_i) / q_i(x_i)}; if it is
rejected, r ← (r - q_i)₊, and q_{i+1} is q_i without x_i, made to sum to 1. If all are rejected, the token is sampled
from r. By induction from the last draft to the first, the output of each try is a sample of its own r, and r of the
first try is p. A looked-up draft was not sampled and counts as one whose q is 1 at that token.

Typical acceptance (Cai et al., 2024, section 2.3), lossy: a draft x is accepted where p(x) > min(ε, δ · exp(-H(p))), H
being the entropy. The longest path of such drafts is taken, the likeliest one of equally long paths, and the token
after it is p's best. The text is plausible, but it is not distributed as p.
"""
# N tree node, C draft of one node, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from heads.decoding.trees.static import Shape


def walk(shape: Shape, tokens: Sequence[int], choose_at: Callable[[int], int], ended: Callable[[], bool]) -> list[int]:
    """The accepted nodes, root first.

    Two branches may begin with the same tokens (the heads' tree and a looked-up chain). Both are followed, and the
    longer path is returned.

    Args:
        tokens: the token of each node.
        choose_at: chooses and emits the token after a node.
        ended: whether the token just emitted ended the row.

    >>> shape = Shape((-1, 0, 1, 0))                     # root 7, its children 3 and 5, and 4 below 3
    >>> chosen = {0: 3, 1: 4, 2: 9}                      # the backbone's token after each node
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


def best_at_nodes(logits_BNV: Tensor) -> Tensor:
    """(B, N): the greedy choice after every node, for requests without processors.

    float64 logits are compared in float32, as in `generate`; a cast would not change the order of smaller dtypes.
    """
    if logits_BNV.dtype == torch.float64:
        logits_BNV = logits_BNV.float()
    return logits_BNV.argmax(dim=-1)


def residual(r_V: Tensor, q_V: Tensor) -> Tensor:
    """(r - q)₊: the distribution to sample from once a draft from q was rejected.

    Where no r(x) exceeds q(x), the two are equal within rounding, which alone caused the rejection, and the division by
    zero would give NaN. r itself is returned then: it is the distribution wanted, and is 0 wherever p is.

    >>> p_V, q_V = torch.tensor([0.30, 0.45, 0.10, 0.15]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    >>> residual(p_V, q_V)
    tensor([0.0000, 0.7500, 0.0000, 0.2500])
    >>> residual(p_V, p_V).equal(p_V)
    True
    """
    over_V = (r_V - q_V).clamp(min=0)
    total = over_V.sum()
    return torch.where(total > 0, over_V / total, r_V)


def reject_in_turn(p_V: Tensor, q_V: Tensor, drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(C,): each draft's probability of being accepted if those before it were rejected; (V,): the residual if all are.

    Args:
        p_V: the backbone's distribution, in float64, since differences of nearly equal probabilities are sampled from.
        q_V: the distribution that the drafts were sampled from without replacement, in any dtype, on any device and up
            to a factor. A draft that has probability 0 in it, or equals an earlier one, was not sampled: its q is 1 at
            that token.
        drafts: tokens in the order in which they were sampled.

    >>> p_V = torch.tensor([0.30, 0.45, 0.10, 0.15], dtype=torch.float64)
    >>> accept_C, rest_V = reject_in_turn(p_V, torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64), [0])
    >>> round(float(accept_C), 6), [round(float(x), 6) for x in rest_V]
    (0.75, [0.0, 0.75, 0.0, 0.25])
    """
    r_V, q_V = p_V, q_V.to(p_V)
    accept = []
    for x in drafts:
        one_hot_V = torch.zeros_like(p_V)
        one_hot_V[x] = 1
        given_V = torch.where(q_V[x] > 0, q_V / q_V.sum(), one_hot_V)
        accept.append((r_V[x] / given_V[x]).clamp(max=1))
        r_V = residual(r_V, given_V)
        q_V = q_V * (1 - one_hot_V)
    return torch.stack(accept), r_V


def choose_by_rejection(p_V: Tensor, q_V: Tensor, drafts: Sequence[int], generator: torch.Generator | None) -> int:
    """One sample of p: the first draft that is accepted, else another token. Arguments as in `reject_in_turn`."""
    accept_C, rest_V = reject_in_turn(p_V, q_V, drafts)
    return settle(drafts, accept_C, rest_V, generator)


def settle(drafts: Sequence[int], accept_C: Tensor, rest_V: Tensor, generator: torch.Generator | None) -> int:
    """The first draft whose random number accepts it, else a sample of the rest; the host waits for the device once."""
    coins_C = torch.rand(accept_C.shape, dtype=accept_C.dtype, device=accept_C.device, generator=generator)
    other_1 = torch.multinomial(rest_V, num_samples=1, generator=generator)
    *accepted, other = torch.cat([coins_C < accept_C, other_1]).tolist()  # < : probability 0 is never accepted
    return next((x for x, is_accepted in zip(drafts, accepted, strict=True) if is_accepted), int(other))


def typical_threshold(p_V: Tensor, epsilon: float, delta: float) -> Tensor:
    """min(ε, δ · exp(-H(p))): lossy typical acceptance accepts drafts whose probability is greater.

    >>> float(typical_threshold(torch.tensor([0.5, 0.5]), epsilon=0.09, delta=0.1))     # exp(-H) is 1/2
    0.05000000074505806
    """
    return (delta * torch.exp(-torch.special.entr(p_V).sum())).clamp(max=epsilon)


def walk_typical(typical: Callable[[list[int]], list[tuple[int, float]]]) -> list[int]:
    """The longest path that lossy typical acceptance accepts, root first; the likeliest one of equally long paths.

    Args:
        typical: returns the accepted children of a path's last node, each with its probability.

    >>> children = {0: [(1, 0.6), (3, 0.4)], 1: [(2, 0.5)], 2: [], 3: [(4, 0.9)], 4: []}
    >>> walk_typical(lambda path: children[path[-1]])                   # 0.4 · 0.9 beats 0.6 · 0.5
    [0, 3, 4]
    """
    longest, ways = ([0], 1.0), [([0], 1.0)]
    while ways:
        path, probability = ways.pop()
        longest = max(longest, (path, probability), key=lambda way: (len(way[0]), way[1]))
        ways += [([*path, child], probability * p) for child, p in typical(path)]
    return longest[0]
