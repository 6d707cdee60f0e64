"""Drafting of a static tree as one compiled graph: what `heads.TreeDecoding(token_heads, compile=True)` drafts with.

A level of a tree is a few small products, so fast devices spend their time on starting them. Here all levels of a tree
are one graph, on CUDA a CUDA graph. A graph has as many rows as the batch began with: where rows have ended, the last
running row is repeated in their places. What is compiled is the code of `static_tree.draft`, the plain reference;
tests/heads/decoding/proposers/test_compiled_drafting.py compares the tokens.
"""
# B batch, X row of a graph, repeated ones among them, N tree node

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from heads.backbone.compiled import repeat_last
from heads.backbone.graph import compile_apart
from heads.backbone.projection import Projection
from heads.decoding.proposers.static_tree import TreeIndex, fill
from heads.interface.token_heads import TokenHeads


class CompiledDrafting:
    """One graph for each tree and number of rows of these heads, compiled when it is first asked for.

    Attributes:
        compile_seconds: seconds of the first call of each graph so far, compiling included, by (tree, rows).
    """

    def __init__(self, family: str, *, on_cuda: bool) -> None:
        self.family = family
        self.on_cuda = on_cuda
        self.graphs: dict[tuple[Any, int], Callable[..., Tensor]] = {}
        self.compile_seconds: dict[tuple[Any, int], float] = {}

    def draft(
        self, token_heads: TokenHeads, projections: Sequence[Projection], state: Any, root_B: Tensor, index: TreeIndex
    ) -> Tensor:
        """Tokens of the tree's nodes (B, N), as `draft` has them.

        Args:
            index: for the rows of the graph, of which there may be more than in `root_B`.

        Raises:
            ValueError: torch cannot make one graph of these heads.
        """
        rows = len(index.rows_B)
        level = pytree.tree_map(lambda x_B: repeat_last(x_B, rows), token_heads.first_level(state))
        key, start = (tuple(index.tree.paths), rows), time.perf_counter()
        run = self.graph(key)
        try:
            tokens_XN = run(token_heads, projections, level, repeat_last(root_B, rows), index.levels, index.order_BN)
        except torch._dynamo.exc.Unsupported as error:
            raise ValueError(
                f"compile=True was given, but torch makes no graph of drafting with {self.family} heads "
                f"({str(error).splitlines()[0]}); give compile=False."
            ) from error
        self.compile_seconds.setdefault(key, time.perf_counter() - start)
        return (tokens_XN.clone() if self.on_cuda else tokens_XN)[: len(root_B)]  # the next replay writes over it

    def graph(self, key: tuple[Any, int]) -> Callable[..., Tensor]:
        if key not in self.graphs:
            self.graphs[key] = compile_apart(fill, self.on_cuda)
        if self.on_cuda:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return self.graphs[key]


_COMPILED: weakref.WeakKeyDictionary[TokenHeads, CompiledDrafting] = weakref.WeakKeyDictionary()


def compiled_drafting(token_heads: TokenHeads) -> CompiledDrafting:
    """The heads' compiled drafting; all decoders of these heads share its graphs."""
    if token_heads not in _COMPILED:
        on_cuda = token_heads.backbone.heads_device.type == "cuda"
        _COMPILED[token_heads] = CompiledDrafting(token_heads.family, on_cuda=on_cuda)
    return _COMPILED[token_heads]
