"""Paired bootstrap intervals of ratios (Efron and Tibshirani, 1993): units are sampled with replacement, in pairs.

A ratio is of sums over units (tokens over seconds of questions), so it is the pooled mean and not a mean of ratios.
"""
# U unit (a question), S resample

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heads.evaluation.throughput import RESAMPLES, SHARES, resample


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio with its 95 % interval.

    Attributes:
        units: how many units it was taken over; of one alone the interval says nothing.
    """

    value: float
    low: float
    high: float
    units: int

    @property
    def verdict(self) -> str:
        """Whether the ratio differs from 1 beyond its interval: "more", "less", or "" where it does not.

        >>> [Ratio(value=1.2, low=low, high=1.5, units=4).verdict for low in (0.9, 1.1)]
        ['', 'more']
        """
        if self.units < 2:
            return ""
        return "more" if self.low > 1 else "less" if self.high < 1 else ""

    def __str__(self) -> str:
        if self.units < 2:
            return f"{self.value:.2f} (one unit: no interval)"
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The sum of one over the sum of the other, unit by unit.

    >>> str(ratio_of_sums([2.0, 4.0], [1.0, 2.0]))
    '2.00 (2.00–2.00)'
    """
    return ratio_of_ratios(above, below, [1.0] * len(above), [1.0] * len(above))


def ratio_of_ratios(
    above: Sequence[float], below: Sequence[float], other_above: Sequence[float], other_below: Sequence[float]
) -> Ratio:
    """One ratio of sums over another one, both of the same units: (Σa / Σb) / (Σc / Σd).

    Raises:
        ValueError: no units, or not as many of each.
    """
    found = [np.asarray(values, dtype=np.float64) for values in (above, below, other_above, other_below)]
    units = len(found[0])
    if units == 0 or any(len(values) != units for values in found):
        raise ValueError(f"Figures of {[len(values) for values in found]} units were given; give as many of each.")
    times_SU = resample(units, RESAMPLES, np.random.default_rng(0))
    drawn = [times_SU @ values for values in found]
    low, high = np.quantile(drawn[0] / drawn[1] / (drawn[2] / drawn[3]), SHARES)
    sums = [values.sum() for values in found]
    return Ratio(value=float(sums[0] / sums[1] / (sums[2] / sums[3])), low=float(low), high=float(high), units=units)
