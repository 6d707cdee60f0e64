"""The loss from hidden states: a plain reference, and a fast path that never stores logits of all rows.

    loss of a row = hard · cross-entropy with the true token
                  + weight · T² · divergence from a teacher          (train/objective/soft_targets.py)
                  + regression · SmoothL1 between its hidden state and the teacher's   (Hydra, EAGLE)

The fast path computes chunk after chunk of rows. Its forward replaces a chunk's logits by their gradient in place, so
logits are computed once and never stored: memory is one chunk of logits (two with a teacher), whatever the number of
rows, heads and tokens. Heads that share an unembedding are computed together, with one gradient buffer and full chunks.
Any `Projection` (norm, bias, scale, soft cap) is supported, which torch's own linear_cross_entropy does not do.
"""
# R rows, C rows of one chunk, K head, P sets of rows in one pass, D model width, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows
from torch.profiler import record_function

from heads.backbone.gradient_gate import gate
from heads.backbone.projection import Projection
from train.objective.soft_targets import Distillation, hard_loss, mixed_loss, plain_divergence
from train.objective.targets import HeadRows
from train.objective.unembedding import Unembedding, widen

CHUNK_ELEMENTS = {"cpu": 2**23}
"""Logits of one chunk, in elements: 32 MiB in float32; `python -m benchmarks.training chunks` measures other sizes."""
CHUNK_ELEMENTS_ELSEWHERE = 2**27
"""On an accelerator: 1,024 rows of a vocabulary of 128k, 512 MiB. Fewer rows are bound by reading the weights."""
LOSS_SCOPE = "headway: loss"
"""The name of the loss in profiles; `train plan` counts its memory under it."""
LEAST_ROWS = 64  # smaller chunks are bound by reading the weights, whatever the vocabulary


def plain_cross_entropy(projection: Projection, hidden_RD: Tensor, labels_R: Tensor) -> Tensor:
    """The sum over rows of -log softmax(projection(hidden))[label], in float32. The reference.

    >>> p = Projection(weight=torch.zeros(4, 2))
    >>> plain_cross_entropy(p, torch.ones(3, 2), torch.tensor([0, 1, 2]))   # 3 · ln 4
    tensor(4.1589)
    """
    logits_RV = projection(hidden_RD.to(projection.weight.dtype))
    return F.cross_entropy(widen(logits_RV), labels_R, reduction="sum")


def plain_loss(rows: HeadRows) -> Tensor:
    """The loss of a head's rows before their factor, as a reference; `plain_cross_entropy` is its first term."""
    loss = rows.hard * plain_cross_entropy(rows.projection, rows.hidden_RD, rows.labels_R)
    if rows.distillation is not None:
        logits_RV = rows.projection(rows.hidden_RD.to(rows.projection.weight.dtype))
        loss = loss + rows.distillation.factor * plain_divergence(rows.distillation, logits_RV).sum()
    if rows.target_RD is not None:
        norm = rows.projection.norm
        hidden_RD = rows.hidden_RD if norm is None else norm(rows.hidden_RD.to(rows.projection.weight.dtype))
        loss = loss + rows.regression * smooth_l1(hidden_RD, rows.target_RD)
    return loss


def smooth_l1(hidden_RD: Tensor, target_RD: Tensor) -> Tensor:
    """The sum over rows of the mean over a row of SmoothL1: d²/2 up to a distance d of 1, d - 1/2 beyond.

    >>> smooth_l1(torch.tensor([[0.0, 3.0]]), torch.tensor([[1.0, 0.0]]))     # (0.5 + 2.5) / 2
    tensor(1.5000)
    """
    return F.smooth_l1_loss(widen(hidden_RD), widen(target_RD).detach(), reduction="sum") / max(1, hidden_RD.shape[1])


