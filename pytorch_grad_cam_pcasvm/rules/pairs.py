"""Pairs: functions y = f(a, b) of two numbers, broadcast to one another."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, ratio, register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.rules.rule import Call, by_number
from pytorch_grad_cam_pcasvm.runtime.numerics import quotient

Slopes = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _pair(name: str, slopes: Slopes) -> None:
    """Register the derivatives of a function with respect to its two numbers, given these and ``y``."""
    function = getattr(torch, name)

    def rule(input: Any, other: Any, *, y: Tensor, grad: Tensor, base: Call | None = None) -> Any:
        """The two derivatives; from a start, the change by each number alone, the mean of both orders."""
        a, b = (torch.as_tensor(x, dtype=y.dtype, device=y.device) for x in (input, other))
        by_a, by_b = slopes(a, b, y) if base is None else _secants(function, slopes, (a, b, y), base)
        return lambda: unbroadcast(grad * by_a, input), lambda: unbroadcast(grad * by_b, other)

    register_jacobian(*aten(name), tokens=by_number)(rule)


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
