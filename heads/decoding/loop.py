"""The one loop of every lossless decoder: propose, verify in one pass of the backbone, accept, commit.

    while not done:
        proposal = drafter.propose(rows)             a token tree or chain for each row, from heads or a draft model
        logits_BNV = backbone.verify(proposal)       one pass
        paths = rule.accept(row, nodes)              emits tokens and returns the accepted nodes
        backbone.commit, drafter.commit              one plan for all caches
        rows that ended are removed from the batch

Greedy output is exactly what `model.generate(do_sample=False)` returns; sampled output follows exactly the backbone's
distribution after all logits processors, unless the rule says that it is lossy (heads/decoding/acceptance/rules.py).
"""
# B row that still runs, T prompt position, N node, V vocabulary, R row that stays

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from heads.backbone.model import Backbone, BackboneState, CommitPlan, Pass
from heads.decoding.acceptance import batched
from heads.decoding.acceptance.probability import best_at_nodes
from heads.decoding.acceptance.rules import Rule, VerifiedNodes
from heads.decoding.proposers.proposal import Drafter, Proposal
from heads.decoding.request.entry import Call
from heads.decoding.request.images import read_with_images
from heads.decoding.request.output import DecodingOutput, DecodingStats, finish, record
from heads.decoding.request.request import Row
from heads.decoding.reuse import CachedText, ReusableCaches
from heads.decoding.trees.static import Shape


