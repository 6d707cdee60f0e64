"""Cross-entropy from hidden states: a plain reference, and a fast path that never holds (rows, vocabulary) at once.

The fast path goes over chunks of rows and takes each chunk's gradients while its logits exist, in forward: logits are
computed once and never stored, and memory is one chunk's logits however many rows, heads or tokens there are. It works
through any `Projection` (norm, bias, scale, soft cap), which torch's own linear_cross_entropy does not.
"""
# R rows, C rows of one chunk, D model width, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.gradient_gate import gate
from heads.projection import Projection

CHUNK_ELEMENTS = 2**22
"""Logits of one chunk, in elements: 16 MiB in float32, which is about what stays near a core."""


def plain_cross_entropy(projection: Projection, hidden_RD: Tensor, labels_R: Tensor) -> Tensor:
    """The sum over rows of -log softmax(projection(hidden))[label], in float32. The reference.

    >>> p = Projection(weight=torch.zeros(4, 2))
    >>> plain_cross_entropy(p, torch.ones(3, 2), torch.tensor([0, 1, 2]))   # 3 · ln 4
    tensor(4.1589)
    """
    logits_RV = projection(hidden_RD.to(projection.weight.dtype))
    return F.cross_entropy(widen(logits_RV), labels_R, reduction="sum")


def chunked_cross_entropy(
    projection: Projection, hidden_RD: Tensor, labels_R: Tensor, gates: Sequence[float] | None = None
) -> Tensor:
    """The same sum in chunks of rows, with gradients for the hidden states and the projection's trained tensors.

    Args:
        gates: a factor on the gradient of each of `projection.parameters()`, in their order; 1 where not given.
    """
    chunk_rows = max(1, CHUNK_ELEMENTS // projection.weight.shape[0])
    tensors = projection.parameters()
    if gates is not None:
        tensors = [gate(tensor, scale) for tensor, scale in zip(tensors, gates, strict=True)]
    return _ChunkedCrossEntropy.apply(hidden_RD, labels_R, projection, chunk_rows, *tensors)


def widen(logits_RV: Tensor) -> Tensor:
    """float32 at least: a sum over a vocabulary loses its small terms in half precision."""
    return logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, labels_R: Tensor, projection: Projection, chunk_rows: int, *tensors: Tensor
    ) -> Tensor:
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]]
        hidden_grad_RD = torch.zeros_like(hidden_RD) if wanted[0] else None
        tensor_grads = [torch.zeros_like(t) if needs else None for t, needs in zip(tensors, wanted[1:], strict=True)]
        # Made once: under autocast each new leaf would leave its cast in autocast's cache until the step ends.
        leaves = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, wanted[1:], strict=True)]
        total = torch.zeros((), dtype=torch.float32, device=hidden_RD.device)
        for start in range(0, len(hidden_RD), chunk_rows):
            rows = slice(start, start + chunk_rows)
            loss, hidden_grad, grads = _chunk(projection, hidden_RD[rows], labels_R[rows], leaves, wanted)
            total += loss
            if hidden_grad_RD is not None:
                assert hidden_grad is not None
                hidden_grad_RD[rows] = hidden_grad
            for accumulated, grad in zip([g for g in tensor_grads if g is not None], grads, strict=True):
                accumulated += grad
        ctx.hidden_grad_RD, ctx.tensor_grads = hidden_grad_RD, tensor_grads
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (scale,) = grad_outputs
        scaled = [None if g is None else g * scale.to(g.dtype) for g in (ctx.hidden_grad_RD, *ctx.tensor_grads)]
        return scaled[0], None, None, None, *scaled[1:]


def _chunk(
    projection: Projection, hidden_CD: Tensor, labels_C: Tensor, leaves: list[Tensor], wanted: list[bool]
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """One chunk's loss and its gradients for the hidden states and the tensors that want one."""
    if not any(wanted):
        return plain_cross_entropy(projection, hidden_CD, labels_C), None, []
    with torch.enable_grad():
        hidden_CD = hidden_CD.detach().requires_grad_(wanted[0])
        loss = plain_cross_entropy(_rebuild(projection, leaves), hidden_CD, labels_C)
        sources = ([hidden_CD] if wanted[0] else []) + [leaf for leaf in leaves if leaf.requires_grad]
        grads = list(torch.autograd.grad(loss, sources))
    return loss.detach(), grads.pop(0) if wanted[0] else None, grads


def _rebuild(projection: Projection, leaves: list[Tensor]) -> Projection:
    """The projection over detached leaves, in the order of `Projection.parameters`."""
    weight, *others = leaves
    bias = others.pop(0) if projection.bias is not None else None
    norm: Any = projection.norm
    if norm is not None:
        # A shallow copy, called by `forward`: engines hang hooks on modules and look there for weights of their own.
        module = copy.copy(norm)
        module.__dict__["_parameters"] = dict(zip((name for name, _ in norm.named_parameters()), others, strict=True))
        norm = module.forward
    return replace(projection, norm=norm, weight=weight, bias=bias)
