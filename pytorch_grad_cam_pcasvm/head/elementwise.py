"""Stages that change every value on its own: logarithms, powers, activations, and the curves of calibrators."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stage import Scaled, Stage
from pytorch_grad_cam_pcasvm.rules.elementwise import look_up_slope
from pytorch_grad_cam_pcasvm.rules.rule import quotient
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference

# Operations by numpy's names, or those of scikit-learn's activations.
_OPERATIONS = {"absolute": "abs", "arcsinh": "asinh", "arctan": "atan", "logistic": "sigmoid"} | {
    name: name for name in ("exp", "expm1", "log", "log1p", "relu", "sqrt", "square", "tanh")
}
# The function, and its slope at x, whose value is y.
FUNCTIONS = {name: (getattr(torch, call), look_up_slope(call)) for name, call in _OPERATIONS.items()}


class OneToOne(Stage):
    """Every output is a function of the input at its place. Subclasses define ``function`` and ``slope``.

    Example:
        >>> class Cube(OneToOne):
        ...     function = lambda self, x: x**3
        ...     slope = lambda self, x: 3 * x**2
    """

    def function(self, x: Tensor) -> Tensor:
        """Return f(x), of the shape of x, (N, D)."""
        raise NotImplementedError(f"{type(self).__name__} defines no function(x)")

    def slope(self, x: Tensor) -> Tensor:
        """Return f'(x), of the shape of x, (N, D)."""
        raise NotImplementedError(f"{type(self).__name__} defines no slope(x)")

    def evaluate(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return y = f(x), shape (N, D); and x and y."""
        y = self.function(x)
        return y, (x, y)

    def pullback(self, saved: tuple[Tensor, Tensor], grad: Tensor) -> Scaled:
        """Return ``grad f'(x)``."""
        return grad * self.slope(saved[0]).unsqueeze(1), None

    def secant(self, saved: tuple[Tensor, Tensor], saved0: tuple[Tensor, Tensor], grad: Tensor) -> Scaled:
        """Return ``grad (y - y0) / (x - x0)``."""
        x, y = saved
        # Where only rounding is left of the quotient, the slope half-way is nearest to it.
        return grad * quotient(x, y, *saved0, self.slope((x + saved0[0]) / 2)).unsqueeze(1), None


class Elementwise(OneToOne):
    """``y = f(x)``, f one of the functions that have a name in :data:`FUNCTIONS`.

    Example:
        >>> stage_for(FunctionTransformer(np.log1p))
        Elementwise()
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self._function, self._slope = FUNCTIONS[name]

    def function(self, x: Tensor) -> Tensor:
        """Return f(x), of the shape of x, (N, D)."""
        return self._function(x)

    def slope(self, x: Tensor) -> Tensor:
        """Return f'(x), of the shape of x, (N, D)."""
        return self._slope(x, self._function(x))


class Power(OneToOne):
    """``y = ((x + 1)^e - 1) / e``, as PowerTransformer: of x < 0, ``-((1 - x)^(2 - e) - 1) / (2 - e)``.

    Args:
        exponents: e of every feature, shape (D,); where one is 0, y is the logarithm, which is the limit.
        of_positive: ``(x^e - 1) / e`` instead, of positive numbers (Box-Cox).

    Example:
        >>> exponents = stage_for(PowerTransformer(standardize=False).fit(features)).exponents
    """

    def __init__(self, exponents: Tensor, of_positive: bool) -> None:
        super().__init__()
        self.n_inputs = self.n_outputs = len(exponents)
        self.of_positive = of_positive
        self.keep(exponents=exponents)

    def function(self, x: Tensor) -> Tensor:
        """Return y, shape (N, D)."""
        logarithm, exponent = self._logarithm(x)
        y = torch.expm1(exponent * logarithm) / torch.where(exponent == 0, 1.0, exponent)
        y = torch.where(exponent == 0, logarithm, y)
        return y if self.of_positive else torch.where(x < 0, -y, y)

    def slope(self, x: Tensor) -> Tensor:
        """Return dy/dx, shape (N, D)."""
        logarithm, exponent = self._logarithm(x)
        return torch.exp((exponent - 1) * logarithm)

    def _logarithm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.of_positive:
            return x.log(), self.exponents
        # Not x.abs(), whose derivative autograd takes for 0 at 0.
        return torch.where(x < 0, -x, x).log1p(), torch.where(x < 0, 2 - self.exponents, self.exponents)


# A curve on scores of one class (...), or a calibration of all classes, (..., C) or (..., 1) to (..., C).
Calibration = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Platt:
    """One class: ``1 / (1 + exp(a s + b))``."""

    a: float
    b: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, of the shape of the scores."""
        return torch.sigmoid(-(self.a * scores + self.b))


@dataclass(frozen=True)
class Isotonic:
    """One class: linear between the points (x, y), constant outside them."""

    x: list[float]
    y: list[float]

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, of the shape of the scores."""
        at, height = (_curve(tuple(values), scores.dtype, scores.device) for values in (self.x, self.y))
        if len(at) == 1:
            return height.expand_as(scores)
        inside = scores.clamp(at[0], at[-1]).contiguous()
        right = torch.searchsorted(at, inside.detach()).clamp(1, len(at) - 1)
        left = right - 1
        slope = (height[right] - height[left]) / (at[right] - at[left])
        return height[left] + (inside - at[left]) * slope


@lru_cache(maxsize=256)
def _curve(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, which is sent to its device once: to send it again is to wait for the device."""
    with without_inference():
        return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class PerClass:
    """All classes: one curve for each, then divided by their sum; two classes have one curve."""

    curves: list[Platt | Isotonic]

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, shape (..., C)."""
        # Of the pairwise scores of a one-vs-one classifier scikit-learn takes the first C.
        columns = scores.unbind(-1)[: len(self.curves)]
        raw = torch.stack([curve(score) for curve, score in zip(self.curves, columns, strict=True)], -1)
        if len(self.curves) == 1:
            return torch.cat([1 - raw, raw], -1)
        total = raw.sum(-1, keepdim=True)
        # Where every curve gives 0, scikit-learn takes the uniform distribution.
        return torch.where(total > 0, raw / torch.where(total > 0, total, 1.0), 1 / len(self.curves))


@dataclass(frozen=True)
class Temperature:
    """All classes: ``softmax(beta s)``; two classes have the scores -s and s."""

    beta: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, shape (..., C)."""
        scores = torch.cat([-scores, scores], -1) if scores.shape[-1] == 1 else scores
        return torch.softmax(self.beta * scores, -1)
