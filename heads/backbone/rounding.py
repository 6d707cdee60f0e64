"""Whether two computations of the same numbers are equal but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE_ERROR = 1e-4
"""As a share of the largest logit: correct passes in float32 differ by 7e-7, and by 5e-4 where a state is forgotten."""


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal but for rounding: the same operations in the same dtype, by different kernels."""
    if one.shape != other.shape:
        return False
    tolerance = 20 * torch.finfo(one.dtype).eps * other.float().abs().max().clamp(min=1.0)
    return bool(((one.float() - other.float()).abs() <= tolerance).all())


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.to(wanted.device) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))


def above(error: float, dtype: torch.dtype) -> float:
    """The error if it is more than rounding, or nan; else 0."""
    return 0.0 if error <= max(RELATIVE_ERROR, 16 * torch.finfo(dtype).eps) else error
