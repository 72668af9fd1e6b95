"""Norms and distances: divisions of numbers by their own size, such sizes themselves, and similarities of vectors."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.rules.registry import aten, list_dims, ratio, register_jacobian, unbroadcast, with_dims
from pytorch_grad_cam_pcasvm.rules.rule import Call, mid, quotient, resolution, take_first


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


def _differentiate_norm(x1: Tensor, x2: Tensor, p: float, base: Call | None, grad: Tensor, eps: float = 0.0) -> Tensor:
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
    pulled = (grad if keepdim else grad.unsqueeze(-1)) * _differentiate_norm(x1, x2, p, base, grad, eps)
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
    pulled = grad.unsqueeze(-1) * _differentiate_norm(rows, columns, p, inner, grad)
    return (
        lambda: unbroadcast(pulled, rows).reshape(len(grad), *input.shape),
        lambda: unbroadcast(-pulled, columns).reshape(len(grad), *other.shape),
    )


def _keeps_statistics(input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any) -> bool:
    return not training


@register_jacobian(
    *aten("batch_norm"), secant="linear", needs="others", relevance="kept", holds=_keeps_statistics, by_image=True
)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *rest: Any,
    y: Tensor,
    grad: Tensor,
) -> Tensor:
    """``grad weight / sqrt(var + eps)``, channel by channel."""
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    return grad * scale.reshape(-1, *[1] * (input.dim() - 2))


def _divided(
    grad: Tensor, here: tuple[Tensor, Tensor], start: tuple[Tensor, Tensor], dims: list[int], slope: Tensor
) -> Tensor:
    """``y = c / s``: ``dy = (dc - mean(y) ds) / mean(s)`` with ``ds = slope dc``; dims count from behind."""
    # The means are those of c and s here and at the start, without one the numbers themselves. With 1 / s in place
    # of s this would be exact, too, but of huge terms that cancel, where a start of zeros has no s.
    (c, s), (c0, s0) = here, start
    y, divided = c / s if c0 is c else mid(c / s, c0 / s0), grad / mid(s, s0)
    return divided - slope * (divided * y).sum(dims, keepdim=True)


def _standardised(
    grad: Tensor, x: Tensor, x0: Tensor, dims: list[int], eps: float, *, centred: bool = True, summed: int | None = None
) -> Tensor:
    """``y = c / s`` with ``s = sqrt(mean(c^2) + eps)``, ``ds = mean(mean(c) dc) / mean(s)``; c is x, or x centred.

    Args:
        grad: shape (K, *x.shape).
        x: the input.
        x0: that at the start.
        dims: over which it is standardised, from behind.
        eps: added to the variance.
        centred: whether the mean is subtracted.
        summed: the dimension of tokens (N, L, D) that share grad (K, N, 1, D): their sum, of D x D numbers an image.

    Returns:
        The gradient.
    """
    if summed is not None:
        channels_first = x.movedim(summed, 1)
        x, x0 = channels_first, channels_first if x0 is x else x0.movedim(summed, 1)
    here, start, slope = _standard(x, x0, dims, eps, centred)
    if summed is not None:
        (c, s), (c0, s0), shared = here, start, grad.squeeze(summed + 1)
        size = mid(s, s0)
        mixed = (mid(c / s, c0 / s0) / size).mT @ slope
        pulled = (shared * (1 / size).sum(1) - (shared.transpose(0, 1) @ mixed).transpose(0, 1)).unsqueeze(summed + 1)
    else:
        pulled = _divided(grad, here, start, dims, slope)
    return pulled - pulled.mean(dims, keepdim=True) if centred else pulled


def _standard(
    x: Tensor, x0: Tensor, dims: list[int], eps: float, centred: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Return c and s here, at the start, and the slope of s."""

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        c = x - x.mean(dims, keepdim=True) if centred else x
        return c, torch.sqrt(c.square().mean(dims, keepdim=True) + eps)

    here = parts(x)
    start = here if x0 is x else parts(x0)
    return here, start, mid(here[0], start[0]) / mid(here[1], start[1]) / math.prod(x.shape[dim] for dim in dims)


def _before_norm(dim: int, input: Tensor, normalized_shape: Any, *args: Any, y: Tensor, **options: Any) -> int | None:
    return dim if dim < y.dim() - len(normalized_shape) else None


@register_jacobian(*aten("layer_norm"), needs="inputs", tokens=_before_norm, sums_tokens=True)
def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
    summed: int | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the last dimensions."""
    grad = grad if weight is None else grad * weight
    dims = [-1 - i for i in range(len(normalized_shape))]
    return _standardised(grad, input, take_first(base, input), dims, eps, summed=summed)


@register_jacobian(*aten("rms_norm"), needs="inputs", tokens=_before_norm, sums_tokens=True)
def rms_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
    summed: int | None = None,
) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dimensions."""
    grad = grad if weight is None else grad * weight
    dims = [-1 - i for i in range(len(normalized_shape))]
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _standardised(grad, input, take_first(base, input), dims, eps, centred=False, summed=summed)


