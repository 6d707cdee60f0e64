"""The one loop of every lossless decoder: propose, verify in one pass of the backbone, accept, commit.

    while not done:
        proposal = drafter.propose(rows)             a token tree or chain for each row, from heads or a draft model
        logits_BNV = backbone.verify(proposal)       one pass
        paths = rule.accept(row, nodes)              emits tokens, says which nodes stay
        backbone.commit, drafter.commit              one plan for all caches
        rows that ended leave the batch

Greedy output is exactly what `model.generate(do_sample=False)` returns; sampled output follows exactly the backbone's
distribution after all logits processors, unless the rule says that it is lossy (heads/decoding/acceptance/rules.py).
"""
# B row that still runs, T prompt position, N node, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from heads.backbone.model import Backbone, BackboneState, CommitPlan, Pass, Tap
from heads.decoding.acceptance import batched as at_once
from heads.decoding.acceptance.probability import best_at_nodes
from heads.decoding.acceptance.rules import Nodes, Rule
from heads.decoding.request.output import DecodingOutput, DecodingStats
from heads.decoding.request.request import Request, Row
from heads.decoding.reuse import Kept, KeptCaches
from heads.decoding.trees.static import Shape


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one pass verifies, the root of each row first.

    Attributes:
        tokens_BN: each node's token; the root's is the row's newest, which the backbone has not read yet.
        depth: (N,) or, where rows differ, (B, N).
        sees: (N, N) or (B, N, N): True where a node sees another, itself and its ancestors.
        shapes: each row's nodes; rows may share one object. None: `parents_BN` has them, on the device.
        parents_BN: each node's parent, the root's 0, read together with what was chosen: the host waits once a pass.
        max_depth: no node is deeper.
        q_BNV: where drafts were drawn by lot, the distributions that they were drawn from, up to a factor; the children
            of a node without replacement, in the order of the children. None where drafts are the proposer's best.
        drawn_from: for each node the row of `q_BNV` that it was drawn from, -1 where it was not drawn; None: row n is
            what node n's children were drawn from.
    """

    tokens_BN: Tensor
    depth: Tensor
    sees: Tensor
    shapes: Sequence[Shape] | None
    max_depth: int
    parents_BN: Tensor | None = None
    q_BNV: Tensor | None = None
    drawn_from: Sequence[int] | None = None


def read_nodes(
    proposal: Proposal, chosen_BN: Tensor | None
) -> tuple[list[list[int]], Sequence[Shape], list[list[int] | None]]:
    """Tokens, shapes and choices on the host: the one place where it waits for the pass."""
    asked = [x_BN for x_BN in (proposal.tokens_BN, proposal.parents_BN, chosen_BN) if x_BN is not None]
    tokens, *others = torch.stack([x_BN.to(asked[-1].device) for x_BN in asked]).tolist()
    chosen = others.pop() if chosen_BN is not None else [None] * len(tokens)
    shapes = proposal.shapes or [Shape((-1, *parents[1:])) for parents in others[0]]
    return tokens, shapes, chosen


class Drafter(Protocol):
    """Proposes tokens and keeps its own state in step with the backbone's."""

    @property
    def taps(self) -> Sequence[Tap]:
        """Hidden states of the backbone that `begin` and `commit` are given."""
        ...

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        """After each pass over prompt tokens, of which a long prompt takes several; `rows` are those of the batch,
        before their first emitted token."""
        ...

    def propose(self, rows: list[Row]) -> Proposal:
        """For each running row what to verify next."""
        ...

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        """Keep what the backbone keeps of the pass."""
        ...

    def keep_rows(self, rows_R: Tensor) -> None:
        """The other rows have ended and leave the batch."""
        ...


