"""Operators that ONNX runtimes lack, or are slow at, written with operators that they have."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import scipy.special
import torch
from torch import Tensor
from torch.fx import Graph, Node

_aten = torch.ops.aten
_NODES = 40  # of the interpolation of erfcx
_MAP = 3.75  # what x the middle of its interval is
_BLOCK = 1 << 16  # numbers of points whose differences are taken at once


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions of operators that onnxruntime lacks."""
    _interpolation()  # made here, its numbers are constants of a program
    return {
        _aten._cdist_forward.default: distances,
        _aten.convolution_backward.default: convolution_backward,
        _aten.copy.default: lambda into, x, wait=False: x.to(into.dtype).expand(into.shape).clone(),
        _aten.logsumexp.default: logsumexp,
        _aten.nan_to_num.default: nan_to_num,
        _aten.special_erfcx.default: erfcx,
        _aten.stack.default: lambda parts, dim=0: torch.cat([part.unsqueeze(dim) for part in parts], dim),
    }


def distances(x: Tensor, points: Tensor, p: float, mode: int | None) -> Tensor:
    """Return the distances of x (N, B) from points (I, B), shape (N, I), from differences, so that nothing cancels."""
    size = max(1, _BLOCK // points.shape[-1])
    starts = range(0, points.shape[0], size)
    parts = [(x.unsqueeze(-2) - points[start : start + size]).square().sum(-1).sqrt() for start in starts]
    return torch.cat(parts, -1)


def convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, bias_sizes: Any, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, None, None]:  # fmt: skip
    """Return the pullback of a convolution to its input, as a transposed convolution, and the other way round."""
    if transposed:
        return _aten.convolution(grad, weight, None, stride, padding, dilation, False, [0], groups), None, None
    sizes = zip(input.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    left = [
        size - ((out - 1) * step - 2 * pad + wide * (kernel - 1) + 1) for size, out, kernel, step, pad, wide in sizes
    ]
    return _aten.convolution(grad, weight, None, stride, padding, dilation, True, left, groups), None, None


def logsumexp(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Return ``log(sum(exp(x)))``; onnxruntime's own is wrong if the first number is minus infinity."""
    over = tuple(dims)
    top = x.amax(over, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    sums = (x - top).exp().sum(over, keepdim=True).log() + top
    return sums if keepdim else sums.squeeze(over)


def nan_to_num(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Return x with numbers in place of NaN and infinity."""
    limits = torch.finfo(x.dtype)
    x = torch.where(x == math.inf, limits.max if posinf is None else posinf, x)
    x = torch.where(x == -math.inf, limits.min if neginf is None else neginf, x)
    return x if nan is not None and math.isnan(nan) else torch.where(x != x, 0.0 if nan is None else nan, x)


def erfcx(x: Tensor) -> Tensor:
    """Return ``exp(x^2) erfc(x)`` for x from 0, a rational function, right to 2e-15 of its size.

    ``(1 + 2 x) erfcx(x)`` is smooth in ``t = (x - k) / (x + k)`` from -1 to 1: it is interpolated between Chebyshev's
    nodes by the barycentric formula (Shepherd and Laframboise, Mathematics of Computation 36 (1981), for t).
    """
    nodes, weights, values = (numbers.to(x) for numbers in _interpolation())
    away = ((x - _MAP) / (x + _MAP)).unsqueeze(-1) - nodes
    shares = weights / torch.where(away == 0, torch.finfo(x.dtype).tiny, away)
    return (shares @ values) / (shares.sum(-1) * (1 + 2 * x))


@cache
def _interpolation() -> tuple[Tensor, Tensor, Tensor]:
    """Return nodes t, their barycentric weights, and the values there."""
    angles = math.pi * (np.arange(_NODES) + 0.5) / _NODES
    t = np.cos(angles)
    x = _MAP * (1 + t) / (1 - t)
    values = (1 + 2 * x) * scipy.special.erfcx(x)
    weights = (-1.0) ** np.arange(_NODES) * np.sin(angles)
    return torch.from_numpy(t), torch.from_numpy(weights), torch.from_numpy(values)


def narrow_before_expanding(graph: Graph) -> None:
    """Narrow before expanding, which is a view in torch but in ONNX a copy of everything, to keep one number of it."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        source, dim, *limits = (*node.args, 0)[: max(2, len(node.args))]
        if source.target is not torch.ops.aten.expand.default or limits != [0, 1] or "val" not in source.args[0].meta:
            continue
        value, sizes = source.args[0], list(source.args[1])
        shape = value.meta["val"].shape
        dim %= len(sizes)
        own = dim - len(sizes) + len(shape)
        if own < 0 or shape[own] == 1:
            sizes[dim] = 1
            with graph.inserting_before(node):
                narrow = graph.call_function(torch.ops.aten.expand.default, (value, sizes))
            narrow.meta = dict(node.meta)
            node.replace_all_uses_with(narrow)


def plain_softmaxes(graph: Graph) -> None:
    """Take the softmax of attention without a mask as it is: only a mask can leave rows of minus infinity."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._safe_softmax.default):
        scores, dim, *dtype = node.args
        if not dtype and _behind_views(scores).target is torch.ops.aten.bmm.default:
            node.target, node.args = torch.ops.aten._softmax.default, (scores, dim, False)


def plain_zeros(graph: Graph) -> None:
    """Take zeros as they are, whatever their layout was while derivatives were traced."""
    strided = graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default)
    for node in strided:
        zeros, shape, *_ = node.args
        alone = len(zeros.users) == 1 and not any(user in strided for user in node.users)  # nobody writes beside it
        if zeros.target is torch.ops.aten.new_zeros.default and zeros not in strided and alone:
            node.target, node.args, node.kwargs = torch.ops.aten.new_zeros.default, (zeros.args[0], shape), zeros.kwargs


def _behind_views(node: Node) -> Node:
    while node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.mul.Scalar):
        node = node.args[0]  # type: ignore[assignment]
    return node
