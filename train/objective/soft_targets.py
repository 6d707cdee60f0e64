"""Soft labels: a teacher's distribution instead of, or in addition to, the true token (Hinton et al. 2015, section 2).

    position           t    t+1   …   t+k   t+k+1
    head k at t                              x       predicts x_{t+k+1}
    its teacher at t+k                       x       predicts x_{t+k+1}, with x_{t+1} … x_{t+k} before it

    loss of a row = hard · CE(label) + weight · T² · D(p ‖ q),   p = softmax(teacher's logits / T), q the student's

T² keeps the gradient about as large as at T = 1: the gradient of D(p ‖ q) shrinks with 1/T², since both distributions
flatten. D is the cross-entropy -Σ p log q or the Kullback-Leibler divergence Σ p log (p / q). They differ by the
teacher's entropy, a constant, so their gradients are the same. A teacher costs one more chunk of logits.
"""
# N teacher's states, R rows, C rows of one chunk, n tokens of a teacher's distribution, V vocabulary, D model width

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from heads.backbone.projection import Projection
from train.objective.unembedding import Unembedding, into_probabilities, widen

Divergence = Literal["cross_entropy", "kl"]


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """A teacher's states, which of them teaches each of a head's rows, and the weight of the divergence.

    Attributes:
        states_ND: the teacher's hidden states, without gradient; heads that share them are computed together.
        rows_R: the entry of `states_ND` for each row, ascending; None where each row has its own entry, in order.
        projection: the teacher's unembedding, without norm and without gradient.
        weight: weight of the divergence in the loss.
        temperature: T, which the logits of teacher and student are divided by.
        top_n: restrict the teacher to its n most probable tokens, renormalised; None is all.
        divergence: "cross_entropy" or "kl"; the values differ, the gradients do not.
    """

    states_ND: Tensor
    projection: Projection
    rows_R: Tensor | None = None
    weight: float = 1.0
    temperature: float = 1.0
    top_n: int | None = None
    divergence: Divergence = "cross_entropy"

    def __post_init__(self) -> None:
        if self.projection.norm is not None:
            raise ValueError("A teacher's projection was given with a norm; give normed states and without_norm().")

    @property
    def factor(self) -> float:
        """The factor on D(p ‖ q) in the loss."""
        return self.weight * self.temperature**2

    @property
    def pass_key(self) -> tuple[object, ...]:
        """Heads with the same key are taught by the same distributions, each at its rows of them."""
        projection = self.projection
        own = (id(projection.weight), id(projection.bias), projection.scale, projection.soft_cap)
        return id(self.states_ND), *own, self.weight, self.temperature, self.top_n, self.divergence

    def hidden(self, rows: slice = slice(None)) -> Tensor:
        """(R, D): the teacher's hidden states for these of a head's rows."""
        return (self.states_ND[rows] if self.rows_R is None else self.states_ND[self.rows_R[rows]]).detach()

    def soft_target(self, teacher: Unembedding, rows: slice, dtype: torch.dtype) -> SoftTarget:
        """The teacher's distribution at a chunk of the rows; `teacher` holds this projection."""
        logits_CV, ids_Cn = teacher.logits(self.hidden(rows)), None
        if self.top_n is not None and self.top_n < logits_CV.shape[1]:
            logits_CV, ids_Cn = logits_CV.topk(self.top_n, dim=1)
        if self.temperature != 1.0:
            logits_CV.div_(self.temperature)
        return SoftTarget(into_probabilities(logits_CV)[0].to(dtype), ids_Cn)


def plain_divergence(distillation: Distillation, logits_RV: Tensor) -> Tensor:
    """(R,): D(p ‖ q) of each row, from the student's full logits. The reference.

    The teacher's logits are (0, ln 3), so p = (1/4, 3/4); the student's are equal, so q = (1/2, 1/2):

    >>> weight = torch.tensor([[0.0], [1.0986]])
    >>> teacher = Distillation(states_ND=torch.ones(1, 1), projection=Projection(weight=weight))
    >>> plain_divergence(teacher, torch.zeros(1, 2))     # ln 2
    tensor([0.6931])
    """
    with torch.no_grad():
        hidden_RD = distillation.hidden().to(distillation.projection.weight.dtype)
        teacher_RV = widen(distillation.projection(hidden_RD)) / distillation.temperature
        if distillation.top_n is not None:
            best_Rn, ids_Rn = teacher_RV.topk(min(distillation.top_n, teacher_RV.shape[1]), dim=1)
            teacher_RV = torch.full_like(teacher_RV, -torch.inf).scatter(1, ids_Rn, best_Rn)
        probs_RV = teacher_RV.softmax(dim=1)
    crosses_R = -(probs_RV * (widen(logits_RV) / distillation.temperature).log_softmax(dim=1)).sum(dim=1)
    if distillation.divergence == "cross_entropy":
        return crosses_R
    return crosses_R + torch.xlogy(probs_RV, probs_RV).sum(dim=1)


@dataclass(frozen=True)
class SoftTarget:
    """Distributions of a chunk of rows over the vocabulary, or over the n tokens `ids_Cn` of each row."""

    probs_Cn: Tensor
    ids_Cn: Tensor | None

    def expectation(self, values_CV: Tensor) -> Tensor:
        """(C,): Σ p · value, without a temporary (C, V) product."""
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
    """Cross-entropies (C,) and their gradient at the logits, p - onehot, which overwrites the logits."""
    picked_C1 = logits_CV.gather(1, labels_C[:, None])
    probs_CV, sums_C = into_probabilities(logits_CV)
    add_at(probs_CV, labels_C, -1.0)
    return sums_C - picked_C1.squeeze(1), probs_CV


def mixed_loss(
    logits_CV: Tensor, labels_C: Tensor, hard: float, target: SoftTarget, distillation: Distillation
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropies (C,), divergences (C,), and the gradient of hard · cross-entropy + weight · T² · divergence.

    At T = 1 one softmax serves both: the gradient is (hard + weight) · q - hard · onehot - weight · p. Otherwise there
    are two.
    """
    t, weight = distillation.temperature, distillation.weight
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
    if distillation.divergence == "kl":
        divergences_C = divergences_C - target.entropy()
    return sums_C - picked_C, divergences_C, gradient_CV


def add_at(values_CV: Tensor, labels_C: Tensor, value: float) -> None:
    values_CV.scatter_add_(1, labels_C[:, None], values_CV.new_full((len(labels_C), 1), value))
