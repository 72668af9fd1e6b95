"""The log-ratio of the evidence of an RBF SVM: it has the sign of the decision value, and does not saturate.

A decision value ``a(x) = sum_i c_i K(p_i, x) + g``, with ``c_i = alpha_i y_i``, is the difference of what speaks for a
class and what speaks against it. Its log-ratio is the logarithm of their quotient,
``r(x) = log sum_(c_i > 0) c_i K(p_i, x) - log sum_(c_i < 0) |c_i| K(p_i, x)``, with ``|g|`` among the terms of its
sign. ``log K(p_i, x) = -gamma |p_i - x|^2`` is taken as it is, so nothing underflows however far x is from all p_i.
Bley et al., arXiv 2508.03913.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.decisions import Decision, Ensemble, KernelSVM
from pytorch_grad_cam_pcasvm.head.kernels import RBF, squared_distances
from pytorch_grad_cam_pcasvm.head.stage import USUAL, Conditions, Scaled, Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced, kept_on_devices

# A line is integrated over in so many intervals, of which as many as _HALVED are halved in each of _ROUNDS.
_INTERVALS, _HALVED, _ROUNDS = 8, 8, 10
_NODES, _WEIGHTS = (torch.from_numpy(array) / 2 for array in np.polynomial.legendre.leggauss(8))
_NODES += 0.5
_QUADRATURE = {
    "nodes": _NODES,
    "weights": _WEIGHTS,
    "nodes and ends": torch.cat([_NODES, torch.tensor([0.0, 1.0], dtype=_NODES.dtype)]),
}
_send_quadrature = kept_on_devices(_QUADRATURE.__getitem__)
_AT_ONCE = 1 << 20  # terms at nodes of a line, beyond which they are taken in blocks


class LogRatio(Stage):
    """The log-ratios of the decision values of an RBF SVM, shape (N, P), as a stage in its place.

    Args:
        svm: the SVM.

    Raises:
        ValueError: its kernel is not positive everywhere, it is a regressor, or a decision value has terms of one sign
            only.
    """

    def __init__(self, svm: KernelSVM) -> None:
        super().__init__()
        if svm.voting.about == "value":
            raise ValueError("LogRatioTarget is for classifiers, but this head ends with a regressor: use SVMTarget")
        if not isinstance(svm.kernel, RBF):
            name = type(svm.kernel).__name__.lower()
            raise ValueError(
                f"LogRatioTarget needs a kernel that is positive everywhere, as RBF, but this one is {name}: use "
                "SVMTarget, which explains the margin of any SVM"
            )
        self.svm, self.gamma = svm, svm.kernel.gamma
        self.n_inputs, self.n_outputs = svm.n_inputs, svm.n_outputs
        if can_sync(svm.intercept) and not all(evidence.has_both_sides() for evidence in self._evidence()):
            raise ValueError(
                "LogRatioTarget needs terms for and against, but all support vectors of this SVM and its intercept "
                "speak for one side: use SVMTarget"
            )

    def evaluate(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Conditions]]:
        """Return the log-ratios, shape (N, P); and x, with how exactly it is known."""
        return torch.stack([evidence.value(x) for evidence in self._evidence()], -1), (x, USUAL)

    def attach_conditions(self, saved: Any, conditions: Conditions) -> Any:
        """Return x, with how exactly it is known."""
        return (saved[0], conditions) if isinstance(saved, tuple) else saved

    def pullback(self, saved: tuple[Tensor, Conditions], grad: Tensor) -> Scaled:
        """Return ``grad dr/dx``, shape (N, K, B)."""
        return self._list_gradient_rows(saved[0], grad, lambda evidence: evidence.gradient(*saved))

    def secant(self, saved: tuple[Tensor, Conditions], saved0: tuple[Tensor, Conditions], grad: Tensor) -> Scaled:
        """Return the same with the mean of the gradient along the straight line from x0 to x."""
        return self._list_gradient_rows(saved[0], grad, lambda evidence: evidence.secant(saved[0], saved0[0]))

    def _list_gradient_rows(self, x: Tensor, grad: Tensor, slope: "Callable[[Evidence], Tensor]") -> Scaled:
        rows = []
        for seed, evidence in zip(grad.unbind(-1), self._evidence(), strict=True):
            if can_sync(seed) and not bool(seed.any()):
                rows.append(torch.zeros_like(x))  # a pair that no target is about
            else:
                rows.append(slope(evidence))
        return grad @ torch.stack(rows, 1), None

    def _evidence(self) -> "Iterator[Evidence]":
        """Yield the evidence of every decision value, of which only two classes' support vectors are part."""
        svm = self.svm
        if len(svm.dual_coef) == 1:
            yield Evidence.of(svm.support_vectors, svm.dual_coef[0], svm.intercept[0], self.gamma)
            return
        points, coefficients = svm.support_vectors.split(svm.n_support), svm.dual_coef.split(svm.n_support, 1)
        for intercept, (a, b) in zip(svm.intercept, combinations(range(len(points)), 2), strict=True):
            of_pair = torch.cat([coefficients[a][b - 1], coefficients[b][a]])
            yield Evidence.of(torch.cat([points[a], points[b]]), of_pair, intercept, self.gamma)


