"""Labels never cross a document or fall into a masked turn, and heads are shifted by k + 1."""

import torch

from train.objective.targets import count_supervised, labels_at, supervised_rows

TOKENS = torch.tensor([[10, 11, 12, 20, 21], [30, 31, 32, 33, 34]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
ALL = torch.ones(2, 5, dtype=torch.bool)


def test_picture_of_the_docstring():
    rows = supervised_rows(ALL[:1], DOCUMENTS[:1], 1)
    assert rows.tolist() == [0, 1, 3]
    assert labels_at(TOKENS[:1], rows, 1).tolist() == [11, 12, 21]
    assert supervised_rows(ALL[:1], DOCUMENTS[:1], 2).tolist() == [0]


def test_rows_of_a_second_block_are_its_own():
    rows = supervised_rows(ALL, DOCUMENTS, 3)
    assert rows.tolist() == [5, 6]
    assert labels_at(TOKENS, rows, 3).tolist() == [33, 34]


def test_masked_turns_are_no_labels_but_may_be_context():
    mask = torch.tensor([[False, False, True, True, False]])
    one_document = torch.zeros(1, 5, dtype=torch.long)
    assert supervised_rows(mask, one_document, 2).tolist() == [0, 1]


def test_a_shift_as_long_as_the_block_has_no_rows():
    assert supervised_rows(ALL, DOCUMENTS, 5).numel() == 0
    assert supervised_rows(ALL, DOCUMENTS, 9).numel() == 0


def test_counts():
    assert count_supervised(ALL, DOCUMENTS, [1, 2, 3]).tolist() == [7, 4, 2]
