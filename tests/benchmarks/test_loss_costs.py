"""The losses that are timed are the ones that their names say."""

import pytest
import torch

from benchmarks.training.loss_costs import HARD, LOSSES, SHARED, LossWorkload, measure, read_size, table
from train.objective.losses import plain_loss, weighted_loss


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_timed_loss_is_the_plain_one(name):
    workload, loss = LossWorkload(50, 8, 6), LOSSES[name]
    weight = workload.weight_VD.clone().requires_grad_(loss.trained)
    part = workload.rows(loss, weight, workload.hidden_RD.clone().requires_grad_())
    fast, plain = weighted_loss([part])[0], plain_loss(part)
    torch.testing.assert_close(fast, plain)  # float32 sums in another order
    fast.backward()
    assert (weight.grad is not None) == loss.trained


def test_losses_with_other_names_differ():
    workload = LossWorkload(200, 8, 6)  # more tokens than top_n keeps
    values = {
        name: float(weighted_loss([workload.rows(loss, workload.weight_VD.clone(), workload.hidden_RD)])[0])
        for name, loss in LOSSES.items()
        if loss.trained and loss.heads == 1
    }
    assert len({round(value, 3) for value in values.values()}) == len(values), values


def test_each_is_told_of_hard_labels_with_the_same_unembedding():
    found = {"50,8,6": measure((50, 8, 6), rounds=1)}
    assert set(found["50,8,6"]) == set(LOSSES)
    assert (LOSSES["soft, shared"].beside, LOSSES["soft"].beside) == (SHARED, HARD)
    assert table(found).row_count == 2


def test_four_heads_with_one_teacher_ask_it_once():
    assert (LOSSES["4 heads"].limit, LOSSES["4, apart"].limit) == (13 / 12, 16 / 12)


def test_a_wrong_size_is_a_sentence():
    with pytest.raises(ValueError, match=r"--sizes has '32000,1024'; give vocabulary, width and rows"):
        read_size("32000,1024")
