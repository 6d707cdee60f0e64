"""Otsu's threshold and the blur before it, each against a plain loop over all cells."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from plain_joint import loop_blur, loop_otsu

from heads.decoding.dynamo.threshold import (
    adaptive_threshold,
    apply_thresholds,
    best_edge,
    blur,
    gaussian_kernel,
    otsu_threshold,
)


def pictures(seed: int) -> torch.Tensor:
    """(3, 200): smooth, peaked, and mostly zero."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(3, 200, generator=generator, dtype=torch.float64)
    return torch.stack([base[0], base[1] ** 8, base[2].where(base[2] > 0.97, 0.0)])


@pytest.mark.parametrize("seed", range(4))
def test_otsu_is_the_loop(seed):
    picture = pictures(seed)
    expected = [loop_otsu(row) for row in picture.tolist()]
    torch.testing.assert_close(otsu_threshold(picture), torch.tensor(expected, dtype=torch.float64))


def test_otsu_separates_two_heaps_at_the_lowest_edge():
    heaps = torch.tensor([[0.1, 0.12, 0.11, 0.9, 1.0, 0.95, 0.1]])
    assert float(otsu_threshold(heaps)) == pytest.approx(31 / 256)  # 0.12 is of level 30
    assert best_edge(torch.tensor([[0, 4, 0, 0, 0, 4]])).tolist() == [2]


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_a_picture_of_one_grey_is_all_foreground(value):
    picture = torch.full((1, 9), value)
    assert bool((picture >= otsu_threshold(picture)).all())


def test_scale_changes_the_threshold_alike_and_not_the_classes():
    picture = pictures(1)
    torch.testing.assert_close(otsu_threshold(picture * 1e-6), otsu_threshold(picture) * 1e-6)


def test_cells_outside_do_not_count():
    picture = pictures(2)[:1]
    inside = torch.arange(700)[None] < 200
    bright = torch.cat([picture, torch.full((1, 500), 9.0, dtype=torch.float64)], dim=1)
    assert torch.equal(otsu_threshold(bright, inside), otsu_threshold(picture))
    padded = torch.cat([picture, torch.zeros(1, 500, dtype=torch.float64)], dim=1)
    assert torch.equal(otsu_threshold(padded, inside), otsu_threshold(picture))
    assert not torch.equal(otsu_threshold(padded), otsu_threshold(picture)), "they would have counted as dark"


def test_the_kernel_is_opencvs():
    """getGaussianKernel(3, 0): sigma 0.8. Size 5: 1.1."""
    weights = [math.exp(-1 / (2 * 0.8**2)), 1.0, math.exp(-1 / (2 * 0.8**2))]
    assert gaussian_kernel(3) == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)
    ratio = gaussian_kernel(5)[1] / gaussian_kernel(5)[2]
    assert ratio == pytest.approx(math.exp(-1 / (2 * 1.1**2)), rel=1e-12)
    assert gaussian_kernel(1) == [1.0]


