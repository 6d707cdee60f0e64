"""Next-token probabilities of every order, against dictionaries."""

from __future__ import annotations

import random

import pytest
import torch

from heads.decoding.superposed.reference import count_plainly
from heads.ngrams.counting import count_ngrams

ORDER = 6


@pytest.mark.parametrize(("vocab", "length"), [(3, 500), (40, 2000), (400, 300)])
def test_all_questions_at_once_are_answered_as_dictionaries_answer_each(vocab, length, tmp_path):
    draw = random.Random(vocab)
    documents = [[min(draw.randrange(vocab), draw.randrange(vocab)) for _ in range(n)] for n in (length, 1, 7, length)]
    table = count_ngrams(documents, folder=tmp_path / "table", order=ORDER, vocab_size=vocab)
    counts = count_plainly(documents, ORDER)
    contexts = [documents[0][i : i + ORDER - 1] for i in range(0, 60, 2)]
    contexts += [[draw.randrange(vocab) for _ in range(ORDER - 1)] for _ in range(10)]
    contexts += [[-1] * n + documents[3][: ORDER - 1 - n] for n in range(ORDER)]
    contexts += [[vocab + 3] * (ORDER - 1)]  # a token of the backbone that the table does not know
    tokens = [[draw.randrange(vocab + 1) for _ in range(5)] for _ in contexts]
    for i in range(30):  # what did follow
        tokens[i][0] = documents[0][2 * i + ORDER - 1]
    found = table.next_token_probabilities(torch.tensor(contexts), torch.tensor(tokens))
    assert found.shape == (len(contexts), ORDER - 1, 5)
    assert found.dtype == torch.float64
    expected = torch.zeros_like(found)
    for i, (context, asked) in enumerate(zip(contexts, tokens, strict=True)):
        for n in range(2, ORDER + 1):
            after = counts.get(tuple(context[len(context) - n + 1 :]), {})
            for m, token in enumerate(asked):
                expected[i, n - 2, m] = after.get(token, 0) / max(1, sum(after.values()))
    assert (expected > 0).any(dim=2).any(dim=0).all()  # every order is asked for something it knows
    assert torch.equal(found, expected)


def test_texts_that_are_shorter_than_the_orders(tmp_path):
    table = count_ngrams([[0, 1, 2, 0, 1, 1]], folder=tmp_path / "table", order=4, vocab_size=3)
    found = table.next_token_probabilities(torch.tensor([[1]]), torch.tensor([[1, 2]]))
    assert found.tolist() == [[[0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]]
