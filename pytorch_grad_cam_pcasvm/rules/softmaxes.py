"""Softmax, its logarithm, and the logarithm of a sum of exponentials."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, list_dims, ratio, register_jacobian, with_dims
from pytorch_grad_cam_pcasvm.rules.rule import Call


def _keep_other_dim(dim: int, input: Tensor, along: Any = None, *rest: Any, y: Tensor, **options: Any) -> int | None:
    return dim if isinstance(along, int) and along % y.dim() != dim else None


@register_jacobian(*aten("softmax", "_softmax"), needs="y", tokens=_keep_other_dim, attends=("input",))
def softmax(
    input: Tensor,
    dim: int,
    *rest: Any,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
    **options: Any,
) -> Tensor:
    """``s (grad - sum_j grad_j s_j / sum_j s_j)`` with s = y, or its logarithmic mean with y0."""
    return through_softmax(y if base is None else logarithmic_mean(input, base.args[0], dim), grad, dim)


def through_softmax(s: Tensor, grad: Tensor, dim: int) -> Tensor:
    """Pull grad (K, *s.shape) back: ``dy_i = s_i (dx_i - sum_j s_j dx_j / sum_j s_j)``."""
    axis = dim if dim < 0 else dim + 1
    total = s.sum(dim, keepdim=True).unsqueeze(0)
    mean = (grad * s).sum(axis, keepdim=True) / torch.where(total == 0, 1.0, total)
    return s * (grad - mean)


def logarithmic_mean(x: Tensor, x0: Tensor, dims: Any) -> Tensor:
    """Return ``(y - y0) / (log y - log y0)`` of two softmaxes; 0 where both are."""
    shifted = (logits - logits.amax(dims, keepdim=True) for logits in (x, x0))
    logs, logs0 = (logits - logits.logsumexp(dims, keepdim=True) for logits in shifted)
    apart = (logs - logs0).abs()
    # From the larger one down, so that nothing overflows and nothing cancels.
    share = torch.where(apart == 0, 1.0, -torch.expm1(-apart) / apart)
    return (torch.maximum(logs, logs0).exp() * share).nan_to_num()


def _of_sum(x: Tensor, base: Call | None, dims: list[int]) -> Tensor:
    """Return ``w / sum w``, w the softmax or its logarithmic mean: as softmaxes add to 1, ``dl = sum w dx / sum w``."""
    w = logarithmic_mean(x, x if base is None else base.args[0], dims)
    return ratio(w, w.sum(dims, keepdim=True))


@register_jacobian(*aten("logsumexp"), needs="inputs")
def logsumexp(
    input: Tensor, dim: Any, keepdim: bool = False, *, y: Tensor, grad: Tensor, base: Call | None = None
) -> Tensor:
    """``l = log sum exp(x)``: ``grad softmax(x)``."""
    dims = list_dims(input, dim)
    return with_dims(grad, dims, keepdim) * _of_sum(input, base, dims)


@register_jacobian(*aten("log_softmax", "_log_softmax"), needs="inputs")
def log_softmax(
    input: Tensor,
    dim: int,
    *rest: Any,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
    **options: Any,
) -> Tensor:
    """``y = x - l``: ``grad - softmax(x) sum_j grad_j``."""
    dims = list_dims(input, dim)
    return grad - _of_sum(input, base, dims) * grad.sum(dims[0] + 1, keepdim=True)
