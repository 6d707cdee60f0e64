"""The images of a `generate` call's prompt, which it has encoded before it hands the call over."""
# B batch, T prompt position

from __future__ import annotations

from typing import Any

from torch import Tensor

IMAGE_INPUTS = frozenset(("mm_encoder_outputs", "mm_token_type_ids", "token_type_ids", "position_ids"))
"""What `generate` makes of images, processed ones and the places of their tokens."""


def take_images(model_kwargs: dict[str, Any], valid_BT: Tensor) -> dict[str, Any] | None:
    """What `generate` made of a prompt's images; None where it has none.

    Raises:
        ValueError: several rows or padding, or something that is not an image.
    """
    encoded = model_kwargs.get("mm_encoder_outputs")
    if not encoded:
        return None
    if others := set(encoded) - {"image"}:
        raise ValueError(
            f"The prompt has {' and '.join(sorted(others))}, and multi-token decoding was tried with text and images "
            f"alone; decode it with plain generate."
        )
    if len(valid_BT) > 1 or not bool(valid_BT.all()):
        raise ValueError(
            f"A prompt with images was given in {len(valid_BT)} rows or with padding; multi-token decoding reads one "
            f"such prompt at a time: give one row without padding."
        )
    return {name: value for name, value in model_kwargs.items() if name in IMAGE_INPUTS and value is not None}
