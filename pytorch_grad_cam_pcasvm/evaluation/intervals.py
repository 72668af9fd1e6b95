"""Confidence intervals of a mean: of shares, of numbers between known bounds, and of any others."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import beta
from scipy.stats import t as student

FEW = 10  # images, below which a standard error says little; so do fewer that differ from all others
ANYTHING = -np.inf, np.inf  # bounds of numbers that have none
SAME = 1e-6  # of the largest value: values that differ by less are the same but for rounding
_SKEWNESS = 1.5  # times that of the sample, which has rarely seen the rare ones; simulated, see benchmarks/looks.py
_ALL_IN = 0.99  # of the largest bet that cannot be lost
_DOUBT = 0.3  # numbers that a guess of mean and variance counts for, before any is seen
_HALVINGS = 40


def interval_of_share(count: int, rest: int, level: float) -> tuple[float, float]:
    """Return the interval of Clopper and Pearson for a share.

    Args:
        count: number of images that have what is counted.
        rest: number of images that do not.
        level: of the interval, such as 0.95.
    """
    low = float(beta.ppf((1 - level) / 2, count, rest + 1)) if count else 0.0
    return low, float(beta.ppf((1 + level) / 2, count + 1, rest)) if rest else 1.0


def interval_of_bounded(numbers: Sequence[float], bounds: tuple[float, float], level: float) -> tuple[float, float]:
    """Return an interval for the mean of numbers between bounds, which holds for any distribution between them.

    It is by betting (Waudby-Smith and Ramdas, arXiv 2010.09686, for a fixed number of them): who bets on each number
    against a mean m, with what was seen before, has on average what they started with if m is right. So m is refused
    where they have 2 / (1 - level) times that: by Markov's inequality this happens no more often than it may.

    Args:
        numbers: one for each image.
        bounds: the lowest and the highest number that there can be.
        level: of the interval, such as 0.95.
    """
    low, high = bounds
    shares = (np.asarray(numbers, np.float64) - low) / (high - low)
    shares = np.clip(shares, 0, 1)[np.random.default_rng(0).permutation(len(shares))]  # sorted ones would be no draws
    least, most = _least_mean(shares, (1 - level) / 2), 1 - _least_mean(1 - shares, (1 - level) / 2)
    return low + (high - low) * least, low + (high - low) * most


def _least_mean(shares: np.ndarray, risk: float) -> float:
    """Return the smallest mean of numbers in [0, 1] that a bet on larger ones does not refuse."""
    seen = np.arange(1, len(shares) + 1) + _DOUBT
    means = (0.5 * _DOUBT + shares.cumsum()) / seen
    variances = (0.25 * _DOUBT + ((shares - means) ** 2).cumsum()) / seen
    known = np.concatenate([[0.25], variances[:-1]])  # before each bet
    bets = np.sqrt(2 * np.log(1 / risk) / (len(shares) * known))
    least, most = 0.0, float(shares.mean())
    for _ in range(_HALVINGS):
        mean = (least + most) / 2
        if not mean > 0:
            break
        wealth = np.log1p(np.minimum(bets, _ALL_IN / mean) * (shares - mean)).sum()
        least, most = (mean, most) if wealth >= np.log(1 / risk) else (least, mean)
    return least


def interval_of_any(numbers: Sequence[float], mean: float, error: float, level: float) -> tuple[float, float]:
    """Return an interval for the mean of numbers that can be anything, or the whole line where they say too little.

    They say too little where fewer than ten differ from the most frequent one. Otherwise it is the union of Student's
    t and of t corrected for skewness (Hall, J. R. Stat. Soc. B 54, 1992), with 1.5 times the skewness of the sample.

    Args:
        numbers: one for each image, or the mean of those that share a draw.
        mean: their mean.
        error: its standard error.
        level: of the interval, such as 0.95.
    """
    count = len(numbers)
    if differing(numbers) < FEW or not error > 0:
        return -np.inf, np.inf
    centred = np.asarray(numbers, np.float64) - np.mean(numbers)
    skewness = (centred**3).mean() / (centred**2).mean() ** 1.5
    skewness *= _SKEWNESS * np.sqrt(count * (count - 1)) / (count - 2)
    end = float(student.ppf((1 + level) / 2, count - 1))
    corrected = _inverse_of_hall(skewness, count)
    return mean - error * max(end, corrected(end)), mean - error * min(-end, corrected(-end))


def _inverse_of_hall(skewness: float, count: int) -> Callable[[float], float]:
    """Return the function from Student's t to the t of skewed numbers that is as rare."""
    step = skewness / (3 * np.sqrt(count))
    if abs(step) < 1e-9:
        return lambda end: end
    return lambda end: float((np.cbrt(1 + 3 * step * (end - step / 2)) - 1) / step)


def differing(numbers: Sequence[float]) -> int:
    """Return how many numbers differ from the most frequent one, but for rounding; all of them if none comes twice."""
    ordered = np.sort(np.asarray(numbers, np.float64))
    if not len(ordered):
        return 0
    ends = np.searchsorted(ordered, ordered + SAME * np.abs(ordered).max(), side="right")
    often = int((ends - np.arange(len(ordered))).max())
    return len(ordered) - (often if often > 1 else 0)
