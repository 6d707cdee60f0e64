"""Speculative sampling: a small draft model proposes K tokens, one pass of the backbone judges them.

Chen et al. (2023) and Leviathan et al. (2023), as the paper on speculative decoding and MX formats describes them: the
draft model runs K times on its own cache, the backbone scores the chain in one pass, and between 1 and K + 1 tokens
are emitted, the last one the backbone's own; both caches drop what was rejected. Greedy output is exactly what
`model.generate(do_sample=False)` returns; sampled output follows exactly the backbone's distribution after all logits
processors, by modified rejection sampling (heads/decoding/acceptance/probability.py).
"""
# B row, T prompt position, N node, U token yet unread, I token drafted so far, V vocabulary, W the draft model's own

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from heads.backbone.loading import max_positions
from heads.backbone.model import Backbone, CommitPlan, Pass, Tap
from heads.decoding.acceptance.rules import RejectionRule
from heads.decoding.loop import Proposal, Run
from heads.decoding.proposers.draft_length import DEFAULT_K, Length, build_length
from heads.decoding.proposers.draft_model import DraftReader
from heads.decoding.proposers.shared_vocabulary import as_known_to, check_same_tokens, fit_vocabulary
from heads.decoding.request.output import DecodingOutput
from heads.decoding.request.request import Request, Row, check_positions, read_request, read_valid
from heads.decoding.request.unsupported import refuse_unknown
from heads.decoding.trees.static import Shape


class DraftModelDecoding:
    """Hand it to `generate`: `model.generate(**inputs, custom_generate=heads.DraftModelDecoding(draft_model))`.

    Args:
        draft_model: a small causal LM with the backbone's tokenizer, of any architecture and dtype. Where the two have
            different numbers of embeddings behind one tokenizer, ids that either lacks are never proposed.
        k: tokens proposed for each pass, 1 to 16; or "adaptive", which takes the number that pays best by what was
            accepted and how long passes took so far, for each batch size (heads/decoding/proposers/draft_length.py).
            Greedy text does not depend on it. Sampled text follows the same distribution, but with "adaptive" the same
            seed gives another text where other times were measured.
        generator: source of randomness for sampling; None is torch's global one, as in `generate`.

    Raises:
        ValueError: no model was given, k is out of range, or the draft model's cache cannot drop rejected tokens. At
            `generate`: another vocabulary than the backbone's, or a text longer than the draft model's positions.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3)).eval()
        >>> draft_model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).eval()
        >>> inputs = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3)}
        >>> asked = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        >>> text = model.generate(**inputs, **asked, custom_generate=DraftModelDecoding(draft_model, k=3))
        >>> torch.equal(text, model.generate(**inputs, **asked))
        True
    """

    def __init__(
        self, draft_model: Any, k: int | Literal["adaptive"] = DEFAULT_K, generator: torch.Generator | None = None
    ) -> None:
        if not isinstance(draft_model, nn.Module):
            raise ValueError(
                f"draft_model={draft_model!r} was given; a causal LM is wanted, not its name: load it with "
                f"AutoModelForCausalLM.from_pretrained(…)."
            )
        self.length: Length = build_length(k)
        self.draft = Backbone(draft_model)
        self.generator = generator
        self._backbone: Backbone | None = None

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
        backbone = self.wrap(model)
        request = read_request(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.generator
        )
        refuse_unknown(model, model_kwargs)
        valid_BT = read_valid(input_ids, model_kwargs.get("attention_mask"))
        check_positions(model_kwargs.get("position_ids"), valid_BT)
        check_room(self.draft, request, valid_BT)
        drafter = ModelDrafter(self.draft, self.length, request, backbone.vocab_size, self.generator)
        rule = RejectionRule(self.generator)
        return Run(backbone, drafter, rule, request, streamer, self.length.longest).decode(input_ids, valid_BT)

    def wrap(self, model: Any) -> Backbone:
        """The model that `generate` was called on, checked once.

        Raises:
            ValueError: it has another vocabulary than the draft model.
        """
        if self._backbone is None or self._backbone.model is not model:
            backbone = Backbone(model)
            check_same_tokens(backbone, self.draft)
            self._backbone = backbone
        return self._backbone


