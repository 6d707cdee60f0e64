"""Superposed decoding: k drafts of a text for one backbone pass a token (Shen et al. 2024).

Every pass reads one embedding a prompt, the mean of the k drafts' newest tokens weighted by the drafts' probabilities.
Its k likeliest next tokens extend every draft; counted n-grams tell the drafts' own continuations apart; the k best of
the k² candidates stay. heads/decoding/superposed/step.py has the equations, reference.py the same in plain Python.

Drafts are approximations by design: only the first token of each is the backbone's own.
"""
# B prompt, K draft, M candidate token, T token of a draft, C context, N draft of a prompt, D model width, L length

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from heads.backbone.model import Backbone, BackboneState, CommitPlan, Pass
from heads.backbone.support import fastest_mode, unwrap
from heads.decoding.request.entry import Call, Decoding, check_generator
from heads.decoding.request.output import DecodingStats
from heads.decoding.superposed.checks import (
    check_embeddings,
    fit_weights,
    refuse_other_choices,
    refuse_processors,
)
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
from heads.ngrams.table import NgramTable
from heads.validation import validated, within

NO_TOKEN = -1


@validated
@dataclass(kw_only=True)
class SuperposedConfig:
    """How drafts are scored.

    Attributes:
        k: drafts of each prompt.
        alpha: α of equation 6, the n-grams' share of p_f; 0 leaves them out.
        temperature: τ of the backbone's distribution.
        penalty: δ of equation 7, the factor on drafts whose n-grams know none of the candidates.
        reset_every: tokens after which one draft is sampled and drafting begins anew behind it (section 5.3).
    """

    k: int = within(1, default=3)
    alpha: float = within(0, 1, default=0.54)
    temperature: float = within(above=0, default=0.06)
    penalty: float = within(above=0, high=1, default=1e-3)
    reset_every: int | None = within(1, default=None)


