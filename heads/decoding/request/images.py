"""A prompt with images is read in one pass of the whole image-text model; what follows it is decoded as text.

`generate` has encoded the images before it calls a decoding method. The model itself puts their embeddings into the
prompt, makes the mask (image tokens of Gemma 3 see one another) and gives its decoder positions, which have three axes
in Qwen's models: time, height and width. The text after the prompt has equal positions on all axes and continues after
the prompt's largest one, so a tree node has one position, as in any text.
"""
# B batch, T prompt position, D model width

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone, BackboneState, CommitPlan, Pass, Tap
from heads.backbone.state import StackTap, hidden_taps, recording

IMAGE_INPUTS = frozenset(("mm_encoder_outputs", "mm_token_type_ids", "token_type_ids", "position_ids"))
"""Inputs that a prompt with images may have: the encoded images, which tokens stand for them, and positions."""


def take_images(model_kwargs: dict[str, Any], valid_BT: Tensor) -> dict[str, Any] | None:
    """The inputs of a prompt with images, by name; None where the prompt has no images.

    Raises:
        ValueError: several rows or padding, or encoded inputs other than images.
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


@dataclass(kw_only=True)
class Seen:
    """What the decoder was given, and the hidden states after its final norm."""

    position_ids: Tensor | None = None
    attention_mask: Any = None
    final_BTD: Tensor | None = None


def read_with_images(
    backbone: Backbone,
    tokens_BT: Tensor,
    images: dict[str, Any],
    taps: Sequence[Tap],
    commit: Callable[[Pass, CommitPlan], None],
) -> tuple[BackboneState, Pass]:
    """The state with the whole prompt committed, and the pass, as `Backbone.read` gives them for a text.

    Args:
        images: what `take_images` returned.

    Raises:
        ValueError: the model gives positions of several axes, and the heads have layers of their own or the backbone
            has windows.
    """
    backbone.refresh()
    tokens_BT = tokens_BT.to(backbone.heads_device)
    state = BackboneState.empty(1, tokens_BT.device, backbone.new_cache(tokens_BT.shape[1]))
    given = {"past_key_values": state.cache, "use_cache": True, "is_first_iteration": True, **images}
    prepared = backbone.model.prepare_inputs_for_generation(tokens_BT.to(backbone.device), **given)
    with recording(backbone.layers, hidden_taps(taps), backbone.heads_device) as recorded, watched(backbone) as seen:
        backbone.model(**prepared | {"logits_to_keep": 1})
    assert seen.final_BTD is not None, "an image-text model runs its decoder"
    if "final" in hidden_taps(taps):
        recorded["final"] = seen.final_BTD
    positions_BT = along_the_text(seen.position_ids, tokens_BT)
    if seen.position_ids is not None and seen.position_ids.ndim > 2:
        refuse_axes(backbone, taps)
    mask = seen.attention_mask if isinstance(seen.attention_mask, dict) or is_4d(seen.attention_mask) else None
    found = backbone.run_stacks(taps, recorded, positions_BT, mask, state.cache)
    output = Pass(tokens_BN=tokens_BT, positions_BN=positions_BT, taps=found, final_BND=seen.final_BTD)
    plan = CommitPlan.whole(torch.ones_like(tokens_BT, dtype=torch.bool))
    commit(output, plan)
    state = backbone.commit(state, output, plan)
    return replace(state, next_position_B=positions_BT.amax(dim=1) + 1), output


@contextlib.contextmanager
def watched(backbone: Backbone) -> Iterator[Seen]:
    """Within the context, what the decoder is given and returns is written into the yielded `Seen`."""
    seen = Seen()

    def see(_: nn.Module, __: Any, given: dict[str, Any], output: Any) -> None:
        seen.position_ids, seen.attention_mask = given.get("position_ids"), given.get("attention_mask")
        seen.final_BTD = output.last_hidden_state.to(backbone.heads_device)

    handle = backbone.decoder.register_forward_hook(see, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def along_the_text(position_ids: Tensor | None, tokens_BT: Tensor) -> Tensor:
    """(B, T): each token's position, the largest on its three axes. Qwen's first of four only counts tokens.

    >>> axes = torch.tensor([[0, 1, 2, 3], [0, 1, 1, 2], [0, 1, 2, 2], [0, 1, 1, 2]])[:, None]
    >>> along_the_text(axes, torch.zeros(1, 4))
    tensor([[0, 1, 2, 2]])
    """
    if position_ids is None:
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    if position_ids.ndim == 2:
        return position_ids.to(tokens_BT.device)
    return position_ids[-3:].amax(dim=0).to(tokens_BT.device)


def is_4d(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 4


def refuse_axes(backbone: Backbone, taps: Sequence[Tap]) -> None:
    """Raise ValueError where the heads' layers or windows would have to follow positions of several axes."""
    if any(isinstance(tap, StackTap) for tap in taps):
        raise ValueError(
            f"{type(backbone.model).__name__} gives image tokens positions of several axes, which layers of heads do "
            f"not follow; give heads without layers (prefix_layers=0, no dynamo), or a prompt without images."
        )
    if backbone.mask_style.window is not None:
        raise ValueError(
            f"{type(backbone.model).__name__} gives image tokens positions of several axes and has windows, which are "
            f"counted in positions here; decode such prompts with plain generate."
        )
