"""Quadratic forms: log-likelihoods of normal distributions, squared distances to centres."""

from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stage import Scaled, Stage


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