class Run:
    """One `generate` call.

    Args:
        max_depth: the deepest node that the drafter may propose.
        kept: caches of the call before, and where this call leaves its own; None keeps nothing.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter,
        rule: Rule,
        request: Request,
        streamer: Any,
        max_depth: int,
        kept: KeptCaches[Any] | None = None,
    ) -> None:
        self.backbone = backbone
        self.drafter = drafter
        self.rule = rule
        self.request = request
        self.streamer = streamer
        self.kept = kept
        self.stats = DecodingStats(accepted_per_depth=[0] * max_depth)

    @torch.no_grad()
    def decode(self, tokens_BT: Tensor, valid_BT: Tensor) -> Tensor | DecodingOutput:
        self.backbone.check_length(valid_BT, self.request.max_length)
        rows = [
            Row(request=self.request, tokens=tokens, device=tokens_BT.device, index=b)
            for b, tokens in enumerate(tokens_BT.tolist())
        ]
        state = self.prefill(rows, tokens_BT, valid_BT)
        state, running = self.drop_ended(state, rows)
        while running:
            with self.stats.time("draft"):
                proposal = self.drafter.propose(running)
            with self.stats.time("verify"):
                output, logits_BNV = self.verify(state, running, proposal)
            with self.stats.time("accept"):
                paths = self.accept(running, proposal, logits_BNV)
            with self.stats.time("commit"):
                state = self.commit(state, output, paths)
                state, running = self.drop_ended(state, running)
        if self.kept is not None:
            # Not the last token: where it is committed, `within_text` may have cut its position.
            committed = rows[0].tokens[:-1][: int(state.next_position_B)]
            self.kept.put(Kept[Any](tokens=committed, state=state, drafter=self.drafter))
        return self.finish(rows)

    def prefill(self, rows: list[Row], tokens_BT: Tensor, valid_BT: Tensor) -> BackboneState:
        """The prompt's pass, in chunks where it is long; it emits each row's first token."""
        with self.stats.time("prefill"):
            kept, num_kept = self.take_kept(tokens_BT, valid_BT)
            tokens_BT, valid_BT = tokens_BT[:, num_kept:], valid_BT[:, num_kept:]

            def begin(output: Pass, plan: CommitPlan) -> None:
                self.drafter.begin(output, plan, rows)

            state, output = self.backbone.read(tokens_BT, valid_BT, self.drafter.taps, kept, commit=begin)
            last_logits_BV = self.backbone.logits(output.final_BND[:, -1])
            self.stats.prompt_tokens = int(valid_BT.sum())
            self.stats.drafted = [[] for _ in rows]
            self.stats.count_pass(len(rows))
            for row, logits_V in zip(rows, last_logits_BV, strict=True):
                row.emit(row.choose(logits_V))
                self.record(row, num_tokens=1, num_drafted=0)
        return state

    def take_kept(self, tokens_BT: Tensor, valid_BT: Tensor) -> tuple[BackboneState | None, int]:
        """What the call before left of the prompt: the state over its first tokens, and how many these are.

        Raises:
            ValueError: several rows, or padding: kept caches have one slot for each token.
        """
        if self.kept is None:
            return None, 0
        if len(tokens_BT) > 1 or not bool(valid_BT.all()):
            raise ValueError(
                f"keep_caches=True was given for {len(tokens_BT)} rows{'' if valid_BT.all() else ' with padding'}; "
                f"caches are kept for one row without padding: give one text at a time, or leave keep_caches out."
            )
        border = self.backbone.rope_border
        if border is not None and border.parts(self.kept.length, tokens_BT.shape[1]):
            self.kept.forget()
        kept = self.kept.take(tokens_BT[0].tolist())
        if kept is None:
            return None, 0
        self.drafter = kept.drafter
        return kept.state, len(kept.tokens)

    def verify(self, state: BackboneState, running: list[Row], proposal: Proposal) -> tuple[Pass, Tensor]:
        if self.request.processors:
            for row in running:  # what they read goes to the device before the pass: behind it, it would wait for it
                row.prefix()
        depth = self.within_text(running, proposal)
        output = self.backbone.verify(state, proposal.tokens_BN, depth, proposal.sees, self.drafter.taps)
        return output, self.backbone.logits(output.final_BND)

    def within_text(self, running: list[Row], proposal: Proposal) -> Tensor:
        """The nodes' depths; near the end those are cut that lie behind the text's last token.

        Such nodes are never reached, but a backbone may have no position for them.
        """
        room = [self.request.max_length - 1 - len(row.tokens) for row in running]
        if min(room) >= proposal.max_depth:
            return proposal.depth
        return proposal.depth.minimum(torch.tensor(room, device=proposal.depth.device)[:, None])

    def accept(self, running: list[Row], proposal: Proposal, logits_BNV: Tensor) -> list[list[int]]:
        """Walk each row's nodes and emit what the rule chooses; the nodes that stay."""
        self.stats.count_pass(len(running))
        randomness = at_once.Randomness(self.request.generator)
        tokens, shapes, chosen = self.choose(running, proposal, logits_BNV, randomness)
        paths = []
        for b, row in enumerate(running):
            nodes = Nodes(
                shape=shapes[b],
                tokens=tokens[b],
                logits_NV=logits_BNV[b],
                chosen=chosen[b],
                q_NV=None if proposal.q_BNV is None else proposal.q_BNV[b],
                drawn_from=proposal.drawn_from,
            )
            before = len(row.tokens)
            paths.append(self.rule.accept(row, nodes))
            self.record(row, num_tokens=len(row.tokens) - before, num_drafted=len(paths[-1]) - 1)
        if randomness.states and len(running) == 1:
            randomness.give_back(used=len(running[0].tokens) - before)
        return paths

    def choose(
        self, running: list[Row], proposal: Proposal, logits_BNV: Tensor, randomness: at_once.Randomness
    ) -> tuple[list[list[int]], Sequence[Shape], list[list[int] | None]]:
        """Tokens and shapes of the nodes on the host and, where all are judged at once, what was chosen behind each."""
        tokens_BN, request = proposal.tokens_BN, self.request
        follows = self.rule.takes_best if request.greedy else self.rule.takes_draws
        depths = 1 + proposal.max_depth
        pays = request.judges_all_nodes_at_once or at_once.pays(running, logits_BNV, depths)
        if not (follows and pays and at_once.can_choose(request, running)):
            return read_nodes(proposal, None)
        if request.judges_all_nodes_at_once:
            chosen_BN = best_at_nodes(logits_BNV)
        else:
            batch, nodes = tokens_BN.shape
            depth_BN, sees_BNN = proposal.depth.expand(batch, nodes), proposal.sees.expand(batch, nodes, nodes)
            chosen_BN = at_once.choose_at_nodes(running, tokens_BN, depth_BN, sees_BNN, logits_BNV, depths, randomness)
        return read_nodes(proposal, chosen_BN)

    def commit(self, state: BackboneState, output: Pass, paths: list[list[int]]) -> BackboneState:
        """Keep the accepted paths in the backbone's cache and in the drafter's state."""
        plan = CommitPlan.from_paths(paths, output.tokens_BN.device)
        self.drafter.commit(output, plan)
        return self.backbone.commit(state, output, plan)

    def drop_ended(self, state: BackboneState, rows: list[Row]) -> tuple[BackboneState, list[Row]]:
        """Rows that ended leave the batch and cost nothing from then on."""
        kept = [b for b, row in enumerate(rows) if not row.done]
        if 0 < len(kept) < len(rows):
            rows_R = torch.tensor(kept, device=state.valid_BS.device)
            state = state.keep_rows(rows_R)
            self.drafter.keep_rows(rows_R)
        return state, [rows[b] for b in kept]

    def record(self, row: Row, *, num_tokens: int, num_drafted: int) -> None:
        """Count what a pass emitted for a row, and stream it; drafted tokens come first."""
        drafted = [i < num_drafted for i in range(num_tokens)]
        self.stats.count_tokens(row.index, drafted)
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
