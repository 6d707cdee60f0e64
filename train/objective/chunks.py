"""The loss chunk by chunk of rows, as one autograd function whose forward computes the gradients too.

A chunk's logits are turned into their gradient (in place on a CPU), so they are computed once and never stored. Heads
with one teacher are computed side by side over the same rows of it: a chunk takes one product with the teacher's
unembedding, and its distribution serves every head before the next chunk overwrites it. So memory holds a few chunks
(logits, their gradient, the teacher's distribution), whatever the number of rows and heads.
"""
# R rows, C rows of one chunk, N teacher's states, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from train.objective.soft_targets import Distillation, SoftTarget, hard_loss, mixed_loss
from train.objective.targets import HeadRows
from train.objective.unembedding import Unembedding

CHUNK_ELEMENTS = {"cpu": 2**23}
"""Logits of one chunk, in elements: 32 MiB in float32; `python -m benchmarks.training chunks` measures other sizes."""
CHUNK_ELEMENTS_ELSEWHERE = 2**27
"""On an accelerator: 1,024 rows of a vocabulary of 128k, 512 MiB. Fewer rows are bound by reading the weights."""
LEAST_ROWS = 256
"""Smaller chunks are bound by reading the weights, whatever the vocabulary: with 128k tokens and a width of 512, chunks
of 65 rows took 1.32 times as long on a CPU, and chunks of 520 0.93 times. A chunk is then 125 MiB in float32."""


def chunk_elements_on(device_type: str) -> int:
    return CHUNK_ELEMENTS.get(device_type, CHUNK_ELEMENTS_ELSEWHERE)


