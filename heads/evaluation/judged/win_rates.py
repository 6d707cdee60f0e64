"""Win rates against speed: DynaMo, §4.3, figures 3, 10, 13, 18 and 19.

At each threshold the win rate is wins / losses against the baseline, and the speed is tokens per pass. A line is fitted
to the win rate as a function of the speed. The speed at which it is 1 is the same-quality speed-up, called theoretical
if no threshold is as fast. All thresholds are compared with the same baseline texts, so their win rates depend on each
other, and 95 % bands come from a bootstrap over prompts, not over thresholds.
"""
# S resample (the first is every prompt once), P prompt, E threshold, X speed

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from heads.evaluation.throughput import resample

Figures = npt.NDArray[np.float64]
RESAMPLES = 1000
BAND = (0.025, 0.975)


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


def sum_up(wins_EP: Figures, losses_EP: Figures, tokens_EP: Figures, passes_EP: Figures, most: float) -> dict[str, Any]:
    """The win rate and speed of each threshold, the line through them, and the same-quality speed-up, as JSON has them.

    Args:
        wins_EP, losses_EP: how many texts of each prompt won or lost against the baseline's at each threshold.
        tokens_EP, passes_EP: tokens and passes of these texts, added up.
        most: the most tokens that a pass can emit, which `speed_up` never exceeds.
    """
    prompts = wins_EP.shape[1]
    weights_SP = np.concatenate([np.ones((1, prompts)), resample(prompts, RESAMPLES, np.random.default_rng(0))])
    won_SE, lost_SE = weights_SP @ wins_EP.T, weights_SP @ losses_EP.T
    rates_SE = rates_of(won_SE, lost_SE)
    speeds_SE = (weights_SP @ tokens_EP.T) / np.maximum(weights_SP @ passes_EP.T, 1)
    lines = [fit_line(speeds, rates) for speeds, rates in zip(speeds_SE, rates_SE, strict=True)]
    grid_X = np.linspace(speeds_SE[0].min(), speeds_SE[0].max(), 20)
    drawn = np.array([line[0] * grid_X + line[1] for line in lines[1:] if line is not None])
    crossing = same_quality(lines[0])
    crossings = [found for line in lines[1:] if (found := same_quality(line)) is not None]
    enough = len(crossings) >= 0.95 * RESAMPLES
    return {
        "speeds": speeds_SE[0].tolist(),
        "rates": [None if np.isnan(rate) else float(rate) for rate in rates_SE[0]],
        "rate_intervals": [interval_of(rates_S) for rates_S in rates_SE[1:].T],
        "line": None if lines[0] is None else list(lines[0]),
        "grid": grid_X.tolist(),
        "band": np.quantile(drawn, BAND, axis=0).tolist() if len(drawn) else None,
        "same_quality": crossing,
        "interval": np.quantile(crossings, BAND).tolist() if crossing is not None and enough else None,
        "theoretical": crossing is not None and crossing > float(speeds_SE[0].max()),
        "speed_up": None if crossing is None else min(crossing, most),
    }


def rate_with_interval(wins_P: Figures, losses_P: Figures) -> tuple[float | None, list[float] | None]:
    """Wins / losses over all prompts and its 95 % interval; None if no text lost.

    >>> rate_with_interval(np.array([2.0, 2.0]), np.array([1.0, 1.0]))
    (2.0, [2.0, 2.0])
    """
    weights_SP = resample(len(wins_P), RESAMPLES, np.random.default_rng(0))
    rate = None if not losses_P.sum() else float(wins_P.sum() / losses_P.sum())
    return rate, interval_of(rates_of(weights_SP @ wins_P, weights_SP @ losses_P))


def rates_of(won: Figures, lost: Figures) -> Figures:
    """Wins / losses; nan where nothing was lost."""
    return np.divide(won, lost, out=np.full(won.shape, np.nan), where=lost > 0)


def interval_of(rates_S: Figures) -> list[float] | None:
    """The 95 % interval of resampled rates; None if more than 5 % of the resamples have no losses."""
    finite = rates_S[np.isfinite(rates_S)]
    return np.quantile(finite, BAND).tolist() if len(finite) >= 0.95 * len(rates_S) else None


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

    >>> describe({"same_quality": 3.456, "interval": None, "theoretical": True})
    '3.46* (no interval: too few resamples have a crossing)'
    """
    if found["same_quality"] is None:
        return "none: the win rate does not fall with speed"
    star = "*" if found["theoretical"] else ""
    if found["interval"] is None:
        return f"{found['same_quality']:.2f}{star} (no interval: too few resamples have a crossing)"
    low, high = found["interval"]
    return f"{found['same_quality']:.2f}{star} [{low:.2f}, {high:.2f}]"
