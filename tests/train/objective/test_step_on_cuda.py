"""A step on an accelerator has the CPU's loss and gradients: the same code, other kernels."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.training.training_speed import Workload

TOLERANCE = 1e-9  # float64, whose sums differ in the fifteenth digit


@pytest.mark.cuda
@pytest.mark.parametrize("unembedding", ["shared", "own"])
@pytest.mark.parametrize("family", ["medusa", "grounded", "gru", "eagle", "dynamo"])
def test_a_step_is_the_cpus(family, unembedding):
    workload = Workload(family=family, unembedding=unembedding, vocab=64, width=64, layers=2, batch=2, length=32)
    here = workload.build().double()
    there = copy.deepcopy(here).cuda()
    batch = workload.data()
    ours, theirs = here(**batch)["loss"], there(**{name: x.cuda() for name, x in batch.items()})["loss"]
    torch.testing.assert_close(theirs.cpu(), ours, atol=TOLERANCE, rtol=TOLERANCE)
    ours.backward()
    theirs.backward()
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad.cpu(), one.grad, atol=TOLERANCE, rtol=TOLERANCE)
