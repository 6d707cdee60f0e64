"""Refuse backbones that scale embeddings or change logits, since foreign drafts do neither.

A foreign draft reads rows of the embedding as they are stored, and its logits are one product with the unembedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.backbone.model import Backbone

ROUNDING, SMALLEST = 2**-7, 1e-6
"""Relative and absolute tolerance for copies in bfloat16, which has 8 bits, and float16, whose least step is 6e-8."""


def is_copy(found_VD: Tensor, own_VD: Tensor) -> bool:
    """Whether a stored table is the backbone's own, up to the dtype that it is stored in."""
    own_VD = own_VD.detach().float().cpu()
    return found_VD.shape == own_VD.shape and torch.allclose(
        found_VD.float().cpu(), own_VD, rtol=ROUNDING, atol=SMALLEST
    )


def refuse_other_logits(backbone: Backbone, format: str, *, with_bias: bool = False) -> None:
    """
    Args:
        with_bias: whether the unembedding may have a bias, since the format has biases of its own.

    Raises:
        ValueError: the model's logits are more than a product with the unembedding.
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
        ValueError: the model scales its embeddings, and a server's draft would read them unscaled.
    """
    embedding = backbone.model.get_input_embeddings()
    tokens_N = torch.arange(min(4, backbone.vocab_size), device=embedding.weight.device)
    if not torch.equal(backbone.embed(tokens_N), embedding.weight[tokens_N]):
        raise ValueError(
            f"{type(backbone.model).__name__} scales its embeddings, which the format {format} cannot say; allowed are "
            f"models that read them as they are stored."
        )
