"""Speculative sampling: a small draft model proposes K tokens, one pass of the backbone verifies them.

Chen et al. (2023) and Leviathan et al. (2023), as the paper on speculative decoding and MX formats describes them: the
draft model runs K times on its own cache, the backbone verifies the chain in one pass, and 1 to K + 1 tokens are
emitted, the last of them the backbone's own. Both caches drop what was rejected. The output is lossless as
heads/decoding/loop.py says, by modified rejection sampling unless another rule is chosen.
"""
# B row, T prompt position

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.backbone.loading import max_positions
from heads.backbone.model import Backbone
from heads.backbone.support import fastest_mode
from heads.decoding.acceptance.rules import Rule, read_rule
from heads.decoding.loop import VerifiedRun
from heads.decoding.proposers.draft_length import DEFAULT_K, DraftLength, build_length
from heads.decoding.proposers.draft_model import ModelDrafter
from heads.decoding.proposers.plain_draft import PlainDraft
from heads.decoding.proposers.prompt_lookup import MAX_GROWTH, check_lookup
from heads.decoding.proposers.shared_vocabulary import check_same_tokens
from heads.decoding.request.entry import Call, Decoding, check_flag, check_generator
from heads.decoding.request.output import DecodingOutput
from heads.decoding.request.request import Request
from heads.decoding.reuse import ReusableCaches, check_keeps
from heads.decoding.trees.dynamic import check_integer


class DraftModelDecoding(Decoding):
    """Hand it to `generate`: `model.generate(**inputs, custom_generate=heads.DraftModelDecoding(draft_model))`.

    Args:
        draft_model: a small causal LM with the backbone's tokenizer, of any dtype and of any architecture whose cache
            can drop rejected tokens. If the two models have different numbers of embeddings for one tokenizer, ids that
            either model lacks are never proposed.
        k: tokens proposed for each pass, 1 to 16; or "adaptive", which chooses the fastest number for each batch size
            from the acceptance and the times so far (heads/decoding/proposers/draft_length.py). Sampled text then
            follows the same distribution, but a seed does not fix it, since measured times differ.
        generator: source of randomness for sampling; None is torch's global one, as in `generate`.
        lookup: length of a chain that is copied from earlier text and verified in the same pass beside the draft
            model's (see `TreeDecoding`). While every row copies, the draft model is not run. 0: no chain.
        keep_caches: for conversations: the caches of both models stay when a call ends, and the next call reads only
            what its prompt adds (see `TreeDecoding`). Calls have one row; `forget()` frees the caches.
        rule: which drafts are accepted where a request samples: "rejection" samples the drafts as well and accepts them
            by modified rejection sampling; "exact" drafts the draft model's best tokens, and for one row and a seed the
            text is that of plain `generate`; both are lossless. "typical" or `heads.TypicalRule(…)` is lossy. Greedy
            text is the same under all of them.

    Raises:
        ValueError: no model was given; k, lookup, rule or a flag is not allowed; or the draft model's cache cannot drop
            rejected tokens. When `generate` is called: the backbone has another vocabulary, or the text may grow beyond
            the draft model's positions.

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
        self,
        draft_model: Any,
        k: int | Literal["adaptive"] = DEFAULT_K,
        generator: torch.Generator | None = None,
        *,
        lookup: int = 0,
        keep_caches: bool = False,
        rule: str | Rule = "rejection",
    ) -> None:
        if not isinstance(draft_model, nn.Module):
            raise ValueError(
                f"draft_model={draft_model!r} was given; a causal LM is wanted, not its name: load it with "
                f"AutoModelForCausalLM.from_pretrained(…)."
            )
        self.length: DraftLength = build_length(k)
        self.draft = wrap_draft(draft_model)
        self.generator = check_generator(generator)
        self.lookup = check_lookup(check_integer(lookup, f"lookup={lookup!r}"))
        self.rule = read_rule(rule, generator)
        keeps = check_flag(keep_caches, "keep_caches")
        if keeps and isinstance(self.draft, Backbone) and self.draft.recurrence is not None:
            raise ValueError(
                f"keep_caches=True was given with {type(draft_model).__name__} as the draft model, whose recurrent "
                f"state cannot be rolled back to an earlier text; leave keep_caches out, or give another draft model."
            )
        self.reusable: ReusableCaches[ModelDrafter] | None = ReusableCaches(self.draft.model) if keeps else None
        self._backbone: Backbone | None = None

    def check_model(self, model: Any) -> None:
        self.wrap(model)

    def decode(self, model: Any, call: Call) -> Tensor | DecodingOutput:
        backbone = self.wrap(model)
        check_room(self.draft, call.request, call.valid_BT)
        drafter = ModelDrafter(
            self.draft,
            self.length,
            backbone.vocab_size,
            self.generator,
            lookup=self.lookup,
            samples_drafts=self.rule.samples_drafts,
        )
        max_depth = max(self.length.longest, MAX_GROWTH * self.lookup)
        mode = fastest_mode(backbone.model, self.draft.model)
        return VerifiedRun(backbone, drafter, self.rule, call, max_depth, self.reusable, mode).decode()

    def forget(self) -> None:
        """Free the caches that the last call left; the next call reads its whole prompt."""
        if self.reusable is not None:
            self.reusable.forget()

    def wrap(self, model: Any) -> Backbone:
        """The model that `generate` was called on, checked once.

        Raises:
            ValueError: it has another vocabulary than the draft model.
        """
        if self._backbone is None or self._backbone.model is not model:
            backbone = Backbone(model)
            check_same_tokens(backbone, self.draft)
            if self.reusable is not None:
                check_keeps(backbone)
            self._backbone = backbone
            self.forget()  # the caches are another model's
        return self._backbone


def wrap_draft(model: nn.Module) -> Backbone | PlainDraft:
    """A draft model as a backbone without heads or, where it cannot be one, as a `PlainDraft`.

    Raises:
        ValueError: its cache cannot drop rejected tokens.
    """
    try:
        return Backbone(model)
    except ValueError as error:
        if not isinstance(model, PreTrainedModel):
            raise
        return PlainDraft(model, error)


def check_room(draft: Backbone | PlainDraft, request: Request, valid_BT: Tensor) -> None:
    """Check that the draft model, which reads all but the last token, has positions for the text.

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
