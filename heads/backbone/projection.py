"""From hidden states to logits: one small record that both the loss and the decoder use.

`lm_head` alone is not enough: Cohere multiplies its logits, Granite divides them and Gemma 2 caps them inside the model
class. A `Projection` holds all of it, so that a head trained through the record is decoded through the same record.
"""
# N rows, D model width, V vocabulary (or the tokens of it that are scored)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from heads.backbone.draft_vocabulary import DraftVocabulary
from heads.products import half
from heads.products.packed import takes_half_products


@dataclass(frozen=True, kw_only=True)
class Projection:
    """logits = cap(scale · (norm(hidden) @ weightᵀ + bias)), each part optional but the weight.

    >>> p = Projection(weight=torch.tensor([[1.0, 0.0], [0.0, 2.0]]), scale=0.5)
    >>> p(torch.tensor([[4.0, 3.0]]))
    tensor([[2., 3.]])

    Attributes:
        norm: final norm of the backbone, for hidden states taken before it; None where they are already normed.
        weight: (V, D).
        bias: (V,) or None.
        scale: what the model class multiplies its logits by.
        soft_cap: c of c·tanh(logits / c), or None.
        vocabulary: which tokens the rows of the weight are; None where row i is token i.
        by_kernel: whether the model's output layer was packed for 16-bit products (heads.pack_weights); every weight
            of the record is then multiplied so.
    """

    weight: Tensor
    norm: nn.Module | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None
    vocabulary: DraftVocabulary | None = None
    by_kernel: bool = False

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        if self.norm is not None:
            hidden_ND = self.norm(hidden_ND).to(self.weight.device)  # a device_map may put them on two devices
        linear = half.linear if self.by_kernel else nn.functional.linear
        return self.finish(linear(hidden_ND, self.weight, self.bias))

    def finish(self, logits_NV: Tensor) -> Tensor:
        """What follows the matrix product: scale, then cap."""
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.soft_cap is not None:
            logits_NV = torch.tanh(logits_NV / self.soft_cap) * self.soft_cap
        return logits_NV

    def ids(self, entries: Tensor) -> Tensor:
        """(…) entries of the logits to (…) token ids."""
        return entries if self.vocabulary is None else self.vocabulary.ids(entries)

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(…) token ids to (…) entries of the logits, and (…) whether the token has one."""
        if self.vocabulary is None:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        return self.vocabulary.find(ids)

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """One value an entry to one value a token of the whole vocabulary; tokens without an entry get `fill`."""
        return values if self.vocabulary is None else self.vocabulary.spread(values, fill)

    def without_norm(self) -> Projection:
        return replace(self, norm=None)

    def with_weight(self, weight_VD: Tensor, bias_V: Tensor | None = None) -> Projection:
        """The same scale and cap around a head's own unembedding, for hidden states that are already normed."""
        return replace(self, norm=None, weight=weight_VD, bias=bias_V)

    def parameters(self) -> list[Tensor]:
        """The tensors of the record that a gradient can reach, in a fixed order."""
        own = [self.weight] + ([] if self.bias is None else [self.bias])
        return own + ([] if self.norm is None else list(self.norm.parameters()))


def is_packed(weight: Tensor) -> bool:
    """Whether a weight with a float dtype stores packed numbers, as torchao's quantised weights do."""
    return hasattr(type(weight), "__tensor_flatten__") and not hasattr(weight, "full_tensor")  # sharded weights have it


def unpacked(weight: Tensor) -> Tensor:
    """The weight as plain numbers, to start other weights from; matrix products take a packed weight as it is."""
    return weight.dequantize() if is_packed(weight) else weight


def read_projection(model: nn.Module, norm: nn.Module) -> Projection:
    """The record of a Hugging Face causal LM, from its output embeddings and its config.

    Raises:
        ValueError: the model has no output embeddings, or their weight is not a floating-point matrix (quantised).
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.ndim != 2:
        raise ValueError(
            f"{type(model).__name__} has no floating-point output embeddings to project with "
            f"(found {type(head).__name__}); keep the lm_head unquantised (skip_modules) and load it again."
        )
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)
    if divisor := getattr(config, "logits_scaling", None):
        scale /= float(divisor)
    return Projection(
        norm=norm,
        weight=weight,
        bias=getattr(head, "bias", None),
        scale=scale,
        soft_cap=getattr(config, "final_logit_softcapping", None),
        by_kernel=takes_half_products(head),
    )