class ModelDrafter:
    """A draft model's chain for each row, for one `generate` call.

    Args:
        vocab_size: of the backbone, whose ids are proposed.
    """

    taps: Sequence[Tap] = ()
    reader: DraftReader

    def __init__(
        self,
        draft: Backbone,
        length: Length,
        request: Request,
        vocab_size: int,
        generator: torch.Generator | None = None,
    ) -> None:
        self.draft = draft
        self.length = length
        self.request = request
        self.vocab_size = vocab_size
        self.generator = generator
        self.num_read: list[int] = []  # of each row's tokens, those that the draft model has kept
        self.first: list[int] = []  # where in the last chain each row's own slots begin
        self.unread: list[int] = []  # how many tokens each row's last chain began with
        self.k = 0
        self.draft_seconds = 0.0
        self.proposed_at = 0.0
        self.rows: list[Row] = []  # of the last proposal, and how many tokens they had then
        self.lengths: list[int] = []

    def begin(self, output: Pass, plan: CommitPlan, rows: list[Row]) -> None:
        tokens_BN = as_known_to(self.draft, output.tokens_BN)
        if self.num_read:  # the prompt is long, and this is not its first pass
            self.reader.read_on(tokens_BN, plan.valid_BA)
        else:
            self.reader = DraftReader(self.draft, tokens_BN, plan.valid_BA)
        self.num_read = [len(row.tokens) for row in rows]

    def propose(self, rows: list[Row]) -> Proposal:
        """A chain of K tokens below each row's root; shorter where no row has room for K + 1 more."""
        start = time.perf_counter()
        self.rows, self.lengths = rows, [len(row.tokens) for row in rows]
        room = self.request.max_length - min(len(row.tokens) for row in rows)
        self.k = min(self.length.choose(len(rows)), room - 1)
        tokens_BN, q = self.draw_chain(rows)
        shape, depth_N, sees_NN = chain(self.k, rows[0].device)
        self.proposed_at = time.perf_counter()
        self.draft_seconds = self.proposed_at - start
        return Proposal(
            tokens_BN=tokens_BN,
            depth=depth_N,
            sees=sees_NN,
            shapes=[shape] * len(rows),
            max_depth=shape.depth,
            q_BNV=torch.stack(q, dim=1) if q else None,
        )

    def draw_chain(self, rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
        """(B, 1 + K): the roots and what is drafted below them; and for each draft what it was drawn from (B, V)."""
        unread = [row.tokens[read:] for row, read in zip(rows, self.num_read, strict=True)]
        longest = max(map(len, unread))
        self.unread = [len(tokens) for tokens in unread]
        self.first = [longest - len(tokens) for tokens in unread]
        filled = [[0] * fill + tokens for fill, tokens in zip(self.first, unread, strict=True)]
        tokens_BU = torch.tensor(filled, device=rows[0].device)
        known_BU = as_known_to(self.draft, tokens_BU)
        drawn, q = [tokens_BU[:, -1:]], []
        for i in range(self.k):
            logits_BW = self.reader.read(drawn[-1]) if i else self.reader.read(known_BU, self.first)
            logits_BV = fit_vocabulary(logits_BW.to(tokens_BU.device), self.vocab_size)
            token_B1, q_BV = self.draw(logits_BV, rows, drawn[1:])
            drawn.append(token_B1)
            if q_BV is not None:
                q.append(q_BV)
        return torch.cat(drawn, dim=1), q

    def draw(self, logits_BV: Tensor, rows: list[Row], drafted: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """(B, 1): the draft model's best token, or one drawn by lot and what it was drawn from."""
        scores_BV = self.process(logits_BV.float(), rows, drafted)
        if self.request.greedy:
            return scores_BV.argmax(dim=-1, keepdim=True), None
        q_BV = torch.softmax(scores_BV, dim=-1)
        return torch.multinomial(q_BV, num_samples=1, generator=self.generator), q_BV

    def process(self, logits_BV: Tensor, rows: list[Row], drafted: list[Tensor]) -> Tensor:
        """The scores after the request's processors, each row's with its own text and what was drafted behind it.

        Only those of transformers are asked: others may keep state between calls, and are called for emitted tokens
        alone. What the draft model proposes is its own affair; the backbone's tokens pass all of them.
        """
        if not self.request.processors:
            return logits_BV
        drafted_BI = torch.cat(drafted, dim=1) if drafted else torch.empty_like(logits_BV[:, :0], dtype=torch.long)
        scored = []
        for row, logits_V, drafted_I in zip(rows, logits_BV, drafted_BI, strict=True):
            prefix_1L = torch.cat([row.prefix(), drafted_I[None]], dim=1)
            own = LogitsProcessorList(p for p in row.processors if type(p).__module__.startswith("transformers."))
            scored.append(own(prefix_1L, logits_V[None]))
        return leave_something(torch.cat(scored), logits_BV)

    def commit(self, output: Pass, plan: CommitPlan) -> None:
        """Keep what was accepted. The chain's last token was drafted but not read: if it stays, it is read next."""
        verify = time.perf_counter() - self.proposed_at
        rows, slots = plan.valid_BA.shape
        accepted = [slots - 1] if rows == 1 else [kept - 1 for kept in plan.valid_BA.sum(dim=1).tolist()]
        if self.k == 0:
            return  # every row's last token was the backbone's own; nothing follows
        kept = [unread + min(count, self.k - 1) for unread, count in zip(self.unread, accepted, strict=True)]
        self.reader.keep(self.first, kept)
        self.num_read = [read + more for read, more in zip(self.num_read, kept, strict=True)]
        emitted = [len(row.tokens) - before for row, before in zip(self.rows, self.lengths, strict=True)]
        self.length.observe(k=self.k, draft=self.draft_seconds, verify=verify, accepted=accepted, emitted=emitted)

    def keep_rows(self, rows_R: Tensor) -> None:
        self.reader.keep_rows(rows_R)
        self.num_read = [self.num_read[b] for b in rows_R.tolist()]


def leave_something(scores_BV: Tensor, logits_BV: Tensor) -> Tensor:
    """Scores with token 0 alone where processors left none of the draft model's tokens, such as a forced end token.

    A draft must be drawn from something. q is 1 at that token then, as it is for a looked-up one, so the rule stays
    exact (heads/decoding/acceptance/probability.py). NaN of the draft model's own stays, and is an error where it is
    drawn from.

    >>> empty_V, some_V = [-torch.inf] * 3, [-1.0, 2.0, -torch.inf]
    >>> leave_something(torch.tensor([empty_V, some_V]), torch.zeros(2, 3)).tolist()
    [[0.0, -inf, -inf], [-1.0, 2.0, -inf]]
    """
    empty_B1 = ~(scores_BV > -torch.inf).any(dim=1, keepdim=True) & ~logits_BV.isnan().any(dim=1, keepdim=True)
    first_V = torch.full_like(scores_BV[0], -torch.inf)
    first_V[0] = 0
    return torch.where(empty_B1, first_V, scores_BV)


@functools.cache
def chain(k: int, device: torch.device) -> tuple[Shape, Tensor, Tensor]:
    """A root and k nodes, each below the one before: shape, depths (N,) and who sees whom (N, N)."""
    shape = Shape((-1, *range(k)))
    return shape, shape.depth_tensor(device), shape.sees_NN(device)


def check_room(draft: Backbone, request: Request, valid_BT: Tensor) -> None:
    """The draft model reads all but the last token.

    Raises:
        ValueError: the text may grow beyond its positions.
    """
    positions = max_positions(draft.model)
    padding = valid_BT.shape[1] - int(valid_BT.sum(dim=1).max())
    longest = request.max_length - padding - 1
    if positions is not None and longest > positions:
        raise ValueError(
            f"The text may grow to {longest + 1} tokens, of which the draft model reads {longest}, but it has "
            f"{positions} positions; lower max_new_tokens, or choose a draft model with more."
        )
