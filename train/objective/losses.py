"""The loss from hidden states: a plain reference, and a fast path that never holds (rows, vocabulary) at once.

    loss of a row = hard · cross-entropy with the true token
                  + weight · T² · divergence from a teacher          (train/objective/soft_targets.py)
                  + regression · SmoothL1 between its hidden state and the teacher's   (Hydra, EAGLE)

The fast path goes over chunks of rows and takes each chunk's gradients by hand while its logits exist, in forward:
logits are computed once, turned into their own gradient in place and never stored, so memory is one chunk's logits
(with a teacher a second one) however many rows, heads or tokens there are. Objectives that share an unembedding go
through it together: there is one gradient of its size, and chunks are full. It works through any `Projection` (norm,
bias, scale, soft cap), which torch's own linear_cross_entropy does not.
"""
# R rows, C rows of one chunk, K objective, P part of one pass, D model width, V vocabulary

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
from train.objective.soft_targets import SoftTargets, Teacher, hard_loss, mixed_loss, plain_divergence
from train.objective.unembedding import Passes, widen

CHUNK_ELEMENTS = {"cpu": 2**23}
"""Logits of one chunk, in elements: 32 MiB in float32; `benchmarks/training/training.py` prints others beside it."""
CHUNK_ELEMENTS_ELSEWHERE = 2**27
"""On an accelerator a product of few rows waits for the weights: 1,024 rows of a vocabulary of 128k, 512 MiB."""
LOSS_SCOPE = "headway: loss"
"""What a profile calls the loss; `train plan` counts the memory of it under this name."""
LEAST_ROWS = 64  # a chunk of fewer spends its time on reading the weights, whatever the vocabulary


def plain_cross_entropy(projection: Projection, hidden_RD: Tensor, labels_R: Tensor) -> Tensor:
    """The sum over rows of -log softmax(projection(hidden))[label], in float32. The reference.

    >>> p = Projection(weight=torch.zeros(4, 2))
    >>> plain_cross_entropy(p, torch.ones(3, 2), torch.tensor([0, 1, 2]))   # 3 · ln 4
    tensor(4.1589)
    """
    logits_RV = projection(hidden_RD.to(projection.weight.dtype))
    return F.cross_entropy(widen(logits_RV), labels_R, reduction="sum")


def plain_loss(part: Part) -> Tensor:
    """A part's loss without its factor, whatever is in it. The reference; `plain_cross_entropy` is its first term."""
    loss = part.hard * plain_cross_entropy(part.projection, part.hidden_RD, part.labels_R)
    if part.teacher is not None:
        logits_RV = part.projection(part.hidden_RD.to(part.projection.weight.dtype))
        loss = loss + part.teacher.factor * plain_divergence(part.teacher, logits_RV).sum()
    if part.target_RD is not None:
        norm = part.projection.norm
        hidden_RD = part.hidden_RD if norm is None else norm(part.hidden_RD.to(part.projection.weight.dtype))
        loss = loss + part.regression * smooth_l1(hidden_RD, part.target_RD)
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
    """The same sum in chunks of rows, with gradients for the hidden states and the projection's trained tensors.

    Args:
        gates: a factor on the gradient of each of `projection.parameters()`, in their order; 1 where not given.
    """
    part = Part(projection=projection, hidden_RD=hidden_RD, labels_R=labels_R, gates=gates)
    return weighted_loss([part])[0]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One objective's rows, and what they count in the whole loss.

    Attributes:
        hidden_RD: hidden states for `projection`.
        factor: () what the sum over these rows is multiplied with in the loss; 1 where not given.
        gates: a factor on the gradient of each of `projection.parameters()`, in their order; 1 where not given.
        shared: others may read the same unembedding, so these rows wait for theirs.
        hard: weight of the cross-entropy with the labels.
        teacher: whose distribution they are to follow as well, or instead.
        target_RD: hidden states that theirs, after the projection's norm, are to come near; no gradient.
        regression: weight of that distance.
    """

    projection: Projection
    hidden_RD: Tensor
    labels_R: Tensor
    factor: Tensor | None = None
    gates: Sequence[float] | None = None
    shared: bool = False
    hard: float = 1.0
    teacher: Teacher | None = None
    target_RD: Tensor | None = None
    regression: float = 0.0

    @property
    def company(self) -> tuple[object, ...]:
        """Parts that share an unembedding and have this in common take one pass together.

        Those that give the unembedding no gradient need one product less; those with a teacher have another loss.
        """
        return (self.unembedding_gate == 0, *(() if self.teacher is None else (self.hard, *self.teacher.kind)))

    @property
    def unembedding_gate(self) -> float:
        """On weight and bias alike: they have one owner."""
        return 1.0 if self.gates is None else self.gates[0]


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Plain sums over rows, without weights, each (K,) and detached; 0 where a part has no such loss.

    Attributes:
        hard: cross-entropies with the labels, also where they weigh nothing.
        soft: divergences from the teacher, without T².
        regression: distances from the target.
    """

    hard: Tensor
    soft: Tensor
    regression: Tensor


