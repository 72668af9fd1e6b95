"""Stages that change every value on its own: logarithms and other functions, powers, activations."""

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stage import Scaled, Stage
from pytorch_grad_cam_pcasvm.rules.elementwise import look_up_slope
from pytorch_grad_cam_pcasvm.runtime.numerics import quotient

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