def log_ratios(decision: Decision) -> Stage:
    """Return the stage of a decision's log-ratios: one for each SVM.

    Raises:
        ValueError: the decision, or a part of it, is none of an RBF SVM.
    """
    if isinstance(decision, KernelSVM):
        return LogRatio(decision)
    if isinstance(decision, Ensemble):
        members = [Chain([*list(member.stages)[:-1], log_ratios(member.stages[-1])]) for member in decision.members]
        return Ensemble(members, decision.sign, decision.voting, decision.classes)
    name = type(decision).__name__
    raise ValueError(
        f"LogRatioTarget needs an SVM with an RBF kernel, but this head decides by {'an' if name[0] in 'AE' else 'a'} "
        f"{name}, which does not saturate: use SVMTarget"
    )


@dataclass(frozen=True)
class Evidence:
    """The terms of one decision value: evidence for it (row 0), and against it (row 1).

    Attributes:
        points: p_i, shape (I, B).
        log_coefficients: ``log |c_i|`` in the row of its sign, minus infinity in the other, shape (2, I).
        log_intercept: ``log |g|`` likewise, shape (2, 1).
        gamma: of the kernel.
    """

    points: Tensor
    log_coefficients: Tensor
    log_intercept: Tensor
    gamma: float

    @staticmethod
    def of(points: Tensor, coefficients: Tensor, intercept: Tensor, gamma: float) -> "Evidence":
        """Return the evidence of points (I, B) with signed coefficients (I,), and of an intercept ()."""
        terms = torch.cat([coefficients, intercept.reshape(1)])
        logarithms = torch.stack([terms, -terms]).clamp(min=0).log()
        return Evidence(points, logarithms[:, :-1], logarithms[:, -1:], gamma)

    def has_both_sides(self) -> bool:
        """Return whether something speaks for it, and something against it."""
        sizes = torch.cat([self.log_coefficients, self.log_intercept], 1).amax(1)
        return bool((sizes > -torch.inf).all())

    def value(self, x: Tensor) -> Tensor:
        """Return the log-ratio, shape (N,)."""
        size = self._compute_terms(x).logsumexp(-1)
        return size[0] - size[1]

    def gradient(self, x: Tensor, conditions: Conditions = USUAL) -> Tensor:
        """Return ``2 gamma sum_i (s_i^+ - s_i^-) (p_i - x)``, shape (N, B), s the shares in the evidence of each side.

        It is 0 where it is no larger than the rounding errors that x has from its network, as on a support vector that
        alone is all the evidence.
        """
        shares = self._compute_terms(x).softmax(-1)[..., :-1]
        grad = self._around(shares[0] - shares[1], x)
        noise = grad.abs() <= 2 * self.gamma * shares.sum((0, 2)).unsqueeze(-1) * conditions.bound_rounding(x)
        return grad - grad.detach() * noise.all(-1, keepdim=True)

    def secant(self, x: Tensor, x0: Tensor) -> Tensor:
        """Return the mean of the gradient along the straight line from x0, (N, B) or (1, B), to x, shape (N, B).

        Its product with ``x - x0`` is ``value(x) - value(x0)``.
        """
        step = x - x0
        squared = step.square().sum(-1, keepdim=True)
        # Around the start, so that nothing cancels in products of points that are far from 0.
        origin = x0[:1]
        slopes = 2 * self.gamma * (step @ (self.points - origin).T - (step * (x0 - origin)).sum(-1, keepdim=True))
        line = Line(
            self.log_coefficients.unsqueeze(1) - self.gamma * squared_distances(x0, self.points).expand(x.shape[0], -1),
            slopes,
            self.log_intercept.unsqueeze(-1),
            self.gamma * squared,
        )
        shares, moments = line.mean_shares()
        signed, moment = shares[0] - shares[1], moments[0] - moments[1]
        secant = self._around(signed, x0) - 2 * self.gamma * moment.unsqueeze(-1) * step
        # What the integral misses is given to the direction of the line, unless it is rounding.
        here, at_start = (self._compute_terms(point).logsumexp(-1) for point in (x, x0))
        gap = (here - at_start)[0] - (here - at_start)[1] - (secant * step).sum(-1)
        rounding = 64 * torch.finfo(x.dtype).eps * (here.abs() + at_start.abs()).sum(0)
        gap = torch.where(gap.abs() > rounding, gap, 0.0).unsqueeze(-1)
        return secant + gap * step / torch.where(squared > 0, squared, 1.0)

    def _compute_terms(self, x: Tensor) -> Tensor:
        """Return the logarithms of the terms of both sides, the intercept's last, shape (2, N, I + 1)."""
        kernels = self.log_coefficients.unsqueeze(1) - self.gamma * squared_distances(x, self.points)
        return torch.cat([kernels, self.log_intercept.unsqueeze(-1).expand(-1, x.shape[0], -1)], -1)

    def _around(self, signed: Tensor, x: Tensor) -> Tensor:
        """Return ``2 gamma sum_i s_i (p_i - x)``, shape (N, B), for signed shares (N, I)."""
        return 2 * self.gamma * (signed @ self.points - signed.sum(-1, keepdim=True) * x)