def chunked_cross_entropy(
    projection: Projection, hidden_RD: Tensor, labels_R: Tensor, gates: Sequence[float] | None = None
) -> Tensor:
    """`plain_cross_entropy` in chunks of rows, with gradients for the hidden states and the projection's tensors.

    Args:
        gates: a factor on the gradient of each of `projection.parameters()`, in their order; None is 1 for all.
    """
    return weighted_loss([HeadRows(projection=projection, hidden_RD=hidden_RD, labels_R=labels_R, gates=gates)])[0]


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Unweighted sums over rows, each (K,) and detached; 0 where a head has no such loss.

    Attributes:
        hard: cross-entropies with the labels, also where their weight is 0.
        soft: divergences from the teacher, without T².
        regression: SmoothL1 distances from the teacher's hidden states.
    """

    hard: Tensor
    soft: Tensor
    regression: Tensor


def weighted_loss(heads: Iterable[HeadRows], chunk_elements: int | None = None) -> tuple[Tensor, Sums]:
    """Σ factor · (loss of a head's rows), and the unweighted sums in the heads' order.

    `heads` yields one head at a time. The loss of a head with its own unembedding is computed immediately. Heads that
    share an unembedding are collected as (R, D) hidden states and computed together after the last one.

    Args:
        chunk_elements: elements of one chunk's logits; None chooses by the device.
    """
    losses: list[Tensor] = []
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    distances: list[Tensor] = []
    waiting: dict[tuple[object, ...], dict[int, HeadRows]] = {}
    for index, rows in enumerate(heads):
        rows = after_norm(rows)
        distance = rows.hidden_RD.new_zeros(())
        if rows.target_RD is not None:
            distance = smooth_l1(rows.hidden_RD, rows.target_RD)
            weighted = rows.regression * distance
            losses.append(weighted if rows.factor is None else weighted * rows.factor)
        distances.append(widen(distance.detach()))
        if rows.shared:
            waiting.setdefault(rows.pass_key, {})[index] = rows
        else:
            losses.append(one_pass({index: rows}, sums, chunk_elements))
    losses += [one_pass(together, sums, chunk_elements) for together in waiting.values()]
    hard, soft = (torch.stack([sums[index][i] for index in range(len(sums))]) for i in range(2))
    return torch.stack(losses).sum(), Sums(hard=hard, soft=soft, regression=torch.stack(distances))


def after_norm(rows: HeadRows) -> HeadRows:
    """The rows after their projection's norm, which ordinary autograd differentiates, since (R, D) is small."""
    norm, hidden_RD = rows.projection.norm, rows.hidden_RD
    if norm is None:
        return rows
    tensors = list(norm.named_parameters())
    gates = [1.0] * len(tensors) if rows.gates is None else rows.gates[len(rows.gates) - len(tensors) :]
    values = {name: gate(tensor, scale) for (name, tensor), scale in zip(tensors, gates, strict=True)}
    # A shallow copy, called by `forward`: engines register hooks on modules, which expect the module's own weights.
    module = copy.copy(norm)
    module.__dict__["_parameters"] = dict.fromkeys(norm._parameters) | values
    hidden_RD = module.forward(hidden_RD.to(rows.projection.weight.dtype))
    return replace(rows, projection=rows.projection.without_norm(), hidden_RD=hidden_RD)


@record_function(LOSS_SCOPE)
def one_pass(
    heads: dict[int, HeadRows], sums: dict[int, tuple[Tensor, Tensor]], chunk_elements: int | None = None
) -> Tensor:
    """The weighted loss of heads that share one unembedding; stores their unweighted sums in `sums` by index."""
    together = list(heads.values())
    rows = joined(together)
    sizes_P = torch.tensor([len(one.labels_R) for one in together], device=rows.hidden_RD.device)

    def for_each_row(values_P: Tensor) -> Tensor:  # with output_size, no synchronisation with the device
        return values_P.to(sizes_P.device).repeat_interleave(sizes_P, output_size=len(rows.hidden_RD))

    gates = [one.unembedding_gate for one in together]
    factors_R = for_each_row(torch.stack([factor_of(one) for one in together]))
    gates_R = None if set(gates) <= {0.0, 1.0} else for_each_row(factors_R.new_tensor(gates))
    weight, bias = rows.projection.weight, rows.projection.bias
    if not any(gates):
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    loss, hard_R, soft_R = _ChunkedLoss.apply(rows.hidden_RD, weight, bias, rows, factors_R, gates_R, chunk_elements)
    sizes = [len(one.labels_R) for one in together]
    for index, hard_P, soft_P in zip(heads, hard_R.split(sizes), soft_R.split(sizes), strict=True):
        sums[index] = hard_P.sum(), soft_P.sum()
    return loss


def factor_of(rows: HeadRows) -> Tensor:
    """() the factor on the sum over rows; without a teacher it includes `hard`."""
    factor = torch.ones(()) if rows.factor is None else rows.factor
    return factor if rows.distillation is not None or rows.hard == 1 else factor * rows.hard


def joined(heads: list[HeadRows]) -> HeadRows:
    """Concatenate the rows of heads with one `pass_key`; without a teacher `factor_of` applies `hard`."""
    first = heads[0]
    if first.distillation is None:
        first = replace(first, hard=1.0)
    if len(heads) == 1:
        return first
    distillation: Distillation | None = None
    if first.distillation is not None:
        states = [one.distillation.hidden_RD for one in heads if one.distillation is not None]
        distillation = replace(first.distillation, hidden_RD=torch.cat(states))
    return replace(
        first,
        hidden_RD=torch.cat([one.hidden_RD for one in heads]),
        labels_R=torch.cat([one.labels_R for one in heads]),
        distillation=distillation,
    )


def chunk_elements_on(device_type: str) -> int:
    return CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS_ELSEWHERE)


