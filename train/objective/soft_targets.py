"""Soft labels: a teacher's distribution in place of, or beside, the true token (Hinton et al. 2015, section 2).

    position           t    t+1   …   t+k   t+k+1
    head k at t                              x       predicts x_{t+k+1}
    its teacher at t+k                       x       predicts x_{t+k+1}, with x_{t+1} … x_{t+k} before it

    loss of a row = hard · CE(label) + weight · T² · D(p ‖ q),   p = softmax(teacher's logits / T), q the student's

T² keeps the gradient as large as at T = 1: that of D(p ‖ q) shrinks with 1/T², since both distributions flatten. D is
the cross-entropy -Σ p log q or the Kullback-Leibler divergence Σ p log (p / q); they differ by the teacher's entropy,
which no student can change, so gradients are the same; the second is 0 where the student has learnt everything and
costs a chunk of logits more.
"""
# R rows, C rows of one chunk, n tokens that are kept of a teacher's distribution, V vocabulary, D model width

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from heads.backbone.projection import Projection
from train.objective.unembedding import Passes, into_probabilities, widen

Divergence = Literal["cross_entropy", "kl"]


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """Whose distribution a part's rows are to follow.

    Attributes:
        hidden_RD: its hidden states at the part's rows; they get no gradient.
        projection: its unembedding, without norm; gets no gradient either.
        weight: of its divergence in the loss, beside the part's `hard`.
        temperature: T, of teacher and student.
        top_n: of its distribution only the n most probable tokens are kept, renormalised; all where it is None.
        divergence: "cross_entropy" or "kl": another value, the same gradient.
    """

    hidden_RD: Tensor
    projection: Projection
    weight: float = 1.0
    temperature: float = 1.0
    top_n: int | None = None
    divergence: Divergence = "cross_entropy"

    def __post_init__(self) -> None:
        if self.projection.norm is not None:
            raise ValueError("A teacher's projection was given with a norm; give normed states and without_norm().")

    @property
    def factor(self) -> float:
        """On D(p ‖ q) in the loss."""
        return self.weight * self.temperature**2

    @property
    def kind(self) -> tuple[object, ...]:
        """Teachers of one kind can take one pass together."""
        own = (id(self.projection.weight), id(self.projection.bias), self.projection.scale, self.projection.soft_cap)
        return *own, self.weight, self.temperature, self.top_n, self.divergence


def plain_divergence(teacher: Teacher, logits_RV: Tensor) -> Tensor:
    """(R,): D(p ‖ q) of each row, from the student's full logits. The reference.

    Teacher's logits (0, ln 3), so p = (1/4, 3/4); a student that knows nothing has q = (1/2, 1/2):

    >>> weight = torch.tensor([[0.0], [1.0986]])
    >>> teacher = Teacher(hidden_RD=torch.ones(1, 1), projection=Projection(weight=weight))
    >>> plain_divergence(teacher, torch.zeros(1, 2))     # ln 2
    tensor([0.6931])
    """
    with torch.no_grad():
        hidden_RD = teacher.hidden_RD.to(teacher.projection.weight.dtype)
        teacher_RV = widen(teacher.projection(hidden_RD)) / teacher.temperature
        if teacher.top_n is not None:
            kept_Rn, ids_Rn = teacher_RV.topk(min(teacher.top_n, teacher_RV.shape[1]), dim=1)
            teacher_RV = torch.full_like(teacher_RV, -torch.inf).scatter(1, ids_Rn, kept_Rn)
        probs_RV = teacher_RV.softmax(dim=1)
    crosses_R = -(probs_RV * (widen(logits_RV) / teacher.temperature).log_softmax(dim=1)).sum(dim=1)
    if teacher.divergence == "cross_entropy":
        return crosses_R
    return crosses_R + torch.xlogy(probs_RV, probs_RV).sum(dim=1)


class SoftTargets:
    """A teacher's distributions, chunk by chunk.

    Args:
        student: the passes whose logits follow those of the teacher.
    """

    def __init__(self, teacher: Teacher, student: Passes) -> None:
        self.teacher = teacher
        self.passes = Passes(teacher.projection, teacher.hidden_RD.device, beside=student, goes_back=False)
        self.dtype = student.wide

    def of(self, rows: slice) -> Target:
        """(C, V), or (C, n) with their tokens where the teacher is cut to its n best."""
        logits_CV = self.passes.logits(self.teacher.hidden_RD[rows].detach())
        top_n, ids_Cn = self.teacher.top_n, None
        if top_n is not None and top_n < logits_CV.shape[1]:
            logits_CV, ids_Cn = logits_CV.topk(top_n, dim=1)
        if self.teacher.temperature != 1.0:
            logits_CV.div_(self.teacher.temperature)
        return Target(into_probabilities(logits_CV)[0].to(self.dtype), ids_Cn)


@dataclass(frozen=True)
class Target:
    """Distributions over the vocabulary, or over some tokens of each row."""

    probs_Cn: Tensor
    ids_Cn: Tensor | None

    def expectation(self, values_CV: Tensor) -> Tensor:
        """(C,): Σ p · value, without a product of their size."""
        chosen_Cn = values_CV if self.ids_Cn is None else values_CV.gather(1, self.ids_Cn)
        with torch.autocast(values_CV.device.type, enabled=False):  # it would round both to half precision
            return torch.bmm(self.probs_Cn[:, None, :], chosen_Cn[:, :, None]).flatten()

    def entropy(self) -> Tensor:
        return torch.special.entr(self.probs_Cn).sum(dim=1)

    def subtract_from(self, gradient_CV: Tensor, factor: float) -> None:
        """gradient -= factor · p"""
        if self.ids_Cn is None:
            gradient_CV.sub_(self.probs_Cn, alpha=factor)
        else:
            gradient_CV.scatter_add_(1, self.ids_Cn, self.probs_Cn * -factor)


def hard_loss(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies (C,) and their gradient at the logits, p - onehot, in place of them."""
    picked_C1 = logits_CV.gather(1, labels_C[:, None])
    probs_CV, sums_C = into_probabilities(logits_CV)
    add_at(probs_CV, labels_C, -1.0)
    return sums_C - picked_C1.squeeze(1), probs_CV


def mixed_loss(
    logits_CV: Tensor, labels_C: Tensor, target: Target, teacher: Teacher, hard: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies (C,), divergences (C,), and the gradient of hard · the first + weight · T² · the second.

    At T = 1 both read one softmax of the student: (hard + weight) · q - hard · onehot - weight · p. Else there are two.
    """
    t, weight = teacher.temperature, teacher.weight
    picked_C = logits_CV.gather(1, labels_C[:, None]).squeeze(1)
    expected_C = target.expectation(logits_CV) / t
    if t == 1.0:
        gradient_CV, sums_C = into_probabilities(logits_CV)
        tempered_C = sums_C
        gradient_CV.mul_(hard + weight)
    else:
        tempered_CV, tempered_C = into_probabilities(logits_CV / t)
        gradient_CV, sums_C = into_probabilities(logits_CV)
        gradient_CV.mul_(hard).add_(tempered_CV, alpha=weight * t)
    target.subtract_from(gradient_CV, weight * t)
    add_at(gradient_CV, labels_C, -hard)
    divergences_C = tempered_C - expected_C
    if teacher.divergence == "kl":
        divergences_C = divergences_C - target.entropy()
    return sums_C - picked_C, divergences_C, gradient_CV


def add_at(values_CV: Tensor, labels_C: Tensor, value: float) -> None:
    values_CV.scatter_add_(1, labels_C[:, None], values_CV.new_full((len(labels_C), 1), value))
