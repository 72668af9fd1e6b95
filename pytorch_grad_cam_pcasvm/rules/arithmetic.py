"""Arithmetic of two tensors, broadcast to one another: each gets its own gradient, if it is on the path."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, ratio, register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.rules.rule import Call, by_number, mid, quotient
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError


@register_jacobian(*aten("add"), secant="linear", needs="nothing", tokens=by_number)
def add(input: Any, other: Any, *, alpha: float = 1, y: Tensor, grad: Tensor) -> Any:
    """``y = a + alpha b``."""
    return lambda: unbroadcast(grad, input), lambda: unbroadcast(grad if alpha == 1 else alpha * grad, other)


@register_jacobian(*aten("sub"), secant="linear", needs="nothing", tokens=by_number)
def sub(input: Any, other: Any, *, alpha: float = 1, y: Tensor, grad: Tensor) -> Any:
    """``y = a - alpha b``."""
    return add(input, other, alpha=-alpha, y=y, grad=grad)


@register_jacobian(*aten("rsub"), secant="linear", needs="nothing", tokens=by_number)
def rsub(input: Any, other: Any, *, alpha: float = 1, y: Tensor, grad: Tensor) -> Any:
    """``y = b - alpha a``."""
    return lambda: unbroadcast(-alpha * grad, input), lambda: unbroadcast(grad, other)


@register_jacobian(
    *aten("mul"),
    secant="linear",
    needs="others",
    tokens=by_number,
    relevance="divided",
)
def mul(input: Any, other: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = a b``."""
    return lambda: unbroadcast(grad * other, input), lambda: unbroadcast(grad * input, other)


def _div_secant(
    input: Any, other: Any, *, rounding_mode: str | None = None, y: Tensor, grad: Tensor, base: Call
) -> Any:
    """``dy = (da - mean(y) db) / mean(b)``; where b changes its sign ``mean(1 / b) da - mean(a) db / (b b0)``."""
    if rounding_mode is not None:
        raise NoClosedFormError("a division that rounds is a step function", "divide without rounding_mode")
    input0, other0 = base.args[:2]
    if other is other0:
        return lambda: unbroadcast(grad / other, input)
    # Both are exact; the first has no huge terms that cancel where b is next to 0 at one end, as a norm is.
    divisor, same_sign = mid(other, other0), other * other0 > 0
    of_input = torch.where(same_sign, 1 / divisor, mid(1 / other, 1 / other0))
    of_other = torch.where(same_sign, mid(y, base.y) / divisor, mid(input, input0) / (other * other0))
    return lambda: unbroadcast(grad * of_input, input), lambda: unbroadcast(-grad * of_other, other)


@register_jacobian(*aten("div"), secant=_div_secant, tokens=by_number, affine=(0,))
def div(input: Any, other: Any, *, rounding_mode: str | None = None, y: Tensor, grad: Tensor) -> Any:
    """``y = a / b``."""
    if rounding_mode is not None:
        return torch.zeros_like(grad)
    return lambda: unbroadcast(grad / other, input), lambda: unbroadcast(-grad * y / other, other)


@register_jacobian(*aten("where"), secant="linear", needs="others", tokens=by_number)
def where(condition: Tensor, input: Any, other: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = a`` where the condition holds, otherwise b."""
    return (
        None,
        lambda: unbroadcast(torch.where(condition, grad, 0.0), input),
        lambda: unbroadcast(torch.where(condition, 0.0, grad), other),
    )


@register_jacobian(*aten("masked_fill"), secant="linear", needs="others", tokens=by_number)
def masked_fill(input: Tensor, mask: Tensor, value: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = x``, but where the mask holds."""
    return (
        lambda: unbroadcast(grad.masked_fill(mask, 0.0), input),
        None,
        lambda: unbroadcast(torch.where(mask, grad, 0.0), value),
    )


@register_jacobian(*aten("addcmul"), secant="linear", needs="others", tokens=by_number)
def addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1, y: Tensor, grad: Tensor) -> Any:
    """``y = c + value a b``."""
    return lambda: unbroadcast(grad, input), *mul(tensor1, tensor2, y=y, grad=value * grad)


