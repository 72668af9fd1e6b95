"""Nearest neighbours: the margin by which one class has the majority among them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.distances import Centred, mean_slopes
from pytorch_grad_cam_pcasvm.head.stage import Scaled, Stage

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
        nearest = self._nearest(x)
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
        points = self.points[self._nearest(x)]
        rivals = self._rivals((x.unsqueeze(-2) - points).square().sum(-1)).unsqueeze(-1)
        return 2 * (points - points.gather(-2, rivals.expand_as(points)))

    def _nearest(self, x: Tensor) -> Tensor:
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
