"""Foreign drafts score by one product with an unembedding: model classes that do more with their logits are refused."""

from __future__ import annotations

from heads.backbone.model import Backbone


def refuse_other_logits(backbone: Backbone, format: str) -> None:
    """
    Raises:
        ValueError: a model class that does more with its logits than a product.
    """
    record = backbone.projection
    if record.scale != 1.0 or record.soft_cap is not None or record.bias is not None:
        raise ValueError(
            f"{type(backbone.model).__name__} scales, caps or shifts its logits, which the format {format} cannot say; "
            f"allowed are models whose logits are a product with the unembedding."
        )