@register_jacobian(*aten("addcdiv"), tokens=by_number)
def addcdiv(
    input: Tensor,
    tensor1: Tensor,
    tensor2: Tensor,
    *,
    value: float = 1,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
) -> Any:
    """``y = c + value a / b``."""
    share = tensor1 / tensor2
    if base is None:
        parts = div(tensor1, tensor2, y=share, grad=value * grad)
    else:
        inner = Call(base.args[1:], {}, base.args[1] / base.args[2], base.eps)
        parts = _div_secant(tensor1, tensor2, y=share, grad=value * grad, base=inner)
    return lambda: unbroadcast(grad, input), *(parts if isinstance(parts, tuple) else (parts,))


@register_jacobian(*aten("lerp"), secant="linear", needs="others", tokens=by_number)
def lerp(input: Tensor, end: Tensor, weight: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = a + w (b - a)``."""
    return (
        lambda: unbroadcast(grad * (1 - weight), input),
        lambda: unbroadcast(grad * weight, end),
        lambda: unbroadcast(grad * (end - input), weight),
    )


Slopes = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _pair(name: str, slopes: Slopes) -> None:
    """Register the derivatives of a function with respect to its two numbers, given these and ``y``."""
    function = getattr(torch, name)

    def pull_pair(input: Any, other: Any, *, y: Tensor, grad: Tensor, base: Call | None = None) -> Any:
        """The two derivatives; from a start, the change by each number alone, the mean of both orders."""
        a, b = (torch.as_tensor(x, dtype=y.dtype, device=y.device) for x in (input, other))
        by_a, by_b = slopes(a, b, y) if base is None else _secants(function, slopes, (a, b, y), base)
        return lambda: unbroadcast(grad * by_a, input), lambda: unbroadcast(grad * by_b, other)

    register_jacobian(*aten(name), tokens=by_number)(pull_pair)


def _secants(function: Any, slopes: Slopes, end: tuple[Tensor, Tensor, Tensor], base: Call) -> tuple[Tensor, Tensor]:
    """Return secants s, t with ``s (a - a0) + t (b - b0) = y - y0``.

    f(a, b) - f(a0, b0) is what a changes at b, and then b at a0; or what b changes at a, and then a at b0. Each order
    counts half; one that passes a point where f is infinite, as x log(y) at y = 0, does not count.
    """
    a, b, y = end
    a0, b0 = (torch.as_tensor(x, dtype=y.dtype, device=y.device) for x in base.args[:2])
    corners = function(a0, b), function(a, b0)
    finite = [corner.isfinite() for corner in corners]
    first = torch.where(finite[0], torch.where(finite[1], 0.5, 1.0), torch.where(finite[1], 0.0, torch.nan)).to(y.dtype)
    passed, left = (torch.where(ok, corner, y) for ok, corner in zip(finite, corners, strict=True))
    (a_last, b_last), (_, b_first), (a_first, _) = slopes(a, b, y), slopes(a0, b, passed), slopes(a, b0, left)

    def mean(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(first == 0, 0.0, first * one) + torch.where(first == 1, 0.0, (1 - first) * other)

    return (
        mean(quotient(a, y, a0, passed, a_last, base.eps), quotient(a, left, a0, base.y, a_first, base.eps)),
        mean(quotient(b, passed, b0, base.y, b_first, base.eps), quotient(b, y, b0, left, b_last, base.eps)),
    )


def _wholes(rounding: str) -> Slopes:
    return lambda a, b, y: (torch.ones_like(y), -torch.div(a, b, rounding_mode=rounding))


_pair("logaddexp", lambda a, b, y: (torch.exp(a - y), torch.exp(b - y)))
_pair("logaddexp2", lambda a, b, y: (torch.exp2(a - y), torch.exp2(b - y)))
_pair("xlogy", lambda a, b, y: (torch.where((a == 0) & (b <= 0), 0.0, b.log()), torch.where(a == 0, 0.0, a / b)))
_pair("hypot", lambda a, b, y: (ratio(a, y), ratio(b, y)))
_pair("atan2", lambda a, b, y: (ratio(b, a * a + b * b), -ratio(a, a * a + b * b)))
_pair("ldexp", lambda a, b, y: (torch.exp2(b), y * math.log(2)))
_pair("remainder", _wholes("floor"))
_pair("fmod", _wholes("trunc"))
