"""Elementwise functions, y_i = f(x_i): the Jacobian is diag(f'(x)), and a rule is a row of a table, its slope f'."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, constant, register_jacobian, register_slope, unbroadcast
from pytorch_grad_cam_pcasvm.rules.rule import Call, mid, quotient
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

Slope = Callable[..., Tensor]

constant(*aten("sign", "sgn", "round", "floor", "ceil", "trunc", "heaviside", "floor_divide"))


def _slope_at_limit() -> float:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True, device="cpu")
        return float(torch.autograd.grad(x.clamp(min=0.0), x)[0])


_SLOPE_AT_LIMIT = _slope_at_limit()  # asked for once: no number may be looked at while a program is traced


def _clamp(x: Tensor, y: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """1 between the limits; at them 0 or 1, as this version of torch has it."""
    below, above = (torch.gt, torch.lt) if _SLOPE_AT_LIMIT == 0 else (torch.ge, torch.le)
    inside = torch.ones_like(y) if min is None else below(x, min).to(y.dtype)
    return inside if max is None else inside * above(x, max)


def _elu(x: Tensor, y: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """``scale``, or ``scale alpha exp(x)``."""
    below = alpha * input_scale * (input_scale * x.clamp(max=0)).exp()
    return scale * torch.where(x > 0, 1.0, below)


def _gelu(x: Tensor, y: Tensor, *, approximate: str = "none") -> Tensor:
    """``Phi(x) + x phi(x)``, or the derivative of its approximation by tanh."""
    if approximate == "tanh":
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density


def _prelu(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """1, or the weight of the channel."""
    weight = weight if weight.numel() == 1 else weight.reshape(-1, *[1] * (x.dim() - 2))
    return torch.where(x > 0, 1.0, weight.expand_as(x))


def _sinc(x: Tensor, y: Tensor) -> Tensor:
    """``(cos(pi x) - y) / x``; its series next to 0, where these cancel."""
    z = (math.pi * x) ** 2
    series = -(math.pi**2) * x * (1 / 3 - z / 30 + z * z / 840)
    near = x.abs() < 0.01
    return torch.where(near, series, (torch.cos(math.pi * x) - torch.sinc(x)) / torch.where(near, 1.0, x))


def _logit(x: Tensor, y: Tensor, eps: float | None = None) -> Tensor:
    """``1 / (x (1 - x))``; 0 outside of the limits."""
    slope = 1 / (x * (1 - x))
    return slope if eps is None else torch.where((x < eps) | (x > 1 - eps), 0.0, slope)


_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717

# Slopes f'(x), by the operation's name, as functions of x, y = f(x) and the operation's other arguments.
_BY_INPUT: dict[str, Slope] = {
    "abs": lambda x, y: x.sign(),
    "acos": lambda x, y: -(1 - x * x).rsqrt(),
    "acosh": lambda x, y: (x * x - 1).rsqrt(),
    "asin": lambda x, y: (1 - x * x).rsqrt(),
    "asinh": lambda x, y: (1 + x * x).rsqrt(),
    "atan": lambda x, y: 1 / (1 + x * x),
    "atanh": lambda x, y: 1 / (1 - x * x),
    "celu": lambda x, y, alpha=1.0: torch.where(x > 0, 1.0, (x.clamp(max=0) / alpha).exp()),
    "clamp": _clamp,
    "clamp_max": lambda x, y, max: _clamp(x, y, None, max),
    "clamp_min": lambda x, y, min: _clamp(x, y, min),
    "cos": lambda x, y: -torch.sin(x),
    "cosh": lambda x, y: torch.sinh(x),
    "elu": _elu,
    "erf": lambda x, y: 2 / math.sqrt(math.pi) * torch.exp(-x * x),
    "erfc": lambda x, y: -(2 / math.sqrt(math.pi) * torch.exp(-x * x)),
    "expm1": lambda x, y: x.exp(),
    "gelu": _gelu,
    "hardshrink": lambda x, y, lambd=0.5: (x.abs() > lambd).to(y.dtype),
    "hardsigmoid": lambda x, y: ((x > -3) & (x < 3)).to(y.dtype) / 6,
    "hardswish": lambda x, y: torch.where(x >= 3, 1.0, torch.where(x <= -3, 0.0, x / 3 + 0.5)),
    "hardtanh": lambda x, y, min_val=-1.0, max_val=1.0: ((x > min_val) & (x < max_val)).to(y.dtype),
    "leaky_relu": lambda x, y, negative_slope=0.01: torch.where(x > 0, torch.ones_like(x), negative_slope),
    "log": lambda x, y: 1 / x,
    "log10": lambda x, y: 1 / (x * math.log(10)),
    "log1p": lambda x, y: 1 / (1 + x),
    "log2": lambda x, y: 1 / (x * math.log(2)),
    "log_sigmoid": lambda x, y: torch.sigmoid(-x),
    "logit": _logit,
    "mish": lambda x, y: (t := torch.tanh(torch.nn.functional.softplus(x))) + x * (1 - t * t) * torch.sigmoid(x),
    "nan_to_num": lambda x, y, *limits, **options: x.isfinite().to(y.dtype),
    "prelu": _prelu,
    # The mean of the slopes that are drawn in training, which is refused before.
    "rrelu": lambda x, y, lower=1 / 8, upper=1 / 3, *training: torch.where(
        x > 0, 1.0, torch.full_like(y, (lower + upper) / 2)
    ),
    "selu": lambda x, y: _elu(x, y, _SELU_ALPHA, _SELU_SCALE),
    "silu": lambda x, y: (s := torch.sigmoid(x)) * (1 + x * (1 - s)),
    "sin": lambda x, y: torch.cos(x),
    "sinc": _sinc,
    "sinh": lambda x, y: torch.cosh(x),
    "softplus": lambda x, y, beta=1.0, threshold=20.0: torch.where(x * beta > threshold, 1.0, torch.sigmoid(beta * x)),
    "softshrink": lambda x, y, lambd=0.5: (x.abs() > lambd).to(y.dtype),
    "square": lambda x, y: 2 * x,
    "threshold": lambda x, y, threshold, value: (x > threshold).to(y.dtype),
}
_BY_OUTPUT: dict[str, Slope] = {
    "exp": lambda x, y: y,
    "exp2": lambda x, y: y * math.log(2),
    "reciprocal": lambda x, y: -y * y,
    "relu": lambda x, y: (y > 0).to(y.dtype),
    "rsqrt": lambda x, y: -0.5 * y**3,
    "sigmoid": lambda x, y: y * (1 - y),
    "sqrt": lambda x, y: 0.5 / y,
    "tan": lambda x, y: 1 + y * y,
    "tanh": lambda x, y: 1 - y * y,
}
_BY_NEITHER: dict[str, Slope] = {
    "frac": lambda x, y: torch.ones_like(y),
    "neg": lambda x, y: -torch.ones_like(y),
}


def _square_secant(input: Tensor, *, y: Tensor, grad: Tensor, base: Call) -> Tensor:
    """``x^2 - x0^2 = (x + x0) (x - x0)``."""
    return grad * (input + base.args[0])


_SECANTS = {"square": _square_secant}

for _needs, _slopes in {"inputs": _BY_INPUT, "y": _BY_OUTPUT, "nothing": _BY_NEITHER}.items():
    for _name, _slope in _slopes.items():
        register_slope(*aten(_name), slope=_slope, secant=_SECANTS.get(_name, "elementwise"), needs=_needs)


def look_up_slope(name: str) -> Slope:
    """Return the slope f'(x) of an operation whose slope varies, as a function of x, y = f(x) and other arguments."""
    return (_BY_INPUT | _BY_OUTPUT)[name]


