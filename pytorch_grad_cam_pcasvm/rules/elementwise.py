"""Elementwise functions, y_i = f(x_i): the Jacobian is diag(f'(x))."""

import math
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import (
    aten,
    constant,
    elementwise,
    register_jacobian,
    unbroadcast,
)
from pytorch_grad_cam_pcasvm.rules.rule import Base, mid
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.numerics import quotient

constant(*aten("sign", "sgn", "round", "floor", "ceil", "trunc", "heaviside", "floor_divide"))


@elementwise(*aten("relu"), needs="y")
def relu(input: Tensor, *, y: Tensor) -> Tensor:
    """``y > 0``."""
    return (y > 0).to(y.dtype)


@elementwise(*aten("hardtanh"))
def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, *, y: Tensor) -> Tensor:
    """1 between the limits."""
    return ((input > min_val) & (input < max_val)).to(y.dtype)


def _slope_at_limit() -> float:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True, device="cpu")
        return float(torch.autograd.grad(x.clamp(min=0.0), x)[0])


_SLOPE_AT_LIMIT = _slope_at_limit()  # asked for once: no number may be looked at while a program is traced


@elementwise(*aten("clamp"))
def clamp(input: Tensor, min: Any = None, max: Any = None, *, y: Tensor) -> Tensor:
    """1 between the limits; at them 0 or 1, as this version of torch has it."""
    below, above = (torch.gt, torch.lt) if _SLOPE_AT_LIMIT == 0 else (torch.ge, torch.le)
    inside = torch.ones_like(y) if min is None else below(input, min).to(y.dtype)
    return inside if max is None else inside * above(input, max)


@elementwise(*aten("leaky_relu"))
def leaky_relu(input: Tensor, negative_slope: float = 0.01, *, y: Tensor) -> Tensor:
    """1 or the negative slope."""
    return torch.where(input > 0, torch.ones_like(input), negative_slope)


@elementwise(*aten("elu"))
def elu(input: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0, *, y: Tensor) -> Tensor:
    """``scale``, or ``scale alpha exp(x)``."""
    below = alpha * input_scale * (input_scale * input.clamp(max=0)).exp()
    return scale * torch.where(input > 0, 1.0, below)


@elementwise(*aten("sigmoid"), needs="y")
def sigmoid(input: Tensor, *, y: Tensor) -> Tensor:
    """``y (1 - y)``."""
    return y * (1 - y)


