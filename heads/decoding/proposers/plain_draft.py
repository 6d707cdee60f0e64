"""Draft models that cannot be a backbone, such as those that count distances in cache slots (Bloom, MPT, GPT-Neo).

A draft model needs no tree: it reads token after token, and drops rejected ones from its cache. Here each row has a
`DynamicCache` of its own without padding, so that the model is called as in plain generation and no mask is built; rows
are read one after the other. Whether the cache can be cropped is tried when the model is given.
"""
# B row, T prompt position, U newly read slot, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class PlainDraft:
    """A causal LM that is called as in plain generation.

    Args:
        refusal: why the model cannot be a backbone; the error quotes it if the model cannot draft either.

    Raises:
        ValueError: it is no causal LM, or its cache cannot drop tokens.
    """

    def __init__(self, model: Any, refusal: ValueError) -> None:
        if model.get_output_embeddings() is None:
            raise ValueError(f"This model cannot draft: {refusal}") from None
        self.model = model.eval()
        self.config = model.config
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.device: torch.device = model.device
        if getattr(model, "_is_stateful", False) or model.config.is_encoder_decoder or not self.crops():
            raise ValueError(f"This model cannot draft: {refusal}") from None
        if not self.is_causal():
            raise ValueError(
                f"{type(model).__name__} reads text in both directions, so what it says of a text's end changes as the "
                f"text goes on; give a causal LM as the draft model."
            ) from None

    @torch.no_grad()
    def read(self, tokens_U: Tensor, cache: DynamicCache) -> Tensor:
        """Read tokens into the cache and return the logits (V,) after the last one."""
        output = self.model(input_ids=tokens_U[None].to(self.device), past_key_values=cache, use_cache=True)
        logits_V: Tensor = output.logits[0, -1]
        return logits_V

    @torch.no_grad()
    def is_causal(self) -> bool:
        """Whether the logits after two tokens stay the same when two more follow."""
        tokens_T = (torch.arange(4) % self.vocab_size).to(self.device)
        before_V = self.model(input_ids=tokens_T[None, :2]).logits[0, 1]
        return same_but_for_rounding(self.model(input_ids=tokens_T[None]).logits[0, 1], before_V)

    def crops(self) -> bool:
        """Whether four tokens have the same logits when a wrong one was read between them and dropped."""
        tokens_T = torch.arange(4) % self.vocab_size
        cache, whole = DynamicCache(), DynamicCache()
        try:
            self.read(torch.cat([tokens_T[:2], tokens_T[:1]]), cache)
            shorten(cache, 2)
            cropped_V, wanted_V = self.read(tokens_T[2:], cache), self.read(tokens_T, whole)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return False  # the model takes no cache of this kind
        return same_but_for_rounding(cropped_V, wanted_V)


def same_but_for_rounding(one_V: Tensor, other_V: Tensor) -> bool:
    """Whether logits are equal but for rounding, in float32 at best: MPT's attention runs in it whatever its dtype."""
    eps = max(torch.finfo(other_V.dtype).eps, torch.finfo(torch.float32).eps)
    rounding = 100 * eps * float(other_V.abs().max().clamp(min=1.0))
    return bool(((one_V - other_V).abs() <= rounding).all())


def shorten(cache: DynamicCache, length: int) -> None:
    if (dropped := cache.get_seq_length() - length) > 0:
        cache.crop(-dropped)


class RowReader:
    """A `DraftReader` that reads row by row; its methods do the same."""

    def __init__(self, draft: PlainDraft, tokens_BT: Tensor, valid_BT: Tensor) -> None:
        self.draft = draft
        self.caches = [DynamicCache() for _ in tokens_BT]
        self.committed = [0] * len(tokens_BT)  # tokens of each row that stay
        self.read_on(tokens_BT, valid_BT)

    def read_on(self, tokens_BT: Tensor, valid_BT: Tensor) -> None:
        for b, (tokens_T, valid_T) in enumerate(zip(tokens_BT, valid_BT, strict=True)):
            if len(own_T := tokens_T[valid_T]):
                self.draft.read(own_T, self.caches[b])
                self.committed[b] += len(own_T)

    def read(self, tokens_BU: Tensor, fillers: Sequence[int] = ()) -> Tensor:
        starts = fillers or [0] * len(tokens_BU)
        rows = zip(tokens_BU, starts, self.caches, strict=True)
        return torch.stack([self.draft.read(tokens_U[start:], cache) for tokens_U, start, cache in rows])

    def keep(self, first: Sequence[int], count: Sequence[int]) -> None:
        """Keep the first `count[b]` tokens of row b's chain, which has no slots of padding here."""
        for b, more in enumerate(count):
            self.committed[b] += more
            shorten(self.caches[b], self.committed[b])

    def keep_rows(self, rows_R: Tensor) -> None:
        self.caches = [self.caches[b] for b in rows_R.tolist()]
        self.committed = [self.committed[b] for b in rows_R.tolist()]

    def keep_slots(self, num_slots: int) -> None:
        self.committed = [num_slots]
        shorten(self.caches[0], num_slots)
