"""T1-L2-M(-1)R: labels are shifted by two, and the first layer may attend to one token ahead.

DynaMo, appendix C.2.1 and figure 11b. The paper leaves its random masking undefined. Here each position t is sampled
independently with a given probability; at a sampled position the first layer also attends to x_{t+1} of the same
document. With labels shifted by two, a sampled position learns the token after the last one it sees, and any other
position the second one after. Only the first layer sees ahead, since every further layer would add another token.
"""
# B batch, T position

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone, read_layer_type


def ahead_mask(document_ids_BT: Tensor, sees_BT: Tensor) -> Tensor:
    """(B, T, T): True at (t, t + 1) where position t sees ahead and both lie in one document.

    >>> ahead_mask(torch.tensor([[0, 0, 1]]), torch.ones(1, 3, dtype=torch.bool))[0].int()
    tensor([[0, 1, 0],
            [0, 0, 0],
            [0, 0, 0]], dtype=torch.int32)
    """
    same_BT = document_ids_BT[:, 1:] == document_ids_BT[:, :-1]
    return torch.diag_embed((same_BT & sees_BT[:, :-1]), offset=1)


@contextlib.contextmanager
def first_layer_sees_ahead(
    backbone: Backbone, document_ids_BT: Tensor, may_attend_BTT: Tensor, positions_BT: Tensor, share: float
) -> Iterator[None]:
    """Within the context, a sampled share of the positions attend to one token ahead in the first layer."""
    sees_BT = torch.rand(document_ids_BT.shape, device=document_ids_BT.device) < share
    shifted_BTT = may_attend_BTT | ahead_mask(document_ids_BT, sees_BT)
    mask = backbone.mask_style.finish(shifted_BTT, positions_BT, positions_BT, backbone.dtype)
    layer = backbone.layers[0]
    if isinstance(mask, dict):
        mask = mask[read_layer_type(layer)]

    def swap(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": mask}

    handle = layer.register_forward_pre_hook(swap, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