class SuperposedDecoding(Decoding):
    """k drafts of each prompt: `model.generate(**inputs, custom_generate=heads.SuperposedDecoding(k=3))`.

    The output has k rows for each prompt, likeliest first: `sequences` (B · k, L), and with
    `return_dict_in_generate=True` also `sequences_scores` (B · k), the logarithm of each draft's probability at the
    temperature since the prompt or the last reset, and `stats`. Drafts that end are padded on the right.

    Args:
        k: drafts of each prompt, at most the vocabulary.
        ngrams: counted n-grams of the backbone's tokenizer (`heads.NgramTable`) or their folder, or None: drafts are
            then scored by the backbone alone, as in the paper's fact-based setting.
        alpha, temperature: α and τ as the paper tuned them for Llama-2-7B. Another backbone wants its own
            (docs/superposed.md); without n-grams 1 is the model's own distribution.
        weights: λ of equation 5 for n = 2, 3, …; None: the paper's for the orders that the table has.
        penalty: δ of equation 7. The paper leaves its value open.
        reset_every: tokens between resets; None: never.
        generator: source of randomness for the resets; None is torch's global one.

    Raises:
        ValueError: a setting outside its range, weights that do not fit the table; at `generate`: a vocabulary smaller
            than k, another tokenizer's table, a backbone that reads no embeddings, and settings of `generate` that
            choose tokens in another way.
    """

    def __init__(
        self,
        k: int = 3,
        ngrams: NgramModel | str | Path | None = None,
        *,
        alpha: float = 0.54,
        temperature: float = 0.06,
        weights: Sequence[float] | None = None,
        penalty: float = 1e-3,
        reset_every: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.config = SuperposedConfig(
            k=k, alpha=alpha, temperature=temperature, penalty=penalty, reset_every=reset_every
        )
        self.ngrams: NgramModel | None = NgramTable.open(ngrams) if isinstance(ngrams, str | Path) else ngrams
        self.weights = fit_weights(weights, self.ngrams)
        self.generator = check_generator(generator)
        self._backbone: Backbone | None = None

    def __call__(self, model: Any, input_ids: Tensor, *given: Any, **named: Any) -> Any:
        config = named.get("generation_config") or next(x for x in given if isinstance(x, GenerationConfig))
        refuse_other_choices(config, named.get("streamer"))
        return super().__call__(model, input_ids, *given, **named)

    def check_model(self, model: Any) -> None:
        if self._backbone is None or self._backbone.model is not unwrap(model):
            self._backbone = None
            backbone = Backbone(model)
            check_embeddings(backbone)
            self._backbone = backbone
        vocab_size = self._backbone.vocab_size
        if self.config.k > vocab_size:
            raise ValueError(f"k={self.config.k} was given; the vocabulary has {vocab_size} tokens, give at most that.")
        if self.ngrams is not None and hasattr(self.ngrams, "check_vocab"):
            self.ngrams.check_vocab(vocab_size)

    def decode(self, model: Any, call: Call) -> Tensor | SuperposedOutput:
        refuse_processors(call)
        assert self._backbone is not None
        with fastest_mode(self._backbone.model)():
            return SuperposedRun(self, self._backbone, call).decode()


class SuperposedOutput(GenerateBeamDecoderOnlyOutput):
    """`generate`'s output of several sequences a prompt, with `stats`."""

    def __init__(self, *, stats: DecodingStats, **given: Any) -> None:
        super().__init__(**given)
        object.__setattr__(self, "stats", stats)  # an attribute, not an entry: it is no tensor


class SuperposedRun:
    """One `generate` call. Prompts whose drafts have all ended leave the batch."""

    def __init__(self, decoding: SuperposedDecoding, backbone: Backbone, call: Call) -> None:
        self.decoding, self.config, self.backbone, self.call = decoding, decoding.config, backbone, call
        prompts = len(call.tokens_BT)
        self.device = backbone.heads_device
        self.length = call.request.max_length - call.tokens_BT.shape[1]
        self.eos_E = torch.tensor(sorted(call.request.eos_tokens), dtype=torch.long, device=self.device)
        self.stats = DecodingStats(drafted=[[] for _ in range(prompts)])
        valid_BT = call.valid_BT.to(self.device)
        self.prompts_BT = call.tokens_BT.to(self.device).masked_fill(~valid_BT, NO_TOKEN)
        self.running_R = torch.arange(prompts, device=self.device)
        self.superposed = 0  # slots behind the last certain one, the prompt's last or the last reset's
        self.finished: dict[int, Drafts] = {}

    def decode(self) -> Tensor | SuperposedOutput:
        with self.stats.time("prefill"):
            state, output = self.backbone.read(self.call.tokens_BT, self.call.valid_BT)
            drafts = self.begin(output)
        while True:
            state, drafts = self.drop(state, drafts, drafts.ended_BK.all(dim=1) | self.is_full(drafts))
            if not len(self.running_R):
                return self.result()
            resets = self.superposed + 1 == self.config.reset_every
            state, drafts = (self.reset if resets else self.extend)(state, drafts)

    def begin(self, output: Pass) -> Drafts:
        """Equation 1, on the pass over a text that is certain."""
        self.superposed = 0
        return first_drafts(self.log_p(output), self.config.k, self.eos_E)

    def log_p(self, output: Pass) -> Tensor:
        """log p_θ after a pass's last slot."""
        self.stats.count_pass(len(self.running_R))
        self.stats.tokens += len(self.running_R) * self.config.k
        return log_probabilities(self.backbone.logits(output.final_BND[:, -1]), self.config.temperature)

    def extend(self, state: BackboneState, drafts: Drafts) -> tuple[BackboneState, Drafts]:
        """One token more in each draft: superpose, read, interpolate, keep the k best."""
        with self.stats.time("verify"):
            embeddings_BKD = self.backbone.embed(drafts.tokens_BKT[:, :, -1])
            output = self.backbone.read_embeddings(state, superpose(embeddings_BKD, drafts))
            log_p_BM, tokens_BM = self.log_p(output).topk(self.config.k, dim=-1)
        with self.stats.time("commit"):
            plan = CommitPlan.whole(torch.ones_like(output.tokens_BN, dtype=torch.bool))
            state = self.backbone.commit(state, output, plan)
            self.superposed += 1
        with self.stats.time("draft"):
            log_p_f_BKM = self.score(drafts, log_p_BM, tokens_BM)
        with self.stats.time("accept"):
            return state, grow(drafts, log_p_f_BKM, tokens_BM, self.eos_E, self.call.request.pad_token)

    def score(self, drafts: Drafts, log_p_BM: Tensor, tokens_BM: Tensor) -> Tensor:
        """log p_f (B, K, M) of each draft's candidates."""
        k, ngrams, weights = self.config.k, self.decoding.ngrams, self.decoding.weights
        if ngrams is None or not self.config.alpha:
            return log_p_BM[:, None].expand(-1, k, -1)
        prompts_BKT = self.prompts_BT[self.running_R, None, -len(weights) :].expand(-1, k, -1)
        contexts_BKC = torch.cat([prompts_BKT, drafts.tokens_BKT[..., -len(weights) :]], dim=-1)[..., -len(weights) :]
        tokens_BKM = tokens_BM[:, None].expand(-1, k, -1)
        mixture_NM = ngram_mixture(ngrams, weights, contexts_BKC.flatten(0, 1), tokens_BKM.flatten(0, 1))
        ngram_BKM = mixture_NM.view(tokens_BKM.shape)
        return interpolate(log_p_BM, ngram_BKM, self.config.alpha, math.log(self.config.penalty))

    def reset(self, state: BackboneState, drafts: Drafts) -> tuple[BackboneState, Drafts]:
        """Section 5.3: sample one draft by its probability, read its tokens, and draft anew behind them.

        A prompt whose sampled draft has ended is done, with the drafts as they are.
        """
        with self.stats.time("prefill"):
            unread = self.superposed + 1
            state = state.keep_slots(state.valid_BS.shape[1] - self.superposed)
            chosen_B1 = torch.multinomial(draft_weights(drafts.scores_BK), 1, generator=self.decoding.generator)
            ended_B = drafts.ended_BK.gather(1, chosen_B1)[:, 0]
            going_on_R = (~ended_B).nonzero()[:, 0]
            state, drafts = self.drop(state, drafts, ended_B)
            if not len(going_on_R):
                return state, drafts
            rows_R = torch.arange(len(going_on_R), device=self.device)
            tokens_RT = drafts.tokens_BKT[rows_R, chosen_B1[going_on_R, 0]]
            new_RT = tokens_RT[:, -unread:]
            state, output = self.backbone.read(new_RT, torch.ones_like(new_RT, dtype=torch.bool), state=state)
            first = self.begin(output)
            before_RKT = tokens_RT[:, None].expand(-1, self.config.k, -1)
            tokens_RKT = torch.cat([before_RKT, first.tokens_BKT], dim=-1)
            return state, Drafts(tokens_BKT=tokens_RKT, scores_BK=first.scores_BK, ended_BK=first.ended_BK)

    def is_full(self, drafts: Drafts) -> bool:
        return drafts.tokens_BKT.shape[2] >= self.length

    def drop(self, state: BackboneState, drafts: Drafts, done_B: Tensor) -> tuple[BackboneState, Drafts]:
        """Take prompts that are done out of the batch."""
        done = done_B.tolist()
        if not any(done):
            return state, drafts
        rows = {prompt: row for row, prompt in enumerate(self.running_R.tolist()) if done[row]}
        self.finished |= {prompt: drafts.rows(torch.tensor(row)) for prompt, row in rows.items()}
        going_on_R = (~done_B).nonzero()[:, 0]
        self.running_R = self.running_R[going_on_R]
        return state.keep_rows(going_on_R) if len(going_on_R) else state, drafts.rows(going_on_R)

    def result(self) -> Tensor | SuperposedOutput:
        """(B · k, L): the prompts, each with its drafts, filled up on the right."""
        found = [self.finished[prompt] for prompt in range(len(self.finished))]
        longest = max(drafts.tokens_BKT.shape[-1] for drafts in found)
        request, k = self.call.request, self.config.k
        tokens_NT = torch.full((k * len(found), longest), request.pad_token, device=self.device)
        for prompt, drafts in enumerate(found):
            tokens_NT[k * prompt : k * (prompt + 1), : drafts.tokens_BKT.shape[-1]] = drafts.tokens_BKT
        prompts_NT = self.call.tokens_BT.to(self.device).repeat_interleave(k, dim=0)
        sequences_NL = torch.cat([prompts_NT, tokens_NT], dim=1).to(self.call.tokens_BT.device)
        if not request.as_dict:
            return sequences_NL
        scores_N = torch.cat([drafts.scores_BK for drafts in found]).to(sequences_NL.device)
        return SuperposedOutput(stats=self.stats, sequences=sequences_NL, sequences_scores=scores_N)
