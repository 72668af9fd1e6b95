"""Reductions of many numbers to one: the largest or smallest, products, and cumulative ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, list_dims, ratio, register_jacobian, unbroadcast, with_dims
from pytorch_grad_cam_pcasvm.rules.rule import Call

Chosen = Callable[[Tensor], tuple[Tensor, Tensor]]


def _send_to_chosen(grad: Tensor, x: Tensor, base: Call | None, dims: list[int], sign: int, chosen: Chosen) -> Tensor:
    """Send the gradient to the chosen numbers: ``chosen`` gives the extreme, with its dims, and weights of x."""
    y, weights = chosen(x)
    if base is not None:
        # As DeepLIFT: to where x has its maximum if that has grown, otherwise to where x0 had it. What the maximum has
        # changed by is a share, between 0 and 1, of what x has changed by there.
        x0 = base.args[0]
        y0, weights0 = chosen(x0)
        weights = torch.where(sign * (y - y0) >= 0, weights, weights0)
        change = (weights * (x - x0)).sum(dims, keepdim=True)
        weights = weights * torch.where(change == 0, 1.0, ratio(y - y0, change))
    return grad * weights


def _extreme(sign: int) -> Callable[..., Tensor]:
    reduce = torch.amax if sign > 0 else torch.amin

    def rule(
        input: Tensor, dim: Any = None, keepdim: bool = False, *, y: Tensor, grad: Tensor, base: Call | None = None
    ) -> Tensor:
        """Grad where the extreme is; several that are equal get even parts."""
        dims = list_dims(input, dim)

        def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
            y = reduce(x, dims, keepdim=True)
            equal = (x == y).to(x)
            return y, equal / equal.sum(dims, keepdim=True)

        return _send_to_chosen(with_dims(grad, dims, keepdim), input, base, dims, sign, chosen)

    return rule


_amax, _amin = _extreme(1), _extreme(-1)
register_jacobian(*aten("amax"), needs="inputs")(_amax)
register_jacobian(*aten("amin"), needs="inputs")(_amin)


@register_jacobian(*aten("aminmax"), needs="inputs")
def aminmax(
    input: Tensor, *, dim: int | None = None, keepdim: bool = False, y: Any, grad: Any, base: Call | None = None
) -> Tensor:
    """The smallest and the largest number."""
    parts = zip((_amin, _amax), y, grad, strict=True)
    pulled = [rule(input, dim, keepdim, y=end, grad=part, base=base) for rule, end, part in parts if part is not None]
    return pulled[0] if len(pulled) == 1 else pulled[0] + pulled[1]


def _of_two(sign: int) -> Callable[..., Any]:
    extreme = _amax if sign > 0 else _amin

    def rule(input: Tensor, other: Tensor, *, y: Tensor, grad: Tensor, base: Call | None = None) -> Any:
        """Grad for the one that is larger (or smaller), half of it for each of two that are equal."""
        pair = torch.stack(torch.broadcast_tensors(input, other))
        pair0 = None if base is None else torch.stack(torch.broadcast_tensors(*base.args[:2]))
        inner = None if base is None else Call((pair0,), {}, base.y, base.eps)
        of_input, of_other = extreme(pair, 0, y=y, grad=grad, base=inner).unbind(1)
        return lambda: unbroadcast(of_input, input), lambda: unbroadcast(of_other, other)

    return rule


_maximum, _minimum = _of_two(1), _of_two(-1)
register_jacobian(*aten("maximum", "fmax"), needs="inputs")(_maximum)
register_jacobian(*aten("minimum", "fmin"), needs="inputs")(_minimum)


def _with_index(sign: int) -> Callable[..., Any]:
    reduce = torch.max if sign > 0 else torch.min

    def rule(
        input: Tensor, dim: Any = None, keepdim: bool = False, *, y: Any, grad: Any, base: Call | None = None
    ) -> Any:
        """The extreme of everything, of two tensors, or along a dimension, where one of several that are equal wins."""
        if isinstance(dim, Tensor):
            return (_maximum if sign > 0 else _minimum)(input, dim, y=y, grad=grad, base=base)
        if dim is None:
            return (_amax if sign > 0 else _amin)(input, y=y, grad=grad, base=base)
        dims = list_dims(input, dim)

        def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
            values, places = reduce(x, dims[0], keepdim=True)
            return values, torch.zeros_like(x).scatter(dims[0], places, 1.0)

        return _send_to_chosen(with_dims(grad[0], dims, keepdim), input, base, dims, sign, chosen)

    return rule


for _sign, _name in ((1, "max"), (-1, "min")):
    _rule = _with_index(_sign)
    register_jacobian(*aten(_name), needs="inputs")(_rule)


def _ranked(dim: int, choose: Callable[[Tensor], tuple[Tensor, Tensor]], keeps_dim: bool) -> Callable[..., Tensor]:
    """Return the pullback of numbers that are chosen along a dimension by their rank, as ``choose`` gives them."""

    def pull_ranked(input: Tensor, grad: Tensor, base: Call | None) -> Tensor:
        axis = dim % max(input.dim(), 1) + 1
        grad = grad if keeps_dim else grad.unsqueeze(axis)
        y, places = choose(input)
        rest: Tensor | float = 0.0
        if base is not None:
            # As of a maximum: to where x has this rank if the number has grown, otherwise to where x0 had it, if that
            # has changed by as much at least; else to all that have changed, in proportion.
            change = input - base.args[0]
            y0, places0 = choose(base.args[0])
            places = torch.where(y >= y0, places, places0)
            own, dy = change.gather(axis - 1, places), y - y0
            alone = own.abs() >= dy.abs()
            rest = (grad * torch.where(alone, 0.0, dy)).sum(axis, keepdim=True)
            rest = rest * ratio(change, change.square().sum(axis - 1, keepdim=True))
            grad = grad * torch.where(alone, torch.where(own == 0, 1.0, ratio(dy, own)), 0.0)
        pulled = grad.new_zeros(len(grad), *input.shape)
        return pulled.scatter_add(axis, places.expand_as(grad), grad) + rest

    return pull_ranked


@register_jacobian(*aten("topk"), needs="inputs")
def topk(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, y: Any, grad: Any,
    base: Call | None = None,
) -> Tensor:  # fmt: skip
    """The k largest numbers, or smallest."""
    return _ranked(dim, lambda x: x.topk(k, dim, largest, True), True)(input, grad[0], base)


@register_jacobian(*aten("sort"), needs="inputs")
def sort(
    input: Tensor, dim: Any = -1, descending: bool = False, *, y: Any, grad: Any, base: Call | None = None,
    stable: bool = False,
) -> Tensor:  # fmt: skip
    """All numbers, in order."""
    return _ranked(dim, lambda x: x.sort(dim=dim, descending=descending, stable=bool(stable)), True)(
        input, grad[0], base
    )


@register_jacobian(*aten("kthvalue"), needs="inputs")
def kthvalue(
    input: Tensor, k: int, dim: int = -1, keepdim: bool = False, *, y: Any, grad: Any, base: Call | None = None
) -> Tensor:
    """The k-th smallest number."""
    return _ranked(dim, lambda x: x.kthvalue(k, dim, keepdim=True), keepdim)(input, grad[0], base)


@register_jacobian(*aten("median"), needs="inputs")
def median(
    input: Tensor, dim: int | None = None, keepdim: bool = False, *, y: Any, grad: Any, base: Call | None = None
) -> Tensor:
    """The number in the middle; of two the smaller."""
    if dim is not None:
        return _ranked(dim, lambda x: x.median(dim, keepdim=True), keepdim)(input, grad[0], base)
    flat = input.reshape(-1)
    inner = None if base is None else Call((base.args[0].reshape(-1),), {}, None, base.eps)
    pulled = _ranked(0, lambda x: x.median(0, keepdim=True), True)(flat, grad.reshape(-1, 1), inner)
    return pulled.reshape(len(grad), *input.shape)


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
