"""Which positions each head is trained at, and on what (Modified-CLM).

position t       0    1    2    3    4        labels of shift s at t: x_{t+s}, where it lies in the same document and is
tokens           a    b    c  | x    y        no masked turn. The backbone has shift 1; head k has shift k + 1.
shift 1          b    c    .    y    .
shift 2 (head 1) c    .    .    .    .
"""
# B batch, T position, R supervised row of one head, K head

from __future__ import annotations

import torch
from torch import Tensor

from heads.backbone.draft_vocabulary import DraftVocabulary


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
    """x_{t+shift} at each row. Rows never reach over a row's end: `supervised_rows` left those out."""
    return tokens_BT.flatten()[rows_R + shift]


def scored_rows(labels_R: Tensor, vocabulary: DraftVocabulary) -> tuple[Tensor, Tensor]:
    """Which rows heads with a draft vocabulary are trained at, and the entries of their logits that the labels are.

    The other labels are tokens that such heads never draft.

    >>> few = DraftVocabulary(tokens_S=torch.tensor([3, 7]), size=9)
    >>> scored_rows(torch.tensor([7, 5, 3]), few)
    (tensor([0, 2]), tensor([1, 0]))
    """
    entries_R, scored_R = vocabulary.find(labels_R)
    rows = scored_R.nonzero().squeeze(1)
    return rows, entries_R[rows]


def count_supervised(loss_mask_BT: Tensor, document_ids_BT: Tensor, shifts: list[int]) -> Tensor:
    """(K,): how many labels each head has in a batch. Heads count apart: the last ones lose more at document ends."""
    return torch.tensor([len(supervised_rows(loss_mask_BT, document_ids_BT, shift)) for shift in shifts])
