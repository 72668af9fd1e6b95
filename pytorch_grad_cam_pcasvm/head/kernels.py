"""The kernels of support vector machines: their values and gradients.

Every kernel is a function of one number per pair, its argument: a squared distance or an inner product. It has five
methods. With ``x`` of shape (N, B) and ``points`` (the support vectors) of shape (I, B):

- ``argument(x, points)``: shape (N, I), computed once for everything below;
- ``value(argument)``: ``K(p_i, x)``, shape (N, I);
- ``pullback(at, points, coefficients)``, where ``at`` is x, its argument, and how exactly x is known:
  ``sum_i c_i dK(p_i, x)/dx`` for coefficients of shape (N, K, I) or (1, K, I), as a pair: the gradient, shape
  (N, K, B), and the natural logarithm of a factor that was taken out of it, shape (N, K);
- ``secant(at, at0, points, coefficients)``, where ``at0`` is a start x0 of N rows or of 1 and its argument: the
  vectors whose products with ``x - x0`` are ``sum_i c_i (K(p_i, x) - K(p_i, x0))``, as a pair, too;
- ``effect(x, points)``: ``|dK(p_i, x)/dx|``, the paper's E, shape (N, I).

The logarithm is 0 wherever the gradient fits a 32-bit float with room to spare. Far from every support vector
``exp(-gamma d^2)`` underflows although the direction is well defined: there the size of the terms is factored out.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stage import USUAL, Conditions
from pytorch_grad_cam_pcasvm.runtime.device import kept_on_devices


class At(NamedTuple):
    """Where a kernel is: x, shape (N, B), its argument there, (N, I), and how exactly x is known."""

    x: Tensor
    argument: Tensor
    conditions: Conditions = USUAL


# exp(-30) = 1e-13: below this a float32 pullback through further layers begins to lose small terms.
_REPRESENTABLE = -30.0

# Gauss-Legendre nodes and weights on [0, 1]: 12 integrate exp(-e) to the last bit where e, quadratic, varies by 1.
_NODES, _WEIGHTS = (torch.from_numpy(array) / 2 for array in np.polynomial.legendre.leggauss(12))
_NODES += 0.5
# Columns: the nodes, their squares, and the weights for the integral of a function, and of t times it.
_QUADRATURE = torch.stack([_NODES, _NODES.square(), _WEIGHTS, _WEIGHTS * _NODES], 1)
_send_quadrature = kept_on_devices(lambda: _QUADRATURE)


class _OfInnerProduct:
    """A kernel of ``<p_i, x>``, whose derivative is ``_slope``."""

    def argument(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``<p_i, x>``, shape (N, I)."""
        return x @ points.T

    def effect(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``E = |slope| |p_i|``, shape (N, I)."""
        return self._slope(At(x, self.argument(x, points))).abs() * points.norm(dim=1)

    def _slope(self, at: At) -> Tensor:
        return torch.ones_like(at.argument)


@dataclass(frozen=True)
class Linear(_OfInnerProduct):
    """``K(p_i, x) = <p_i, x>``, gradient ``p_i``.

    Example:
        >>> Head.of(KernelPCA(2).fit(features)).stages[0].kernel
        Linear()
    """

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return argument

    def pullback(self, at: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sum_i c_i p_i``, shape (N, K, B), and zeros, shape (N, K)."""
        grad = torch.tensordot(coefficients, points, 1).expand(at.x.shape[0], -1, -1)
        return grad, grad.new_zeros(grad.shape[:2])

    def secant(self, at: At, at0: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same: the kernel is linear."""
        return self.pullback(at, points, coefficients)


@dataclass(frozen=True)
class Polynomial(_OfInnerProduct):
    """``K(p_i, x) = z^degree`` with ``z = gamma <p_i, x> + coef0``, gradient ``degree gamma z^(degree-1) p_i``.

    Example:
        >>> svm = SVC(kernel="poly", gamma=1.0, degree=2).fit(features, labels)
        >>> Head.of(svm).stages[-1].kernel
        Polynomial(gamma=1.0, degree=2, coef0=0.0)
    """

    gamma: float
    degree: float
    coef0: float

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return (self.gamma * argument + self.coef0).pow(self.degree)

    def pullback(self, at: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sum_i c_i slope p_i``, shape (N, K, B), slope ``degree gamma z^(degree-1)``; and zeros, (N, K)."""
        return Linear().pullback(at, points, coefficients * self._slope(at).unsqueeze(1))

    def secant(self, at: At, at0: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same with the slope ``gamma (z^degree - z0^degree) / (z - z0)``."""
        return Linear().pullback(at, points, coefficients * self._mean_slope(at, at0).unsqueeze(1))

    def _slope(self, at: At) -> Tensor:
        z = self.gamma * at.argument + self.coef0
        return self.degree * self.gamma * z.pow(self.degree - 1) if self.degree else torch.zeros_like(z)

    def _mean_slope(self, at: At, at0: At) -> Tensor:
        z, z0 = (self.gamma * argument + self.coef0 for argument in (at.argument, at0.argument))
        if self.degree == int(self.degree):
            # sum_j z^j z0^(degree-1-j), by Horner's rule: nothing cancels.
            total = torch.zeros_like(z)
            for power in range(int(self.degree)):
                total = total * z + z0**power
            return self.gamma * total
        # Of a fractional degree, whose z are positive: z^degree - w^degree = -z^degree expm1(degree log(w / z)).
        larger, smaller = torch.maximum(z, z0), torch.minimum(z, z0)
        step = (smaller - larger) / larger
        quotient = larger.pow(self.degree - 1) * torch.expm1(self.degree * torch.log1p(step)) / step
        return self.gamma * torch.where(smaller == larger, self.degree * larger.pow(self.degree - 1), quotient)


@dataclass(frozen=True)
class Sigmoid(_OfInnerProduct):
    """``K(p_i, x) = tanh(z)`` with ``z = gamma <p_i, x> + coef0``, gradient ``gamma sech(z)^2 p_i``.

    Example:
        >>> svm = SVC(kernel="sigmoid", gamma=1.0).fit(features, labels)
        >>> Head.of(svm).stages[-1].kernel
        Sigmoid(gamma=1.0, coef0=0.0)
    """

    gamma: float
    coef0: float

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return torch.tanh(self.gamma * argument + self.coef0)

    def pullback(self, at: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sum_i c_i gamma sech(z)^2 p_i``, shape (N, K, B), and the logarithm of its factor, shape (N, K)."""
        scaled, log_scale = _times_exp(self.gamma * coefficients, 2 * self._log_sech(at.argument))
        return torch.tensordot(scaled, points, 1), log_scale

    def secant(self, at: At, at0: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same with ``sinh(u) / (u cosh(z) cosh(z0))``, u = z - z0, in place of ``sech(z)^2``."""
        argument, argument0 = at.argument, at0.argument
        u = (self.gamma * (argument - argument0)).abs()
        # sinh(u) / u = exp(u) (1 - exp(-2u)) / (2u), whose parts overflow where their quotient does not.
        mean = torch.where(u > 0, -torch.expm1(-2 * u) / (2 * u), 1.0)
        log_slope = u + mean.log() + self._log_sech(argument) + self._log_sech(argument0)
        scaled, log_scale = _times_exp(self.gamma * coefficients, log_slope)
        return torch.tensordot(scaled, points, 1), log_scale

    def _slope(self, at: At) -> Tensor:
        return self.gamma * (2 * self._log_sech(at.argument)).exp()

    def _log_sech(self, argument: Tensor) -> Tensor:
        """Return the logarithm of sech(z), written so that nothing cancels where tanh saturates."""
        z = (self.gamma * argument + self.coef0).abs()
        return math.log(2) - z - torch.log1p(torch.exp(-2 * z))


@dataclass(frozen=True)
class RBF:
    """``K(p_i, x) = exp(-gamma d_i^2)`` with ``d_i = |p_i - x|``, gradient ``2 gamma K(p_i, x) (p_i - x)``.

    Example:
        >>> Head.of(SVC(gamma=0.5).fit(features, labels)).stages[-1].kernel
        RBF(gamma=0.5)
    """

    gamma: float

    def argument(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``d_i^2``, shape (N, I)."""
        return squared_distances(x, points)

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return torch.exp(-self.gamma * argument)

    def pullback(self, at: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``2 gamma sum_i c_i K(p_i, x) (p_i - x)``, (N, K, B), and the logarithm of its factor, (N, K).

        It is 0 where it is no larger than the rounding errors that x has from its network (see :class:`.Conditions`).
        """
        x, argument, conditions = at
        scaled, log_scale = _times_exp(2 * self.gamma * coefficients, -self.gamma * argument)
        grad = _around(scaled, points, x)
        # On a support vector of a narrow kernel all that is left is the rounding of its distance, and no direction.
        rounding = scaled.abs().sum(-1, keepdim=True) * conditions.bound_rounding(x).unsqueeze(1)
        return grad - grad.detach() * (grad.abs() <= rounding).all(-1, keepdim=True), log_scale

    def secant(self, at: At, at0: At, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of the gradient along the straight line from x0 to x.

        It is ``2 gamma sum_i c_i I_i (p_i - x0 - tau_i (x - x0))``: I_i is the mean value of the kernel on the line,
        and tau_i, from 0 to 1, the centre of the kernel's weight on it.
        """
        (x, argument, _), (x0, argument0, _) = at, at0
        step = x - x0
        scaled_step = self.gamma * step
        # Around the start, so that nothing cancels in products of points that are far from 0.
        points, start = points - x0[:1], x0 - x0[:1] if x0.shape[0] > 1 else None
        along = scaled_step @ points.T
        if start is not None:
            along = along - (start * scaled_step).sum(-1, keepdim=True)
        length = (step * scaled_step).sum(-1, keepdim=True)
        log_mean, tau = _along_a_line(self.gamma * torch.minimum(argument0, argument), along, length)
        scaled, log_scale = _times_exp(2 * self.gamma * coefficients, log_mean)
        grad = torch.tensordot(scaled, points, 1) if start is None else _around(scaled, points, start)
        return grad - (scaled * tau.unsqueeze(1)).sum(-1, keepdim=True) * step.unsqueeze(1), log_scale

    def coincides(self, x: Tensor, points: Tensor, conditions: Conditions = USUAL) -> Tensor:
        """Return whether x (N, B) equals each of the points but for rounding, shape (N, I)."""
        return ((x.unsqueeze(1) - points).abs() <= conditions.bound_rounding(x).unsqueeze(1)).all(-1)

    def effect(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``E = 2 gamma exp(-gamma d_i^2) d_i``, shape (N, I).

        It is 0 at distance 0 and at infinity, and largest at ``d = 1 / sqrt(2 gamma)``: ``sqrt(2 gamma) exp(-1/2)``.
        """
        squared = self.argument(x, points)
        return 2 * self.gamma * torch.exp(-self.gamma * squared) * squared.sqrt()


Kernel = Linear | Polynomial | Sigmoid | RBF


def squared_distances(x: Tensor, points: Tensor) -> Tensor:
    """Return ``|x - p_i|^2`` for x (N, B) and points (I, B), shape (N, I), from differences, so nothing cancels."""
    return _SquaredDistances.apply(x, points)


class _SquaredDistances(torch.autograd.Function):
    """``torch.cdist`` squared, with a backward pass that can itself be differentiated (cdist's cannot), and forward AD.

    The points are constants.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, points: Tensor) -> Tensor:
        return torch.cdist(x, points, compute_mode="donot_use_mm_for_euclid_dist").square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, points = ctx.saved_tensors
        return 2 * (grad.sum(-1, keepdim=True) * x - grad @ points), None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, points_tangent: None) -> Tensor:
        x, points = ctx.saved_tensors
        return 2 * ((x * x_tangent).sum(-1, keepdim=True) - x_tangent @ points.T)


def _along_a_line(nearer: Tensor, along: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``log I`` and ``tau``: ``I = int exp(-e(t)) dt`` and ``tau = int t exp(-e(t)) dt / I``, t from 0 to 1.

    ``e(t) = e(0) - 2 t along + t^2 length`` is gamma times the squared distance of a point from a line, so nowhere
    negative, and ``nearer`` the smaller of e(0) and e(1). Shapes broadcast to (N, I).
    """
    # The nearest place on the line is in its first half; otherwise the line is run through from its other end.
    first = torch.minimum(along, length - along)
    squared = length + (length == 0)
    s, nearest = squared.sqrt(), first / squared
    # e(0) - e and e(1) - e at the lowest e on the line: at its nearest place, if that is on it, or at its start.
    inside = first.clamp(min=0)
    to_start = inside * nearest
    to_end = torch.sub(length, first, alpha=2) + to_start
    # Integrals from there to both ends, divided by exp(-e) at the lowest: of exp(-u^2) for u from -b to s - b.
    b = nearest * s
    at_first, at_last = torch.exp(-to_start), torch.exp(-to_end)
    near = at_first * torch.special.erfcx(b.abs())
    total = torch.where(first < 0, near, 2 - near) - at_last * torch.special.erfcx(s - b)
    mean = total / (s * (2 / math.sqrt(math.pi)))
    tau = torch.addcdiv(nearest, at_first - at_last, total * (s * math.sqrt(math.pi)))
    # Where exp(-e) is nearly the same all along the line, these differences cancel; few nodes integrate it there.
    flat = to_end < 1
    table = _send_quadrature(like=along)
    terms = torch.exp((2 * first).unsqueeze(-1) * table[:, 0] - length.unsqueeze(-1) * table[:, 1])
    zeroth, moment = torch.tensordot(terms, table[:, 2:], 1).unbind(-1)
    tau = torch.where(flat, moment / zeroth, tau)
    tau = torch.where(first < along, 1 - tau, tau).clamp(0, 1)
    # Rounding must not make a distance negative.
    lowest = (nearer - to_start.masked_fill(flat, 0.0)).clamp(min=0)
    return torch.where(flat, zeroth, mean).log() - lowest, tau


def _around(coefficients: Tensor, points: Tensor, x: Tensor) -> Tensor:
    """Return ``sum_i c_i (p_i - x)``, shape (N, K, B), for coefficients (N, K, I), points (I, B) and x (N, B)."""
    # Not addcmul: rounded once, it leaves something of c p - c x where p is x.
    return torch.tensordot(coefficients, points, 1) - coefficients.sum(-1, keepdim=True) * x.unsqueeze(1)


def _times_exp(coefficients: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``coefficients * exp(exponents)``, shape (N, K, I), divided by a factor where all terms would underflow.

    For coefficients of shape (N, K, I) or (1, K, I) and exponents (N, I). The factor's logarithm, (N, K), is second.
    """
    if not coefficients.shape[-1]:  # an SVM without support vectors
        products = coefficients.expand(exponents.shape[0], -1, -1)
        return products, products.new_zeros(products.shape[:2])
    # What takes no part in a target must not set its scale.
    exponents = exponents.unsqueeze(1).masked_fill(coefficients == 0, -torch.inf)
    largest = exponents.amax(-1) + coefficients.abs().amax(-1).log()
    log_scale = largest.masked_fill(largest >= _REPRESENTABLE, 0.0).nan_to_num(torch.nan, neginf=0.0)
    return coefficients * torch.exp(exponents - log_scale.unsqueeze(-1)), log_scale
