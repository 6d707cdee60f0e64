"""One `generate` call of superposed decoding (lossy): superpose, read, score, keep the k best, begin anew at resets."""
# B prompt, R prompt that still runs, K draft, M candidate token, T token of a draft, C context, N draft of a prompt,
# D model width, V vocabulary, L length, E end of text

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from heads.backbone.model import Backbone, BackboneState, CommitPlan, Pass
from heads.backbone.recurrent.cache import State, select_rows
from heads.decoding.request.entry import Call
from heads.decoding.request.output import DecodingStats
from heads.decoding.reuse import CachedText, ReusableCaches
from heads.decoding.superposed.draft_head import DraftHead
from heads.decoding.superposed.own_text import OwnText
from heads.decoding.superposed.step import (
    Drafts,
    NgramModel,
    draft_weights,
    first_drafts,
    grow,
    interpolate,
    log_probabilities,
    ngram_mixture,
    superpose,
)
from heads.interface.token_heads import TokenHeads
from heads.validation import validated, within

NO_TOKEN = -1
DEFAULT_PENALTY = 1e-30
"""δ: on the demo backbone, smaller values gave better drafts down to this one (docs/decisions.md)."""


@validated
@dataclass(kw_only=True)
class SuperposedConfig:
    """How drafts are scored, as `SuperposedDecoding` describes it."""

    k: int = within(1, default=3)
    alpha: float = within(0, 1, default=0.54)
    temperature: float = within(above=0, default=0.06)
    penalty: float = within(above=0, high=1, default=DEFAULT_PENALTY)
    head_weight: float = within(above=0, below=1, default=0.3)
    reset_every: int | None = within(1, default=None)


class SuperposedOutput(GenerateBeamDecoderOnlyOutput):
    """`generate`'s output of several sequences for each prompt, with `stats`."""

    def __init__(self, *, stats: DecodingStats, **given: Any) -> None:
        super().__init__(**given)
        object.__setattr__(self, "stats", stats)  # an attribute, not an entry: it is no tensor


class NothingKept:
    """Stands for a drafter in `ReusableCaches`, which here only keeps the backbone's cache."""

    def keep_slots(self, num_slots: int) -> None: ...


