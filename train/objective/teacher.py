"""The backbone as the run found it, which teaches the one that is trained (self-distillation).

With a LoRA adapter it is the same weights with the adapter off: a second pass of the decoder, no second copy. Where all
weights are trained it is a frozen copy, which takes as many bytes again as the trained weights. Either way it runs
without autograd and in eval mode, so that it samples nothing (no dropout) and is never recomputed in backward.
"""
# B batch, T position, D model width

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.checkpoint.adapter import adapter_off, has_adapter


class Teacher(nn.Module):
    """Make it before the first step: what is copied is what is there.

    Attributes:
        copy: the frozen copy; None where an adapter is switched off instead.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.copy: Any = None if has_adapter(backbone.model) else frozen_copy(backbone.model)
        self.backbone = backbone if self.copy is None else Backbone(self.copy, check_projection=False)

    def train(self, mode: bool = True) -> Teacher:
        return super().train(False)

    @property
    def projection(self) -> Projection:
        """From `final_states` to its logits."""
        return self.backbone.projection.without_norm()

    @torch.no_grad()
    def final_states(self, tokens_BT: Tensor, mask: Any, positions_BT: Tensor) -> Tensor:
        """(B, T, D): its hidden states after the final norm, under the masks and positions of the trained one."""
        with adapter_off(self.backbone.model), evaluating(self.backbone.model):
            final_BTD, _ = self.backbone.forward(
                tokens_BT, attention_mask=mask, position_ids=positions_BT, use_cache=False
            )
        return final_BTD


def frozen_copy(model: Any) -> Any:
    return copy.deepcopy(model).requires_grad_(False).eval()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode while it is open."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
