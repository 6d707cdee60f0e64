"""The losses of other trainers, restated, are ours on the same heads, and steps of both take them alike."""

import pytest
import torch

from benchmarks.training.training_peers import EQUAL, figures, our_step_with_loss, restated_step
from benchmarks.training.training_speed import Workload, our_step, reference_step


@pytest.mark.parametrize("family", ["medusa", "grounded"])
def test_restated_losses_are_ours(family):
    workload = Workload(family=family, unembedding="own", vocab=96, width=64, layers=1, batch=2, length=24)
    theirs = restated_step(workload.build(), workload.data_of_seed())
    ours = our_step_with_loss(workload.build(), workload.data_of_seed())
    for _ in range(3):  # a step of the optimizer keeps them equal
        assert theirs().item() == pytest.approx(ours().item(), rel=EQUAL)


def test_losses_that_differ_are_no_comparison():
    rounds = [{"peer": 2.0, "ours": 1.0, "losses": 1e-7}] * 3
    assert figures(rounds, Workload(family="medusa", unembedding="own"))[3:] == ["2.00", "2.00–2.00"]
    with pytest.raises(ValueError, match=r"The two losses differ by 1\.0e-03"):
        figures([{**rounds[0], "losses": 1e-3}], Workload(family="medusa", unembedding="own"))


def test_the_plain_step_has_the_same_optimizer_as_ours(monkeypatch):
    built, adamw = [], torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **kwargs: built.append(adamw(*args, **kwargs)) or built[-1])
    workload = Workload(family="medusa", unembedding="own", vocab=96, width=64, layers=1, batch=2, length=24)
    for make in (reference_step, our_step):
        make(workload.build(), workload.data_of_seed())
    plain, *ours = [
        {name: value for name, value in group.items() if name not in ("params", "name")}
        for optimizer in built
        for group in optimizer.param_groups
    ]
    assert plain["fused"]
    assert all(group == plain for group in ours)
