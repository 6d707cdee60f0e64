"""Refuse models that scale embeddings or change logits: foreign drafts read stored rows and score by one product."""

from __future__ import annotations

import torch
from torch import Tensor

from heads.backbone.model import Backbone

ROUNDING, SMALLEST = 2**-7, 1e-6
"""Tolerances for a copy in bfloat16, which has 8 bits, or float16, whose smallest numbers are some 1e-7 apart."""


def is_copy(found_VD: Tensor, own_VD: Tensor) -> bool:
    """Whether a stored table is the backbone's own, up to the dtype that it is stored in."""
    own_VD = own_VD.detach().float().cpu()
    return found_VD.shape == own_VD.shape and torch.allclose(
        found_VD.float().cpu(), own_VD, rtol=ROUNDING, atol=SMALLEST
    )


def refuse_other_logits(backbone: Backbone, format: str, *, with_bias: bool = False) -> None:
    """
    Args:
        with_bias: the format has biases of its own, so the backbone's may have one.

    Raises:
        ValueError: a model class that does more with its logits than a product.
    """
    record = backbone.projection
    if record.scale != 1.0 or record.soft_cap is not None or (record.bias is not None and not with_bias):
        raise ValueError(
            f"{type(backbone.model).__name__} scales, caps or shifts its logits, which the format {format} cannot say; "
            f"allowed are models whose logits are a product with the unembedding."
        )


@torch.no_grad()
def refuse_scaled_embedding(backbone: Backbone, format: str) -> None:
    """
    Raises:
        ValueError: a model class that scales its embeddings, which a server's draft reads as they are stored.
    """
    embedding = backbone.model.get_input_embeddings()
    tokens_N = torch.arange(min(4, backbone.vocab_size), device=embedding.weight.device)
    if not torch.equal(backbone.embed(tokens_N), embedding.weight[tokens_N]):
        raise ValueError(
            f"{type(backbone.model).__name__} scales its embeddings, which the format {format} cannot say; allowed are "
            f"models that read them as they are stored."
        )
