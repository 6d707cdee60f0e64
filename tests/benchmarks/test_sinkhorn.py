"""The Sinkhorn loop finds the minimum of equation 5 for ε₂ > 0."""

import numpy as np
import torch

from benchmarks.paper.sinkhorn import SPEEDS, THRESHOLDS, Emitted, describe_differences, share_at_speeds, sinkhorn

PULL = 0.7  # ε₂ with ε₁ = 1


def objective(p, product, ratio, marginals):
    """Equation 5 with c = -log ratio and ε₁ = 1."""
    found = (p * -ratio.log()).sum() + (p * (p / product).log()).sum()
    for axis, wanted in enumerate(marginals):
        own = p.sum(dim=1 - axis)
        found = found + PULL * (own * (own / wanted).log()).sum()
    return found


def test_the_loop_ends_at_the_minimum_of_equation_5():
    generator = torch.Generator().manual_seed(0)
    marginals = [torch.rand(n, generator=generator, dtype=torch.float64).softmax(0) for n in (3, 4)]
    ratio = torch.rand(3, 4, generator=generator, dtype=torch.float64) * 4 + 0.1
    product = marginals[0][:, None] * marginals[1]
    start = product * ratio / (product * ratio).sum()
    end = sinkhorn(start[None], [m[None] for m in marginals], PULL, iterations=200)[0]
    lowest = objective(end, product, ratio, marginals)
    assert lowest < objective(start, product, ratio, marginals) - 1e-3
    for _ in range(200):  # every step along the simplex leads up
        step = torch.randn(3, 4, generator=generator, dtype=torch.float64) * 1e-3
        moved = (end + (step - step.mean())).clamp(min=1e-12)
        assert objective(moved / moved.sum(), product, ratio, marginals) >= lowest - 1e-12


def test_no_pull_changes_nothing():
    start = torch.tensor([[[0.4, 0.1], [0.3, 0.2]]])
    assert torch.allclose(sinkhorn(start, [torch.tensor([[0.9, 0.1]])] * 2, 0.0), start)


def emitted(right_K):
    """All of 100 positions a block are emitted at a threshold of 0, and fewer with every threshold."""
    emitted_TK = np.linspace(100, 0, len(THRESHOLDS))[:, None] * np.ones(len(right_K))
    return Emitted(
        emitted_TK=emitted_TK, right_TK=emitted_TK * np.array(right_K), positions_K=np.full(len(right_K), 100.0)
    )


def test_a_difference_is_marked_only_where_its_interval_excludes_0():
    better, worse, mixed = emitted([0.8, 0.7, 0.9, 0.8]), emitted([0.4, 0.5, 0.4, 0.3]), emitted([0.1, 0.9, 0.9, 0.2])
    assert share_at_speeds(worse, np.ones(4)) == [0.4] * len(SPEEDS)
    assert share_at_speeds(worse, np.array([0.0, 4.0, 0.0, 0.0])) == [0.5] * len(SPEEDS)
    assert all(cell.startswith("+0.400 [+0.") and cell.endswith("]*") for cell in describe_differences(better, worse))
    assert all(cell.startswith("+0.125 [-0.") and cell.endswith("]") for cell in describe_differences(mixed, worse))
    assert describe_differences(worse, worse) == ["+0.000 [+0.000, +0.000]"] * len(SPEEDS)
