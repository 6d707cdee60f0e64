"""Drafts of a draft model for one `generate` call: a chain of K tokens below each row's root, and a looked-up chain.

Chen et al. (2023) and Leviathan et al. (2023): the draft model runs K times on its own cache, and drops from it the
tokens that the backbone rejected.
"""
# B row, N node, U token that the draft model has not read, I token drafted so far, V the backbone's vocabulary,
# W the draft model's

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.backbone.model import Backbone, CommitPlan, Pass, Tap
from heads.decoding.proposers.draft_length import DraftLength
from heads.decoding.proposers.draft_reader import DraftReader
from heads.decoding.proposers.plain_draft import PlainDraft, RowReader
from heads.decoding.proposers.prompt_lookup import RowLookups, count_shared
from heads.decoding.proposers.proposal import Proposal
from heads.decoding.proposers.shared_vocabulary import as_known_to, fit_vocabulary
from heads.decoding.request.request import Row, may_keep_state
from heads.decoding.trees.static import Shape


class ModelDrafter:
    """A draft model's chain for each row, for one `generate` call, and a looked-up chain beside it.

    Args:
        vocab_size: the backbone's, whose ids are proposed.
        samples_drafts: drafts are sampled where a request samples; else they are the draft model's best tokens.
    """

    taps: Sequence[Tap] = ()
    reader: DraftReader | RowReader

    def __init__(
        self,
        draft: Backbone | PlainDraft,
        length: DraftLength,
        vocab_size: int,
        generator: torch.Generator | None = None,
        *,
        lookup: int = 0,
        samples_drafts: bool = True,
    ) -> None:
        self.draft = draft
        self.length = length
        self.vocab_size = vocab_size
        self.generator = generator
        self.lookups = RowLookups(lookup, reach=0)  # 0: a chain of any length goes alone, and saves K draft passes
        self.samples_drafts = samples_drafts
        self.num_cached: int | None = None  # tokens in the draft model's cache from the previous call
        self.num_read: list[int] = []  # for each row, the number of its tokens in the draft model's cache
        self.first: list[int] = []  # for each row, how many slots of padding its last chain began with
        self.unread: list[int] = []  # for each row, how many committed tokens followed that padding
        self.k = 0
        self.draft_seconds = 0.0
        self.proposed_at = 0.0
        self.rows: list[Row] = []  # the rows of the last proposal
        self.lengths: list[int] = []  # and how many tokens they had then

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        tokens_BN, valid_BN = output.tokens_BN, plan.valid_BA
        if self.num_cached is not None:  # one row without padding, of which the draft model may lack the last tokens
            missing_1N = tokens_BN.new_tensor([rows[0].tokens[self.num_cached : int(output.positions_BN[0, 0])]])
            tokens_BN, valid_BN = torch.cat([missing_1N, tokens_BN], dim=1), valid_BN.new_ones(1, 1)
            valid_BN = valid_BN.expand_as(tokens_BN)
        known_BN = as_known_to(self.draft, tokens_BN)
        if self.num_read:  # a later pass over a long prompt, or its beginning is in a cache of the previous call
            self.reader.read_on(known_BN, valid_BN)
        elif isinstance(self.draft, PlainDraft):
            self.reader = RowReader(self.draft, known_BN, valid_BN)
        else:
            self.reader = DraftReader(self.draft, known_BN, valid_BN)
        self.num_cached = None
        self.num_read = [len(row.tokens) for row in rows]
        self.lookups.begin(rows)

    def propose(self, rows: list[Row]) -> Proposal:
        """A chain of K tokens below each row's root, shorter if no row has room for K + 1 more; and a looked-up chain.

        While every row copies, the looked-up chain is proposed alone, and the draft model reads those tokens later.
        """
        start = time.perf_counter()
        self.rows, self.lengths = rows, [len(row.tokens) for row in rows]
        chains = self.lookups.find(rows)
        room = rows[0].request.max_length - min(len(row.tokens) for row in rows)
        alone = chains is not None and self.lookups.alone(rows)
        self.k = 0 if alone else min(self.length.choose(len(rows)), room - 1)
        tokens_BN, q = self.draft_chain(rows)
        looked_up = 0 if chains is None else len(chains[0])
        if looked_up:
            tokens_BN = torch.cat([tokens_BN, torch.tensor(chains, device=tokens_BN.device)], dim=1)
        shape, depth_N, sees_NN = chain(self.k, rows[0].device, beside=looked_up)
        self.proposed_at = time.perf_counter()
        self.draft_seconds = self.proposed_at - start
        return Proposal(
            tokens_BN=tokens_BN,
            depth=depth_N,
            sees=sees_NN,
            shapes=[shape] * len(rows),
            max_depth=shape.depth,
            q_BNV=torch.stack(q, dim=1) if q else None,
            sampled_from=[-1, *range(self.k), *[-1] * looked_up] if q else None,
        )

    def draft_chain(self, rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
        """(B, 1 + K): the roots and the chains below them; and for each depth its drafts' distributions (B, V)."""
        unread = [row.tokens[read:] for row, read in zip(rows, self.num_read, strict=True)]
        longest = max(map(len, unread))
        self.unread = [len(tokens) for tokens in unread]
        self.first = [longest - len(tokens) for tokens in unread]
        filled = [[0] * fill + tokens for fill, tokens in zip(self.first, unread, strict=True)]
        tokens_BU = torch.tensor(filled, device=rows[0].device)
        known_BU = as_known_to(self.draft, tokens_BU)
        drafted, q = [tokens_BU[:, -1:]], []
        for i in range(self.k):
            logits_BW = self.reader.read(drafted[-1]) if i else self.reader.read(known_BU, self.first)
            logits_BV = fit_vocabulary(logits_BW.to(tokens_BU.device), self.vocab_size)
            token_B1, q_BV = self.choose(logits_BV, rows, drafted[1:])
            drafted.append(token_B1)
            if q_BV is not None:
                q.append(q_BV)
        return torch.cat(drafted, dim=1), q

    def choose(self, logits_BV: Tensor, rows: list[Row], drafted: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """(B, 1): the draft model's best token and None, or a sampled one and its distribution (B, V)."""
        scores_BV = self.process(logits_BV.float(), rows, drafted)
        if rows[0].request.greedy or not self.samples_drafts:
            return scores_BV.argmax(dim=-1, keepdim=True), None
        q_BV = torch.softmax(scores_BV, dim=-1)
        return torch.multinomial(q_BV, num_samples=1, generator=self.generator), q_BV

    def process(self, logits_BV: Tensor, rows: list[Row], drafted: list[Tensor]) -> Tensor:
        """The scores after the request's processors, which get each row's text and its drafts so far.

        Processors that may keep a state are left out. This changes what is proposed, not the text, since all processors
        are called for the backbone's scores.
        """
        if not rows[0].request.processors:
            return logits_BV
        drafted_BI = torch.cat(drafted, dim=1) if drafted else torch.empty_like(logits_BV[:, :0], dtype=torch.long)
        scored = []
        for row, logits_V, drafted_I in zip(rows, logits_BV, drafted_BI, strict=True):
            prefix_1L = torch.cat([row.prefix(), drafted_I[None]], dim=1)
            stateless = LogitsProcessorList(p for p in row.processors if not may_keep_state(p))
            scored.append(stateless(prefix_1L, logits_V[None]))
        return allow_some_token(torch.cat(scored), logits_BV)

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        """Keep what the draft model's cache holds of the accepted tokens.

        The draft model never read its last draft, and reads the text's last one before it drafts again.
        """
        verify = time.perf_counter() - self.proposed_at
        if self.k == 0:
            return  # nothing was drafted, so nothing was read
        drafts = output.tokens_BN[:, 1 : 1 + self.k].tolist()
        emitted = [row.tokens[before:] for row, before in zip(self.rows, self.lengths, strict=True)]
        right = [count_shared(drafted, tokens) for drafted, tokens in zip(drafts, emitted, strict=True)]
        num_kept = [
            unread + min(count, self.k - 1, len(tokens) - 1)
            for unread, count, tokens in zip(self.unread, right, emitted, strict=True)
        ]
        self.reader.keep(self.first, num_kept)
        self.num_read = [read + more for read, more in zip(self.num_read, num_kept, strict=True)]
        compared = [min(count + 1, len(tokens), self.k) for count, tokens in zip(right, emitted, strict=True)]
        self.length.observe(k=self.k, draft=self.draft_seconds, verify=verify, accepted=right, compared=compared)

    def keep_rows(self, rows_R: Tensor) -> None:
        self.reader.keep_rows(rows_R)
        self.num_read = [self.num_read[b] for b in rows_R.tolist()]

    def keep_slots(self, num_slots: int) -> None:
        """Roll one row back to its first `num_slots` tokens (heads/decoding/reuse.py); it may have read fewer."""
        self.num_cached = min(num_slots, *self.num_read)
        self.reader.keep_slots(self.num_cached)


def allow_some_token(scores_BV: Tensor, logits_BV: Tensor) -> Tensor:
    """The scores, with only token 0 allowed in rows where processors allow no token of the draft model.

    A draft must be sampled from something. q is then 1 at token 0, as for a looked-up token, so the rule stays exact
    (heads/decoding/acceptance/probability.py). NaN from the draft model stays, and sampling from it raises.

    >>> empty_V, some_V = [-torch.inf] * 3, [-1.0, 2.0, -torch.inf]
    >>> allow_some_token(torch.tensor([empty_V, some_V]), torch.zeros(2, 3)).tolist()
    [[0.0, -inf, -inf], [-1.0, 2.0, -inf]]
    """
    empty_B1 = ~(scores_BV > -torch.inf).any(dim=1, keepdim=True) & ~logits_BV.isnan().any(dim=1, keepdim=True)
    first_V = torch.full_like(scores_BV[0], -torch.inf)
    first_V[0] = 0
    return torch.where(empty_B1, first_V, scores_BV)


@functools.cache
def chain(k: int, device: torch.device, beside: int = 0) -> tuple[Shape, Tensor, Tensor]:
    """Shape, depths (N,) and mask (N, N) of a root with two chains below it, one of k nodes and one of `beside`."""
    shape = Shape((-1, *range(k)))
    shape = shape.with_chain(beside) if beside else shape
    return shape, shape.depth_tensor(device), shape.sees_NN(device)
