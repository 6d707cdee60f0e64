"""Draft and accept for code with a decoding loop of its own; docs/decode.md adds verify and commit to them.

`TreeDecoding` does the same inside `generate`, with processors, stopping criteria, lookup and statistics.
"""
# B row, N tree node, V vocabulary

from __future__ import annotations

from typing import Any

from torch import Tensor

from heads.decoding.acceptance.probability import best_at_nodes, walk
from heads.decoding.proposers.static_tree import TreeIndex, draft
from heads.decoding.trees.static import Shape, Tree
from heads.interface.token_heads import TokenHeads


class TreeDrafter:
    """Fills a tree with the heads' tokens, for one batch size.

    Attributes:
        depth_N, sees_NN: the nodes' depths and which nodes each one sees, as `Backbone.verify` takes them.

    Raises:
        ValueError: `tree` is no `Tree`.
    """

    def __init__(self, token_heads: TokenHeads, tree: Tree, batch: int = 1) -> None:
        if not isinstance(tree, Tree):
            raise ValueError(f"tree={tree!r:.80} was given; give a heads.Tree, such as heads.Tree([[0], [0, 0], [1]]).")
        token_heads.refresh()
        self.token_heads = token_heads
        self.tree = tree
        self.index = TreeIndex(tree, batch, token_heads.backbone.heads_device, grounded=token_heads.grounded)
        self.depth_N, self.sees_NN = self.index.depth_N, self.index.sees_NN
        self._projections = [token_heads.projection(k) for k in range(1, tree.depth + 1)]

    def draft(self, heads_state: Any, root_B: Tensor) -> Tensor:
        """Tokens (B, N) of the nodes, the root first.

        Args:
            heads_state: what `token_heads.commit` returned last.
            root_B: each row's newest token, which the backbone has not read yet.
        """
        return draft(self.token_heads, self._projections, heads_state, root_B, self.index)


def accept_greedy(shape: Shape, tokens_BN: Tensor, logits_BNV: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """For each row the accepted nodes, root first, and its new tokens: the backbone's best after each of those nodes.

    The tokens are those of plain greedy generation; the last one is the next root.

    >>> import torch
    >>> tree = Tree([[0], [1]])                                       # a root with two children
    >>> logits = torch.eye(10)[[3, 5, 7]][None]                       # 3, 5, 7 are the likeliest after the nodes
    >>> accept_greedy(tree, torch.tensor([[8, 4, 3]]), logits)        # the second child holds 3
    ([[0, 2]], [[3, 7]])

    Args:
        tokens_BN: the nodes' tokens, as drafted.
        logits_BNV: the backbone's logits after each node.
    """
    best = best_at_nodes(logits_BNV).tolist()
    paths = [
        walk(shape, tokens, chosen.__getitem__, lambda: False)
        for tokens, chosen in zip(tokens_BN.tolist(), best, strict=True)
    ]
    return paths, [[chosen[node] for node in path] for path, chosen in zip(paths, best, strict=True)]
