"""Distances to training points, and densities: one value, larger the more a row is like the training set.

Their gradient changes along a line, so that secants are its mean at a few places between start and x, with the smallest
change that makes them exact.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stage import Scaled, Stage

_NODES = 16  # of a line


class OfPoints(Stage):
    """A function of the distances to training points.

    Args:
        points: the training set, shape (I, D).
    """

    n_outputs = 1
    is_distance = False  # whether the value is minus a distance, which starts at 0

    def __init__(self, points: Tensor, **tensors: Tensor) -> None:
        super().__init__()
        self.n_inputs, self.row_width = points.shape[1], len(points)
        self.keep(points=points, **tensors, **Centred.of(points)._asdict())

    @property
    def at_centre(self) -> "Centred":
        """The points, less their mean, which is taken once: a bank is large, and asked for block after block."""
        return Centred(self.centre, self.centred, self.squares)

    def evaluate(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the value, shape (N, 1); and x and it."""
        y = self.values(x, self.at_centre).unsqueeze(-1)
        return y, (x, y)

    def pullback(self, saved: Any, grad: Tensor) -> Scaled:
        """Return ``grad df/dx``."""
        return grad @ self.slopes(saved[0], self.at_centre).unsqueeze(-2), None

    def secant(self, saved: Any, saved0: Any, grad: Tensor) -> Scaled:
        """Return the mean gradient along the straight line from x0 to x, corrected to add up to the difference."""
        (x, y), (x0, y0) = saved, saved0
        size, centred = torch.maximum(y.abs(), y0.abs()), self.at_centre
        return grad @ mean_slopes(lambda at: self.slopes(at, centred).unsqueeze(-2), x, x0, y - y0, size), None

    @abstractmethod
    def values(self, x: Tensor, points: "Centred") -> Tensor:
        """Return the values of rows (..., D), shape (...)."""

    @abstractmethod
    def slopes(self, x: Tensor, points: "Centred") -> Tensor:
        """Return the gradients at rows (..., D), of the same shape."""

    def nearest(self, x: Tensor, points: "Centred", k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k nearest points of rows (..., D): their numbers and distances, (..., k), and differences to them.

        The differences have the shape (..., k, D).
        """
        index = points.squared_distances(x).topk(k, -1, largest=False).indices
        ways = x.unsqueeze(-2) - self.points[index]  # exact, where a product of large numbers is not
        return index, ways.norm(dim=-1), ways

    def distances(self, x: Tensor, others: Tensor) -> Tensor:
        """Return the distances of rows (..., D), which are numbers of the same broadcast shape without D."""
        return (x - others).norm(dim=-1)


class NearestDistance(OfPoints):
    """``y = -(d_1 + ... + d_k) / k``, minus the mean distance to the k nearest of training points, or centres.

    Args:
        points: shape (I, D).
        k: how many of them count.

    Example:
        >>> stage_for(NearestNeighbors(n_neighbors=3).fit(features)).stages[0].k
        3
    """

    is_distance = True

    def __init__(self, points: Tensor, k: int) -> None:
        super().__init__(points)
        self.k = k

    def values(self, x: Tensor, points: "Centred") -> Tensor:
        """Return minus the mean distances."""
        return -self.nearest(x, points, self.k)[1].mean(-1)

    def slopes(self, x: Tensor, points: "Centred") -> Tensor:
        """Return ``sum_j (p_j - x) / (k d_j)``; a point that x equals has no direction."""
        _, distances, ways = self.nearest(x, points, self.k)
        return -_units(ways, distances).mean(-2)


class CosineDistance(NearestDistance):
    """``y = -(d_1 + ... + d_k) / k``, minus the mean cosine distance, ``d = 1 - <x, p>``, to the k nearest points.

    Rows and points have the length 1, or 0, behind a Normaliser.

    Args:
        points: shape (I, D).
        k: how many of them count.

    Example:
        >>> [type(stage).__name__ for stage in stage_for(NearestNeighbors(metric="cosine").fit(features)).stages]
        ['Normalise', 'CosineDistance', 'LinearDecision']
    """

    def slopes(self, x: Tensor, points: "Centred") -> Tensor:
        """Return the mean of the k nearest points."""
        return self.points[self.nearest(x, points, self.k)[0]].mean(-2)

    def nearest(self, x: Tensor, points: "Centred", k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k nearest points of rows (..., D) by their cosine, in the form used for other distances."""
        index = (x @ self.points.T).topk(k, -1).indices
        near = self.points[index]
        return index, self.distances(x.unsqueeze(-2), near), x.unsqueeze(-2) - near

    def distances(self, x: Tensor, others: Tensor) -> Tensor:
        """Return ``1 - <x, p>``: half the square of the difference, which is exact near 0, of rows of length 1."""
        lengths = x.square().sum(-1) + others.square().sum(-1)
        return (x - others).square().sum(-1) / 2 + (1 - lengths / 2)


class LogDensity(OfPoints):
    """``y = log sum_i w_i exp(-|x - p_i|^2 / (2 h^2)) + c``, the logarithm of a density of Gaussian kernels.

    Args:
        points: shape (I, D).
        logarithms: those of the weights w_i, shape (I,).
        bandwidth: h.
        constant: c.

    Example:
        >>> stage_for(KernelDensity(bandwidth=2.0).fit(features)).stages[0].bandwidth
        2.0
    """

    def __init__(self, points: Tensor, logarithms: Tensor, bandwidth: float, constant: float) -> None:
        super().__init__(points, logarithms=logarithms)
        self.bandwidth, self.constant = bandwidth, constant

    def values(self, x: Tensor, points: "Centred") -> Tensor:
        """Return log-densities."""
        return self._exponents(x, points).logsumexp(-1) + self.constant

    def slopes(self, x: Tensor, points: "Centred") -> Tensor:
        """Return ``sum_i s_i (p_i - x) / h^2``, s_i the share of kernel i in the density."""
        return (self._exponents(x, points).softmax(-1) @ self.points - x) / self.bandwidth**2

    def _exponents(self, x: Tensor, points: "Centred") -> Tensor:
        squares = points.squared_distances(x) + (x - points.centre).square().sum(-1, keepdim=True)
        return self.logarithms - squares.clamp(min=0) / (2 * self.bandwidth**2)


class LocalOutlier(OfPoints):
    """``y = -m (r + 1e-10) - offset``, the local outlier factor: how dense neighbours lie, and how far away they are.

    r is the mean over the k nearest points of their distance, but at least the one of their own k-th neighbour; m is
    the mean of their local densities. Where other points are the nearest, both change at once: y jumps.

    Args:
        points: shape (I, D).
        densities: local densities of the points, shape (I,).
        radii: distances of each to its k-th neighbour, shape (I,).
        k: how many neighbours count.
        offset: above which value of ``-m r`` rows are inliers.

    Example:
        >>> stage_for(LocalOutlierFactor(n_neighbors=5, novelty=True).fit(features)).stages[0].k
        5
    """

    def __init__(self, points: Tensor, densities: Tensor, radii: Tensor, k: int, offset: float) -> None:
        super().__init__(points, densities=densities, radii=radii)
        self.k, self.offset = k, offset

    def values(self, x: Tensor, points: "Centred") -> Tensor:
        """Return minus the local outlier factors, and the offset."""
        index, distances, _ = self.nearest(x, points, self.k)
        reached = torch.maximum(distances, self.radii[index]).mean(-1)
        return -self.densities[index].mean(-1) * (reached + 1e-10) - self.offset

    def slopes(self, x: Tensor, points: "Centred") -> Tensor:
        """Return ``-m dr/dx``: of neighbours that are nearer than their own k-th one, r does not change."""
        index, distances, ways = self.nearest(x, points, self.k)
        beyond = (distances > self.radii[index]).unsqueeze(-1)
        return -self.densities[index].mean(-1).unsqueeze(-1) * torch.where(beyond, _units(ways, distances), 0).mean(-2)


def mean_slopes(slopes: Callable[[Tensor], Tensor], x: Tensor, x0: Tensor, change: Tensor, size: Tensor) -> Tensor:
    """Return secants of C values: the means of their gradients from x0 to x, with the smallest change that is exact.

    Args:
        slopes: the gradients at rows (..., D), shape (..., C, D).
        x: shape (N, D).
        x0: shape (N, D) or (1, D).
        change: by how much the values differ, (N, C).
        size: of the numbers that they are differences of, in comparison with which rounding is nothing, (N, C).

    Returns:
        The secants, shape (N, C, D).
    """
    way = x - x0
    places = (torch.arange(_NODES, dtype=x.dtype, device=x.device) + 0.5) / _NODES
    mean = torch.stack([slopes(x0 + place * way) for place in places]).mean(0)
    missing = change - (mean @ way.unsqueeze(-1)).squeeze(-1)
    # What is only rounding would be made large where x is near its start.
    missing = torch.where(missing.abs() > 16 * torch.finfo(x.dtype).eps * size, missing, 0.0)
    length = way.square().sum(-1, keepdim=True)
    return mean + missing.unsqueeze(-1) * (way / torch.where(length > 0, length, 1.0)).unsqueeze(-2)


class Centred(NamedTuple):
    """Points less their mean: far from it, products are rounded to nothing but their common part.

    Attributes:
        centre: the mean, (D,).
        centred: the points less that, shape (I, D).
        squares: of their lengths, (I,).
    """

    centre: Tensor
    centred: Tensor
    squares: Tensor

    @staticmethod
    def of(points: Tensor) -> "Centred":
        """Return points, (I, D), less their mean."""
        centre = points.mean(0)
        return Centred(centre, points - centre, (points - centre).square().sum(-1))

    def squared_distances(self, x: Tensor) -> Tensor:
        """Return the squared distances of x, (..., D), to the points, (..., I), less a number that all share."""
        return self.squares - 2 * (x - self.centre) @ self.centred.T


def density_constant(bandwidth: float, width: int, weight: float) -> float:
    """Return the logarithm of the factor that makes a sum of Gaussian kernels a density."""
    return -width * (math.log(bandwidth) + math.log(2 * math.pi) / 2) - math.log(weight)


def _units(ways: Tensor, lengths: Tensor) -> Tensor:
    """Return vectors (..., D) of length 1; of length 0 none has a direction."""
    return ways / torch.where(lengths > 0, lengths, torch.inf).unsqueeze(-1)
