"""Arithmetic of two tensors, broadcast to one another: each gets its own gradient, if it is on the path."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import functions, register_jacobian, unbroadcast


@register_jacobian(*functions("add"), torch.Tensor.__radd__)
def add(input: Any, other: Any, *, alpha: float = 1, y: Tensor, grad: Tensor) -> Any:
    """``y = a + alpha b``."""
    return lambda: unbroadcast(grad, input), lambda: unbroadcast(grad if alpha == 1 else alpha * grad, other)


@register_jacobian(*functions("sub", "subtract"))
def sub(input: Any, other: Any, *, alpha: float = 1, y: Tensor, grad: Tensor) -> Any:
    """``y = a - alpha b``."""
    return add(input, other, alpha=-alpha, y=y, grad=grad)


@register_jacobian(torch.Tensor.__rsub__, torch.rsub)
def rsub(input: Any, other: Any, *, alpha: float = 1, y: Tensor, grad: Tensor) -> Any:
    """``y = b - alpha a``."""
    return lambda: unbroadcast(-alpha * grad, input), lambda: unbroadcast(grad, other)


@register_jacobian(*functions("mul", "multiply"), torch.Tensor.__rmul__)
def mul(input: Any, other: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = a b``."""
    return lambda: unbroadcast(grad * other, input), lambda: unbroadcast(grad * input, other)


@register_jacobian(*functions("div", "divide", "true_divide"))
def div(input: Any, other: Any, *, rounding_mode: str | None = None, y: Tensor, grad: Tensor) -> Any:
    """``y = a / b``."""
    if rounding_mode is not None:
        return torch.zeros_like(grad)
    return lambda: unbroadcast(grad / other, input), lambda: unbroadcast(-grad * y / other, other)


@register_jacobian(torch.Tensor.__rdiv__)
def rdiv(input: Any, other: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = b / a``."""
    return lambda: unbroadcast(-grad * y / input, input), lambda: unbroadcast(grad / input, other)


@register_jacobian(torch.where)
def where(condition: Tensor, input: Any, other: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = a`` where the condition holds, otherwise b."""
    return (
        None,
        lambda: unbroadcast(torch.where(condition, grad, 0.0), input),
        lambda: unbroadcast(torch.where(condition, 0.0, grad), other),
    )


@register_jacobian(torch.Tensor.where)
def where_method(input: Tensor, condition: Tensor, other: Any, *, y: Tensor, grad: Tensor) -> Any:
    """The same, with the arguments of the method."""
    _, of_input, of_other = where(condition, input, other, y=y, grad=grad)
    return of_input, None, of_other


@register_jacobian(*functions("masked_fill"))
def masked_fill(input: Tensor, mask: Tensor, value: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = x``, but where the mask holds."""
    return lambda: unbroadcast(grad.masked_fill(mask, 0.0), input)
