"""Distances to points and centres, and densities: one value, larger the more a row is like the training set."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stage import Scaled, Stage

_SHARE = 0.999  # of the training rows that are below what they reach: a few may be defects


class Quadratic(Stage):
    """``y_c = offset_c - |(x - m_c) R_c|^2``: QDA, naive Bayes, mixtures, elliptic envelopes, nearest centroids.

    Args:
        centres: m_c, shape (C, D).
        roots: R_c, shape (C, D, R); or (C, D), if they are diagonal.
        offsets: shape (C,).

    Example:
        >>> stage_for(GaussianNB().fit(features, labels)).stages[0]
        Quadratic()
    """

    def __init__(self, centres: Tensor, roots: Tensor, offsets: Tensor) -> None:
        super().__init__()
        self.n_outputs, self.n_inputs = centres.shape
        self.keep(centres=centres, roots=roots, offsets=offsets)

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return y, shape (N, C); and ``(x - m_c) R_c``, shape (N, C, R)."""
        z = x.unsqueeze(1) - self.centres
        z = z * self.roots if self.roots.dim() == 2 else (z.unsqueeze(-2) @ self.roots).squeeze(-2)
        return self.offsets - z.square().sum(-1), z

    def pullback(self, saved: Tensor, grad: Tensor) -> Scaled:
        """Return ``-2 sum_c grad_c R_c z_c``, z_c = (x - m_c) R_c."""
        return self.secant(saved, saved, grad)

    def secant(self, saved: Tensor, saved0: Tensor, grad: Tensor) -> Scaled:
        """Return the gradient at the point half-way to the start."""
        z = saved + saved0
        z = z * self.roots if self.roots.dim() == 2 else (self.roots @ z.unsqueeze(-1)).squeeze(-1)
        return -(grad @ z), None


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

    def distances(self, x: Tensor, points: Tensor) -> Tensor:
        """Return the distances of rows (..., D), which are numbers of the same broadcast shape without D."""
        return (x - points).norm(dim=-1)


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

    def distances(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``1 - <x, p>``: half the square of the difference, which is exact near 0, of rows of length 1."""
        lengths = x.square().sum(-1) + points.square().sum(-1)
        return (x - points).square().sum(-1) / 2 + (1 - lengths / 2)


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


def measure_reach(values: np.ndarray, *, is_distance: bool) -> tuple[float, float]:
    """Return between which numbers anomalies of training rows are; distances start at 0.

    Args:
        values: anomalies of rows, each measured by a head that was fitted without it, shape (R,).
        is_distance: whether they are distances.

    Example:
        >>> measure_reach(np.array([1.0, 2.0, 2.0]), is_distance=True)
        (0.0, 2.0)
    """
    return 0.0 if is_distance else float(values.min()), float(np.quantile(values, _SHARE))


def density_constant(bandwidth: float, width: int, weight: float) -> float:
    """Return the logarithm of the factor that makes a sum of Gaussian kernels a density."""
    return -width * (math.log(bandwidth) + math.log(2 * math.pi) / 2) - math.log(weight)


def _units(ways: Tensor, lengths: Tensor) -> Tensor:
    """Return vectors (..., D) of length 1; of length 0 none has a direction."""
    return ways / torch.where(lengths > 0, lengths, torch.inf).unsqueeze(-1)


_At = tuple[Tensor, Tensor, Tensor]  # x, the margins, and the largest of the distances


class Neighbours(Stage):
    """``a_c = min_(o != c) D_o - D_c``, D_c the squared distance to the m_c-th nearest point of class c.

    Between two classes, with ``m = (k + 1) / 2`` for an odd k, a_c is positive just where c has most of the k votes. Of
    more classes a plurality may decide, so that the k nearest points' votes are counted, too: they have no gradient.

    Along a line every a_c is continuous and made of straight pieces. Its secant is the mean gradient at 16 places
    between start and x, with the smallest change that makes it exact.

    Args:
        points: the training set, shape (I, D), class by class.
        counts: how many of them each class has, C numbers.
        ranks: m_c, C numbers.
        k: how many neighbours vote.

    Example:
        >>> stage_for(KNeighborsClassifier(5).fit(features, labels)).stages[0].ranks
        [3, 3, 3]
    """

    constants = ("_of_point",)

    def __init__(self, points: Tensor, counts: Sequence[int], ranks: Sequence[int], k: int) -> None:
        super().__init__()
        self.n_inputs, self.row_width = points.shape[1], len(points)
        self.counts, self.ranks, self.k = list(counts), list(ranks), k
        self.n_outputs = len(self.counts) * (2 if len(self.counts) > 2 else 1)
        self.keep(points=points)
        self._of_point = torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))

    def evaluate(self, x: Tensor) -> tuple[Tensor, _At]:
        """Return the margins, shape (N, C), of more than two classes and their votes, (N, 2C); and saved numbers."""
        nearest = self._find_nearest(x)
        distances = (x.unsqueeze(1) - self.points[nearest]).square().sum(-1)
        margins = distances.gather(-1, self._rivals(distances)) - distances
        saved = x, margins, distances.amax(-1, keepdim=True)
        if len(self.counts) == 2:
            return margins, saved
        voters = self._of_point[Centred.of(self.points).squared_distances(x).topk(self.k, -1, largest=False).indices]
        votes = (voters.unsqueeze(-1) == torch.arange(len(self.counts), device=x.device)).sum(-2)
        return torch.cat([margins, votes.to(margins)], -1), saved

    def pullback(self, saved: _At, grad: Tensor) -> Scaled:
        """Return ``2 sum_c grad_c (q_c - q_o)``, q the points at whose distance D_c and its rival's D_o are."""
        return grad[..., : len(self.counts)] @ self._slopes(saved[0]), None

    def secant(self, saved: _At, saved0: _At, grad: Tensor) -> Scaled:
        """Return the mean gradient along the straight line from x0 to x, corrected to add up to the difference."""
        (x, margins, size), (x0, margins0, size0) = saved, saved0
        slopes = mean_slopes(self._slopes, x, x0, margins - margins0, size + size0)
        return grad[..., : len(self.counts)] @ slopes, None

    def _slopes(self, x: Tensor) -> Tensor:
        """Return the gradients of the margins at x, shape (..., D): (..., C, D)."""
        points = self.points[self._find_nearest(x)]
        rivals = self._rivals((x.unsqueeze(-2) - points).square().sum(-1)).unsqueeze(-1)
        return 2 * (points - points.gather(-2, rivals.expand_as(points)))

    def _find_nearest(self, x: Tensor) -> Tensor:
        """Return which points have the distances D of the classes from x, (..., D): shape (..., C)."""
        positions, start = [], 0
        for of_class, rank in zip(
            Centred.of(self.points).squared_distances(x).split(self.counts, -1), self.ranks, strict=True
        ):
            positions.append(start + of_class.topk(rank, -1, largest=False).indices[..., -1])
            start += of_class.shape[-1]
        return torch.stack(positions, -1)

    @staticmethod
    def _rivals(distances: Tensor) -> Tensor:
        """Return the nearest other class of each, by their distances, (..., C): the second of the nearest itself."""
        first, second = distances.topk(2, -1, largest=False).indices.split(1, -1)
        numbers = torch.arange(distances.shape[-1], device=distances.device)
        return torch.where(numbers == first, second, first)
