"""Lossless decoding with a token tree and a looked-up chain: draft, verify in one pass, accept, commit.

Greedy output is exactly what `model.generate(do_sample=False)` returns; sampled output follows exactly the backbone's
distribution after all logits processors (heads/decoding/acceptance/probability.py has the rule).
"""
# B batch, N tree node

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from heads.backbone.compiled import compiled
from heads.backbone.model import CommitPlan, Pass, Tap
from heads.decoding.acceptance.rules import Rule, read_rule
from heads.decoding.defaults import AnyTree, choose, refuse_drawn_dynamic
from heads.decoding.loop import Proposal, Run
from heads.decoding.proposers.compiled import compiled_drafting
from heads.decoding.proposers.heads import TreeIndex, draft
from heads.decoding.proposers.prompt_lookup import GROWTH, ChainIndex, Lookup
from heads.decoding.proposers.sampled import DrawnTreeIndex, draw_tree
from heads.decoding.request.output import DecodingOutput
from heads.decoding.request.request import (
    Row,
    check_heads,
    check_positions,
    check_token_heads,
    read_request,
    read_valid,
)
from heads.decoding.request.unsupported import refuse_unknown
from heads.decoding.reuse import KeptCaches
from heads.decoding.trees.dynamic import DynamicTree, grow
from heads.decoding.trees.static import Tree
from heads.interface.token_heads import TokenHeads


class TreeDecoding:
    """Hand it to `generate`: `model.generate(**inputs, custom_generate=heads.TreeDecoding(token_heads))`.

    Args:
        token_heads: heads on the very model that `generate` is called on.
        tree: a `Tree`, a `DynamicTree`, a list of paths, a JSON file of paths or of `headway tune-tree`, or a node
            budget. None is the tree.json beside the heads where it was made for this kind of device and dtype; else a
            default that fits the number of heads (grown from the heads' own measured accuracy where their checkpoint
            has it). `Tree.root_only()` drafts nothing. Where tree.json is dynamic and the rule draws its drafts, the
            static tree of the same file is taken, else the default.
        lookup: tokens copied from behind the last earlier place in the text that reads like its end (prompt lookup),
            verified in the same pass beside the heads' tree. While the text goes on as the whole chain foretold, the
            chain alone is verified and doubles, up to four times `lookup`. Where nothing is found nothing is paid; 0
            leaves the heads alone. None is what the tree.json that is used or given says, else 10. The text is the same
            either way.
        keep_caches: for conversations: the caches stay when a call ends, and the next call reads only what its prompt
            adds to the text so far. One row at a time; the text is the same either way. `forget()` frees them, and has
            to be called where the backbone's weights have changed.
        generator: source of randomness for sampling; None is torch's global one, as in `generate`.
        rule: which drafts stay where a request samples (docs/acceptance.md): "exact" follows the backbone's own draws
            through the heads' best candidates; "rejection" draws the candidates by lot and weighs them, as lossless;
            "typical" or `heads.TypicalRule(…)` keeps likely drafts and is lossy. Greedy text is the same under all.
        compile: passes, and the drafting of static trees, run as compiled graphs of fixed shapes
            (heads/backbone/compiled.py, compiled_drafting.py): faster where passes are short, after seconds of
            compiling for each shape that is met. Drafts that are drawn by lot and dynamic trees are drafted without.
            None is what the tree.json that is used or given says (`headway tune-tree --compile`), else False.

    Raises:
        ValueError: no heads, a tree that is deeper than the heads draft, or that is malformed, or an unknown rule;
            `compile` without what it needs.
    """

    def __init__(
        self,
        token_heads: TokenHeads,
        tree: AnyTree | None = None,
        generator: torch.Generator | None = None,
        *,
        lookup: int | None = None,
        keep_caches: bool = False,
        rule: str | Rule = "exact",
        compile: bool | None = None,
    ) -> None:
        check_token_heads(token_heads)
        self.token_heads = token_heads
        self.rule = read_rule(rule, generator)
        chosen = choose(token_heads, tree, lookup, compile, self.rule)
        self.tree, self.lookup = chosen.tree, chosen.lookup
        self.backbone = compiled(token_heads.backbone) if chosen.compile else token_heads.backbone
        self.drafting = compiled_drafting(token_heads) if chosen.compile else None
        self.generator = generator
        self.kept: KeptCaches[HeadsDrafter] | None = KeptCaches() if keep_caches else None
        refuse_drawn_dynamic(self.rule, self.tree)
        self._indices: dict[tuple[int, torch.device, bool], TreeIndex] = {}
        self._drawn_indices: dict[tuple[int, torch.device, bool], DrawnTreeIndex] = {}
        self._chains: dict[tuple[int, torch.device], ChainIndex] = {}

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | DecodingOutput:
        check_heads(self.token_heads, model)
        request = read_request(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.generator
        )
        refuse_unknown(model, model_kwargs)
        valid_BT = read_valid(input_ids, model_kwargs.get("attention_mask"))
        check_positions(model_kwargs.get("position_ids"), valid_BT)
        drafter = HeadsDrafter(self)
        max_depth = max(self.tree.depth or 0, GROWTH * self.lookup)
        run = Run(self.backbone, drafter, self.rule, request, streamer, max_depth, self.kept)
        return run.decode(input_ids, valid_BT)

    def forget(self) -> None:
        """Free the caches that the last call left; the next call reads its whole prompt."""
        if self.kept is not None:
            self.kept.forget()

    def index(self, batch: int, device: torch.device, *, chained: bool) -> TreeIndex:
        """The tree's indices for a batch size, with or without the looked-up chain; kept from call to call."""
        key = (batch, device, chained)
        if key not in self._indices:
            assert isinstance(self.tree, Tree)
            chain = self.lookup if chained else 0
            self._indices[key] = TreeIndex(self.tree, batch, device, grounded=self.token_heads.grounded, chain=chain)
        return self._indices[key]

    def drawn_index(self, batch: int, device: torch.device, *, chained: bool) -> DrawnTreeIndex:
        """The same for drafts that are drawn by lot."""
        key = (batch, device, chained)
        if key not in self._drawn_indices:
            assert isinstance(self.tree, Tree)
            chain, grounded = self.lookup if chained else 0, self.token_heads.grounded
            self._drawn_indices[key] = DrawnTreeIndex(self.tree, batch, device, grounded=grounded, chain=chain)
        return self._drawn_indices[key]

    def chain_index(self, length: int, device: torch.device) -> ChainIndex:
        """The indices of a looked-up chain without the tree; kept from call to call."""
        key = (length, device)
        if key not in self._chains:
            self._chains[key] = ChainIndex(length, device)
        return self._chains[key]


