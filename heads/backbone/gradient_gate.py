"""The gradient gate between a trained backbone and its heads: the identity forward, a factor on the gradient backward.

DynaMo (appendix A.1, figure 5) trains the backbone at LR_B and the heads at LR_M, and counts the gradient that flows
from the heads into the backbone at LR_MB. With one optimizer this is a factor on that gradient:

    stem's gradient = g_1 + (LR_MB / LR_B) · (g_2 + … + g_n)        g_n: from the n-th token's loss

Under AdamW this weights one gradient against the other; it is not a second learning rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gate(x: Tensor, scale: float) -> Tensor:
    """`x`, whose gradient is multiplied by `scale`; 0 detaches it.

    >>> w = torch.ones(2, requires_grad=True)
    >>> gate(3 * w, 0.1).sum().backward()
    >>> w.grad
    tensor([0.3000, 0.3000])
    """
    if scale == 1.0 or not x.requires_grad:
        return x
    return x.detach() if scale == 0.0 else _Gate.apply(x, scale)  # type: ignore[no-untyped-call]


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (gradient,) = grad_outputs
        return gradient * ctx.scale, None