@pytest.mark.parametrize("sizes", [(4, 5), (3, 2, 4), (1, 4, 2), (2, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("kernel", [3, 5])
def test_the_blur_is_the_loop(sizes, kernel):
    picture = torch.rand(2, *sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = [torch.full((2,), size) for size in sizes]
    blurred = blur(picture, counts, kernel)
    for row, result in zip(picture, blurred, strict=True):
        cells = {cell: float(row[cell]) for cell in itertools.product(*map(range, sizes))}
        for cell, value in loop_blur(cells, list(sizes), gaussian_kernel(kernel)).items():
            assert float(result[cell]) == pytest.approx(value, rel=1e-12)


def test_a_blur_averages():
    """Weights sum to 1 for every cell, so no blurred value is above the largest: what J's peak relies on."""
    flat = blur(torch.ones(1, 4, 3, 5, dtype=torch.float64), [torch.tensor([n]) for n in (4, 3, 5)], 3)
    torch.testing.assert_close(flat, torch.ones_like(flat))


@pytest.mark.parametrize("size", [1, 3])
def test_a_row_with_fewer_candidates_is_blurred_and_thresholded_as_if_alone(size):
    generator, dark_would_count = torch.Generator().manual_seed(3), 0
    for _ in range(20):
        wide = torch.rand(1, 6, 5, generator=generator, dtype=torch.float64)
        small = torch.rand(1, 3, 4, generator=generator, dtype=torch.float64)
        padded = torch.zeros(1, 6, 5, dtype=torch.float64)
        padded[:, :3, :4] = small
        whole, some = [torch.tensor([6]), torch.tensor([5])], [torch.tensor([3]), torch.tensor([4])]
        both = [torch.cat(pair) for pair in zip(whole, some, strict=True)]
        together = adaptive_threshold(torch.cat([wide, padded]), both, size)
        alone = adaptive_threshold(small, some, size)
        assert torch.equal(together[1, :3, :4], alone[0])
        assert torch.equal(together[:1], adaptive_threshold(wide, whole, size))
        dark_would_count += not torch.equal(adaptive_threshold(padded, whole, size)[0, :3, :4], alone[0])
    assert dark_would_count > 5


def test_the_threshold_is_the_blurred_pictures_and_what_it_zeroes_is_not():
    """A lone spike away from the corner: in the blurred picture its neighbours are brighter than in J."""
    joint = torch.full((1, 6, 6), 0.001, dtype=torch.float64)
    joint[0, 0, 0], joint[0, 3, 4] = 0.4, 0.3
    counts = [torch.tensor([6]), torch.tensor([6])]
    blurred = blur(joint, counts, 3)
    threshold = float(otsu_threshold(blurred.flatten(1)))
    found = adaptive_threshold(joint, counts, 3)
    assert torch.equal(found, torch.where(joint < threshold, 0.0, joint))
    assert found.nonzero()[:, 1:].tolist() == [[0, 0], [3, 4]]
    by_blurred_value = torch.where(blurred < threshold, 0.0, joint)
    assert not torch.equal(found, by_blurred_value), "the other reading would have kept other cells"


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_peak_always_stays(size, seed):
    generator = torch.Generator().manual_seed(seed)
    joint = torch.rand(4, 7, 6, 5, generator=generator, dtype=torch.float64) ** (1 + 10 * seed)
    found = adaptive_threshold(joint, [torch.full((4,), n) for n in (7, 6, 5)], size)
    assert torch.equal(found.flatten(1).amax(dim=1), joint.flatten(1).amax(dim=1))
    assert bool((found == 0).any()), "and something goes"
    assert torch.equal(found[found > 0], joint[found > 0]), "what stays is not rescaled"


def static(values, threshold, places, adaptive=None):
    """What becomes of some entries of J over so many places."""
    shape = (1, len(values), *[1] * (places - 1))
    counts = [torch.tensor([len(values)]), *[torch.tensor([1])] * (places - 1)]
    joint = torch.tensor(values).view(shape)
    return apply_thresholds(joint, counts, threshold, adaptive, 1).flatten().tolist()


def test_the_static_threshold_is_epsilon_to_the_n_minus_1():
    """Of 0.5: pairs at 0.5, triples at 0.25, where 0.3 stays though it is below 0.5."""
    values = [0.6, 0.5, 0.3, 0.25, 0.2]
    assert static(values, 0.5, 2) == pytest.approx([0.6, 0.5, 0, 0, 0])
    assert static(values, 0.5, 3) == pytest.approx([0.6, 0.5, 0.3, 0.25, 0])
    assert static([0.0, 0.0], 0.0, 3) == [0, 0]


def test_the_readings_differ_where_they_say_so():
    """Triples at ε_b = 0.5. A bright cell, a middle one above 0.25 and below 0.5, and dark ones."""
    values = [0.56, 0.35, *[0.015] * 6]
    kept = pytest.approx
    assert static(values, 0.5, 3) == kept([0.56, 0.35, *[0] * 6])
    assert static(values, 0.5, 3, "static_first") == kept([0.56, 0.35, *[0] * 6]), "two bright cells beside zeros"
    assert static(values, 0.5, 3, "at_epsilon") == kept([0.56, 0, *[0] * 6])
    assert static([0.56, 0.26, *[0.03] * 6], 0.3, 3, "static_first") == kept([0.56, 0.26, *[0] * 6])
    assert static([0.56, 0.26, *[0.2] * 6], 0.3, 3, "otsu_first") == kept([0.56, 0, *[0] * 6])
    assert static([0.56, 0.26, *[0.2] * 6], 0.3, 3, None) == kept([0.56, 0.26, *[0.2] * 6])


def test_what_a_blur_makes_of_candidates_that_a_row_does_not_have_stays_0():
    joint = torch.zeros(2, 4, 4, dtype=torch.float64)
    joint[:, :2, :2] = torch.tensor([[0.6, 0.2], [0.1, 0.1]])
    counts = [torch.tensor([4, 2])] * 2
    whole, cut = apply_thresholds(joint, counts, 0.05, "blurred", 3)
    assert not cut[2:].any()
    assert not cut[:, 2:].any()
    alone = apply_thresholds(joint[1:, :2, :2], [torch.tensor([2])] * 2, 0.05, "blurred", 3)
    assert torch.equal(cut[:2, :2], alone[0])
    assert float(whole.max()) < 0.6, "a blur darkens the peak"
