"""Self-distillation: the backbone from before training is the teacher of the trained one.

With a LoRA adapter the teacher is the same weights with the adapter switched off: a second decoder pass, but no second
copy. Where all weights are trained it is a frozen copy, of as many bytes as the trained weights. Either way it runs
without autograd and in eval mode, so that it has no dropout and is never recomputed in backward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.checkpoint.adapter import adapter_off, has_adapter


class Teacher(nn.Module):
    """The teacher; create it before the first step, since it copies the present weights.

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
        """From the teacher's states after the final norm to its logits."""
        return self.backbone.projection.without_norm()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within the context `backbone` is the teacher: no adapter, no dropout, no gradient."""
        with torch.no_grad(), adapter_off(self.backbone.model), evaluating(self.backbone.model):
            yield


def frozen_copy(model: Any) -> Any:
    return copy.deepcopy(model).requires_grad_(False).eval()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode within the context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