@dataclass(frozen=True)
class Line:
    """The terms of both sides along a straight line, t from 0 to 1.

    All exponents ``-gamma |p_i - x(t)|^2`` have the same square in t; without it, which changes no share, they are
    ``start + slope t``, and that of the intercept is ``intercept + bend t^2``.

    Attributes:
        start: shape (2, N, I).
        slope: shape (N, I).
        intercept: shape (2, 1, 1).
        bend: shape (N, 1).
    """

    start: Tensor
    slope: Tensor
    intercept: Tensor
    bend: Tensor

    def mean_shares(self) -> tuple[Tensor, Tensor]:
        """Return the means along the line of the shares of all support vectors, (2, N, I), and of t times their sums.

        There is no closed form. Shares change within a small part of the line, anywhere on it, if the kernel is narrow.
        But the logarithm of the sum, M(t), is known, and so are the errors of an integral of its derivative over each
        interval: where they are largest, intervals are halved.
        """
        like = self.start[..., 0]
        lows = torch.arange(_INTERVALS, dtype=like.dtype, device=like.device) / _INTERVALS
        lows = lows.expand(*like.shape, -1)
        widths = torch.full_like(lows, 1 / _INTERVALS)
        errors = self._bound_errors(lows, widths)
        for _ in range(_ROUNDS):
            order = errors.argsort(-1, descending=True)
            lows, widths, errors = (tensor.gather(-1, order) for tensor in (lows, widths, errors))
            half = widths[..., :_HALVED] / 2
            new = torch.cat([lows[..., :_HALVED], lows[..., :_HALVED] + half], -1), torch.cat([half, half], -1)
            halves = (*new, self._bound_errors(*new))
            lows, widths, errors = (
                torch.cat([tensor[..., _HALVED:], more], -1)
                for tensor, more in zip((lows, widths, errors), halves, strict=True)
            )
        t = (lows.unsqueeze(-1) + widths.unsqueeze(-1) * _send_quadrature("nodes", like=like)).flatten(2)
        weights = (widths.unsqueeze(-1) * _send_quadrature("weights", like=like)).flatten(2)
        shares, moments = torch.zeros_like(self.start), torch.zeros_like(like)
        for part, weight in zip(*(tensor.split(self._at_once(), -1) for tensor in (t, weights)), strict=True):
            terms, _, total, _ = self._terms_at(part)
            weight = weight / total
            shares = shares + (weight.unsqueeze(-2) @ terms).squeeze(-2)
            moments = moments + (weight * part * terms.sum(-1)).sum(-1)
        return shares, moments

    def _bound_errors(self, lows: Tensor, widths: Tensor) -> Tensor:
        """Return how much the nodes of intervals, shape (2, N, J), miss of the rise of M over each of them."""
        like = self.start
        places = _send_quadrature("nodes and ends", like=like)
        t = (lows.unsqueeze(-1) + widths.unsqueeze(-1) * places).flatten(2)
        values, slopes = [], []
        for part in t.split(self._at_once(), -1):
            terms, of_intercept, total, value = self._terms_at(part)
            rising = (terms @ self.slope.unsqueeze(-1)).squeeze(-1) + of_intercept * 2 * self.bend * part
            values.append(value)
            slopes.append(rising / total)
        value, slope = (torch.cat(blocks, -1).unflatten(-1, (-1, len(places))) for blocks in (values, slopes))
        return (
            widths * (slope[..., :-2] @ _send_quadrature("weights", like=like)) - (value[..., -1] - value[..., -2])
        ).abs()

    def _terms_at(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the terms at t, (2, N, M), the intercept's, and their sum, all divided by the largest; and M(t)."""
        exponents = self.start.unsqueeze(-2) + self.slope.unsqueeze(-2) * t.unsqueeze(-1)
        of_intercept = self.intercept + self.bend * t.square()
        largest = torch.maximum(exponents.amax(-1), of_intercept)
        terms, of_intercept = (exponents - largest.unsqueeze(-1)).exp(), (of_intercept - largest).exp()
        total = terms.sum(-1) + of_intercept
        return terms, of_intercept, total, largest + total.log()

    def _at_once(self) -> int:
        images = 8 if is_traced() else self.start.shape[1]  # a program is for any number: let it be a few
        return max(1, _AT_ONCE // (images * self.start[:, 0].numel()))
