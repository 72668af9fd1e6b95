"""Arithmetic of two tensors, broadcast to one another: each gets its own gradient, if it is on the path."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.rules.rule import Call, by_number, mid
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
    if not isinstance(other, Tensor) or other is other0:
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
