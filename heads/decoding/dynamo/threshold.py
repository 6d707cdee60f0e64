"""The static and the adaptive threshold of a joint distribution J, which is treated as a picture (DynaMo, 3.2.2).

The adaptive one is Otsu's, with or without a Gaussian blur before it. The paper allows four ways to combine them:

    static_first    zero below ε_b^(n-1), then Otsu on what is left: Algorithm 1 with the bound of its line 12
    otsu_first      Otsu on the whole J, then zero below ε_b^(n-1)
    at_epsilon      zero below ε_b itself, as the text says, then Otsu: line 12 no longer decides for n > 2
    blurred         as static_first, but J becomes the blurred picture, as in OpenCV's example of Otsu after a blur

In the first three, Otsu's threshold is found on the blurred picture and zeroes what is below it in J itself. A blur
averages, so J's largest entry stays in these three, and Otsu changes which tokens are emitted, not how many. The
default, `otsu_first` without a blur, is the only one that made text likelier than no Otsu beyond noise, and only under
the model that wrote it (docs/decisions.md).

Histogram: 256 levels of equal width from 0 to the picture's largest value, as in an 8-bit picture whose white is the
peak. Threshold: the edge between two levels that separates the cells best (largest variance between the two classes),
the lowest of equally good edges, as in OpenCV and scikit-image.

Blur: along each axis a Gaussian of `size` cells with OpenCV's sigma for that size, 0.3 · ((size - 1) / 2 - 1) + 0.8,
which is 0.8 for the paper's 3. The axes are sorted by probability, so neighbours are candidates of like rank. The
border's value is repeated beyond it, so that the peak, which is often in the first corner, is not darkened.
"""
# B batch, k candidates of one place, M cells of a picture (all its axes flattened), L grey level

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Adaptive = Literal["static_first", "otsu_first", "at_epsilon", "blurred"]
LEVELS = 256


def static_bound(threshold: float, places: int, adaptive: Adaptive | None) -> float:
    """The static threshold: entries of a joint distribution over n places become 0 below it.

    >>> static_bound(0.5, 3, "static_first"), static_bound(0.5, 3, "at_epsilon")
    (0.25, 0.5)
    """
    return threshold if adaptive == "at_epsilon" else threshold ** (places - 1)


def apply_thresholds(
    joint: Tensor, counts: Sequence[Tensor], threshold: float, adaptive: Adaptive | None, blur_size: int
) -> Tensor:
    """A joint distribution (B, k, …, k) after the static threshold and Otsu's.

    >>> joint = torch.tensor([[[0.5, 0.2], [0.2, 0.1]]])
    >>> counts = [torch.tensor([2])] * 2
    >>> apply_thresholds(joint, counts, 0.15, None, 1)
    tensor([[[0.5000, 0.2000],
             [0.2000, 0.0000]]])
    >>> apply_thresholds(joint, counts, 0.15, "otsu_first", 1)
    tensor([[[0.5000, 0.0000],
             [0.0000, 0.0000]]])

    Args:
        counts: for each axis, how many candidates each row has (B,); a row's picture consists of these only.
        threshold: ε_b.
        adaptive: how the two are combined; None leaves Otsu out.
        blur_size: cells of the kernel, an odd number; 1 does not blur.
    """
    bound = static_bound(threshold, joint.ndim - 1, adaptive)
    if adaptive == "otsu_first":
        return zero_below(adaptive_threshold(joint, counts, blur_size), bound)
    joint = zero_below(joint, bound)
    if adaptive is None:
        return joint
    if adaptive == "blurred":
        held = inside(joint, counts)
        joint = blur(joint, counts, blur_size)
        return adaptive_threshold(joint if held is None else torch.where(held, joint, 0.0), counts, 1)
    return adaptive_threshold(joint, counts, blur_size)


def zero_below(joint: Tensor, bound: float | Tensor) -> Tensor:
    return torch.where(joint < bound, 0.0, joint)


def adaptive_threshold(joint: Tensor, counts: Sequence[Tensor], blur_size: int) -> Tensor:
    """Zero what is below Otsu's threshold, which is found on the blurred joint distribution (B, k, …, k)."""
    picture = blur(joint, counts, blur_size) if blur_size > 1 else joint
    held = inside(joint, counts)
    threshold_B = otsu_threshold(picture.flatten(1), None if held is None else held.flatten(1))
    return zero_below(joint, threshold_B.view(-1, *[1] * len(counts)))


def inside(joint: Tensor, counts: Sequence[Tensor]) -> Tensor | None:
    """True for the cells whose candidates a row has; None if every row has all candidates."""
    sizes = joint.shape[1:]
    has = [torch.arange(size, device=joint.device) < n_B[:, None] for size, n_B in zip(sizes, counts, strict=True)]
    if all(bool(has_Bk.all()) for has_Bk in has):
        return None
    held = torch.ones_like(joint, dtype=torch.bool)
    for axis, has_Bk in enumerate(has, start=1):
        held &= along(has_Bk, axis, len(has))
    return held


