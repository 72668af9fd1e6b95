"""Writes in place: the tensor as it is after them, made of what it was before and what was written."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.autodiff.rules.registry import functions, register_jacobian, unbroadcast


@register_jacobian(torch.Tensor.__setitem__, secant="linear", needs="nothing")
def setitem(input: Tensor, index: Any, value: Any, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where nothing was written, and where the value was."""
    places = torch.arange(input.numel(), device=grad.device).reshape(input.shape)[index]

    def of_value() -> Tensor:
        # What is written may have more dimensions, of size 1.
        plain = value.reshape(value.shape[max(0, value.dim() - places.dim()) :])
        return unbroadcast(grad.flatten(1)[:, places], plain).reshape(len(grad), *value.shape)

    return lambda: grad.flatten(1).index_fill(1, places.flatten(), 0.0).reshape(grad.shape), None, of_value


@register_jacobian(torch.Tensor.copy_, torch.Tensor.fill_, torch.Tensor.zero_, secant="linear", needs="nothing")
def copied(input: Tensor, other: Any = 0, *rest: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The overwritten input gets no gradient."""
    return torch.zeros_like(grad), lambda: unbroadcast(grad, other)


@register_jacobian(*functions("index_add"), secant="linear", needs="nothing")
def index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, y: Tensor, grad: Tensor
) -> Any:
    """``y = x``, plus the source at the index."""
    return grad, None, None, lambda: alpha * grad.index_select(dim % input.dim() + 1, index)
