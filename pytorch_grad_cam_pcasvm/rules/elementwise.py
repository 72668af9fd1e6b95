"""Elementwise functions, y_i = f(x_i): the Jacobian is diag(f'(x))."""

import math
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import constant, elementwise, functions, register_jacobian

constant(*functions("sign", "round", "floor", "ceil", "trunc", "heaviside"))


@elementwise(*functions("relu"))
def relu(input: Tensor, inplace: bool = False, *, y: Tensor) -> Tensor:
    """``y > 0``."""
    return (y > 0).to(y.dtype)


@elementwise(*functions("hardtanh"))
def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False, *, y: Tensor) -> Tensor:
    """1 between the limits."""
    return ((input > min_val) & (input < max_val)).to(y.dtype)


@elementwise(*functions("relu6"))
def relu6(input: Tensor, inplace: bool = False, *, y: Tensor) -> Tensor:
    """1 between 0 and 6."""
    return hardtanh(input, 0.0, 6.0, y=y)


@elementwise(*functions("clamp", "clip"))
def clamp(input: Tensor, min: Any = None, max: Any = None, *, y: Tensor) -> Tensor:
    """1 between the limits, and at them, as autograd has it."""
    inside = torch.ones_like(input, dtype=torch.bool)
    inside = inside if min is None else inside & (input >= min)
    inside = inside if max is None else inside & (input <= max)
    return inside.to(y.dtype)


@elementwise(*functions("leaky_relu"))
def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False, *, y: Tensor) -> Tensor:
    """1 or the negative slope."""
    return torch.where(input > 0, torch.ones_like(input), negative_slope)


@elementwise(*functions("elu"))
def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False, *, y: Tensor) -> Tensor:
    """1, or ``alpha exp(x)``."""
    return torch.where(input > 0, 1.0, alpha * input.clamp(max=0).exp())


@elementwise(*functions("sigmoid", "expit"))
def sigmoid(input: Tensor, *, y: Tensor) -> Tensor:
    """``y (1 - y)``."""
    return y * (1 - y)


@elementwise(*functions("tanh"))
def tanh(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 - y^2``."""
    return 1 - y * y


@elementwise(*functions("silu"))
def silu(input: Tensor, inplace: bool = False, *, y: Tensor) -> Tensor:
    """``s (1 + x (1 - s))`` with s = sigmoid(x)."""
    s = torch.sigmoid(input)
    return s * (1 + input * (1 - s))


@elementwise(*functions("gelu"))
def gelu(input: Tensor, approximate: str = "none", *, y: Tensor) -> Tensor:
    """``Phi(x) + x phi(x)``, or the derivative of its approximation by tanh."""
    if approximate == "tanh":
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (input + 0.044715 * input**3))
        return 0.5 * (1 + t) + 0.5 * input * (1 - t * t) * c * (1 + 3 * 0.044715 * input * input)
    density = torch.exp(-0.5 * input * input) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(input / math.sqrt(2))) + input * density


@elementwise(*functions("hardsigmoid"))
def hardsigmoid(input: Tensor, inplace: bool = False, *, y: Tensor) -> Tensor:
    """1/6 between -3 and 3."""
    return ((input > -3) & (input < 3)).to(y.dtype) / 6


@elementwise(*functions("hardswish"))
def hardswish(input: Tensor, inplace: bool = False, *, y: Tensor) -> Tensor:
    """``x / 3 + 1 / 2`` between -3 and 3."""
    return torch.where(input >= 3, 1.0, torch.where(input <= -3, 0.0, input / 3 + 0.5))


@elementwise(*functions("neg", "negative"))
def neg(input: Tensor, *, y: Tensor) -> Tensor:
    """-1."""
    return -torch.ones_like(y)


@elementwise(*functions("exp"))
def exp(input: Tensor, *, y: Tensor) -> Tensor:
    """``y``."""
    return y


@elementwise(*functions("log"))
def log(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / x``."""
    return 1 / input


@elementwise(*functions("sqrt"))
def sqrt(input: Tensor, *, y: Tensor) -> Tensor:
    """``1 / (2 y)``."""
    return 0.5 / y


@elementwise(*functions("rsqrt"))
def rsqrt(input: Tensor, *, y: Tensor) -> Tensor:
    """``-y^3 / 2``."""
    return -0.5 * y**3


@elementwise(*functions("square"))
def square(input: Tensor, *, y: Tensor) -> Tensor:
    """``2 x``."""
    return 2 * input


@elementwise(*functions("erf"))
def erf(input: Tensor, *, y: Tensor) -> Tensor:
    """``2 / sqrt(pi) exp(-x^2)``."""
    return 2 / math.sqrt(math.pi) * torch.exp(-input * input)


@register_jacobian(*functions("pow"), torch.Tensor.__pow__, torch.Tensor.__ipow__)
def power(input: Tensor, exponent: Any, *, y: Tensor, grad: Tensor) -> Tensor:
    """``n x^(n-1)`` for a number n."""
    return grad * exponent * input ** (exponent - 1) if exponent else torch.zeros_like(grad)
