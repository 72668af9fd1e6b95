"""Thresholds of anomalies: above which score a photo fails, by the scores of good photos that were left out."""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Threshold:
    """Up to which score a photo is taken for a good one.

    Attributes:
        score: the largest score that passes.
        rate: of new good photos, at most this share fails, on average over sets of good photos.
        wanted: the share that was asked for, less than ``rate`` if there are too few photos.
        count: of different good photos, or of objects.
    """

    score: float
    rate: float
    wanted: float
    count: int

    @property
    def needed(self) -> int:
        """How many good photos, or objects, the share that was asked for needs."""
        return count_needed(self.wanted)


def choose_threshold(scores: Any, rate: float = 0.01, groups: Any = None) -> Threshold:
    """Return the threshold of n good scores: the ``ceil((n + 1)(1 - rate))``-th smallest, or the largest of too few.

    A new score that is exchangeable with these is above the k-th smallest of n with a probability of at most
    ``1 - k / (n + 1)`` (split conformal prediction). Scores of one object are not exchangeable with others: each object
    counts once, and its scores share that (Lee, Barber and Willett, 2023). The same file twice is such an object.

    Args:
        scores: of good photos, left out of what they were scored by, shape (N,).
        rate: the share of new good photos that may fail.
        groups: the number of the object of each; None: they are all different.

    Raises:
        ValueError: there are no scores, some are not finite, or the rate is no share above 0 and below 1.

    Example:
        >>> choose_threshold(range(1, 100)).score, choose_threshold(range(1, 41)).rate
        (99.0, 0.024390243902439025)
    """
    scores = np.asarray(scores, np.float64)
    if not scores.size or scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError(
            "a threshold needs scores of good photos that were left out, (N,), none of them NaN or infinite, got "
            f"{scores.tolist()!r:.60}"
        )
    if not 0 < rate < 1:
        raise ValueError(f"rate={rate}: the share of good photos that may fail is above 0 and below 1, such as 0.01")
    own = np.arange(len(scores)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes, order = np.bincount(own), np.argsort(scores, kind="stable")
    count = len(sizes)
    wanted = (count + 1) * (1 - Fraction(str(rate)))  # as it is typed, so that 0.01 of 100 is one
    if wanted > count:
        return Threshold(float(scores.max()), 1 / (count + 1), rate, count)
    reached = accumulate(Fraction(1, int(sizes[own[row]])) for row in order.tolist())
    place = next(place for place, shares in enumerate(reached) if shares >= wanted)
    return Threshold(float(scores[order[place]]), rate, rate, count)


def count_needed(rate: float) -> int:
    """Return how many photos a rate needs at least: then not even the largest of their scores is beyond it."""
    return math.ceil((1 - Fraction(str(rate))) / Fraction(str(rate)))
