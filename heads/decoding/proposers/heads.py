"""Drafts of the heads for one `generate` call: a tree, and beside it a chain that is looked up in the text.

The tree is static, with the heads' best tokens or sampled ones (heads/decoding/proposers/static_tree.py), or
dynamic (heads/decoding/trees/dynamic.py).

With `compile=True` all levels of a static tree are one compiled graph, on CUDA a CUDA graph: a level is a few small
products, and fast devices spend their time on starting them. A graph has as many rows as the batch began with: where
rows have ended, the last running row is repeated in their places. What is compiled is `static_tree.fill`, the plain
reference; tests/heads/decoding/proposers/test_compiled_drafting.py compares the tokens.
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
    """The indices of all passes of one tree and lookup length, each made once and used by every call.

    Attributes:
        tree: by batch size, device and length of the chain beside the tree.
        sampled: the same for sampled drafts.
        chain: of a looked-up chain without the tree, by its length and device.
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
        lookup: tokens of the chain; 0: none.
        graphs: drafts static trees as compiled graphs; None: uncompiled.
        samples_drafts: where a request samples, static trees are filled with sampled tokens.
        generator: what they are sampled with.
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

        While every row copies, the chain alone is proposed: the heads' drafts would be time for nothing.
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
        processors = row.request.processors  # those that shape a distribution are the same for all rows
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
        """A tree of its own shape for each row."""
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
