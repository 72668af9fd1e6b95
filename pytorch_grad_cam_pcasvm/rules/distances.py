"""Distances and similarities of vectors."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.rules.norms import normalised, size_slope
from pytorch_grad_cam_pcasvm.rules.registry import aten, list_dims, register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.rules.rule import Call, mid, resolution


@register_jacobian(*aten("cosine_similarity"), needs="inputs")
def cosine_similarity(
    input: Tensor, other: Tensor, dim: int = 1, eps: float = 1e-8, *, y: Tensor, grad: Tensor, base: Call | None = None
) -> Any:
    """``y = sum a / max(|a|, eps) b / max(|b|, eps)``."""
    a, b = torch.broadcast_tensors(input, other)
    a0, b0 = (a, b) if base is None else torch.broadcast_tensors(*base.args[:2])
    dims = [d - a.dim() for d in list_dims(a, dim)]
    spacing = resolution(grad, base)
    grad = grad.unsqueeze(dims[0])

    def pull(x: Tensor, x0: Tensor, z: Tensor, z0: Tensor, argument: Tensor) -> Tensor:
        direction = mid(F.normalize(z, 2, dims[0], eps), F.normalize(z0, 2, dims[0], eps))
        return unbroadcast(normalised(grad * direction, x, x0, 2, dims, eps, spacing), argument)

    return partial(pull, a, a0, b, b0, input), partial(pull, b, b0, a, a0, other)


def _apart(x1: Tensor, x2: Tensor, p: float, base: Call | None, grad: Tensor, eps: float = 0.0) -> Tensor:
    """Return the slope of ``|a - b|`` by a - b, over the last dimension."""
    apart = x1 - x2 + eps
    apart0 = apart if base is None else base.args[0] - base.args[1] + eps
    return size_slope(apart, apart0, p, [-1], resolution(grad, base))


def _is_power(x1: Tensor, x2: Tensor, p: float = 2.0, *rest: Any) -> bool:
    return 0 < p < math.inf


@register_jacobian(*aten("pairwise_distance"), needs="inputs", holds=_is_power)
def pairwise_distance(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
    *,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
) -> Any:
    """``y = |a - b|``, row by row."""
    pulled = (grad if keepdim else grad.unsqueeze(-1)) * _apart(x1, x2, p, base, grad, eps)
    return lambda: unbroadcast(pulled, x1), lambda: unbroadcast(-pulled, x2)


@register_jacobian(*aten("cdist"), needs="inputs", holds=_is_power)
def cdist(
    input: Tensor,
    other: Tensor,
    p: float = 2.0,
    compute_mode: Any = None,
    *,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
) -> Any:
    """``y_ij = |a_i - b_j|``."""
    rows, columns = input.unsqueeze(-2), other.unsqueeze(-3)
    inner = None if base is None else Call((base.args[0].unsqueeze(-2), base.args[1].unsqueeze(-3)), {}, None, base.eps)
    pulled = grad.unsqueeze(-1) * _apart(rows, columns, p, inner, grad)
    return (
        lambda: unbroadcast(pulled, rows).reshape(len(grad), *input.shape),
        lambda: unbroadcast(-pulled, columns).reshape(len(grad), *other.shape),
    )
