"""Statistics: a mean over images, and how far it can be trusted."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A mean over images.

    Attributes:
        mean: the mean; NaN without images.
        standard_error: standard deviation of the images' numbers divided by the root of ``n``; NaN below two images.
        n: number of images.
    """

    mean: float
    standard_error: float
    n: int

    @staticmethod
    def of(values: Any) -> "Estimate":
        """Return the mean of numbers, one for each image; NaN marks an image without one."""
        found = np.asarray(values, np.float64)
        found = found[~np.isnan(found)]
        error = float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else float("nan")
        return Estimate(float(found.mean()) if len(found) else float("nan"), error, len(found))

    def above(self, value: float) -> bool:
        """Return whether the mean is above a value by more than two standard errors."""
        return self.n > 1 and self.mean - 2 * self.standard_error > value

    def __str__(self) -> str:
        if self.n < 2:
            return "–" if self.n == 0 else f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} ± {self.standard_error:.2f}"


def rank_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation of two maps for each image, (N, ...) and (N, ...); NaN if one is constant."""
    a, b = (_ranks(maps.reshape(len(maps), -1)) for maps in (first, second))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    size = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.divide((a * b).sum(1), size, out=np.full(len(a), np.nan), where=size > 0)


def _ranks(rows: np.ndarray) -> np.ndarray:
    """Return the ranks of the numbers of each row, equal numbers sharing theirs."""
    found = np.empty(rows.shape)
    for row, ranks in zip(rows, found, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        ranks[:] = ((ends - counts + ends - 1) / 2)[inverse]
    return found