def rows_of_chunk(vocab_size: int, elements: int) -> int:
    """
    >>> rows_of_chunk(2_048, 2**23), rows_of_chunk(32_000, 2**23), rows_of_chunk(128_256, 2**23)
    (4096, 262, 256)
    """
    return max(LEAST_ROWS, elements // vocab_size)


@dataclass(frozen=True, kw_only=True)
class Student:
    """Rows that one unembedding scores: one head's, or those of several heads that share it.

    Attributes:
        rows: hidden states after the norm; `factors_R` and `gates_R` replace their `factor` and `gates`.
        factors_R: the factor on each row's loss.
        gates_R: the factor on each row's gradient at weight and bias; None where all are 1 or there is no gradient.
        trains_unembedding: weight and bias may have a gradient.
    """

    rows: HeadRows
    factors_R: Tensor
    gates_R: Tensor | None = None
    trains_unembedding: bool = True

    @property
    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.rows.projection.weight, self.rows.projection.bias
        if self.trains_unembedding:
            return weight, bias
        return weight.detach(), None if bias is None else bias.detach()


def side_by_side(heads: Sequence[HeadRows]) -> tuple[list[HeadRows], list[Tensor | None]]:
    """Pad heads that share a teacher to one set of rows.

    Head k has no row at the first k tokens of a document, where others may have one. Its states there are zeros, to
    which the caller gives the factor 0.

    Returns:
        The padded heads, and the indices of each head's own rows in the set; None where a head has all rows.
    """
    teachers = [one.distillation for one in heads if one.distillation is not None]
    read = [teacher.rows_R for teacher in teachers if teacher.rows_R is not None]
    if len(heads) == 1 or not read:
        return list(heads), [None] * len(heads)
    is_read_N = torch.zeros(len(teachers[0].states_ND), dtype=torch.bool, device=read[0].device)
    for rows_R in read:
        is_read_N[rows_R] = True
    together_R, places_N = is_read_N.nonzero().squeeze(1), is_read_N.cumsum(0) - 1
    places = [None if len(rows_R) == len(together_R) else places_N[rows_R] for rows_R in read]
    return [spread(one, together_R, place) for one, place in zip(heads, places, strict=True)], places


def spread(rows: HeadRows, together_R: Tensor, place: Tensor | None) -> HeadRows:
    """Pad a head's rows with zeros to the rows `together_R` of the teacher.

    Args:
        together_R: the teacher's rows that at least one head needs.
        place: where the head's own rows lie among these; None: it has all of them.
    """
    assert rows.distillation is not None
    distillation = replace(rows.distillation, rows_R=together_R)
    if place is None:
        return replace(rows, distillation=distillation)
    hidden_RD = rows.hidden_RD.new_zeros(len(together_R), rows.hidden_RD.shape[1]).index_copy(0, place, rows.hidden_RD)
    labels_R = rows.labels_R.new_zeros(len(together_R)).index_copy(0, place, rows.labels_R)
    return replace(rows, hidden_RD=hidden_RD, labels_R=labels_R, distillation=distillation)


def chunked_loss(
    students: Sequence[Student], chunk_elements: int | None = None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Σ factor · (loss of a row); and each student's cross-entropies and divergences (R,), without gradients.

    Either all students share one teacher and the same rows of it, or there is a single student without a teacher.
    """
    unembeddings = {id(student.rows.projection.weight): student.unembedding for student in students}
    tensors = [student.rows.hidden_RD for student in students], [t for pair in unembeddings.values() for t in pair]
    loss, *sums = _ChunkedLoss.apply(students, chunk_elements, *tensors[0], *tensors[1])
    return loss, sums[: len(students)], sums[len(students) :]


class _Running:
    """One student's losses, and its gradients at the hidden states, chunk after chunk."""

    def __init__(self, student: Student, unembedding: Unembedding, unit: Tensor, needs_hidden: bool) -> None:
        self.student, self.rows, self.unembedding, self.unit = student, student.rows, unembedding, unit
        hidden_RD = self.rows.hidden_RD
        self.hidden_grad_RD = torch.empty_like(hidden_RD, dtype=unembedding.wide) if needs_hidden else None
        self.hard_R = torch.empty(len(hidden_RD), dtype=unembedding.wide, device=hidden_RD.device)
        self.soft_R = torch.zeros_like(self.hard_R)

    def add(self, chunk: slice, target: SoftTarget | None, grads: tuple[Tensor | None, Tensor | None]) -> None:
        """Compute the chunk's losses and gradients; those at weight and bias are added to `grads`."""
        weight_grad, bias_grad = grads
        hidden_CD = self.rows.hidden_RD[chunk].to(self.unembedding.dtype)
        gradient_CV = self._losses(chunk, self.unembedding.logits(hidden_CD), target)
        if self.hidden_grad_RD is None and weight_grad is None and bias_grad is None:
            return
        scale_C1 = self.student.factors_R[chunk, None] / self.unit
        gradient_CV = self.unembedding.through_finish(gradient_CV)
        if self.hidden_grad_RD is not None:
            self.hidden_grad_RD[chunk] = self.unembedding.into_hidden(gradient_CV) * scale_C1
        if self.student.gates_R is not None:
            scale_C1 = scale_C1 * self.student.gates_R[chunk, None]
        if weight_grad is not None:
            _add_product(weight_grad, gradient_CV.t(), (hidden_CD * scale_C1).to(self.unembedding.dtype))
        if bias_grad is not None:
            bias_grad += (gradient_CV.t() @ scale_C1.to(self.unembedding.dtype)).squeeze(1)

    def _losses(self, chunk: slice, logits_CV: Tensor, target: SoftTarget | None) -> Tensor:
        """Store the chunk's losses; returns their gradient at the logits."""
        labels_C, distillation = self.rows.labels_R[chunk], self.rows.distillation
        if target is None or distillation is None:
            self.hard_R[chunk], gradient_CV = hard_loss(logits_CV, labels_C)
        else:
            self.hard_R[chunk], self.soft_R[chunk], gradient_CV = mixed_loss(
                logits_CV, labels_C, self.rows.hard, target, distillation
            )
        return gradient_CV

    @property
    def weighted_sum(self) -> Tensor:
        teacher = self.rows.distillation
        loss_R = self.hard_R if teacher is None else self.rows.hard * self.hard_R + teacher.factor * self.soft_R
        return (loss_R * self.student.factors_R).sum()


class _ChunkedLoss(torch.autograd.Function):
    """Forward computes the gradients; backward scales and returns them, once."""

    @staticmethod
    def forward(ctx: Any, students: Sequence[Student], chunk_elements: int | None, *tensors: Tensor | None) -> Any:
        """
        Args:
            tensors: each student's hidden states, then weight and bias of each of their unembeddings.

        Returns:
            The weighted sum, each student's cross-entropies, each student's divergences.
        """
        needs, first = ctx.needs_input_grad[2:], students[0].rows
        device, distillation = first.hidden_RD.device, first.distillation
        unembeddings = unembeddings_of(students, device)
        # A factor is about 1 / (labels of a batch). In float16, small gradients times that would underflow before
        # backward multiplies by the loss scale. So the largest factor is divided out here, and backward restores it.
        unit = largest(torch.cat([student.factors_R for student in students]))
        running = [
            _Running(student, unembeddings[id(student.rows.projection.weight)], unit, needs_hidden)
            for student, needs_hidden in zip(students, needs, strict=False)
        ]
        wide = [wide for one in unembeddings.values() for wide in (one.wide, one.wide)]
        parts = zip(tensors[len(students) :], needs[len(students) :], wide, strict=True)
        sums = [torch.zeros_like(t, dtype=w) if n and t is not None else None for t, n, w in parts]  # over chunks
        grads = dict(zip(unembeddings, zip(sums[::2], sums[1::2], strict=True), strict=True))
        teacher = None if distillation is None else unembedding_of_teacher(distillation, running[0].unembedding)
        elements = chunk_elements or chunk_elements_on(device.type)
        chunk_rows = rows_of_chunk(len(first.projection.weight), elements)
        for start in range(0, len(first.hidden_RD), chunk_rows):
            chunk, target = slice(start, start + chunk_rows), None
            if distillation is not None and teacher is not None:  # before the students: they may share its buffer
                target = distillation.soft_target(teacher, chunk, running[0].unembedding.wide)
            for one in running:
                one.add(chunk, target, grads[id(one.rows.projection.weight)])
        ctx.gradients, ctx.unit = [*(one.hidden_grad_RD for one in running), *sums], unit
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        losses = *(one.hard_R for one in running), *(one.soft_R for one in running)
        ctx.mark_non_differentiable(*losses)
        return torch.stack([one.weighted_sum for one in running]).sum(), *losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("backward was called twice; the gradients were scaled in place and given away.")
        gradients, ctx.gradients = ctx.gradients, None
        scale = grad_outputs[0] * ctx.unit
        scaled = (None if g is None else g.mul_(scale).to(t) for g, t in zip(gradients, ctx.dtypes, strict=True))
        return None, None, *scaled


def unembeddings_of(students: Sequence[Student], device: torch.device) -> dict[int, Unembedding]:
    """One unembedding for each weight; all write their logits to the first one's buffer, since they take turns."""
    found: dict[int, Unembedding] = {}
    for student in students:
        first, key = next(iter(found.values()), None), id(student.rows.projection.weight)
        if key not in found:
            found[key] = Unembedding(student.rows.projection, device, beside=first)
    return found


def unembedding_of_teacher(distillation: Distillation, student: Unembedding) -> Unembedding:
    return Unembedding(distillation.projection, distillation.states_ND.device, beside=student, goes_back=False)


def largest(factors_R: Tensor) -> Tensor:
    """() the largest factor's size; 1 where there is none above 0."""
    unit = factors_R.abs().amax() if len(factors_R) else factors_R.new_ones(())
    return torch.where(unit > 0, unit, 1.0)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a copy of `total` where the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