class HeadsDrafter:
    """Heads fill a tree, and a looked-up chain stands beside it, for one `generate` call.

    Where the tree is the root alone, heads are neither asked nor kept in step.
    """

    def __init__(self, decoding: TreeDecoding) -> None:
        self.decoding = decoding
        self.asks_heads = decoding.tree.depth != 0
        self.token_heads = decoding.token_heads
        deepest = max(self.token_heads.num_heads, decoding.tree.depth or 0)
        self.projections = [self.token_heads.projection(k) for k in range(1, deepest + 1)]
        self.lookups: dict[int, Lookup] = {}  # by the row's place in the batch
        self.began_with = 0
        self.state: Any = None

    @property
    def taps(self) -> Sequence[Tap]:
        return self.token_heads.taps if self.asks_heads else ()

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        self.commit(output, plan)
        self.began_with = len(rows)
        if self.decoding.lookup:
            self.lookups = {row.index: Lookup(self.decoding.lookup) for row in rows}

    def propose(self, rows: list[Row]) -> Proposal:
        """The heads' tree, and a chain where one was looked up.

        While every row copies, the heads are not asked: their drafting would be time for nothing.
        """
        device = self.token_heads.backbone.heads_device
        chains = self.look_up(rows)
        root_B = torch.tensor([row.tokens[-1] for row in rows], device=device)
        chains_BL = None if chains is None else torch.tensor(chains, device=device)
        index: TreeIndex | ChainIndex
        q_BQV, drawn_from = None, None
        if chains is not None and self.copying(rows):
            index, tokens_BN = self.decoding.chain_index(len(chains[0]), device), root_B[:, None]
        elif isinstance(self.decoding.tree, DynamicTree):
            return self.propose_dynamic(root_B, chains_BL, self.decoding.tree)
        elif self.decoding.rule.draws_drafts and not rows[0].request.greedy and self.asks_heads:
            index = self.decoding.drawn_index(len(rows), device, chained=chains is not None)
            tokens_BN, q_BQV = self.draw(root_B, index, rows[0])
            drawn_from = index.drawn_from
        else:
            index = self.decoding.index(len(rows), device, chained=chains is not None)
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
            drawn_from=drawn_from,
        )

    def draw(self, root_B: Tensor, index: DrawnTreeIndex, row: Row) -> tuple[Tensor, Tensor]:
        """Drafts that are drawn by lot; what shapes a distribution is the same for all rows of a request."""
        return draw_tree(
            self.token_heads,
            self.projections,
            self.state,
            root_B,
            index,
            row.request.processors,
            self.decoding.generator,
        )

    def draft(self, root_B: Tensor, index: TreeIndex) -> Tensor:
        """Tokens of a static tree's nodes (B, N)."""
        if not self.asks_heads:
            return root_B[:, None]
        if (drafting := self.decoding.drafting) is None:
            return draft(self.token_heads, self.projections, self.state, root_B, index)
        of_graph = self.decoding.index(self.began_with, root_B.device, chained=False)
        return drafting.draft(self.token_heads, self.projections, self.state, root_B, of_graph)

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

    def look_up(self, rows: list[Row]) -> list[list[int]] | None:
        """A chain of one length for each row, None where no row's last tokens have been there before.

        The length grows where all rows copy, for then the tree is left out.
        """
        if not self.lookups:
            return None
        worth = [self.lookups[row.index].look(row.tokens) for row in rows]
        length = min(worth) if self.copying(rows) else self.decoding.lookup
        found = [
            self.lookups[row.index].take(row.tokens, length if n else 0) for row, n in zip(rows, worth, strict=True)
        ]
        return [chain or [0] * length for chain in found] if any(worth) else None

    def copying(self, rows: list[Row]) -> bool:
        """Every row copies, and what is copied reaches further than the heads could."""
        depth = self.decoding.tree.depth or 0
        return self.decoding.lookup > depth and all(self.lookups[row.index].copying for row in rows)

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        if self.asks_heads:
            self.state = self.token_heads.commit(self.state, output.tokens_BN, output.taps, output.positions_BN, plan)

    def keep_rows(self, rows_R: Tensor) -> None:
        if self.asks_heads:
            self.state = self.token_heads.keep_rows(self.state, rows_R)

    def keep_slots(self, num_slots: int) -> None:
        if self.asks_heads:
            self.state = self.token_heads.keep_slots(self.state, num_slots)
