"""The loss from hidden states: a plain reference, and a fast path that never stores logits of all rows.

    loss of a row = hard · cross-entropy with the true token
                  + weight · T² · divergence from a teacher          (train/objective/soft_targets.py)
                  + regression · SmoothL1 between its hidden state and the teacher's   (Hydra, EAGLE)

The fast path computes chunk after chunk of rows (train/objective/chunks.py), so memory holds a few chunks of logits,
whatever the number of rows and heads. Heads that share an unembedding are computed together, with one gradient buffer
and full chunks. So are heads that share a teacher, with one product for its logits. Any `Projection` (norm, bias,
scale, soft cap) is supported, which torch's own linear_cross_entropy does not do.
"""
# R rows, K head, P sets of rows in one pass, D model width, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows
from torch.profiler import record_function

from heads.backbone.gradient_gate import gate
from heads.backbone.projection import Projection
from train.objective.chunks import Student, chunked_loss, side_by_side
from train.objective.soft_targets import plain_divergence
from train.objective.targets import HeadRows
from train.objective.unembedding import widen

LOSS_SCOPE = "headway: loss"
"""The name of the loss in profiles; `train plan` counts its memory under it."""


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

    Raises:
        ValueError: heads whose hidden states have another width than the backbone's.
    """
    if hidden_RD.shape != target_RD.shape:
        raise ValueError(
            f"loss.regression was given for heads whose hidden states have width {hidden_RD.shape[-1]}, and the "
            f"backbone's have {target_RD.shape[-1]}; leave loss.regression out, or inner_width."
        )
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

    `heads` yields one head at a time. The loss of a head with its own unembedding and hard labels is computed
    immediately. Heads that share an unembedding, or a teacher, are collected as (R, D) hidden states and computed
    together after the last one.

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
        if rows.shared or rows.distillation is not None:
            waiting.setdefault(rows.pass_key, {})[index] = rows
        else:
            losses.append(one_pass({index: rows}, sums, chunk_elements))
    losses += [one_pass(together, sums, chunk_elements) for together in waiting.values()]
    hard, soft = (torch.stack([sums[index][i] for index in range(len(sums))]) for i in range(2))
    return torch.stack(losses).sum(), Sums(hard=hard, soft=soft, regression=torch.stack(distances))


def after_norm(rows: HeadRows) -> HeadRows:
    """The rows after their projection's norm, which autograd differentiates as usual, since (R, D) is small."""
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
    """The weighted loss of heads with one `pass_key`; stores their unweighted sums in `sums` by index."""
    if next(iter(heads.values())).distillation is None:
        return joined_pass(heads, sums, chunk_elements)
    aligned, places = side_by_side(list(heads.values()))
    students = [student_of(rows, place) for rows, place in zip(aligned, places, strict=True)]
    loss, hard, soft = chunked_loss(students, chunk_elements)
    for index, place, hard_R, soft_R in zip(heads, places, hard, soft, strict=True):
        own = (hard_R, soft_R) if place is None else (hard_R[place], soft_R[place])
        sums[index] = own[0].sum(), own[1].sum()
    return loss


def student_of(rows: HeadRows, place: Tensor | None) -> Student:
    """A head's rows and factors for a pass that it shares with other heads of the same teacher.

    Args:
        rows: padded by `side_by_side`.
        place: which of them are the head's own; the others get the factor 0. None: all are.
    """
    factor, size = factor_of(rows).to(rows.hidden_RD.device), len(rows.hidden_RD)
    factors_R = factor.expand(size)
    if place is not None:
        factors_R = factor.new_zeros(size).index_copy(0, place, factor.expand(len(place)))
    scale = rows.unembedding_gate
    gates_R = None if scale in (0.0, 1.0) else torch.full_like(factors_R, scale)
    return Student(rows=rows, factors_R=factors_R, gates_R=gates_R, trains_unembedding=scale != 0.0)


def joined_pass(
    heads: dict[int, HeadRows], sums: dict[int, tuple[Tensor, Tensor]], chunk_elements: int | None
) -> Tensor:
    """The loss of heads with hard labels and one unembedding, whose rows are joined and multiplied together."""
    together = list(heads.values())
    rows = joined(together)
    sizes_P = torch.tensor([len(one.labels_R) for one in together], device=rows.hidden_RD.device)

    def for_each_row(values_P: Tensor) -> Tensor:  # with output_size, no synchronisation with the device
        return values_P.to(sizes_P.device).repeat_interleave(sizes_P, output_size=len(rows.hidden_RD))

    gates = [one.unembedding_gate for one in together]
    factors_R = for_each_row(torch.stack([factor_of(one) for one in together]))
    gates_R = None if set(gates) <= {0.0, 1.0} else for_each_row(factors_R.new_tensor(gates))
    student = Student(rows=rows, factors_R=factors_R, gates_R=gates_R, trains_unembedding=any(gates))
    loss, (hard_R,), (soft_R,) = chunked_loss([student], chunk_elements)
    sizes = [len(one.labels_R) for one in together]
    for index, hard_P, soft_P in zip(heads, hard_R.split(sizes), soft_R.split(sizes), strict=True):
        sums[index] = hard_P.sum(), soft_P.sum()
    return loss


def factor_of(rows: HeadRows) -> Tensor:
    """() the factor on the sum over rows; without a teacher it includes `hard`."""
    factor = torch.ones(()) if rows.factor is None else rows.factor
    return factor if rows.distillation is not None or rows.hard == 1 else factor * rows.hard


def joined(heads: list[HeadRows]) -> HeadRows:
    """Concatenate the rows of heads with hard labels and one `pass_key`; `factor_of` applies their `hard`."""
    first = replace(heads[0], hard=1.0)
    if len(heads) == 1:
        return first
    return replace(
        first,
        hidden_RD=torch.cat([one.hidden_RD for one in heads]),
        labels_R=torch.cat([one.labels_R for one in heads]),
    )
