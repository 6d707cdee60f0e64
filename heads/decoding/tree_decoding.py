"""Lossless decoding with a static token tree and a looked-up chain: draft, verify in one pass, accept, commit.

Greedy output is exactly what `model.generate(do_sample=False)` returns; sampled output follows exactly the backbone's
distribution after all logits processors (heads/decoding/acceptance.py has the rule).
"""
# B batch, T prompt position, N tree node, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from heads.backbone import Backbone, BackboneState, CommitPlan, Pass
from heads.decoding.acceptance import best_at_nodes, walk
from heads.decoding.drafting import TreeIndex, draft
from heads.decoding.lookup import DEFAULT_LOOKUP, ChainIndex, Lookup, check_lookup
from heads.decoding.request import Request, Row, check_positions, read_request, refuse_unknown
from heads.decoding.stats import DecodingOutput, DecodingStats
from heads.decoding.tree import TYPICAL_ACCURACY, Shape, Tree, grow_tree, read_tree
from heads.interface import TokenHeads
from heads.projection import Projection

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

    Raises:
        ValueError: a tree that is deeper than there are heads, or that is malformed.
    """

    def __init__(
        self,
        token_heads: TokenHeads,
        tree: Tree | Sequence[Sequence[int]] | str | Path | int | None = None,
        generator: torch.Generator | None = None,
        *,
        lookup: int = DEFAULT_LOOKUP,
    ) -> None:
        self.token_heads = token_heads
        self.tree = choose_tree(token_heads, tree)
        self.generator = generator
        self.lookup = check_lookup(lookup)
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
        return Run(self, request, streamer).decode(input_ids, valid_BT)

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


class Run:
    """One `generate` call."""

    def __init__(self, decoding: TreeDecoding, request: Request, streamer: Any) -> None:
        self.decoding = decoding
        self.token_heads = decoding.token_heads
        self.backbone: Backbone = self.token_heads.backbone
        self.request = request
        self.streamer = streamer
        self.stats = DecodingStats(accepted_per_depth=[0] * max(decoding.tree.depth, decoding.lookup))
        self.lookups: list[Lookup] = []

    @torch.no_grad()
    def decode(self, tokens_BT: Tensor, valid_BT: Tensor) -> Tensor | DecodingOutput:
        rows = [
            Row(request=self.request, tokens=tokens, device=tokens_BT.device, index=b)
            for b, tokens in enumerate(tokens_BT.tolist())
        ]
        projections = [self.token_heads.projection(k) for k in range(1, self.token_heads.num_heads + 1)]
        if self.decoding.lookup:
            self.lookups = [Lookup(self.decoding.lookup) for _ in rows]
        state, heads_state = self.prefill(rows, tokens_BT, valid_BT)
        while not all(row.done for row in rows):
            with self.stats.time("draft"):
                tokens_BN, index = self.propose(rows, heads_state, projections)
            with self.stats.time("verify"):
                depths = self.depths(rows, index)
                output = self.backbone.verify(state, tokens_BN, depths, index.sees_NN, self.token_heads.taps)
                logits_BNV = self.backbone.logits(output.final_BND)
            with self.stats.time("accept"):
                paths = self.accept(rows, index.shape, tokens_BN, logits_BNV)
            with self.stats.time("commit"):
                plan = CommitPlan.from_paths(paths, tokens_BT.device)
                state, heads_state = self.commit(state, heads_state, output, plan)
        return self.finish(rows)

    def prefill(self, rows: list[Row], tokens_BT: Tensor, valid_BT: Tensor) -> tuple[BackboneState, Any]:
        """The prompt's pass; it emits each row's first token."""
        with self.stats.time("prefill"):
            state, output = self.backbone.prefill(tokens_BT, valid_BT, self.token_heads.taps)
            last_logits_BV = self.backbone.logits(output.final_BND[:, -1])
            heads_state = self.token_heads.commit(
                None, output.tokens_BN, output.taps, output.positions_BN, CommitPlan.whole(valid_BT)
            )
            self.stats.drafted = [[] for _ in rows]
            self.stats.count_pass(len(rows))
            for b, row in enumerate(rows):
                row.emit(row.choose(last_logits_BV[b]))
                self.record(b, row, num_tokens=1, num_drafted=0)
        return state, heads_state

    def propose(
        self, rows: list[Row], heads_state: Any, projections: list[Projection]
    ) -> tuple[Tensor, TreeIndex | ChainIndex]:
        """The nodes' tokens (B, N) and the shape they form: the heads' tree, and a chain where one was looked up.

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
            tokens_BN = draft(self.token_heads, projections, heads_state, root_B, index)
        if chains is not None:
            tokens_BN = torch.cat([tokens_BN, torch.tensor(chains, device=device)], dim=1)
        return tokens_BN, index

    def look_up(self, rows: list[Row]) -> list[list[int]] | None:
        """A chain for each row; None where no row's last tokens have been there before."""
        found = [lookup.propose(row.tokens) for lookup, row in zip(self.lookups, rows, strict=False)]
        if not any(found):
            return None
        return [chain or [0] * self.decoding.lookup for chain in found]

    def copying(self, rows: list[Row]) -> bool:
        """Every row that goes on copies, and what is copied reaches further than the heads could."""
        return self.decoding.lookup > self.decoding.tree.depth and all(
            row.done or lookup.copying for lookup, row in zip(self.lookups, rows, strict=True)
        )

    def depths(self, rows: list[Row], index: TreeIndex | ChainIndex) -> Tensor:
        """Depths of the nodes: (N,), and near the end (B, N) with those cut that lie behind the text's last token.

        Such nodes are never reached, but a backbone may have no position for them.
        """
        room = [self.request.max_length - 1 - len(row.tokens) for row in rows]
        if min(room) >= index.shape.depth:
            return index.depth_N
        return index.depth_N.minimum(torch.tensor(room, device=index.depth_N.device)[:, None])

    def accept(self, rows: list[Row], shape: Shape, tokens_BN: Tensor, logits_BNV: Tensor) -> list[list[int]]:
        """Walk each row's tree and emit what the backbone chooses; the nodes that stay, none of a row that ended."""
        self.stats.count_pass(sum(not row.done for row in rows))
        tokens = tokens_BN.tolist()
        best = best_at_nodes(logits_BNV) if self.request.judges_all_nodes_at_once else None
        return [
            []
            if row.done
            else self.accept_row(b, row, shape, tokens[b], logits_BNV[b], None if best is None else best[b])
            for b, row in enumerate(rows)
        ]

    def accept_row(
        self, b: int, row: Row, shape: Shape, tokens: list[int], logits_NV: Tensor, best: list[int] | None
    ) -> list[int]:
        def choose_at(node: int) -> int:
            token = best[node] if best is not None else row.choose(logits_NV[node])
            row.emit(token)
            return token

        before = len(row.tokens)
        path = walk(shape, tokens, choose_at, lambda: row.done)
        self.record(b, row, num_tokens=len(row.tokens) - before, num_drafted=len(path) - 1)
        return path

    def commit(
        self, state: BackboneState, heads_state: Any, output: Pass, plan: CommitPlan
    ) -> tuple[BackboneState, Any]:
        """Keep the accepted paths in the backbone's cache and in the family's state."""
        heads_state = self.token_heads.commit(heads_state, output.tokens_BN, output.taps, output.positions_BN, plan)
        return self.backbone.commit(state, output, plan), heads_state

    def record(self, b: int, row: Row, *, num_tokens: int, num_drafted: int) -> None:
        """Count what a pass emitted for a row, and stream it; drafted tokens come first."""
        drafted = [i < num_drafted for i in range(num_tokens)]
        self.stats.count_tokens(b, drafted)
        if self.streamer is None:
            return
        tokens = torch.tensor(row.tokens[-num_tokens:])
        if hasattr(self.streamer, "put_drafted"):
            self.streamer.put_drafted(tokens, drafted)
        else:
            self.streamer.put(tokens)

    def finish(self, rows: list[Row]) -> Tensor | DecodingOutput:
        """Fill up rows that ended early and return what was asked for."""
        if self.streamer is not None:
            self.streamer.end()
        longest = max(len(row.tokens) for row in rows)
        padded = [row.tokens + [self.request.pad_token] * (longest - len(row.tokens)) for row in rows]
        sequences_BL = torch.tensor(padded, device=rows[0].device)
        if not self.request.as_dict:
            return sequences_BL
        return DecodingOutput(
            stats=self.stats,
            sequences=sequences_BL,
            scores=tuple(rows[0].scores) or None,
            logits=tuple(rows[0].logits) or None,
        )


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


def read_valid(input_ids_BT: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Which prompt tokens are real. Padding lies on the left; elsewhere a row could not go on from its last token."""
    if attention_mask is None:
        return torch.ones_like(input_ids_BT, dtype=torch.bool)
    valid_BT = attention_mask.to(input_ids_BT.device).bool()
    if valid_BT.shape != input_ids_BT.shape or not bool(
        (valid_BT.long().diff(dim=1) >= 0).all() & valid_BT[:, -1].all()
    ):
        raise ValueError(
            f"attention_mask of shape {tuple(valid_BT.shape)} must match input_ids {tuple(input_ids_BT.shape)} "
            f"and have its zeros on the left only; tokenize with padding_side='left'."
        )
    return valid_BT
