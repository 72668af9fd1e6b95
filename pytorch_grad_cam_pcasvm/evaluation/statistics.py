"""Statistics: a mean over images, and how far it can be trusted."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.stats import rankdata
from scipy.stats import t as student

from pytorch_grad_cam_pcasvm.evaluation.intervals import (
    SAME,
    interval_of_any,
    interval_of_bounded,
    interval_of_share,
)

LEVEL = 0.95  # of confidence intervals
ALIKE = 0.5  # the rank correlation above which two maps look the same to the eye


@dataclass(frozen=True)
class Estimate:
    """A mean over images.

    Attributes:
        mean: the mean; NaN without images.
        standard_error: the standard deviation of the images' numbers divided by the square root of ``n``; NaN for fewer
            than two images. If several images share a random draw, the standard error of the draws' means.
        n: number of images.
        draws: number of random draws, if several images share one; None: each image has its own.
        share: whether each image's number is 0 or 1.
        numbers: each image's number, or the mean of those that share a draw; empty: they are not known.
        bounds: the lowest and the highest number that an image can have; None: there are none.

    Example:
        >>> evaluation.Estimate.of([1.0, 2.0, 3.0]).mean
        2.0
    """

    mean: float
    standard_error: float
    n: int
    draws: int | None = None
    share: bool = field(default=False, compare=False)
    numbers: tuple[float, ...] = field(default=(), compare=False, repr=False)
    bounds: tuple[float, float] | None = field(default=None, compare=False)

    @staticmethod
    def of(values: Any, draws: Any = None, bounds: tuple[float, float] | None = None) -> "Estimate":
        """Return the mean of numbers, one for each image; NaN marks an image without one.

        Args:
            values: the numbers, shape (N,).
            draws: which random draw each image belongs to, shape (N,); None: each has its own.
            bounds: the lowest and the highest number that an image can have, whatever these are: (-1, 1) for a
                correlation, (-inf, inf) if there are none. None: there are none, but numbers that are all 0 or 1 are
                taken for a share.

        Returns:
            The mean, with the standard error of a mean over clusters if images share draws.

        Raises:
            ValueError: a number is beyond the bounds.
        """
        numbers = np.asarray(values, np.float64)
        valid = ~np.isnan(numbers)
        numbers = numbers[valid]
        if not len(numbers):
            return Estimate(float("nan"), float("nan"), 0)
        # By more than rounding.
        if bounds is not None and (numbers.min() < bounds[0] - SAME or numbers.max() > bounds[1] + SAME):
            raise ValueError(
                f"numbers from {numbers.min():.6g} to {numbers.max():.6g} are not between {bounds[0]:g} and "
                f"{bounds[1]:g}: give bounds that hold for every image, or none"
            )
        mean = numbers.mean()
        _, cluster = np.unique(
            np.arange(len(numbers)) if draws is None else np.asarray(draws)[valid], return_inverse=True
        )
        sums = np.bincount(cluster, numbers - mean)
        count = len(sums)
        error = np.sqrt(count / (count - 1) * (sums**2).sum()) / len(numbers) if count > 1 else float("nan")
        share = draws is None and bounds in (None, (0, 1)) and bool(np.isin(numbers, (0, 1)).all())
        known = bounds is not None and bool(np.isfinite(bounds).all())
        of_each = numbers if draws is None else np.bincount(cluster, numbers) / np.bincount(cluster)
        return Estimate(
            float(mean), float(error), len(numbers), None if draws is None else count, share,
            tuple(of_each.tolist()), bounds if known else None,
        )  # fmt: skip

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the mean, see :meth:`interval_at`."""
        return self.interval_at(LEVEL)

    def interval_at(self, level: float) -> tuple[float, float]:
        """Return the confidence interval of the mean at a level, such as 0.99; NaN where there is no standard error.

        Of a share, it is Clopper and Pearson's. Of numbers between bounds, it is by betting, and holds whatever their
        distribution. Of others, it is Student's t, wider on the side to which numbers are skewed; and the whole line
        while fewer than ten differ from the most frequent one. Images that share a draw count as one number. Where the
        numbers themselves are not known, it is Student's t, and the whole line for a standard error of 0.
        """
        if self.share and self.n > 1:
            return interval_of_share(round(self.mean * self.n), round((1 - self.mean) * self.n), level)
        if np.isnan(self.standard_error):
            return float("nan"), float("nan")
        if self.numbers and self.bounds is not None:
            return interval_of_bounded(self.numbers, self.bounds, level)
        if self.numbers:
            return interval_of_any(self.numbers, self.mean, self.standard_error, level)
        if not self.standard_error > 0:
            return -float("inf"), float("inf")
        half = self.standard_error * float(student.ppf((1 + level) / 2, (self.draws or self.n) - 1))
        return self.mean - half, self.mean + half

    def repeated(self, times: int) -> "Estimate":
        """Return the estimate of so many times as many images with the same numbers."""
        return replace(
            self, n=times * self.n, standard_error=self.standard_error / times**0.5, numbers=times * self.numbers
        )

    def above(self, value: float, level: float = LEVEL) -> bool:
        """Return whether the whole interval is above a value."""
        return self.interval_at(level)[0] > value

    def below(self, value: float, level: float = LEVEL) -> bool:
        """Return whether the whole interval is below a value."""
        return self.interval_at(level)[1] < value

    def __str__(self) -> str:
        mean = f"{round(self.mean, 2) or 0.0:+.2f}"  # not -0.00
        if self.n < 2:
            return "–" if self.n == 0 else mean
        return f"{mean} ± {self.standard_error:.2f}"


def rank_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of two maps for each image, (N, ...) and (N, ...).

    It is NaN where the first is constant, and 0 where only the second is: nothing of the first is left in it.
    """
    a, b = (rankdata(maps.reshape(len(maps), -1), axis=1) for maps in (first, second))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.divide((a * b).sum(1), size, out=np.where(a.any(1), 0.0, np.nan), where=size > 0)
