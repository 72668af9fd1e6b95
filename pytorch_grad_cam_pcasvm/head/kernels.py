"""The kernels of support vector machines: their values and, beside them, their gradients.

Every kernel is a function of one number per pair, its argument: a squared distance or an inner product. It has four
methods. With ``x`` of shape (N, B) and ``points`` (the support vectors) of shape (I, B):

- ``argument(x, points)``: shape (N, I), computed once for all that follows;
- ``value(argument)``: ``K(p_i, x)``, shape (N, I);
- ``pullback(argument, x, points, coefficients)``: ``sum_i c_i dK(p_i, x)/dx`` for coefficients of shape (N, K, I) or
  (1, K, I), as a pair: the gradient, shape (N, K, B), and the natural logarithm of a factor that was taken out of it,
  shape (N, K);
- ``effect(x, points)``: ``|dK(p_i, x)/dx|``, the paper's E, shape (N, I).

The logarithm is 0 wherever the gradient fits a 32-bit float with room to spare. Far from every support vector
``exp(-gamma d^2)`` underflows although the direction is well defined: there the size of the terms is factored out.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# exp(-30) = 1e-13: below this a float32 pullback through further layers begins to lose small terms.
_REPRESENTABLE = -30.0


class _OfInnerProduct:
    """A kernel of ``<p_i, x>``, whose derivative is ``_slope``."""

    def argument(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``<p_i, x>``, shape (N, I)."""
        return x @ points.T

    def effect(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``E = |slope| |p_i|``, shape (N, I)."""
        return self._slope(self.argument(x, points)).abs() * points.norm(dim=1)

    def _slope(self, argument: Tensor) -> Tensor:
        return torch.ones_like(argument)


@dataclass(frozen=True)
class Linear(_OfInnerProduct):
    """``K(p_i, x) = <p_i, x>``, gradient ``p_i``."""

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return argument

    def pullback(self, argument: Tensor, x: Tensor, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sum_i c_i p_i``, shape (N, K, B), and zeros, shape (N, K)."""
        grad = (coefficients @ points).expand(len(x), -1, -1)
        return grad, grad.new_zeros(grad.shape[:2])


@dataclass(frozen=True)
class Polynomial(_OfInnerProduct):
    """``K(p_i, x) = z^degree`` with ``z = gamma <p_i, x> + coef0``, gradient ``degree gamma z^(degree-1) p_i``."""

    gamma: float
    degree: float
    coef0: float

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return (self.gamma * argument + self.coef0).pow(self.degree)

    def pullback(self, argument: Tensor, x: Tensor, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sum_i c_i degree gamma z^(degree-1) p_i``, shape (N, K, B), and zeros, shape (N, K)."""
        return Linear().pullback(argument, x, points, coefficients * self._slope(argument).unsqueeze(1))

    def _slope(self, argument: Tensor) -> Tensor:
        z = self.gamma * argument + self.coef0
        return self.degree * self.gamma * z.pow(self.degree - 1) if self.degree else torch.zeros_like(z)


@dataclass(frozen=True)
class Sigmoid(_OfInnerProduct):
    """``K(p_i, x) = tanh(z)`` with ``z = gamma <p_i, x> + coef0``, gradient ``gamma sech(z)^2 p_i``."""

    gamma: float
    coef0: float

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return torch.tanh(self.gamma * argument + self.coef0)

    def pullback(self, argument: Tensor, x: Tensor, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``sum_i c_i gamma sech(z)^2 p_i``, shape (N, K, B), and the logarithm of its factor, shape (N, K)."""
        scaled, log_scale = _times_exp(self.gamma * coefficients, self._log_slope(argument))
        return scaled @ points, log_scale

    def _slope(self, argument: Tensor) -> Tensor:
        return self.gamma * self._log_slope(argument).exp()

    def _log_slope(self, argument: Tensor) -> Tensor:
        """Return log sech(z)^2, written so that nothing cancels where tanh saturates, as in 1 - tanh(z)^2."""
        z = (self.gamma * argument + self.coef0).abs()
        return math.log(4) - 2 * z - 2 * torch.log1p(torch.exp(-2 * z))


@dataclass(frozen=True)
class RBF:
    """``K(p_i, x) = exp(-gamma d_i^2)`` with ``d_i = |p_i - x|``, gradient ``2 gamma K(p_i, x) (p_i - x)``."""

    gamma: float

    def argument(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``d_i^2``, shape (N, I)."""
        return squared_distances(x, points)

    def value(self, argument: Tensor) -> Tensor:
        """Return ``K(p_i, x)``, shape (N, I)."""
        return torch.exp(-self.gamma * argument)

    def pullback(self, argument: Tensor, x: Tensor, points: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``2 gamma sum_i c_i K(p_i, x) (p_i - x)``, (N, K, B), and the logarithm of its factor, (N, K)."""
        scaled, log_scale = _times_exp(2 * self.gamma * coefficients, -self.gamma * argument)
        return scaled @ points - scaled.sum(-1, keepdim=True) * x.unsqueeze(1), log_scale

    def effect(self, x: Tensor, points: Tensor) -> Tensor:
        """Return ``E = 2 gamma exp(-gamma d_i^2) d_i``, shape (N, I).

        It is 0 at distance 0 and at infinity, and largest at ``d = 1 / sqrt(2 gamma)``: ``sqrt(2 gamma) exp(-1/2)``.
        """
        squared = self.argument(x, points)
        return 2 * self.gamma * torch.exp(-self.gamma * squared) * squared.sqrt()


Kernel = Linear | Polynomial | Sigmoid | RBF


def squared_distances(x: Tensor, points: Tensor) -> Tensor:
    """Return ``|x - p_i|^2`` of x (N, B) to points (I, B), shape (N, I), from differences: nothing cancels."""
    if torch.is_grad_enabled():
        return _SquaredDistances.apply(x, points)
    return _SquaredDistances.forward(x, points)


class _SquaredDistances(torch.autograd.Function):
    """``torch.cdist`` squared, with a backward pass that can itself be differentiated (cdist's cannot)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, points: Tensor) -> Tensor:
        return torch.cdist(x, points, compute_mode="donot_use_mm_for_euclid_dist").square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, points = ctx.saved_tensors
        return 2 * (grad.sum(-1, keepdim=True) * x - grad @ points), None


def _times_exp(coefficients: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``coefficients * exp(exponents)``, shape (N, K, I), divided by a factor where all terms would underflow.

    For coefficients of shape (N, K, I) or (1, K, I) and exponents (N, I). The factor's logarithm, (N, K), is second.
    """
    if not coefficients.shape[-1]:  # a machine without support vectors
        products = coefficients.expand(len(exponents), -1, -1)
        return products, products.new_zeros(products.shape[:2])
    # What takes no part in a target must not set its scale.
    exponents = torch.where(coefficients == 0, -torch.inf, exponents.unsqueeze(1))
    largest = exponents.amax(-1) + coefficients.abs().amax(-1).log()
    log_scale = torch.where((largest < _REPRESENTABLE) & (largest > -torch.inf), largest, 0.0)
    return coefficients * torch.exp(exponents - log_scale.unsqueeze(-1)), log_scale