class VerifiedRun:
    """One `generate` call of a decoder that verifies its drafts.

    Args:
        max_depth: the deepest node that the drafter may propose.
        reusable: holds the previous call's caches, and this call's once it has ended; None: nothing is reused.
        mode: the context of drafts, passes and commits; the caller's processors and criteria run outside of it.
    """

    def __init__(
        self,
        backbone: Backbone,
        drafter: Drafter,
        rule: Rule,
        call: Call,
        max_depth: int,
        reusable: ReusableCaches[Any] | None = None,
        mode: Callable[[], contextlib.AbstractContextManager[Any]] = torch.no_grad,
    ) -> None:
        self.backbone = backbone
        self.drafter = drafter
        self.rule = rule
        self.call = call
        self.request = call.request
        self.reusable = reusable
        self.mode = mode
        self.stats = DecodingStats(accepted_per_depth=[0] * max_depth)

    @torch.no_grad()
    def decode(self) -> Tensor | DecodingOutput:
        self.backbone.check_length(self.call.valid_BT, self.request.max_length)
        rows = self.call.rows()
        state = self.prefill(rows)
        with self.mode():
            state, running = self.drop_ended(state, rows)
        while running:
            if self.request.processors:
                for row in running:  # a later copy would wait for the pass, and a buffer of `mode` could not be edited
                    row.prefix()
            with self.stats.time("draft"), self.mode():
                proposal = self.drafter.propose(running)
            with self.stats.time("verify"):
                output, logits_BNV = self.verify(state, running, proposal)
            with self.stats.time("accept"):
                paths = self.accept(running, proposal, logits_BNV)
            with self.stats.time("commit"), self.mode():
                state = self.commit(state, output, paths)
                state, running = self.drop_ended(state, running)
        if self.reusable is not None:
            # The last token is left out: if it was committed, `within_text` may have lowered its position.
            committed = rows[0].tokens[:-1][: int(state.next_position_B)]
            self.reusable.put(CachedText[Any](tokens=committed, state=state, drafter=self.drafter))
        return finish(rows, self.stats, self.call.streamer, self.returned_cache(state, rows))

    def returned_cache(self, state: BackboneState, rows: list[Row]) -> DynamicCache | None:
        """What `generate` returns as past_key_values: None for padding or several rows, whose caches have holes."""
        if len(rows) > 1 or not self.request.keep_cache or not bool(state.valid_BS.all()):
            return None
        return state.cache.as_dynamic(self.backbone.config, len(rows[0].tokens) - 1)

    def prefill(self, rows: list[Row]) -> BackboneState:
        """Read the prompts, long ones in chunks, and emit each row's first token."""
        with self.stats.time("prefill"):
            cached, num_cached = self.reuse_caches()
            tokens_BT, valid_BT = self.call.tokens_BT[:, num_cached:], self.call.valid_BT[:, num_cached:]

            def begin(output: Pass, plan: CommitPlan) -> None:
                self.drafter.begin(output, plan, rows)

            with self.mode():
                if self.call.images is None:
                    state, output = self.backbone.read(tokens_BT, valid_BT, self.drafter.taps, cached, commit=begin)
                else:
                    state, output = read_with_images(
                        self.backbone, tokens_BT, self.call.images, self.drafter.taps, begin
                    )
                last_logits_BV = self.backbone.logits(output.final_BND[:, -1])
            self.stats.prompt_tokens = int(valid_BT.sum())
            self.stats.drafted = [[] for _ in rows]
            self.stats.count_pass(len(rows))
            for row, logits_V in zip(rows, last_logits_BV, strict=True):
                row.emit(row.choose(logits_V))
                record(row, [False], self.stats, self.call.streamer)
        return state

    def reuse_caches(self) -> tuple[BackboneState | None, int]:
        """The previous call's state over the first tokens of this prompt, and their number.

        Raises:
            ValueError: images, or what `ReusableCaches.reuse` refuses.
        """
        if self.reusable is None:
            return None, 0
        if self.call.images is not None:
            raise ValueError(
                "keep_caches=True was given for a prompt with images, whose tokens do not tell images apart; leave "
                "keep_caches out, or give texts alone."
            )
        cached = self.reusable.reuse(self.backbone, self.call.tokens_BT, self.call.valid_BT, self.mode)
        if cached is None:
            return None, 0
        self.drafter = cached.drafter
        return cached.state, len(cached.tokens)

    def verify(self, state: BackboneState, running: list[Row], proposal: Proposal) -> tuple[Pass, Tensor]:
        with self.mode():
            depth = self.within_text(running, proposal)
            output = self.backbone.verify(state, proposal.tokens_BN, depth, proposal.sees, self.drafter.taps)
            return output, self.backbone.logits(output.final_BND)

    def within_text(self, running: list[Row], proposal: Proposal) -> Tensor:
        """(B, N): the nodes' depths, where those beyond a row's `max_length` get the last depth within it.

        Such nodes are never emitted, but a backbone may have no position embedding for their true depth.
        """
        room = [self.request.max_length - 1 - len(row.tokens) for row in running]
        if min(room) >= proposal.max_depth:
            return proposal.depth
        return proposal.depth.minimum(torch.tensor(room, device=proposal.depth.device)[:, None])

    def accept(self, running: list[Row], proposal: Proposal, logits_BNV: Tensor) -> list[list[int]]:
        """Emit for each row the tokens that the rule chooses, and return its accepted nodes."""
        self.stats.count_pass(len(running))
        noise = batched.ReplayableNoise(self.request.generator)
        tokens, shapes, chosen = self.choose(running, proposal, logits_BNV, noise)
        paths = []
        for b, row in enumerate(running):
            nodes = VerifiedNodes(
                shape=shapes[b],
                tokens=tokens[b],
                logits_NV=logits_BNV[b],
                chosen=chosen[b],
                q_NV=None if proposal.q_BNV is None else proposal.q_BNV[b],
                sampled_from=proposal.sampled_from,
            )
            before = len(row.tokens)
            paths.append(self.rule.accept(row, nodes))
            drafted = [i < len(paths[-1]) - 1 for i in range(len(row.tokens) - before)]
            record(row, drafted, self.stats, self.call.streamer)
        if noise.states and len(running) == 1:
            noise.rewind(used=len(running[0].tokens) - before)
        return paths

    def choose(
        self, running: list[Row], proposal: Proposal, logits_BNV: Tensor, noise: batched.ReplayableNoise
    ) -> tuple[list[list[int]], Sequence[Shape], list[list[int] | None]]:
        """Tokens and shapes of the nodes on the host; and the token chosen after each node where that is faster."""
        request, depths = self.request, 1 + proposal.max_depth
        suffices = self.rule.argmax_suffices if request.greedy else self.rule.sample_suffices
        faster = request.needs_argmax_alone or batched.is_faster(running, logits_BNV, depths)
        if not (suffices and faster and batched.is_possible(request, running)):
            return read_nodes(proposal, None)
        if request.needs_argmax_alone:
            chosen_BN = best_at_nodes(logits_BNV)
        else:
            batch, nodes = proposal.tokens_BN.shape
            depth_BN, sees_BNN = proposal.depth.expand(batch, nodes), proposal.sees.expand(batch, nodes, nodes)
            chosen_BN = batched.choose_at_nodes(
                running, proposal.tokens_BN, depth_BN, sees_BNN, logits_BNV, depths, noise
            )
        return read_nodes(proposal, chosen_BN)

    def commit(self, state: BackboneState, output: Pass, paths: list[list[int]]) -> BackboneState:
        plan = CommitPlan.from_paths(paths, output.tokens_BN.device)
        self.drafter.commit(output, plan)
        return self.backbone.commit(state, output, plan)

    def drop_ended(self, state: BackboneState, rows: list[Row]) -> tuple[BackboneState, list[Row]]:
        """Take rows that ended out of the batch, so that later passes are smaller."""
        running = [b for b, row in enumerate(rows) if not row.done]
        if 0 < len(running) < len(rows):
            rows_R = torch.tensor(running, device=state.valid_BS.device)
            state = state.keep_rows(rows_R)
            self.drafter.keep_rows(rows_R)
        return state, [rows[b] for b in running]


def read_nodes(
    proposal: Proposal, chosen_BN: Tensor | None
) -> tuple[list[list[int]], Sequence[Shape], list[list[int] | None]]:
    """Tokens, shapes and choices on the host, in one copy: this is where the host waits for the pass."""
    wanted = [x_BN for x_BN in (proposal.tokens_BN, proposal.parents_BN, chosen_BN) if x_BN is not None]
    tokens, *others = torch.stack([x_BN.to(wanted[-1].device) for x_BN in wanted]).tolist()
    chosen = others.pop() if chosen_BN is not None else [None] * len(tokens)
    shapes = proposal.shapes or [Shape((-1, *parents[1:])) for parents in others[0]]
    return tokens, shapes, chosen
