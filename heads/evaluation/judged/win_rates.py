"""Win rates against speed: DynaMo, §4.3, figures 3, 10, 13, 18 and 19.

At each threshold the win rate is wins / losses against the baseline, and the speed is tokens per pass. A line is fitted
to the win rate as a function of the speed. The speed at which it is 1 is the same-quality speed-up, called theoretical
if no threshold is as fast, and then at most the tokens that a pass can emit. All thresholds are compared with the same
baseline texts, so their win rates depend on each other, and 95 % bands come from a bootstrap over prompts, not over
thresholds. A bootstrap is too narrow for few prompts (heads/evaluation/runs/ratios.py: with 8 it errs in 11 %), so
below 8 there is no band. The intervals of single ratios are Student's and hold for few prompts.
"""
# S resample (the first is every prompt once), P prompt, E threshold, X speed

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from heads.evaluation.runs.ratios import LEAST_UNITS, ratio_of_sums
from heads.evaluation.throughput import resample

Figures = npt.NDArray[np.float64]
RESAMPLES = 1000
BAND = (0.025, 0.975)
LEAST_PROMPTS = 8
"""A band by bootstrap is given from so many prompts on."""


def fit_line(speeds: Figures, rates: Figures) -> tuple[float, float] | None:
    """Slope and intercept by least squares over finite points; None with fewer than two speeds.

    >>> fit_line(np.array([1.0, 2.0, 3.0]), np.array([2.0, 1.0, np.nan]))
    (-1.0, 3.0)
    """
    good = np.isfinite(speeds) & np.isfinite(rates)
    x, y = speeds[good], rates[good]
    if len(x) < 2 or np.ptp(x) < 1e-9:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return slope, float(y.mean() - slope * x.mean())


def same_quality(line: tuple[float, float] | None, level: float = 1.0) -> float | None:
    """The speed at which a falling line is at `level`; None for a line that does not fall.

    >>> same_quality((-1.0, 3.0)), same_quality((1.0, 0.0))
    (2.0, None)
    """
    return None if line is None or line[0] >= 0 else (level - line[1]) / line[0]


def weights_of(prompts: int) -> Figures:
    """(1 + S, P): how often each prompt counts: once, then as in each resample."""
    return np.concatenate([np.ones((1, prompts)), resample(prompts, RESAMPLES, np.random.default_rng(0))])


def sum_up(wins_EP: Figures, losses_EP: Figures, gains_EP: Figures, costs_EP: Figures, most: float) -> dict[str, Any]:
    """The win rate and speed of each threshold, the line through them, and the same-quality speed-up, as JSON has them.

    Args:
        wins_EP, losses_EP: how many texts of each prompt won or lost against the baseline's at each threshold.
        gains_EP, costs_EP: the speed is the sum of gains over the sum of costs: tokens over passes, or the seconds of
            plain over those of dynamic decoding for as many tokens.
        most: the most tokens that a pass can emit, which `speed_up` never exceeds.
    """
    weights_SP = weights_of(wins_EP.shape[1])
    rates_SE = ratios_of(weights_SP, wins_EP, losses_EP)
    speeds_SE = ratios_of(weights_SP, gains_EP, costs_EP)
    lines = [fit_line(speeds, rates) for speeds, rates in zip(speeds_SE, rates_SE, strict=True)]
    crossing = same_quality(lines[0])
    crossings = [found for line in lines[1:] if (found := same_quality(line)) is not None]
    enough = len(crossings) >= 0.95 * RESAMPLES and wins_EP.shape[1] >= LEAST_PROMPTS
    slowest, fastest = float(speeds_SE[0].min()), float(speeds_SE[0].max())
    return {
        "speeds": speeds_SE[0].tolist(),
        "speed_intervals": [ratio_with_interval(*both)[1] for both in zip(gains_EP, costs_EP, strict=True)],
        "rates": [None if np.isnan(rate) else float(rate) for rate in rates_SE[0]],
        "rate_intervals": [ratio_with_interval(*both)[1] for both in zip(wins_EP, losses_EP, strict=True)],
        **with_band(speeds_SE, lines, wins_EP.shape[1]),
        "same_quality": crossing,
        "interval": np.quantile(crossings, BAND).tolist() if crossing is not None and enough else None,
        "theoretical": crossing is not None and crossing > fastest,
        "speed_up": None if crossing is None or crossing < slowest else min(crossing, most),
    }


