"""Numbers of a run's config: comparisons alone let NaN through, of which `nan < 0` and `nan <= 0` are both false."""

from __future__ import annotations

import math
from typing import Any


def is_amount(value: Any) -> bool:
    """A finite number, 0 or more.

    >>> [is_amount(value) for value in (0, 0.5, -1, float("nan"), float("inf"), "1")]
    [True, True, False, False, False, False]
    """
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def is_positive(value: Any) -> bool:
    """A finite number above 0.

    >>> [is_positive(value) for value in (0, 0.5, -1, float("nan"), float("inf"), None)]
    [False, True, False, False, False, False]
    """
    return is_amount(value) and value > 0
