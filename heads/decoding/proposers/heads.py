"""Drafts of the heads for one `generate` call: a tree, and beside it a chain that is looked up in the text.

The tree is static, with the heads' best tokens or sampled ones (heads/decoding/proposers/static_tree.py), or
dynamic (heads/decoding/trees/dynamic.py).

With `compile=True` all levels of a static tree are drafted by one compiled graph, on CUDA a CUDA graph, since a level
is a few small products and a fast device spends its time on starting them. A graph has as many rows as the batch began
with: once rows have ended, the last running row is repeated in their stead. The compiled function is
`static_tree.fill`; tests/heads/decoding/proposers/test_compiled_drafting.py compares its tokens with uncompiled ones.
"""
# B row, X row of a graph, repeated ones among them, N tree node, Q distribution that drafts were sampled from,
# V vocabulary, L looked-up token, R row that stays

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from heads.backbone.compiling.buffers import repeat_last
from heads.backbone.compiling.graph import compile_apart
from heads.backbone.model import CommitPlan, Pass, Tap
from heads.backbone.projection import Projection
from heads.decoding.proposers.prompt_lookup import ChainIndex, RowLookups
from heads.decoding.proposers.proposal import Proposal
from heads.decoding.proposers.static_tree import SampledTreeIndex, TreeIndex, draft, fill, sample_tree
from heads.decoding.request.request import Row
from heads.decoding.trees.dynamic import DynamicTree, grow
from heads.decoding.trees.static import Tree
from heads.interface.token_heads import TokenHeads


class DraftIndices:
    """The index tensors of one tree and its looked-up chains, each made once and used by every call.

    Attributes:
        tree, sampled: the tree's, by batch size, device and length of the chain beside it; for sampled drafts.
        chain: those of a chain without the tree, by length and device.
    """

    def __init__(self, tree: Tree | DynamicTree, *, grounded: bool) -> None:
        def index_tree(batch: int, device: torch.device, chain: int) -> TreeIndex:
            assert isinstance(tree, Tree)
            return TreeIndex(tree, batch, device, grounded=grounded, chain=chain)

        def index_samples(batch: int, device: torch.device, chain: int) -> SampledTreeIndex:
            assert isinstance(tree, Tree)
            return SampledTreeIndex(tree, batch, device, grounded=grounded, chain=chain)

        self.tree = functools.cache(index_tree)
        self.sampled = functools.cache(index_samples)
        self.chain = functools.cache(ChainIndex)


