"""Attention, o = softmax(s Q K^T + M) V."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.autodiff.rules.cotangents import Outer, by_rows, cotangent
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.autodiff.rules.rule import Base, mid
from pytorch_grad_cam_pcasvm.autodiff.rules.softmaxes import logarithmic_mean, through_softmax
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError


def _queries(
    dim: int, query: Tensor, key: Any, value: Any, mask: Tensor | None = None, *rest: Any, y: Tensor, **named: Any
) -> list[int | None] | None:
    special = any(rest[1:]) or named.get("is_causal") or named.get("enable_gqa")  # rest: dropout, is_causal
    if special or dim != y.dim() - 2 or query.dim() != y.dim():
        return None
    mask = named.get("attn_mask", mask)
    own = mask is not None and mask.dim() > 1 and mask.shape[-2] > 1
    return [dim, None, None, mask.dim() - 2 if mask is not None and own else None]


@register_jacobian(
    F.scaled_dot_product_attention,
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
    base: Base | None = None,
) -> Any:
    """``dV = A^T r``, ``dM = A (dA - sum_j A dA)`` with ``dA = r V^T``, ``dQ = s dM K``, ``dK = s dM^T Q``."""
    if dropout_p:
        raise NoClosedFormError("dropout in attention has no rule")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    given = query, key, value, attn_mask
    # Queries that share a key stand in one group.
    shared = query.shape[-3] // key.shape[-3] if enable_gqa else 1

    def heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return query, *(each.repeat_interleave(shared, -3) if shared > 1 else each for each in (key, value))

    def of_group(pulled: Tensor, argument: Tensor) -> Tensor:
        return unbroadcast(pulled.unflatten(-3, (-1, shared)).sum(-3) if shared > 1 else pulled, argument)

    def outer(left: Tensor, right: Tensor, argument: Tensor) -> Any:
        shared_by_targets = min(left, right, key=Tensor.dim)
        if argument.shape[:-2] == grad.shape[1:-2] == shared_by_targets.shape[:-2]:
            return Outer(left, right)
        return lambda: of_group(left.mT @ right, argument)

    def scores_of(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        scores = scale * query @ key.mT
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask

    def weights_of(scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, -1)
        return weights if attn_mask is None else weights.nan_to_num()  # a query that may look at nothing

    query, key, value = heads(query, key, value)
    scores = scores_of(query, key, attn_mask)
    weights = slopes = weights_of(scores)
    if base is not None:  # midpoints of products, and the logarithmic mean of the softmax
        query0, key0, value0 = heads(*base.args[:3])
        scores0 = scores_of(query0, key0, base.args[3] if len(base.args) > 3 else attn_mask)
        weights, slopes = mid(weights, weights_of(scores0)), logarithmic_mean(scores, scores0, -1)
        query, key, value = mid(query, query0), mid(key, key0), mid(value, value0)
    of_scores = through_softmax(slopes, by_rows(grad, value.mT), -1)
    return (
        lambda: unbroadcast(by_rows(scale * of_scores, key), given[0]),
        outer(scale * of_scores, query, given[1]),
        outer(weights, grad, given[2]),
        lambda: unbroadcast(of_scores, given[3]),
    )


@register_jacobian(F.multi_head_attention_forward, needs="inputs", attends=("query", "key"))
def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    y: tuple[Tensor, Tensor | None],
    grad: tuple[Tensor | None, Tensor | None],
    base: Base | None = None,
) -> Any:
    """Input projections, attention head by head, output projection; tokens come first, (L, N, D)."""
    extras = (bias_k, bias_v, key_padding_mask, static_k, static_v)
    if any(extra is not None for extra in extras) or add_zero_attn or query.dim() != 3:
        raise NoClosedFormError("a MultiheadAttention with added keys, padding or without a batch has no rule")
    if len(grad) > 1 and grad[1] is not None:
        raise NoClosedFormError("the attention weights that a MultiheadAttention returns have no rule")
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    matrices: Any = separate if in_proj_weight is None else in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)

    def heads(x: Tensor) -> Tensor:
        """(..., L, N, heads d) to (..., N, heads, L, d)."""
        return x.unflatten(-1, (num_heads, -1)).movedim(-4, -2)

    def joined(x: Tensor) -> Tensor:
        return x.movedim(-2, -4).flatten(-2)

    def projected(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(heads(F.linear(x, w, b)) for x, w, b in zip(inputs, matrices, biases, strict=True))

    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask  # here True means that a key is left out
    causal = is_causal and attn_mask is None
    assert grad[0] is not None
    of_heads = heads(grad[0] @ out_proj_weight)
    inner = None if base is None else Base(projected(base.args[:3]), {}, None, base.eps)
    q, k, v = projected((query, key, value))
    pulled = attention(q, k, v, attn_mask, 0.0, causal, y=y[0], grad=of_heads, base=inner)[:3]
    pairs = zip(pulled, matrices, strict=True)
    return tuple(lambda part=part, matrix=matrix: joined(cotangent(part).dense()) @ matrix for part, matrix in pairs)
