"""Lossless decoding with a static token tree and a looked-up chain: draft, verify in one pass, accept, commit.

Greedy output is exactly what `model.generate(do_sample=False)` returns; sampled output follows exactly the backbone's
distribution after all logits processors (heads/decoding/acceptance.py has the rule).
"""
# B batch, N tree node

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from heads.backbone import CommitPlan, Pass, Tap
from heads.decoding.compiled import compiled
from heads.decoding.drafting import TreeIndex, draft
from heads.decoding.lookup import DEFAULT_LOOKUP, ChainIndex, Lookup, check_lookup
from heads.decoding.loop import Proposal, Run
from heads.decoding.request import Row, check_positions, read_request, read_valid, refuse_unknown
from heads.decoding.rules import ExactRule
from heads.decoding.stats import DecodingOutput
from heads.decoding.tree import TYPICAL_ACCURACY, Tree, grow_tree, read_tree
from heads.interface import TokenHeads

DEFAULT_NODES, DEFAULT_NODES_ON_CPU = 16, 8


class TreeDecoding:
    """Hand it to `generate`: `model.generate(**inputs, custom_generate=heads.TreeDecoding(token_heads))`.

    Args:
        token_heads: heads on the very model that `generate` is called on.
        tree: a `Tree`, a list of paths, a JSON file of paths, a node budget, or None for a default that fits the number
            of heads (grown from the heads' own measured accuracy where their checkpoint has it).
        lookup: tokens copied from behind the last earlier place in the text that reads like its end (prompt lookup),
            verified in the same pass beside the heads' tree. Where nothing is found nothing is paid; 0 leaves the heads
            alone. The text is the same either way.
        generator: source of randomness for sampling; None is torch's global one, as in `generate`.
        compile: passes run as compiled graphs of fixed shapes (heads/decoding/compiled.py): faster where passes are
            short, after seconds of compiling for each shape that is met.

    Raises:
        ValueError: a tree that is deeper than there are heads, or that is malformed; `compile` without what it needs.
    """

    def __init__(
        self,
        token_heads: TokenHeads,
        tree: Tree | Sequence[Sequence[int]] | str | Path | int | None = None,
        generator: torch.Generator | None = None,
        *,
        lookup: int = DEFAULT_LOOKUP,
        compile: bool = False,
    ) -> None:
        self.token_heads = token_heads
        self.backbone = compiled(token_heads.backbone) if compile else token_heads.backbone
        self.tree = choose_tree(token_heads, tree)
        self.generator = generator
        self.lookup = check_lookup(lookup)
        self.rule = ExactRule()
        self._indices: dict[tuple[int, torch.device, bool], TreeIndex] = {}
        self._chains: dict[torch.device, ChainIndex] = {}

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
        if model is not self.token_heads.backbone.model:
            raise ValueError(
                "generate was called on another model than the heads' backbone; load the heads on this model."
            )
        request = read_request(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.generator
        )
        refuse_unknown(model, model_kwargs)
        valid_BT = read_valid(input_ids, model_kwargs.get("attention_mask"))
        check_positions(model_kwargs.get("position_ids"), valid_BT)
        drafter = HeadsDrafter(self)
        max_depth = max(self.tree.depth, self.lookup)
        return Run(self.backbone, drafter, self.rule, request, streamer, max_depth).decode(input_ids, valid_BT)

    def index(self, batch: int, device: torch.device, *, chained: bool) -> TreeIndex:
        """The tree's indices for a batch size, with or without the looked-up chain; kept from call to call."""
        key = (batch, device, chained)
        if key not in self._indices:
            chain = self.lookup if chained else 0
            self._indices[key] = TreeIndex(self.tree, batch, device, grounded=self.token_heads.grounded, chain=chain)
        return self._indices[key]

    def chain_index(self, device: torch.device) -> ChainIndex:
        """The indices of the looked-up chain without the tree; kept from call to call."""
        if device not in self._chains:
            self._chains[device] = ChainIndex(self.lookup, device)
        return self._chains[device]


