"""Softmax, its relatives, and attention, o = softmax(s Q K^T + M) V."""

import math
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.cotangents import Outer, by_rows
from pytorch_grad_cam_pcasvm.rules.registry import aten, list_dims, ratio, register_jacobian, unbroadcast, with_dims
from pytorch_grad_cam_pcasvm.rules.rule import Call, mid


def _keep_other_dim(dim: int, input: Tensor, along: int, *rest: Any, y: Tensor, **options: Any) -> int | None:
    return dim if along % y.dim() != dim else None


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


def _queries(
    dim: int, query: Tensor, key: Any, value: Any, mask: Tensor | None = None, *rest: Any, y: Tensor, **options: Any
) -> list[int | None] | None:
    special = any(rest[1:]) or options.get("is_causal") or options.get("enable_gqa")  # rest: dropout, is_causal
    if special or dim != y.dim() - 2 or query.dim() != y.dim():
        return None
    mask = options.get("attn_mask", mask)
    own = mask.dim() - 2 if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1 else None
    return [dim, None, None, own]


@register_jacobian(
    *aten("scaled_dot_product_attention"),
    needs="inputs",
    tokens=_queries,
    attends=("query", "key", "attn_mask"),
    separates_heads=True,
)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
) -> Any:
    """``dV = A^T r``, ``dM = A (dA - sum_j A dA)`` with ``dA = r V^T``, ``dQ = s dM K``, ``dK = s dM^T Q``."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    arguments = query, key, value, attn_mask
    # Queries that share a key stand in one group.
    shared = query.shape[-3] // key.shape[-3] if enable_gqa else 1

    def heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return query, *(x.repeat_interleave(shared, -3) if shared > 1 else x for x in (key, value))

    def of_group(pulled: Tensor, argument: Tensor) -> Tensor:
        return unbroadcast(pulled.unflatten(-3, (-1, shared)).sum(-3) if shared > 1 else pulled, argument)

    def outer(left: Tensor, right: Tensor, argument: Tensor) -> Any:
        shared_by_targets = min(left, right, key=Tensor.dim)
        if argument.shape[:-2] == grad.shape[1:-2] == shared_by_targets.shape[:-2]:
            return Outer(left, right)
        return lambda: of_group(left.mT @ right, argument)

    def score(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        scores = scale * query @ key.mT
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask

    def weigh(scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        return weights if attn_mask is None else weights.nan_to_num()  # a query that may look at nothing

    query, key, value = heads(query, key, value)
    scores = score(query, key, attn_mask)
    weights = slopes = weigh(scores)
    if base is not None:  # midpoints of products, and the logarithmic mean of the softmax
        query0, key0, value0 = heads(*base.args[:3])
        scores0 = score(query0, key0, base.args[3] if len(base.args) > 3 else attn_mask)
        weights, slopes = mid(weights, weigh(scores0)), logarithmic_mean(scores, scores0, -1)
        query, key, value = mid(query, query0), mid(key, key0), mid(value, value0)
    of_scores = through_softmax(slopes, by_rows(grad, value.mT), -1)
    return (
        lambda: unbroadcast(by_rows(scale * of_scores, key), arguments[0]),
        outer(scale * of_scores, query, arguments[1]),
        outer(weights, grad, arguments[2]),
        lambda: unbroadcast(of_scores, arguments[3]),
    )