@register_jacobian(*aten("pow"))
def power(input: Any, exponent: Any, *, y: Tensor, grad: Tensor, base: Call | None = None) -> Any:
    """``n x^(n-1)`` and ``x^n log(x)``; 0 where the exponent is."""
    input0, exponent0 = (input, exponent) if base is None else base.args[:2]
    if input is not input0 and exponent is not exponent0:
        raise NoClosedFormError(
            "a power with both the base and the exponent computed has no secant",
            "write it as torch.exp(exponent * torch.log(base))",
            "use a gradient method such as ClosedFormGradCAM",
        )

    def pull_base() -> Tensor:
        slope = exponent * input ** (exponent - 1)
        slope = torch.where(torch.as_tensor(exponent == 0, device=grad.device), 0.0, slope)
        slope = slope if base is None else quotient(input, y, input0, base.y, slope, base.eps)
        return unbroadcast(grad * slope, input)

    def pull_exponent() -> Tensor:
        slope = y * torch.as_tensor(input).to(y).log()
        slope = slope if base is None else quotient(exponent, y, exponent0, base.y, slope, base.eps)
        return unbroadcast(grad * slope, exponent)

    return pull_base, pull_exponent


@register_jacobian(*aten("glu"), needs="inputs")
def glu(input: Tensor, dim: int = -1, *, y: Tensor, grad: Tensor, base: Call | None = None) -> Tensor:
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