def weighted_loss(parts: Iterable[Part], chunk_elements: int | None = None) -> tuple[Tensor, Sums]:
    """Σ factor · (a part's loss), and the plain sums.

    Parts are taken one at a time. Those with an unembedding of their own are done at once; shared ones are kept, as
    (R, D) hidden states, until the last is there.

    Args:
        chunk_elements: logits that are held at a time, in elements; chosen by the device where it is not given.
    """
    losses: list[Tensor] = []
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    distances: list[Tensor] = []
    waiting: dict[tuple[object, ...], list[tuple[int, Part]]] = {}
    for index, part in enumerate(parts):
        part = after_norm(part)
        distance = part.hidden_RD.new_zeros(())
        if part.target_RD is not None:
            distance = smooth_l1(part.hidden_RD, part.target_RD)
            weighted = part.regression * distance
            losses.append(weighted if part.factor is None else weighted * part.factor)
        distances.append(widen(distance.detach()))
        if part.shared:
            waiting.setdefault(part.company, []).append((index, part))
        else:
            losses.append(one_pass([(index, part)], sums, chunk_elements))
    losses += [one_pass(together, sums, chunk_elements) for together in waiting.values()]
    hard, soft = (torch.stack([sums[index][i] for index in range(len(sums))]) for i in range(2))
    return torch.stack(losses).sum(), Sums(hard=hard, soft=soft, regression=torch.stack(distances))


def after_norm(part: Part) -> Part:
    """The part behind its projection's norm, which ordinary autograd goes through: (R, D) is small."""
    norm, hidden_RD = part.projection.norm, part.hidden_RD
    if norm is None:
        return part
    tensors = list(norm.named_parameters())
    gates = [1.0] * len(tensors) if part.gates is None else part.gates[len(part.gates) - len(tensors) :]
    values = {name: gate(tensor, scale) for (name, tensor), scale in zip(tensors, gates, strict=True)}
    # A shallow copy, called by `forward`: engines hang hooks on modules and look there for weights of their own.
    module = copy.copy(norm)
    module.__dict__["_parameters"] = dict.fromkeys(norm._parameters) | values
    hidden_RD = module.forward(hidden_RD.to(part.projection.weight.dtype))
    return replace(part, projection=part.projection.without_norm(), hidden_RD=hidden_RD)


@record_function(LOSS_SCOPE)
def one_pass(
    parts: list[tuple[int, Part]], sums: dict[int, tuple[Tensor, Tensor]], chunk_elements: int | None = None
) -> Tensor:
    """The weighted loss of parts that share one unembedding; notes their plain sums under their indices."""
    projection, teacher, hard = parts[0][1].projection, joined_teacher([part for _, part in parts]), parts[0][1].hard
    sizes = [len(part.labels_R) for _, part in parts]
    hidden_RD = torch.cat([part.hidden_RD for _, part in parts]) if len(parts) > 1 else parts[0][1].hidden_RD
    labels_R = torch.cat([part.labels_R for _, part in parts])
    factors = [torch.ones(()) if part.factor is None else part.factor for _, part in parts]
    if teacher is None:  # with one kind of loss its weight is part of the factor
        factors, hard = (
            [f if part.hard == 1 else f * part.hard for f, (_, part) in zip(factors, parts, strict=True)],
            1.0,
        )
    gates = [part.unembedding_gate for _, part in parts]

    def for_each_row(values_P: Tensor) -> Tensor:
        counts_P = torch.tensor(sizes, device=hidden_RD.device)
        return values_P.to(hidden_RD.device).repeat_interleave(counts_P, output_size=len(hidden_RD))  # no wait for it

    factors_R = for_each_row(torch.stack(factors))
    gates_R = None if set(gates) <= {0.0, 1.0} else for_each_row(factors_R.new_tensor(gates))
    weight, bias = projection.weight, projection.bias
    if not any(gates):
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    mix = Mix(projection=projection, hard=hard, teacher=teacher, chunk_elements=chunk_elements)
    loss, hard_R, soft_R = _ChunkedLoss.apply(hidden_RD, labels_R, factors_R, gates_R, mix, weight, bias)
    for (index, _), hard_P, soft_P in zip(parts, hard_R.split(sizes), soft_R.split(sizes), strict=True):
        sums[index] = hard_P.sum(), soft_P.sum()
    return loss