class HeadsDrafter:
    """Heads fill a tree, and a looked-up chain stands beside it, for one `generate` call."""

    def __init__(self, decoding: TreeDecoding) -> None:
        self.decoding = decoding
        self.token_heads = decoding.token_heads
        self.projections = [self.token_heads.projection(k) for k in range(1, self.token_heads.num_heads + 1)]
        self.lookups: dict[int, Lookup] = {}  # by the row's place in the batch
        self.state: Any = None

    @property
    def taps(self) -> Sequence[Tap]:
        return self.token_heads.taps

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        self.commit(output, plan)
        if self.decoding.lookup:
            self.lookups = {row.index: Lookup(self.decoding.lookup) for row in rows}

    def propose(self, rows: list[Row]) -> Proposal:
        """The heads' tree, and a chain where one was looked up.

        While every row copies, the heads are not asked: their drafting would be time for nothing.
        """
        device = rows[0].device
        chains = self.look_up(rows)
        root_B = torch.tensor([row.tokens[-1] for row in rows], device=device)
        index: TreeIndex | ChainIndex
        if self.copying(rows):
            index, tokens_BN = self.decoding.chain_index(device), root_B[:, None]
        else:
            index = self.decoding.index(len(rows), device, chained=chains is not None)
            tokens_BN = draft(self.token_heads, self.projections, self.state, root_B, index)
        if chains is not None:
            tokens_BN = torch.cat([tokens_BN, torch.tensor(chains, device=device)], dim=1)
        shapes = [index.shape] * len(rows)
        return Proposal(tokens_BN=tokens_BN, depth=index.depth_N, sees=index.sees_NN, shapes=shapes)

    def look_up(self, rows: list[Row]) -> list[list[int]] | None:
        """A chain for each row; None where no row's last tokens have been there before."""
        found = [self.lookups[row.index].propose(row.tokens) for row in rows] if self.lookups else []
        if not any(found):
            return None
        return [chain or [0] * self.decoding.lookup for chain in found]

    def copying(self, rows: list[Row]) -> bool:
        """Every row copies, and what is copied reaches further than the heads could."""
        return self.decoding.lookup > self.decoding.tree.depth and all(self.lookups[row.index].copying for row in rows)

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        self.state = self.token_heads.commit(self.state, output.tokens_BN, output.taps, output.positions_BN, plan)

    def keep_rows(self, rows_R: Tensor) -> None:
        self.state = self.token_heads.keep_rows(self.state, rows_R)


def choose_tree(token_heads: TokenHeads, tree: Tree | Sequence[Sequence[int]] | str | Path | int | None) -> Tree:
    """A `Tree` from any of the forms that `TreeDecoding` takes, no deeper than there are heads."""
    if tree is None or isinstance(tree, int):
        nodes = default_nodes(token_heads.backbone.device) if tree is None else tree
        accuracy = token_heads.measured_accuracy or TYPICAL_ACCURACY
        return grow_tree(nodes, token_heads.num_heads, [row[: token_heads.backbone.vocab_size] for row in accuracy])
    if isinstance(tree, str | Path):
        tree = read_tree(tree)
    chosen = tree if isinstance(tree, Tree) else Tree(tree)
    if chosen.depth > token_heads.num_heads:
        raise ValueError(
            f"The tree is {chosen.depth} deep but there are {token_heads.num_heads} heads; "
            f"give paths of at most {token_heads.num_heads} ranks."
        )
    worst = max(rank for path in chosen.paths for rank in path)
    if worst >= token_heads.backbone.vocab_size:
        raise ValueError(
            f"The tree asks for rank {worst} but the vocabulary has {token_heads.backbone.vocab_size} tokens; "
            f"give ranks below that."
        )
    return chosen


def default_nodes(device: torch.device) -> int:
    """Nodes of the default tree, the root included.

    Where a pass is bound by reading weights, further rows are nearly free. A CPU pays for each: its matrix products of
    five and more rows cost several times the matrix-vector products of a plain step, and the looked-up chain adds rows
    of its own.
    """
    return DEFAULT_NODES_ON_CPU if device.type == "cpu" else DEFAULT_NODES