@elementwise(*aten("tanh"), needs="y")
def tanh(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 - y^2``."""
    return 1 - y * y


@elementwise(*aten("silu"))
def silu(input: Tensor, *, y: Tensor) -> Tensor:
    """``s (1 + x (1 - s))`` with s = sigmoid(x)."""
    s = torch.sigmoid(input)
    return s * (1 + input * (1 - s))


@elementwise(*aten("gelu"))
def gelu(input: Tensor, *, approximate: str = "none", y: Tensor) -> Tensor:
    """``Phi(x) + x phi(x)``, or the derivative of its approximation by tanh."""
    if approximate == "tanh":
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (input + 0.044715 * input**3))
        return 0.5 * (1 + t) + 0.5 * input * (1 - t * t) * c * (1 + 3 * 0.044715 * input * input)
    density = torch.exp(-0.5 * input * input) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(input / math.sqrt(2))) + input * density


@elementwise(*aten("hardsigmoid"))
def hardsigmoid(input: Tensor, *, y: Tensor) -> Tensor:
    """1/6 between -3 and 3."""
    return ((input > -3) & (input < 3)).to(y.dtype) / 6


@elementwise(*aten("hardswish"))
def hardswish(input: Tensor, *, y: Tensor) -> Tensor:
    """``x / 3 + 1 / 2`` between -3 and 3."""
    return torch.where(input >= 3, 1.0, torch.where(input <= -3, 0.0, input / 3 + 0.5))


@elementwise(*aten("neg"), needs="nothing")
def neg(input: Tensor, *, y: Tensor) -> Tensor:
    """-1."""
    return -torch.ones_like(y)


@elementwise(*aten("exp"), needs="y")
def exp(input: Tensor, *, y: Tensor) -> Tensor:
    """``y``."""
    return y


@elementwise(*aten("log"))
def log(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / x``."""
    return 1 / input


@elementwise(*aten("sqrt"), needs="y")
def sqrt(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / (2 y)``."""
    return 0.5 / y


@elementwise(*aten("rsqrt"), needs="y")
def rsqrt(input: Tensor, *, y: Tensor) -> Tensor:
    """``-y^3 / 2``."""
    return -0.5 * y**3


def _square_secant(input: Tensor, *, y: Tensor, grad: Tensor, base: Base) -> Tensor:
    """``x^2 - x0^2 = (x + x0) (x - x0)``."""
    return grad * (input + base.args[0])


@elementwise(*aten("square"), secant=_square_secant)
def square(input: Tensor, *, y: Tensor) -> Tensor:
    """``2 x``."""
    return 2 * input


@elementwise(*aten("erf"))
def erf(input: Tensor, *, y: Tensor) -> Tensor:
    """``2 / sqrt(pi) exp(-x^2)``."""
    return 2 / math.sqrt(math.pi) * torch.exp(-input * input)


@register_jacobian(*aten("pow"))
def power(input: Any, exponent: Any, *, y: Tensor, grad: Tensor, base: Base | None = None) -> Any:
    """``n x^(n-1)`` and ``x^n log(x)``; 0 where the exponent is."""
    input0, exponent0 = (input, exponent) if base is None else base.args[:2]
    if input is not input0 and exponent is not exponent0:
        raise NoClosedFormError(
            "a power with both the base and the exponent computed has no secant",
            "write it as torch.exp(exponent * torch.log(base))",
            "use a gradient method such as ClosedFormGradCAM",
        )

    def of_base() -> Tensor:
        slope = exponent * input ** (exponent - 1)
        slope = torch.where(torch.as_tensor(exponent == 0, device=grad.device), 0.0, slope)
        slope = slope if base is None else quotient(input, y, input0, base.y, slope, base.eps)
        return unbroadcast(grad * slope, input)

    def of_exponent() -> Tensor:
        slope = y * torch.as_tensor(input).to(y).log()
        slope = slope if base is None else quotient(exponent, y, exponent0, base.y, slope, base.eps)
        return unbroadcast(grad * slope, exponent)

    return of_base, of_exponent


@elementwise(*aten("abs"))
def absolute(input: Tensor, *, y: Tensor) -> Tensor:
    """The sign."""
    return input.sign()


@elementwise(*aten("softplus"))
def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0, *, y: Tensor) -> Tensor:
    """``sigmoid(beta x)``, and 1 beyond the threshold."""
    return torch.where(input * beta > threshold, 1.0, torch.sigmoid(beta * input))


@elementwise(*aten("clamp_min"))
def clamp_min(input: Tensor, min: Any, *, y: Tensor) -> Tensor:
    """1 above the limit."""
    return clamp(input, min, y=y)


@elementwise(*aten("clamp_max"))
def clamp_max(input: Tensor, max: Any, *, y: Tensor) -> Tensor:
    """1 below the limit."""
    return clamp(input, None, max, y=y)


@elementwise(*aten("threshold"))
def threshold(input: Tensor, threshold: float, value: float, *, y: Tensor) -> Tensor:
    """1 above the threshold."""
    return (input > threshold).to(y.dtype)


@elementwise(*aten("prelu"))
def prelu(input: Tensor, weight: Tensor, *, y: Tensor) -> Tensor:
    """1, or the weight of the channel."""
    weight = weight if weight.numel() == 1 else weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, 1.0, weight.expand_as(input))


@elementwise(*aten("rrelu"))
def rrelu(
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
    *,
    y: Tensor,
) -> Tensor:
    """1, or the mean of the slopes that are drawn in training, which is refused before."""
    return torch.where(input > 0, 1.0, torch.full_like(y, (lower + upper) / 2))


@elementwise(*aten("selu"))
def selu(input: Tensor, *, y: Tensor) -> Tensor:
    """``scale``, or ``scale alpha exp(x)``."""
    return elu(input, _SELU_ALPHA, _SELU_SCALE, y=y)


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


@elementwise(*aten("celu"))
def celu(input: Tensor, alpha: float = 1.0, *, y: Tensor) -> Tensor:
    """1, or ``exp(x / alpha)``."""
    return torch.where(input > 0, 1.0, (input.clamp(max=0) / alpha).exp())


@elementwise(*aten("mish"))
def mish(input: Tensor, *, y: Tensor) -> Tensor:
    """``t + x (1 - t^2) sigmoid(x)`` with t = tanh(softplus(x))."""
    t = torch.tanh(torch.nn.functional.softplus(input))
    return t + input * (1 - t * t) * torch.sigmoid(input)


@elementwise(*aten("log_sigmoid"))
def logsigmoid(input: Tensor, *, y: Tensor) -> Tensor:
    """``sigmoid(-x)``."""
    return torch.sigmoid(-input)


@elementwise(*aten("hardshrink"))
def hardshrink(input: Tensor, lambd: float = 0.5, *, y: Tensor) -> Tensor:
    """0 between the limits."""
    return (input.abs() > lambd).to(y.dtype)


@elementwise(*aten("softshrink"))
def softshrink(input: Tensor, lambd: float = 0.5, *, y: Tensor) -> Tensor:
    """0 between the limits."""
    return hardshrink(input, lambd, y=y)


@elementwise(*aten("reciprocal"), needs="y")
def reciprocal(input: Tensor, *, y: Tensor) -> Tensor:
    """``-y^2``."""
    return -y * y


@elementwise(*aten("log1p"))
def log1p(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / (1 + x)``."""
    return 1 / (1 + input)


@elementwise(*aten("log2"))
def log2(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / (x log 2)``."""
    return 1 / (input * math.log(2))


@elementwise(*aten("log10"))
def log10(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / (x log 10)``."""
    return 1 / (input * math.log(10))


@elementwise(*aten("expm1"), needs="y")
def expm1(input: Tensor, *, y: Tensor) -> Tensor:
    """``y + 1``."""
    return y + 1


@elementwise(*aten("exp2"), needs="y")
def exp2(input: Tensor, *, y: Tensor) -> Tensor:
    """``y log 2``."""
    return y * math.log(2)


@elementwise(*aten("sin"))
def sin(input: Tensor, *, y: Tensor) -> Tensor:
    """``cos(x)``."""
    return torch.cos(input)


@elementwise(*aten("cos"))
def cos(input: Tensor, *, y: Tensor) -> Tensor:
    """``-sin(x)``."""
    return -torch.sin(input)


@elementwise(*aten("atan"))
def atan(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / (1 + x^2)``."""
    return 1 / (1 + input * input)


@elementwise(*aten("tan"), needs="y")
def tan(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 + y^2``."""
    return 1 + y * y


@elementwise(*aten("sinh"))
def sinh(input: Tensor, *, y: Tensor) -> Tensor:
    """``cosh(x)``."""
    return torch.cosh(input)


@elementwise(*aten("cosh"))
def cosh(input: Tensor, *, y: Tensor) -> Tensor:
    """``sinh(x)``."""
    return torch.sinh(input)


@elementwise(*aten("asin"))
def asin(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / sqrt(1 - x^2)``."""
    return (1 - input * input).rsqrt()


@elementwise(*aten("acos"))
def acos(input: Tensor, *, y: Tensor) -> Tensor:
    """``-1 / sqrt(1 - x^2)``."""
    return -asin(input, y=y)


@elementwise(*aten("asinh"))
def asinh(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / sqrt(1 + x^2)``."""
    return (1 + input * input).rsqrt()


@elementwise(*aten("acosh"))
def acosh(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / sqrt(x^2 - 1)``."""
    return (input * input - 1).rsqrt()


@elementwise(*aten("atanh"))
def atanh(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / (1 - x^2)``."""
    return 1 / (1 - input * input)


@elementwise(*aten("erfc"))
def erfc(input: Tensor, *, y: Tensor) -> Tensor:
    """``-2 / sqrt(pi) exp(-x^2)``."""
    return -erf(input, y=y)


@elementwise(*aten("sinc"))
def sinc(input: Tensor, *, y: Tensor) -> Tensor:
    """``(cos(pi x) - y) / x``; its series next to 0, where these cancel."""
    z = (math.pi * input) ** 2
    series = -(math.pi**2) * input * (1 / 3 - z / 30 + z * z / 840)
    near = input.abs() < 0.01
    return torch.where(near, series, (torch.cos(math.pi * input) - torch.sinc(input)) / torch.where(near, 1.0, input))


@elementwise(*aten("logit"))
def logit(input: Tensor, eps: float | None = None, *, y: Tensor) -> Tensor:
    """``1 / (x (1 - x))``; 0 outside of the limits."""
    slope = 1 / (input * (1 - input))
    return slope if eps is None else torch.where((input < eps) | (input > 1 - eps), 0.0, slope)


@elementwise(*aten("frac"), needs="nothing")
def frac(input: Tensor, *, y: Tensor) -> Tensor:
    """1."""
    return torch.ones_like(y)


@elementwise(*aten("nan_to_num"))
def nan_to_num(input: Tensor, *limits: Any, y: Tensor, **options: Any) -> Tensor:
    """1 where x is finite."""
    return input.isfinite().to(y.dtype)


@register_jacobian(*aten("glu"), needs="inputs")
def glu(input: Tensor, dim: int = -1, *, y: Tensor, grad: Tensor, base: Base | None = None) -> Tensor:
    """``y = a s`` with s = sigmoid(b), for two halves a and b: ``dy = mean(s) da + mean(a) ds``."""
    a, b = input.chunk(2, dim)
    s = torch.sigmoid(b)
    slope = s * (1 - s)
    if base is not None:
        a0, b0 = base.args[0].chunk(2, dim)
        s0 = torch.sigmoid(b0)
        slope = quotient(b, s, b0, s0, slope, base.eps)
        a, s = mid(a, a0), mid(s, s0)
    return torch.cat([grad * s, grad * a * slope], dim % input.dim() + 1)