def joined_teacher(parts: list[Part]) -> Teacher | None:
    """One teacher for the rows of all; they are of one kind."""
    teachers = [part.teacher for part in parts if part.teacher is not None]
    if not teachers:
        return None
    if len(teachers) == 1:
        return teachers[0]
    return replace(teachers[0], hidden_RD=torch.cat([teacher.hidden_RD for teacher in teachers]))


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What the rows of one pass have in common."""

    projection: Projection
    hard: float
    teacher: Teacher | None
    chunk_elements: int | None = None

    def weigh(self, hard_R: Tensor, soft_R: Tensor) -> Tensor:
        return hard_R if self.teacher is None else self.hard * hard_R + self.teacher.factor * soft_R


def chunk_elements_on(device_type: str) -> int:
    return CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS_ELSEWHERE)


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are made in forward and handed out by backward, once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        labels_R: Tensor,
        factors_R: Tensor,
        gates_R: Tensor | None,
        mix: Mix,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (0, 5, 6))
        passes = Passes(mix.projection, hidden_RD.device)
        targets = None if mix.teacher is None else SoftTargets(mix.teacher, passes)
        # Factors are 1 / labels of a batch; times that, small gradients would be lost in float16 before backward brings
        # the loss scale. So the largest factor waits for backward too.
        unit = factors_R.abs().amax() if len(factors_R) else factors_R.new_ones(())
        unit = torch.where(unit > 0, unit, 1.0)
        hidden_grad_RD = torch.empty_like(hidden_RD, dtype=passes.wide) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=passes.wide) if needs_weight else None  # chunks add up in it
        bias_grad = torch.zeros_like(bias, dtype=passes.wide) if needs_bias and bias is not None else None
        hard_R = torch.empty(len(hidden_RD), dtype=passes.wide, device=hidden_RD.device)
        soft_R = torch.zeros_like(hard_R)
        elements = mix.chunk_elements or chunk_elements_on(hidden_RD.device.type)
        chunk_rows = max(LEAST_ROWS, elements // len(weight))
        for start in range(0, len(hidden_RD), chunk_rows):
            rows = slice(start, start + chunk_rows)
            hidden_CD = hidden_RD[rows].to(passes.dtype)
            if mix.teacher is None or targets is None:
                hard_R[rows], gradient_CV = hard_loss(passes.logits(hidden_CD), labels_R[rows])
            else:
                target = targets.of(rows)  # first: it may use the memory of the logits
                hard_R[rows], soft_R[rows], gradient_CV = mixed_loss(
                    passes.logits(hidden_CD), labels_R[rows], target, mix.teacher, mix.hard
                )
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            scale_C1 = factors_R[rows, None] / unit
            gradient_CV = passes.through_finish(gradient_CV)
            if hidden_grad_RD is not None:
                hidden_grad_RD[rows] = passes.into_hidden(gradient_CV) * scale_C1
            if gates_R is not None:
                scale_C1 = scale_C1 * gates_R[rows, None]
            if weight_grad is not None:
                _add_product(weight_grad, gradient_CV.t(), (hidden_CD * scale_C1).to(passes.dtype))
            if bias_grad is not None:
                bias_grad += (gradient_CV.t() @ scale_C1.to(passes.dtype)).squeeze(1)
        ctx.found, ctx.unit = [hidden_grad_RD, weight_grad, bias_grad], unit
        ctx.dtypes = [hidden_RD.dtype, weight.dtype, None if bias is None else bias.dtype]
        ctx.mark_non_differentiable(hard_R, soft_R)
        return (mix.weigh(hard_R, soft_R) * factors_R).sum(), hard_R, soft_R

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.found is None:
            raise RuntimeError("backward was called twice; the gradients were scaled in place and given away.")
        found, ctx.found = ctx.found, None
        scale = grad_outputs[0] * ctx.unit
        hidden_grad_RD, weight_grad, bias_grad = (
            None if g is None else g.mul_(scale).to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)
        )
        return hidden_grad_RD, None, None, None, None, weight_grad, bias_grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a copy of `total` where the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
