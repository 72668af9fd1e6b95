"""Extremes: the largest or smallest of several numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.autodiff.rules.registry import (
    dims_of,
    functions,
    ratio,
    register_jacobian,
    unbroadcast,
    with_dims,
)
from pytorch_grad_cam_pcasvm.autodiff.rules.rule import Base

Chosen = Callable[[Tensor], tuple[Tensor, Tensor]]


def _pulled(grad: Tensor, x: Tensor, base: Base | None, dims: list[int], sign: int, chosen: Chosen) -> Tensor:
    """Send the gradient to what was chosen: ``chosen`` gives the extreme, with its dims, and the weights of x in it."""
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
        input: Tensor, dim: Any = None, keepdim: bool = False, *, y: Tensor, grad: Tensor, base: Base | None = None
    ) -> Tensor:
        """Grad where the extreme is; several that are equal get even parts."""
        dims = dims_of(input, dim)

        def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
            y = reduce(x, dims, keepdim=True)
            equal = (x == y).to(x)
            return y, equal / equal.sum(dims, keepdim=True)

        return _pulled(with_dims(grad, dims, keepdim), input, base, dims, sign, chosen)

    return rule


_amax, _amin = _extreme(1), _extreme(-1)
register_jacobian(*functions("amax"), needs="inputs")(_amax)
register_jacobian(*functions("amin"), needs="inputs")(_amin)


def _of_two(sign: int) -> Callable[..., Any]:
    extreme = _amax if sign > 0 else _amin

    def rule(input: Tensor, other: Tensor, *, y: Tensor, grad: Tensor, base: Base | None = None) -> Any:
        """Grad for the one that is larger (or smaller), half of it for each of two that are equal."""
        pair = torch.stack(torch.broadcast_tensors(input, other))
        pair0 = None if base is None else torch.stack(torch.broadcast_tensors(*base.args[:2]))
        inner = None if base is None else Base((pair0,), {}, base.y, base.eps)
        of_input, of_other = extreme(pair, 0, y=y, grad=grad, base=inner).unbind(1)
        return lambda: unbroadcast(of_input, input), lambda: unbroadcast(of_other, other)

    return rule


_maximum, _minimum = _of_two(1), _of_two(-1)
register_jacobian(*functions("maximum", "fmax"), needs="inputs")(_maximum)
register_jacobian(*functions("minimum", "fmin"), needs="inputs")(_minimum)


def _with_index(sign: int) -> Callable[..., Any]:
    reduce = torch.max if sign > 0 else torch.min

    def rule(
        input: Tensor, dim: Any = None, keepdim: bool = False, *, y: Any, grad: Any, base: Base | None = None
    ) -> Any:
        """The extreme of everything, of two tensors, or along a dimension, where one of several that are equal wins."""
        if isinstance(dim, Tensor):
            return (_maximum if sign > 0 else _minimum)(input, dim, y=y, grad=grad, base=base)
        if dim is None:
            return (_amax if sign > 0 else _amin)(input, y=y, grad=grad, base=base)
        dims = dims_of(input, dim)

        def chosen(x: Tensor) -> tuple[Tensor, Tensor]:
            values, places = reduce(x, dims[0], keepdim=True)
            return values, torch.zeros_like(x).scatter(dims[0], places, 1.0)

        return _pulled(with_dims(grad[0], dims, keepdim), input, base, dims, sign, chosen)

    return rule


for _sign, _name in ((1, "max"), (-1, "min")):
    _rule = _with_index(_sign)
    register_jacobian(*functions(_name), needs="inputs")(_rule)
