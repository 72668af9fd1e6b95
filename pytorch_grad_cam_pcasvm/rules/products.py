"""Products of all numbers along a dimension, and cumulative products."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, register_jacobian
from pytorch_grad_cam_pcasvm.rules.rule import Call


def _through_products(x: Tensor, x0: Tensor, grad: Tensor) -> Tensor:
    """Pull grad (K, ..., n) back through ``cumprod(x)`` over the last dimension, ``p0_(i-1) r_i``."""
    # dp_j = sum_i p0_(i-1) dx_i x_(i+1) ... x_j, exact for any x and x0, with the products p0 at the start; and
    # r_i = grad_i + x_(i+1) r_(i+1).
    before = torch.cat([torch.ones_like(x0[..., :1]), x0.cumprod(-1)[..., :-1]], -1)
    rest, grads = torch.zeros_like(grad[..., 0]), []
    factors = torch.cat([x[..., 1:], torch.zeros_like(x[..., :1])], -1)
    for place in reversed(range(x.shape[-1])):
        rest = grad[..., place] + factors[..., place] * rest
        grads.append(before[..., place] * rest)
    return torch.stack(grads[::-1], -1)


@register_jacobian(*aten("cumprod"), needs="inputs")
def cumprod(input: Tensor, dim: int, *, y: Tensor, grad: Tensor, dtype: Any = None, base: Call | None = None) -> Tensor:
    """``p_j = x_1 ... x_j``."""
    x0 = input if base is None else base.args[0]
    axis = dim % input.dim()
    pulled = _through_products(input.movedim(axis, -1), x0.movedim(axis, -1), grad.movedim(axis + 1, -1))
    return pulled.movedim(-1, axis + 1)


@register_jacobian(*aten("prod"), needs="inputs")
def prod(
    input: Tensor, dim: int | None = None, keepdim: bool = False, *, y: Tensor, grad: Tensor, dtype: Any = None,
    base: Call | None = None,
) -> Tensor:  # fmt: skip
    """``p = x_1 ... x_n``."""
    x0 = input if base is None else base.args[0]
    if dim is None:
        rows, rows0, behind = input.reshape(-1), x0.reshape(-1), grad.reshape(-1, 1)
    else:
        axis = dim % input.dim()
        rows, rows0 = input.movedim(axis, -1), x0.movedim(axis, -1)
        behind = grad.movedim(axis + 1, -1) if keepdim else grad.unsqueeze(-1)
    last = torch.cat([behind.new_zeros(*behind.shape[:-1], rows.shape[-1] - 1), behind], -1)
    pulled = _through_products(rows, rows0, last)
    return pulled.reshape(len(grad), *input.shape) if dim is None else pulled.movedim(-1, axis + 1)
