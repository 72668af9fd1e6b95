"""Indexing: numbers that are taken from, or written at, positions of a tensor."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import aten, register_jacobian, unbroadcast

_at_places = partial(register_jacobian, secant="linear", needs="nothing")


def take(input: Tensor, places: Tensor) -> Tensor:
    """Return the numbers at some places, in the shape of these."""
    return input.reshape(-1)[places]


def put(input: Tensor, places: Tensor, source: Tensor) -> Tensor:
    """Return a tensor with the numbers of another at some places, each of which is named once."""
    flat = input.reshape(-1).index_put((places.reshape(-1),), source.reshape(-1).to(input.dtype))
    return flat.reshape(input.shape)


def put_alike(input: Tensor, places: Tensor, source: Tensor) -> Tensor:
    """Return the same where a place may be named several times, for numbers that are equal."""
    return put(input, places, source)


def add_at(input: Tensor, places: Tensor, source: Tensor) -> Tensor:
    """Return a tensor with the numbers of another added at some places, to one that is named twice both."""
    flat = input.reshape(-1).index_add(0, places.reshape(-1), source.reshape(-1).to(input.dtype))
    return flat.reshape(input.shape)


@_at_places(take, relevance="moved")
def take_rule(input: Tensor, places: Tensor, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad where it was taken from; a place that was named several times gets the sum."""
    pulled = grad.new_zeros(len(grad), input.numel()).index_add(1, places.reshape(-1), grad.flatten(1))
    return pulled.reshape(len(grad), *input.shape)


@_at_places(put)
def put_rule(input: Tensor, places: Tensor, source: Tensor, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where nothing was written, and where the source was."""
    return (
        lambda: grad.flatten(1).index_fill(1, places.flatten(), 0.0).reshape(grad.shape),
        None,
        lambda: grad.flatten(1)[:, places],
    )


@_at_places(put_alike)
def put_alike_rule(input: Tensor, places: Tensor, source: Tensor, *, y: Tensor, grad: Tensor) -> Any:
    """The same; equal numbers at one place get even parts."""

    def of_source() -> Tensor:
        ones = torch.ones_like(places, dtype=grad.dtype).reshape(-1)
        count = grad.new_zeros(input.numel()).index_add(0, places.reshape(-1), ones)
        return (grad.flatten(1) / count)[:, places]

    return *put_rule(input, places, source, y=y, grad=grad)[:2], of_source


@_at_places(add_at)
def add_at_rule(input: Tensor, places: Tensor, source: Tensor, *, y: Tensor, grad: Tensor) -> Any:
    """Grad, for the source where it was added."""
    return grad, None, lambda: grad.flatten(1)[:, places]


_writing = partial(register_jacobian, secant="linear", needs="nothing")


@_writing(*aten("copy", "fill", "zero"))
def copied(input: Tensor, other: Any = 0, *rest: Any, y: Tensor, grad: Tensor) -> Any:
    """The overwritten input gets no gradient."""
    return torch.zeros_like(grad), lambda: unbroadcast(grad, other)


@_writing(*aten("slice_scatter"))
def slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, *, y: Tensor,
    grad: Tensor,
) -> Any:  # fmt: skip
    """Grad where nothing was written, and where the source was."""
    place = (dim % input.dim() + 1, start, end, step)
    return (
        lambda: torch.slice_scatter(grad, grad.new_zeros(len(grad), *src.shape), *place),
        lambda: unbroadcast(torch.ops.aten.slice.Tensor(grad, *place), src),
    )


@_writing(*aten("select_scatter"))
def select_scatter(input: Tensor, src: Tensor, dim: int, index: int, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where nothing was written, and where the source was."""
    place = (dim % input.dim() + 1, index)
    return (
        lambda: torch.select_scatter(grad, grad.new_zeros(len(grad), *src.shape), *place),
        lambda: grad.select(*place),
    )


@_writing(*aten("index_put", "_unsafe_index_put"))
def index_put(
    input: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *rest: Any, y: Tensor, grad: Tensor
) -> Any:
    """Grad where nothing was written, and where the values were."""
    numbers = torch.arange(input.numel(), device=grad.device).reshape(input.shape)
    places = torch.ops.aten.index.Tensor(numbers, list(indices))
    return (
        lambda: grad if accumulate else grad.flatten(1).index_fill(1, places.flatten(), 0.0).reshape(grad.shape),
        None,
        lambda: unbroadcast(grad.flatten(1)[:, places], values),
    )


@_writing(*aten("index_add"))
def index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, y: Tensor, grad: Tensor
) -> Any:
    """``y = x``, plus the source at the index."""
    return grad, None, None, lambda: alpha * grad.index_select(dim % input.dim() + 1, index)


@_writing(*aten("index_copy", "index_fill"))
def index_copy(input: Tensor, dim: int, index: Tensor, source: Any, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where nothing was written, and where the source was."""
    axis = dim % input.dim() + 1

    def of_source() -> Tensor:
        chosen = grad.index_select(axis, index)
        return unbroadcast(chosen, source)

    return lambda: grad.index_fill(axis, index, 0.0), None, None, of_source


@_writing(*aten("scatter.src", "scatter.value"))
def scatter(input: Tensor, dim: int, index: Tensor, source: Any, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where nothing was written, and where the source was."""
    axis, places = dim % input.dim() + 1, index.expand(len(grad), *index.shape)

    def of_source() -> Tensor:
        gathered = grad.gather(axis, places)
        if source.dim() == 0:
            return gathered.reshape(len(grad))
        whole = grad.new_zeros(len(grad), *source.shape)
        whole[(slice(None), *map(slice, index.shape))] = gathered
        return whole

    return lambda: grad.scatter(axis, places, 0.0), None, None, of_source


@_writing(*aten("scatter_add"))
def scatter_add(input: Tensor, dim: int, index: Tensor, source: Any, *, y: Tensor, grad: Tensor) -> Any:
    """``y = x``, plus the source at the index."""
    return grad, None, None, scatter(input, dim, index, source, y=y, grad=grad)[3]