def along(x_Bk: Tensor, axis: int, axes: int) -> Tensor:
    """(B, k) as one axis, counted from 1, of a tensor with `axes` axes beside the batch."""
    batch, size = x_Bk.shape
    return x_Bk.view(batch, *(size if i == axis else 1 for i in range(1, axes + 1)))


def otsu_threshold(picture_BM: Tensor, inside_BM: Tensor | None = None) -> Tensor:
    """(B,): the value from which on cells are foreground; the largest value always is.

    >>> otsu_threshold(torch.tensor([[0.00, 0.01, 0.02, 0.60, 0.64]]))    # the first edge above 0.02 = level 8 of 256
    tensor([0.0225])

    Args:
        picture_BM: values of at least 0.
        inside_BM: False for cells that are not part of the picture.
    """
    batch = picture_BM.shape[0]
    if inside_BM is not None:
        picture_BM = torch.where(inside_BM, picture_BM, 0.0)
    step_B = picture_BM.amax(dim=1) / LEVELS
    tiny = torch.finfo(picture_BM.dtype).tiny
    level_BM = (picture_BM / step_B.clamp(min=tiny)[:, None]).long().clamp(max=LEVELS - 1)
    if inside_BM is not None:
        level_BM = torch.where(inside_BM, level_BM, LEVELS)
    row_B1 = torch.arange(batch, device=picture_BM.device)[:, None] * (LEVELS + 1)
    counts = torch.bincount((level_BM + row_B1).flatten(), minlength=batch * (LEVELS + 1))
    return step_B * best_edge(counts.view(batch, LEVELS + 1)[:, :LEVELS])


def best_edge(counts_BL: Tensor) -> Tensor:
    """The level (B,) at which the foreground begins, from a histogram of whole numbers.

    >>> best_edge(torch.tensor([[5, 1, 0, 0, 2, 3]]))
    tensor([2])
    """
    # Sums are whole numbers, so that edges with no cell between them tie exactly and the lowest is found.
    levels_L = torch.arange(counts_BL.shape[1], device=counts_BL.device)
    cells_BL = counts_BL.cumsum(dim=1)
    sums_BL = (counts_BL * levels_L).cumsum(dim=1)
    total_B1, whole_B1 = cells_BL[:, -1:], sums_BL[:, -1:]
    between_BL = (sums_BL * total_B1 - whole_B1 * cells_BL).double() ** 2
    between_BL = between_BL / (cells_BL * (total_B1 - cells_BL)).clamp(min=1)
    return between_BL[:, :-1].argmax(dim=1) + 1


def gaussian_kernel(size: int) -> list[float]:
    """The weights of one axis.

    >>> [round(weight, 4) for weight in gaussian_kernel(3)]
    [0.239, 0.522, 0.239]
    """
    sigma = 0.3 * ((size - 1) / 2 - 1) + 0.8
    weights = [math.exp(-((i - size // 2) ** 2) / (2 * sigma**2)) for i in range(size)]
    return [weight / sum(weights) for weight in weights]


def blur(picture: Tensor, counts: Sequence[Tensor], size: int) -> Tensor:
    """A blurred picture (B, k, …, k) of at least two axes; each row's own border is repeated beyond it.

    Args:
        counts: for each axis, how many of its cells each row has (B,).
        size: cells of the kernel, an odd number.
    """
    kernel = gaussian_kernel(size)
    for axis, counts_B in enumerate(counts, start=1):
        shape = picture.shape
        weights_B1kk = blur_weights(counts_B, shape[axis], kernel).to(picture.dtype)[:, None]
        if axis == len(counts):
            blurred = picture.flatten(1, -2)[:, None] @ weights_B1kk.mT
        else:  # the axes before become a batch and those after become columns, so that no data has to move
            before, after = math.prod(shape[1:axis]), math.prod(shape[axis + 1 :])
            blurred = weights_B1kk @ picture.view(shape[0], before, shape[axis], after)
        picture = blurred.view(shape)
    return picture


def blur_weights(counts_B: Tensor, width: int, kernel: Sequence[float]) -> Tensor:
    """(B, k, k): the weight with which each cell of an axis takes from each cell."""
    at_k = torch.arange(width, device=counts_B.device)
    weights_Bkk = torch.zeros(len(counts_B), width, width, dtype=torch.float64, device=counts_B.device)
    for offset, weight in enumerate(kernel, start=-(len(kernel) // 2)):
        from_Bk = (at_k + offset).clamp(min=0).minimum(counts_B[:, None] - 1)
        weights_Bkk += weight * torch.nn.functional.one_hot(from_Bk, width).double()
    return weights_Bkk
