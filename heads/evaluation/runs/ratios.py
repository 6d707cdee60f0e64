"""Ratios of sums with 95 % intervals that hold for few units: Student's t on the logarithm, by a jackknife over units.

A ratio is of sums over units (tokens over seconds of questions), so it is the pooled mean and not a mean of ratios. Its
interval is Tukey's (1958): the standard error of the logarithm when each unit is left out in turn, times Student's
quantile. A percentile bootstrap, which resamples the units, is far too narrow for few of them: of two equally fast
methods it calls one faster in 51 % of trials with 2 questions, 25 % with 3 and 11 % with 8, this interval in 4 to 7 %
with any number (tests/heads/evaluation/test_ratios.py simulates it). One and two units get none: Student's quantile
for two is 12.7, so that the interval would say nothing.
"""
# U unit (a question)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_UNITS = 3
"""An interval is given from so many units on."""
STUDENT = {2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622}
"""The 97.5 % quantile of Student's t by degrees of freedom; more of them have `student`'s series."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio with its 95 % interval.

    Attributes:
        units: how many units it rests on, which is 1 where one of its sums is of a single unit or 0. Fewer than
            `LEAST_UNITS` give no interval, and `low` and `high` are the value.
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
        if self.units < LEAST_UNITS:
            return ""
        return "more" if self.low > 1 else "less" if self.high < 1 else ""

    def __str__(self) -> str:
        if self.units < LEAST_UNITS:
            return f"{self.value:.2f}"
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The sum of one over the sum of the other, unit by unit.

    >>> str(ratio_of_sums([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])), str(ratio_of_sums([2.0, 4.0], [1.0, 2.0]))
    ('2.00 (2.00–2.00)', '2.00')
    """
    return ratio_of_ratios(above, below, [1.0] * len(above), [1.0] * len(above))


def ratio_of_ratios(
    above: Sequence[float], below: Sequence[float], other_above: Sequence[float], other_below: Sequence[float]
) -> Ratio:
    """One ratio of sums over another one, both of the same units: (Σa / Σb) / (Σc / Σd).

    Raises:
        ValueError: no units, not as many of each, or a denominator of 0.
    """
    found = [np.asarray(values, dtype=np.float64) for values in (above, below, other_above, other_below)]
    units = len(found[0])
    if units == 0 or any(len(values) != units for values in found):
        raise ValueError(f"Figures of {[len(values) for values in found]} units were given; give as many of each.")
    sums = [values.sum() for values in found]
    if min(sums[1:]) <= 0:
        raise ValueError(f"A ratio of {units} units would divide by 0; measure more of them, or longer texts.")
    value = float(sums[0] / sums[1] / (sums[2] / sums[3]))
    without_U = [total - values for total, values in zip(sums, found, strict=True)]
    if min(left_U.min() for left_U in without_U) <= 0:
        units = 1
    if units < LEAST_UNITS:
        return Ratio(value=value, low=value, high=value, units=units)
    logs_U = np.log(without_U[0] / without_U[1] / (without_U[2] / without_U[3]))
    error = math.sqrt((units - 1) ** 2 / units * float(logs_U.var(ddof=1)))
    factor = math.exp(student(units - 1) * error)
    return Ratio(value=value, low=value / factor, high=value * factor, units=units)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; from ten degrees of freedom on by its series around the normal quantile.

    >>> f"{student(2):.2f} {student(10):.3f} {student(1000):.3f}"
    '4.30 2.228 1.962'
    """
    if freedom in STUDENT:
        return STUDENT[freedom]
    z = 1.959964
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
