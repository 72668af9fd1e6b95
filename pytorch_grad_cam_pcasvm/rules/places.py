"""Places: numbers that are taken from, or put at, places of a tensor, counted from its beginning."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import register_jacobian

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
        return (grad.flatten(1) / count.clamp(min=1))[:, places]

    return *put_rule(input, places, source, y=y, grad=grad)[:2], of_source


@_at_places(add_at)
def add_at_rule(input: Tensor, places: Tensor, source: Tensor, *, y: Tensor, grad: Tensor) -> Any:
    """Grad, for the source where it was added."""
    return grad, None, lambda: grad.flatten(1)[:, places]