@register_jacobian(*aten("group_norm"), needs="inputs")
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the positions of a group of channels."""
    grad = grad if weight is None else grad * weight.reshape(-1, *[1] * (input.dim() - 2))
    x0 = take_first(base, input)
    groups = input.reshape(input.shape[0], num_groups, -1)
    groups0 = groups if x0 is input else x0.reshape(x0.shape[0], num_groups, -1)
    return _standardised(grad.reshape(len(grad), *groups.shape), groups, groups0, [-1], eps).reshape(grad.shape)


@register_jacobian(*aten("instance_norm"), needs="inputs")
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *rest: Any,
    y: Tensor,
    grad: Tensor,
    base: Call | None = None,
) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` over the positions of a channel, or by its running statistics."""
    if not use_input_stats:
        return batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, y=y, grad=grad)
    return group_norm(input, input.shape[1], weight, eps=eps, y=y, grad=grad, base=base)


def _sizes(x: Tensor, p: float, dims: list[int]) -> Tensor:
    return torch.linalg.vector_norm(x, p, dims, keepdim=True)


def size_slope(x: Tensor, x0: Tensor, p: float, dims: list[int], eps: float) -> Tensor:
    """``ds = slope dx`` of ``s = (sum |x|^p)^(1/p)``: for p = 2, ``mean(x) / mean(s)``; 0 where s is."""
    s, s0 = _sizes(x, p, dims), _sizes(x0, p, dims)
    if p == 2:
        return ratio(mid(x, x0), mid(s, s0))
    powers, powers0 = x.abs() ** p, x0.abs() ** p
    total, total0 = powers.sum(dims, keepdim=True), powers0.sum(dims, keepdim=True)
    of_power = quotient(x, powers, x0, powers0, p * ratio(powers, x), eps)
    return of_power * quotient(total, s, total0, s0, ratio(s, p * total), eps)


def _of_sum(input: Tensor, ord: Any = 2, *rest: Any) -> bool:
    """Return whether a norm is the root of a sum of powers; other norms are minima, maxima or counts."""
    return 0 < _order(ord) < math.inf


def _order(ord: Any) -> float:
    return 2.0 if ord in (None, "fro") else float(ord)


@register_jacobian(*aten("linalg_vector_norm"), needs="inputs", holds=_of_sum)
def vector_norm(
    input: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    y: Tensor,
    grad: Tensor,
    dtype: Any = None,
    out: Any = None,
    base: Call | None = None,
) -> Tensor:
    """``s = (sum |x|^p)^(1/p)``."""
    dims = list_dims(input, dim)
    p = _order(ord)
    eps = resolution(grad, base)
    from_behind = [d - input.dim() for d in dims]
    return with_dims(grad, dims, keepdim) * size_slope(input, take_first(base, input), p, from_behind, eps)


@register_jacobian(*aten("norm"), needs="inputs", holds=_of_sum)
def norm(
    input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, *, base: Call | None = None, **options: Any
) -> Tensor:
    """The same by its older name."""
    return vector_norm(input, p, dim, keepdim, base=base, **options)


def normalised(grad: Tensor, x: Tensor, x0: Tensor, p: float, dims: list[int], eps: float, spacing: float) -> Tensor:
    """Pull back through ``y = x / max(s, eps)``."""
    s = _sizes(x, p, dims)
    s0 = s if x0 is x else _sizes(x0, p, dims)
    # Above eps the divisor changes as s does, below it not at all, and across it by a share.
    above, above0 = (s > eps).to(s), (s0 > eps).to(s)
    share = torch.where(above == above0, above, ratio(s.clamp(min=eps) - s0.clamp(min=eps), s - s0))
    slope = share * size_slope(x, x0, p, dims, spacing)
    return _divided(grad, (x, s.clamp(min=eps)), (x0, s0.clamp(min=eps)), dims, slope)


def _spread(root: bool, with_mean: bool) -> Callable[..., Tensor]:
    def pull_spread(
        input: Tensor,
        dim: Any = None,
        unbiased: bool = True,
        keepdim: bool = False,
        *,
        correction: float | None = None,
        y: Any,
        grad: Any,
        base: Call | None = None,
    ) -> Tensor:
        """``dv = 2 sum mean(c) dx / (n - 1)``, c is x centred; of the root, ``mean(c) / mean(s)`` for 2 mean(c)."""
        if isinstance(dim, bool):
            dim, unbiased = None, dim
        dims = list_dims(input, dim)
        count = math.prod(input.shape[d] for d in dims)
        divisor = count - (int(unbiased) if correction is None else correction)

        def parts(x: Tensor) -> tuple[Tensor, Tensor]:
            c = x - x.mean(dims, keepdim=True)
            return c, (c.square().sum(dims, keepdim=True) / divisor).sqrt()

        (c, s), (c0, s0) = parts(input), parts(take_first(base, input))
        slope = ratio(mid(c, c0), mid(s, s0)) if root else 2 * mid(c, c0)
        of_spread, of_mean = grad if with_mean else (grad, None)
        pulled: Tensor | float = 0.0
        if of_spread is not None:
            pulled = with_dims(of_spread, dims, keepdim) * slope / divisor
        if of_mean is not None:
            pulled = pulled + with_dims(of_mean, dims, keepdim).expand(len(of_mean), *input.shape) / count
        assert isinstance(pulled, Tensor)
        return pulled

    return pull_spread


for _name in ("var", "std", "var_mean", "std_mean"):
    _rule = _spread("std" in _name, "mean" in _name)
    register_jacobian(*aten(_name), needs="inputs")(_rule)
