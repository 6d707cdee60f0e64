"""Superposed decoding: k drafts of a text for one backbone pass per token (Shen et al., 2024).

Every pass reads one embedding for each prompt: the mean of the k drafts' newest tokens, weighted by the drafts'
probabilities. The k likeliest next tokens extend every draft, counted n-grams score them by each draft's own text, and
the k best of the k² candidates stay. heads/decoding/superposed/step.py has the equations, reference.py the same in
plain Python.

It is lossy: drafts are approximations, of which only the first token is scored by the backbone on its own text.
"""
# B prompt, K draft, L length

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from heads.backbone.model import Backbone
from heads.backbone.support import fastest_mode, unwrap
from heads.decoding.request.entry import (
    Call,
    Decoding,
    check_flag,
    check_generator,
    check_generator_device,
    check_heads,
)
from heads.decoding.reuse import ReusableCaches, check_keeps
from heads.decoding.superposed.checks import (
    embedding_factor,
    fit_weights,
    refuse_heads_with_kept_caches,
    refuse_other_choices,
    refuse_settings_without_effect,
    refuse_unused_generator,
)
from heads.decoding.superposed.draft_head import check_grounded
from heads.decoding.superposed.run import (
    NothingKept,
    SuperposedConfig,
    SuperposedOutput,
    SuperposedRun,
)
from heads.decoding.superposed.step import NgramModel
from heads.interface.token_heads import TokenHeads
from heads.ngrams.table import NgramTable


class SuperposedDecoding(Decoding):
    """k lossy drafts of each prompt: `model.generate(**inputs, custom_generate=heads.SuperposedDecoding(k=3))`.

    The output has k rows for each prompt, likeliest first: `sequences` (B · k, L), and with
    `return_dict_in_generate=True` also `sequences_scores` (B · k), log p_i since the prompt or the last reset, and
    `stats`, whose phase "draft" is the time of the n-grams. Drafts that end are padded on the right. Logits processors
    and stopping criteria act on every draft by its own text.

    Without n-grams p_i is the draft's probability at the temperature; with them it is equation 2's product, which ranks
    drafts and is no probability.

    Args:
        k: drafts of each prompt, no more than the vocabulary has tokens.
        ngrams: counted n-grams of the backbone's tokenizer (`heads.NgramTable`) or their folder. None: the backbone
            alone scores drafts, as in the paper's fact-based setting.
        alpha, temperature: α, the n-grams' share of p_f in equation 6 (None: 0.54), and τ of the backbone's
            distribution, as the paper tuned them for Llama-2-7B. Tune them for another backbone (docs/superposed.md);
            without n-grams a temperature of 1 gives the model's own distribution.
        weights: λ of equation 5 for n = 2, 3, …; None: the paper's, for the orders that the table has.
        penalty: δ of equation 7, the factor on drafts for which the n-grams contain no candidate. The paper leaves it
            open; None: 1e-30, which was tuned (docs/decisions.md).
        token_heads: grounded heads on the model. Head 1 scores candidates by each draft's newest token, instead of
            n-grams or beside them (heads/decoding/superposed/draft_head.py).
        head_weight: β, the weight of the head against the backbone (None: 0.3).
        reset_every: tokens after which one draft is sampled and drafting begins again after it (section 5.3); None:
            never.
        keep_caches: for editors: the prompt's cache stays when a call ends, and the next call reads only what its
            prompt does not share with it. Calls have one prompt without padding, and no `token_heads`; `forget()` frees
            the cache.
        generator: source of randomness for the resets, with `reset_every` alone; None is torch's global one.

    Raises:
        ValueError: a setting outside its range, or without what it acts on; weights that do not fit the table. When
            `generate` is called: a vocabulary smaller than k, another tokenizer's table, a backbone that reads no
            embeddings, or settings of `generate` that choose tokens in another way.
    """

    def __init__(
        self,
        k: int = 3,
        ngrams: NgramModel | str | Path | None = None,
        *,
        alpha: float | None = None,
        temperature: float = 0.06,
        weights: Sequence[float] | None = None,
        penalty: float | None = None,
        token_heads: TokenHeads | None = None,
        head_weight: float | None = None,
        reset_every: int | None = None,
        keep_caches: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        refuse_settings_without_effect(ngrams, token_heads, alpha=alpha, penalty=penalty, head_weight=head_weight)
        given = {"alpha": alpha, "penalty": penalty, "head_weight": head_weight}
        chosen = {name: value for name, value in given.items() if value is not None}
        self.config = SuperposedConfig(k=k, temperature=temperature, reset_every=reset_every, **chosen)
        self.ngrams: NgramModel | None = NgramTable.open(ngrams) if isinstance(ngrams, str | Path) else ngrams
        self.weights = fit_weights(weights, self.ngrams)
        self.generator = check_generator(generator)
        refuse_unused_generator(generator, reset_every)
        if token_heads is not None:
            check_grounded(token_heads)
        self.token_heads = token_heads
        self.reusable: ReusableCaches[NothingKept] | None = None
        if check_flag(keep_caches, "keep_caches"):
            refuse_heads_with_kept_caches(token_heads)
            self.reusable = ReusableCaches()
        self._backbone: Backbone | None = None
        self._factor = 1.0

    def check_config(self, config: GenerationConfig, streamer: Any) -> None:
        refuse_other_choices(config, streamer)

    def check_model(self, model: Any) -> None:
        if self._backbone is None or self._backbone.model is not unwrap(model):
            self._backbone = None
            backbone = Backbone(model)
            self._factor = embedding_factor(backbone)
            if self.reusable is not None:
                check_keeps(backbone)
            self._backbone = backbone
        if self.token_heads is not None:
            check_heads(self.token_heads, model)
        vocab_size = self._backbone.vocab_size
        if self.config.k > vocab_size:
            raise ValueError(f"k={self.config.k} was given; the vocabulary has {vocab_size} tokens, give at most that.")
        if self.ngrams is not None and hasattr(self.ngrams, "check_vocab"):
            self.ngrams.check_vocab(vocab_size)

    def forget(self) -> None:
        """Free kept caches; call it where weights were edited through `.data`."""
        if self.reusable is not None:
            self.reusable.forget()

    def decode(self, model: Any, call: Call) -> Tensor | SuperposedOutput:
        assert self._backbone is not None
        check_generator_device(self.generator, self._backbone.heads_device)
        run = SuperposedRun(
            self.config,
            self._backbone,
            self._factor,
            call,
            self.ngrams,
            self.weights,
            self.generator,
            self.token_heads,
            self.reusable,
        )
        # A cache that was made in inference mode could not be written to if a later call ran under `no_grad`.
        mode = torch.no_grad if self.reusable is not None else fastest_mode(self._backbone.model)
        with mode():
            run.decode()
        return run.result()  # made outside of inference mode, whose tensors can never be edited