def line_of_scores(scores_EP: Figures, scored_EP: Figures, gains_EP: Figures, costs_EP: Figures) -> dict[str, Any]:
    """Figure 16: the mean score of each threshold, and the line through these against the speed, with its band.

    Args:
        scores_EP, scored_EP: the sum of the texts' scores, and how many texts have one.
        gains_EP, costs_EP: as in `sum_up`.
    """
    weights_SP = weights_of(scores_EP.shape[1])
    means_SE, speeds_SE = ratios_of(weights_SP, scores_EP, scored_EP), ratios_of(weights_SP, gains_EP, costs_EP)
    lines = [fit_line(speeds, means) for speeds, means in zip(speeds_SE, means_SE, strict=True)]
    return {
        "speeds": speeds_SE[0].tolist(),
        "means": [None if np.isnan(mean) else float(mean) for mean in means_SE[0]],
        **with_band(speeds_SE, lines, scores_EP.shape[1]),
    }


def ratios_of(weights_SP: Figures, sums_EP: Figures, counts_EP: Figures) -> Figures:
    """(S, E): the sum over prompts of one figure over that of another; nan where the latter is 0."""
    sums_SE, counts_SE = weights_SP @ sums_EP.T, weights_SP @ counts_EP.T
    return np.divide(sums_SE, counts_SE, out=np.full(sums_SE.shape, np.nan), where=counts_SE > 0)


def with_band(speeds_SE: Figures, lines: Sequence[tuple[float, float] | None], prompts: int) -> dict[str, Any]:
    """The first line and the 95 % band of the others, at 20 speeds from the slowest to the fastest."""
    grid_X = np.linspace(np.nanmin(speeds_SE[0]), np.nanmax(speeds_SE[0]), 20)
    drawn = np.array([line[0] * grid_X + line[1] for line in lines[1:] if line is not None])
    return {
        "line": None if lines[0] is None else list(lines[0]),
        "grid": grid_X.tolist(),
        "band": np.quantile(drawn, BAND, axis=0).tolist() if len(drawn) and prompts >= LEAST_PROMPTS else None,
    }


def ratio_with_interval(gains_P: Figures, costs_P: Figures) -> tuple[float | None, list[float] | None]:
    """A ratio of sums over all prompts, such as wins / losses, and its 95 % interval; None if no text lost.

    There is no interval for fewer than three prompts, and none if all gains or all costs are of one prompt.

    >>> ratio_with_interval(np.full(3, 2.0), np.ones(3)), ratio_with_interval(np.ones(2), np.ones(2))
    ((2.0, [2.0, 2.0]), (1.0, None))
    """
    if not costs_P.sum():
        return None, None
    found = ratio_of_sums(gains_P.tolist(), costs_P.tolist())
    return found.value, None if found.units < LEAST_UNITS else [found.low, found.high]


def show_rate(rate: float | None, interval: list[float] | None) -> str:
    """A rate with its interval, as tables show it.

    >>> show_rate(1.234, [0.9, 1.5]), show_rate(1.234, None), show_rate(None, None)
    ('1.23 [0.90, 1.50]', '1.23', '–')
    """
    if rate is None:
        return "–"
    return f"{rate:.2f}" if interval is None else f"{rate:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def describe(found: dict[str, Any]) -> str:
    """The same-quality speed-up in words; a star marks a theoretical one.

    >>> measured = {"speeds": [1.0, 3.0], "theoretical": False, "speed_up": 2.5}
    >>> describe(measured | {"same_quality": 2.5, "interval": [-4.0, 9.0]})
    '2.50 (below 1.00 to above 3.00)'
    >>> describe(measured | {"same_quality": -3.0, "interval": [-23.0, 2.0], "speed_up": None})
    'below every measured speed (below 1.00 to 2.00)'
    >>> describe({"speeds": [1.0], "same_quality": 3.456, "interval": None, "theoretical": True, "speed_up": 3.0})
    '3.00*, above every measured speed (no interval: too few prompts, or resamples with a crossing)'
    """
    crossing, slowest, fastest = found["same_quality"], min(found["speeds"]), max(found["speeds"])
    if crossing is None:
        return "none: the win rate does not fall with speed"
    if crossing < slowest:
        said = "below every measured speed"
    else:
        said = f"{found['speed_up']:.2f}" + ("*, above every measured speed" if found["theoretical"] else "")
    if found["interval"] is None:
        return f"{said} (no interval: too few prompts, or resamples with a crossing)"
    low, high = (end_of_interval(end, slowest, fastest) for end in found["interval"])
    return f"{said} ({low} to {high})"  # a terminal would take words in square brackets for a style


def end_of_interval(end: float, slowest: float, fastest: float) -> str:
    """An end of an interval of crossings; lines say nothing about speeds that were not measured."""
    if end < slowest:
        return f"below {slowest:.2f}"
    return f"above {fastest:.2f}" if end > fastest else f"{end:.2f}"