class HeadsDrafter:
    """Proposes the heads' tree and a looked-up chain. With a tree of the root alone, the heads are not run.

    Args:
        lookup: tokens of the chain; 0: no chain.
        graphs: compiled graphs that draft static trees; None: trees are drafted uncompiled.
        samples_drafts: static trees are filled with sampled tokens where a request samples.
    """

    def __init__(
        self,
        token_heads: TokenHeads,
        tree: Tree | DynamicTree,
        indices: DraftIndices,
        *,
        lookup: int,
        graphs: CompiledDrafting | None,
        samples_drafts: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.token_heads = token_heads
        self.tree = tree
        self.indices = indices
        self.graphs = graphs
        self.generator = generator
        self.asks_heads = tree.depth != 0
        self.samples_drafts = samples_drafts and self.asks_heads
        deepest = max(token_heads.num_heads, tree.depth or 0)
        self.projections = [token_heads.projection(k) for k in range(1, deepest + 1)]
        self.lookups = RowLookups(lookup, tree.depth or 0)
        self.first_batch = 0  # rows that the call began with
        self.state: Any = None

    @property
    def taps(self) -> Sequence[Tap]:
        return self.token_heads.taps if self.asks_heads else ()

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        self.commit(output, plan)
        self.first_batch = len(rows)
        self.lookups.begin(rows)

    def propose(self, rows: list[Row]) -> Proposal:
        """The heads' tree, and a chain where one was found.

        While every row copies and the chain is longer than the tree is deep, the chain is proposed without the tree.
        """
        device = self.token_heads.backbone.heads_device
        chains = self.lookups.find(rows)
        root_B = torch.tensor([row.tokens[-1] for row in rows], device=device)
        chains_BL = None if chains is None else torch.tensor(chains, device=device)
        length = 0 if chains_BL is None else chains_BL.shape[1]
        index: TreeIndex | ChainIndex
        q_BQV, sampled_from = None, None
        if length and self.lookups.alone(rows):
            index, tokens_BN = self.indices.chain(length, device), root_B[:, None]
        elif isinstance(self.tree, DynamicTree):
            return self.propose_dynamic(root_B, chains_BL, self.tree)
        elif self.samples_drafts and not rows[0].request.greedy:
            index = self.indices.sampled(len(rows), device, length)
            tokens_BN, q_BQV = self.sample(root_B, index, rows[0])
            sampled_from = index.sampled_from
        else:
            index = self.indices.tree(len(rows), device, length)
            tokens_BN = self.draft(root_B, index)
        if chains_BL is not None:
            tokens_BN = torch.cat([tokens_BN, chains_BL], dim=1)
        return Proposal(
            tokens_BN=tokens_BN,
            depth=index.depth_N,
            sees=index.sees_NN,
            shapes=[index.shape] * len(rows),
            max_depth=index.shape.depth,
            q_BNV=q_BQV,
            sampled_from=sampled_from,
        )

    def sample(self, root_B: Tensor, index: SampledTreeIndex, row: Row) -> tuple[Tensor, Tensor]:
        """Sampled tokens (B, N) of a static tree's nodes, and their distributions (B, Q, V)."""
        processors = row.request.processors  # `sample_tree` uses only some that are the same for all rows
        return sample_tree(self.token_heads, self.projections, self.state, root_B, index, processors, self.generator)

    def draft(self, root_B: Tensor, index: TreeIndex) -> Tensor:
        """The heads' best tokens (B, N) of a static tree's nodes."""
        if not self.asks_heads:
            return root_B[:, None]
        if self.graphs is None:
            return draft(self.token_heads, self.projections, self.state, root_B, index)
        of_graph = self.indices.tree(self.first_batch, root_B.device, 0)
        return self.graphs.draft(self.token_heads, self.projections, self.state, root_B, of_graph)

    def propose_dynamic(self, root_B: Tensor, chains_BL: Tensor | None, tree: DynamicTree) -> Proposal:
        """For each row a tree of its own shape, and a chain where one was found."""
        grown, depth = grow(self.token_heads, self.projections, self.state, root_B, tree), tree.depth or 0
        if chains_BL is not None:
            grown, depth = grown.with_chains(chains_BL), max(depth, chains_BL.shape[1])
        return Proposal(
            tokens_BN=grown.tokens_BN,
            depth=grown.depth_BN,
            sees=grown.sees_BNN,
            shapes=None,
            max_depth=depth,
            parents_BN=grown.parents_BN,
        )

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        if self.asks_heads:
            self.state = self.token_heads.commit(self.state, output.tokens_BN, output.taps, output.positions_BN, plan)

    def keep_rows(self, rows_R: Tensor) -> None:
        if self.asks_heads:
            self.state = self.token_heads.keep_rows(self.state, rows_R)

    def keep_slots(self, num_slots: int) -> None:
        """Roll back to the first `num_slots` slots (heads/decoding/reuse.py)."""
        if self.asks_heads:
            self.state = self.token_heads.keep_slots(self.state, num_slots)


class CompiledDrafting:
    """The drafting graphs of some heads, one for each tree and number of rows, compiled at their first call.

    Attributes:
        compile_seconds: seconds of each graph's first call, compiling included, by (tree, rows).
    """

    def __init__(self, family: str, *, on_cuda: bool) -> None:
        self.family = family
        self.on_cuda = on_cuda
        self.graphs: dict[tuple[Any, int], Callable[..., Tensor]] = {}
        self.compile_seconds: dict[tuple[Any, int], float] = {}

    def draft(
        self, token_heads: TokenHeads, projections: Sequence[Projection], state: Any, root_B: Tensor, index: TreeIndex
    ) -> Tensor:
        """Tokens of the tree's nodes (B, N), as `static_tree.draft` returns them.

        Args:
            index: the indices for the rows of the graph, which may be more than those of `root_B`.

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