class SuperposedRun:
    """One `generate` call. Prompts whose drafts have all ended leave the batch."""

    def __init__(
        self,
        config: SuperposedConfig,
        backbone: Backbone,
        embedding_factor: float,
        call: Call,
        ngrams: NgramModel | None,
        weights: tuple[float, ...],
        generator: torch.Generator | None,
        token_heads: TokenHeads | None,
        reusable: ReusableCaches[NothingKept] | None = None,
    ) -> None:
        self.config, self.backbone, self.call = config, backbone, call
        self.embedding_factor = embedding_factor
        self.ngrams, self.weights, self.generator, self.reusable = ngrams, weights, generator, reusable
        self.head = DraftHead(token_heads, config.head_weight, config.temperature) if token_heads else None
        self.taps = self.head.taps if self.head else ()
        backbone.check_length(call.valid_BT, call.request.max_length)
        prompts = len(call.tokens_BT)
        self.device = backbone.heads_device
        self.own_text = OwnText(call, self.device)
        self.length = call.request.max_length - call.tokens_BT.shape[1]
        self.eos_E = torch.tensor(sorted(call.request.eos_tokens), dtype=torch.long, device=self.device)
        self.stats = DecodingStats(drafted=[[] for _ in range(prompts)])
        valid_BT = call.valid_BT.to(self.device)
        self.prompts_BT = call.tokens_BT.to(self.device).masked_fill(~valid_BT, NO_TOKEN)
        self.running = list(range(prompts))
        self.superposed = 0  # slots after the last certain token, which is the prompt's or a reset's
        self.certain: list[State] = []  # recurrent layers' states after that token
        self.finished: dict[int, Drafts] = {}

    def decode(self) -> None:
        """Draft until every prompt is done."""
        with self.stats.time("prefill"):
            commit = self.head.commit if self.head else None
            kept, shared = self.take_kept()
            unread = (self.call.tokens_BT[:, shared:], self.call.valid_BT[:, shared:])
            state, output = self.backbone.read(*unread, self.taps, kept, commit=commit)
            self.stats.prompt_tokens = int(unread[1].sum())
            drafts = self.begin(state, output, self.prompts_BT[:, :0])
            of_prompt = self.certain
        while True:
            state, drafts = self.drop(state, drafts, drafts.ended_BK.all(dim=1) | self.is_full(drafts))
            if not self.running:
                self.keep(state, of_prompt)
                return
            resets = self.superposed + 1 == self.config.reset_every
            state, drafts = (self.reset if resets else self.extend)(state, drafts)

    def take_kept(self) -> tuple[BackboneState | None, int]:
        """The last call's cache, rolled back to the prefix that both prompts share, and the prefix's number of tokens.

        Raises:
            ValueError: as `ReusableCaches.reuse` raises it.
        """
        if self.reusable is None:
            return None, 0
        kept = self.reusable.reuse(self.backbone, self.call.tokens_BT, self.call.valid_BT)
        return (None, 0) if kept is None else (kept.state, len(kept.tokens))

    def keep(self, state: BackboneState, of_prompt: list[State]) -> None:
        """Keep the prompt's slots; later ones hold superposed embeddings or drafts.

        Args:
            of_prompt: recurrent layers' states after the prompt.
        """
        if self.reusable is not None:
            tokens = self.call.tokens_BT[0].tolist()
            state = state.go_back(len(tokens), of_prompt)
            self.reusable.put(CachedText(tokens=tokens, state=state, drafter=NothingKept()))

    def begin(self, state: BackboneState, output: Pass, before_RT: Tensor) -> Drafts:
        """Equation 1: the first tokens of the drafts, from the pass over the prompt or over a draft that was sampled.

        Args:
            before_RT: tokens of the drafts that were sampled at resets.
        """
        self.superposed, self.certain = 0, state.cache.states()
        log_p_RV = self.log_p(output, before_RT[:, None])[:, 0]
        return self.stopped(first_drafts(log_p_RV, self.config.k, self.eos_E).after(before_RT))

    def log_p(self, output: Pass, tokens_RKT: Tensor) -> Tensor:
        """(R, K, V): log p_θ after a pass's last slot; (R, 1, V) if it is the same for all drafts."""
        self.stats.count_pass(len(self.running))
        logits_RV = self.backbone.logits(output.final_BND[:, -1])
        return log_probabilities(self.own_text.process(logits_RV, self.running, tokens_RKT), self.config.temperature)

    def stopped(self, drafts: Drafts) -> Drafts:
        """The drafts, after marking those as ended that a stopping criterion ends."""
        ends_BK = self.own_text.ends(self.running, drafts.tokens_BKT)
        return replace(drafts, ended_BK=drafts.ended_BK | ends_BK)

    def extend(self, state: BackboneState, drafts: Drafts) -> tuple[BackboneState, Drafts]:
        """Extend the drafts by one token: superpose, read, interpolate, keep the k best."""
        with self.stats.time("verify"):
            embeddings_BKD = self.backbone.embed(drafts.tokens_BKT[:, :, -1])
            read_BD = superpose(embeddings_BKD, drafts) * self.embedding_factor
            output = self.backbone.read_embeddings(state, read_BD, self.taps)
            log_p_BKM, tokens_BKM = self.candidates(output, drafts)
        with self.stats.time("commit"):
            plan = CommitPlan.whole(torch.ones_like(output.tokens_BN, dtype=torch.bool))
            state = self.backbone.commit(state, output, plan)
            if self.head:
                self.head.commit(output, plan)
            self.superposed += 1
        with self.stats.time("draft"):
            log_p_f_BKM = self.score(drafts, log_p_BKM, tokens_BKM)
        with self.stats.time("accept"):
            grown = grow(drafts, log_p_f_BKM, tokens_BKM, self.eos_E, self.call.request.pad_token)
            return state, self.stopped(grown)

    def candidates(self, output: Pass, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """(B, K, M) twice: log p_θ of each draft's k most probable next tokens, mixed with a head's; these tokens."""
        log_p_BKM, tokens_BKM = self.log_p(output, drafts.tokens_BKT).topk(self.config.k, dim=-1)
        log_p_BKM, tokens_BKM = (x.expand(-1, self.config.k, -1) for x in (log_p_BKM, tokens_BKM))
        if self.head:  # its state is still the one before this pass
            log_p_BKM = self.head.mix(log_p_BKM, tokens_BKM, self.head.log_p(drafts.tokens_BKT[..., -1]))
        return log_p_BKM, tokens_BKM

    def score(self, drafts: Drafts, log_p_BKM: Tensor, tokens_BKM: Tensor) -> Tensor:
        """log p_f (B, K, M) of each draft's candidates."""
        weights = self.weights
        if self.ngrams is None or not self.config.alpha:
            return log_p_BKM
        prompts_BKT = self.prompts_BT[self.running, None, -len(weights) :].expand(-1, self.config.k, -1)
        contexts_BKC = torch.cat([prompts_BKT, drafts.tokens_BKT[..., -len(weights) :]], dim=-1)[..., -len(weights) :]
        mixture_NM = ngram_mixture(self.ngrams, weights, contexts_BKC.flatten(0, 1), tokens_BKM.flatten(0, 1))
        ngram_BKM = mixture_NM.view(tokens_BKM.shape)
        return interpolate(log_p_BKM, ngram_BKM, self.config.alpha, math.log(self.config.penalty))

    def reset(self, state: BackboneState, drafts: Drafts) -> tuple[BackboneState, Drafts]:
        """Section 5.3: sample one draft by its probability, read its tokens, and start new drafts after them.

        A prompt whose sampled draft has ended is done, and its drafts stay as they are.
        """
        with self.stats.time("prefill"):
            unread = self.superposed + 1
            state = state.go_back(state.valid_BS.shape[1] - self.superposed, self.certain)
            chosen_B1 = torch.multinomial(draft_weights(drafts.scores_BK), 1, generator=self.generator)
            ended_B = drafts.ended_BK.gather(1, chosen_B1)[:, 0]
            going_on_R = (~ended_B).nonzero()[:, 0]
            state, drafts = self.drop(state, drafts, ended_B)
            if not len(going_on_R):
                return state, drafts
            rows_R = torch.arange(len(going_on_R), device=self.device)
            tokens_RT = drafts.tokens_BKT[rows_R, chosen_B1[going_on_R, 0]]
            new_RT = tokens_RT[:, -unread:]
            valid_RT, commit = torch.ones_like(new_RT, dtype=torch.bool), self.head.commit if self.head else None
            state, output = self.backbone.read(new_RT, valid_RT, self.taps, state, commit=commit)
            return state, self.begin(state, output, tokens_RT)

    def is_full(self, drafts: Drafts) -> bool:
        return drafts.tokens_BKT.shape[2] >= self.length

    def drop(self, state: BackboneState, drafts: Drafts, done_B: Tensor) -> tuple[BackboneState, Drafts]:
        """Take prompts that are done out of the batch."""
        done = done_B.tolist()
        if not any(done):
            return state, drafts
        rows = {prompt: row for row, prompt in enumerate(self.running) if done[row]}
        self.finished |= {prompt: drafts.rows([row]) for prompt, row in rows.items()}
        self.running = [prompt for row, prompt in enumerate(self.running) if not done[row]]
        going_on_R = (~done_B).nonzero()[:, 0]
        if not len(going_on_R):
            return state, drafts.rows(going_on_R)
        if self.head:
            self.head.keep_rows(going_on_R)
        self.certain = [select_rows(layer, going_on_R) for layer in self.certain]
        return state.keep_rows(going_on_R), drafts.rows(going_on_R)

    def result(self) -> Tensor | SuperposedOutput:
        """(B · k, L): each prompt with its k drafts, padded on the right.

        Raises:
            ValueError: logits processors leave fewer than k drafts.
        """
        found = [self.finished[prompt] for prompt in range(len(self.finished))]
        scores_N = torch.cat([drafts.scores_BK[0] for drafts in found])
        check_possible(scores_N, self.config.k)
        self.stats.tokens = int(sum(drafts.lengths_BK.sum() for drafts in found))
        longest = max(drafts.tokens_BKT.shape[-1] for drafts in found)
        request, k = self.call.request, self.config.k
        tokens_NT = torch.full((k * len(found), longest), request.pad_token, device=self.device)
        for prompt, drafts in enumerate(found):
            tokens_NT[k * prompt : k * (prompt + 1), : drafts.tokens_BKT.shape[-1]] = drafts.tokens_BKT[0]
        prompts_NT = self.call.tokens_BT.to(self.device).repeat_interleave(k, dim=0)
        sequences_NL = torch.cat([prompts_NT, tokens_NT], dim=1).to(self.call.tokens_BT.device)
        if not request.as_dict:
            return sequences_NL
        return SuperposedOutput(
            stats=self.stats, sequences=sequences_NL, sequences_scores=scores_N.to(sequences_NL.device)
        )


def check_possible(scores_N: Tensor, k: int) -> None:
    impossible_BK = scores_N.view(-1, k).isneginf()
    if bool(impossible_BK.any()):
        fewest = int((~impossible_BK).sum(dim=1).min())
        raise ValueError(
            f"The logits processors of this call leave a prompt {fewest} drafts, and k={k} were asked for; give "
            f"k={max(1, fewest)} or less, or leave out what forbids tokens."
        )
