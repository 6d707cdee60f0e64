"""The positions at which each head is trained and its labels there (Modified-CLM), as `HeadRows` for the loss.

position t       0    1    2    3    4        The label of shift s at t is x_{t+s}, if it lies in the same document and
tokens           a    b    c  | x    y        the loss mask allows it. The backbone has shift 1; head k has shift k + 1.
shift 1          b    c    .    y    .
shift 2 (head 1) c    .    .    .    .
"""
# B batch, T position, R supervised row of one head, K head, D model width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heads.backbone.draft_vocabulary import DraftVocabulary
from heads.backbone.projection import Projection
from train.objective.soft_targets import Distillation


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """One head's supervised rows and all inputs of its loss.

        loss = factor · Σ_rows (hard · cross-entropy + distillation.factor · divergence + regression · distance)

    Attributes:
        hidden_RD: the head's hidden states, for `projection`.
        labels_R: the true tokens; entries of the draft vocabulary once `scored` was called.
        projection: from hidden states to logits; its tensors that require gradients are trained too.
        head: k; 0 is the backbone's own distribution.
        shift: the label at position t is x_{t+shift}.
        rows_R: positions of the rows in the flattened (B·T); None for rows that belong to no block.
        gates: a factor on the gradient of each of `projection.parameters()`, in their order; None is 1 for all.
        shared: other heads may have the same unembedding, so the loss computes these rows together with theirs.
        factor: () the factor on the sum over these rows; None is 1.
        hard: weight of the cross-entropy with the labels.
        distillation: the teacher and its weight; None where there is no teacher.
        target_RD: the teacher's hidden states, for the regression after the projection's norm; without gradient.
        regression: weight of the SmoothL1 distance from them.
    """

    hidden_RD: Tensor
    labels_R: Tensor
    projection: Projection
    head: int = 0
    shift: int = 1
    rows_R: Tensor | None = None
    gates: Sequence[float] | None = None
    shared: bool = False
    factor: Tensor | None = None
    hard: float = 1.0
    distillation: Distillation | None = None
    target_RD: Tensor | None = None
    regression: float = 0.0

    def scored(self) -> HeadRows:
        """Drop the rows whose label is outside the draft vocabulary; labels become entries of that vocabulary."""
        if self.projection.vocabulary is None:
            return self
        rows, entries = scored_rows(self.labels_R, self.projection.vocabulary)
        rows_R = None if self.rows_R is None else self.rows_R[rows]
        return replace(self, hidden_RD=self.hidden_RD[rows], labels_R=entries, rows_R=rows_R)

    def predicting_rows(self) -> Tensor:
        """(R,): positions in the flattened (B·T) at which the backbone predicts the same tokens, shift - 1 ahead."""
        assert self.rows_R is not None, "rows of no block have no place in it"
        return self.rows_R + self.shift - 1

    @property
    def unembedding_gate(self) -> float:
        """The gradient factor of weight and bias, which belong to the same module."""
        return 1.0 if self.gates is None else self.gates[0]

    @property
    def pass_key(self) -> tuple[object, ...]:
        """Rows with the same key are computed together, if they share an unembedding or have a teacher.

        Rows that give the unembedding no gradient need one product less; rows with a teacher have another loss.
        """
        return (
            self.unembedding_gate == 0,
            *(() if self.distillation is None else (self.hard, *self.distillation.pass_key)),
        )


def supervised_rows(loss_mask_BT: Tensor, document_ids_BT: Tensor, shift: int) -> Tensor:
    """Positions whose token `shift` places ahead is a target, as indices into the flattened (B·T).

    >>> supervised_rows(torch.ones(1, 5, dtype=torch.bool), torch.tensor([[0, 0, 0, 1, 1]]), 2)
    tensor([0])
    """
    supervised_BT = torch.zeros_like(loss_mask_BT, dtype=torch.bool)
    if shift < loss_mask_BT.shape[1]:
        same_document = document_ids_BT[:, shift:] == document_ids_BT[:, :-shift]
        supervised_BT[:, :-shift] = loss_mask_BT[:, shift:].bool() & same_document
    return supervised_BT.flatten().nonzero().squeeze(1)


def labels_at(tokens_BT: Tensor, rows_R: Tensor, shift: int) -> Tensor:
    """(R,): x_{t+shift} at each row; `supervised_rows` has no row whose label would lie beyond its block."""
    return tokens_BT.flatten()[rows_R + shift]


def scored_rows(labels_R: Tensor, vocabulary: DraftVocabulary) -> tuple[Tensor, Tensor]:
    """Indices of the rows whose label is in the draft vocabulary, and those labels as entries of the vocabulary.

    Other labels are tokens that such heads never draft.

    >>> few = DraftVocabulary(tokens_S=torch.tensor([3, 7]), size=9)
    >>> scored_rows(torch.tensor([7, 5, 3]), few)
    (tensor([0, 2]), tensor([1, 0]))
    """
    entries_R, scored_R = vocabulary.find(labels_R)
    rows = scored_R.nonzero().squeeze(1)
    return rows, entries_R[rows]


def count_supervised(loss_mask_BT: Tensor, document_ids_BT: Tensor, shifts: list[int]) -> Tensor:
    """(K,): labels of each head in a batch; later heads have fewer, since they lose more at document ends."""
    return torch.tensor([len(supervised_rows(loss_mask_BT, document_ids_BT, shift)) for shift in shifts])