class _ChunkedLoss(torch.autograd.Function):
    """Forward computes the gradients; backward scales and returns them, once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: HeadRows,
        factors_R: Tensor,
        gates_R: Tensor | None,
        chunk_elements: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the weighted sum, and each row's cross-entropy and divergence, without gradients."""
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        distillation = rows.distillation
        student = Unembedding(rows.projection, hidden_RD.device)
        teacher: Unembedding | None = None
        if distillation is not None:
            device = distillation.hidden_RD.device
            teacher = Unembedding(distillation.projection, device, beside=student, goes_back=False)
        # A factor is about 1 / labels of a batch. In float16 small gradients times that would underflow before backward
        # multiplies by the loss scale, so the largest factor is divided out here and multiplied in by backward.
        unit = factors_R.abs().amax() if len(factors_R) else factors_R.new_ones(())
        unit = torch.where(unit > 0, unit, 1.0)
        hidden_grad_RD = torch.empty_like(hidden_RD, dtype=student.wide) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=student.wide) if needs_weight else None  # the sum over chunks
        bias_grad = torch.zeros_like(bias, dtype=student.wide) if needs_bias and bias is not None else None
        hard_R = torch.empty(len(hidden_RD), dtype=student.wide, device=hidden_RD.device)
        soft_R = torch.zeros_like(hard_R)
        elements = chunk_elements or chunk_elements_on(hidden_RD.device.type)
        chunk_rows = max(LEAST_ROWS, elements // len(weight))
        for start in range(0, len(hidden_RD), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            hidden_CD, labels_C = hidden_RD[chunk].to(student.dtype), rows.labels_R[chunk]
            if distillation is None or teacher is None:
                hard_R[chunk], gradient_CV = hard_loss(student.logits(hidden_CD), labels_C)
            else:
                target = distillation.soft_target(teacher, chunk, student.wide)  # first: the two may share a buffer
                hard_R[chunk], soft_R[chunk], gradient_CV = mixed_loss(
                    student.logits(hidden_CD), labels_C, rows.hard, target, distillation
                )
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            scale_C1 = factors_R[chunk, None] / unit
            gradient_CV = student.through_finish(gradient_CV)
            if hidden_grad_RD is not None:
                hidden_grad_RD[chunk] = student.into_hidden(gradient_CV) * scale_C1
            if gates_R is not None:
                scale_C1 = scale_C1 * gates_R[chunk, None]
            if weight_grad is not None:
                _add_product(weight_grad, gradient_CV.t(), (hidden_CD * scale_C1).to(student.dtype))
            if bias_grad is not None:
                bias_grad += (gradient_CV.t() @ scale_C1.to(student.dtype)).squeeze(1)
        ctx.gradients, ctx.unit = [hidden_grad_RD, weight_grad, bias_grad], unit
        ctx.dtypes = [hidden_RD.dtype, weight.dtype, None if bias is None else bias.dtype]
        ctx.mark_non_differentiable(hard_R, soft_R)
        loss_R = hard_R if distillation is None else rows.hard * hard_R + distillation.factor * soft_R
        return (loss_R * factors_R).sum(), hard_R, soft_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("backward was called twice; the gradients were scaled in place and given away.")
        gradients, ctx.gradients = ctx.gradients, None
        scale = grad_outputs[0] * ctx.unit
        scaled = (None if g is None else g.mul_(scale).to(t) for g, t in zip(gradients, ctx.dtypes, strict=True))
        return *scaled, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a copy of `total` where the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
