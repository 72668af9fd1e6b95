"""Axes: the dimensions of a layer's output that count images, channels and positions, found by changing the input.

Shapes alone do not tell: (N, 16, 16, 16) can be read in two ways, and (5, 5, 16, 32, 32) may count steps of time first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.network.inputs import map_input, pick_images
from pytorch_grad_cam_pcasvm.network.layout import Layout, find_sides

_MOVES = 0.15  # of an axis: by how much the centre of what changes moves along it, at least, if it lies on the image
_BESIDE = 0.5  # of that, at most, along all other axes
_DRAWS = 3  # of noise
_TRIES = 8  # of so many draws, until an axis is told


class UnknownAxesError(Exception):
    """Why the axes of an output cannot be told."""


class UndecidedAxesError(UnknownAxesError):
    """What moves in an output tells no reading from another."""


def find_axes(backbone: nn.Module, run: Callable[[nn.Module, Tensor], Any], x: Any, shape: Sequence[int]) -> Layout:
    """Return how an output of at least four dimensions lies on the image.

    The network runs on noise, and on the same noise with other numbers at the near and at the far end of each axis.

    Args:
        backbone: the network, in evaluation mode, without the hooks of others.
        run: runs such a network on images and returns the output.
        x: images, shape (N, C, ...), or several inputs.
        shape: of the output, for some images.

    Raises:
        UndecidedAxesError: what moves tells no reading from another.
        UnknownAxesError: no reading agrees with what moves.
    """
    image = pick_images(x)[0].shape
    sides = tuple(image[dim] for dim in find_sides(image))
    rows = next(number for number in count(_DRAWS * (1 + 2 * len(sides))) if number not in shape)
    change: Any = 0.0
    for seed in range(_TRIES):  # what a few numbers follow by chance, more noise tells
        output = run(backbone, map_input(partial(_change_ends, rows, seed), x))
        images = [dim for dim, size in enumerate(output.shape) if size == rows]
        if len(images) != 1:
            raise UnknownAxesError(f"for {rows} images it returns {tuple(output.shape)}")
        numbers = output.movedim(images[0], 0)[: _DRAWS * (1 + 2 * len(sides))].double().unflatten(0, (_DRAWS, -1))
        change, sizes = change + (numbers - numbers[:, :1]).abs().sum(0), numbers.shape[2:]
        try:
            along = [
                _find_moved(change[1 + 2 * axis], change[2 + 2 * axis]) for axis, side in enumerate(sides) if side > 1
            ]
            break
        except UndecidedAxesError:
            if seed == _TRIES - 1:
                raise
    free = [dim for dim in range(len(sizes)) if dim not in along]
    channels = [dim for dim in free if sizes[dim] > 1] or free[:1]
    positions = [dim for dim in range(len(sizes)) if dim not in channels]
    if len(channels) != 1 or len(set(along)) < len(along):
        counted = " x ".join(str(sizes[dim]) for dim in channels)
        raise UnknownAxesError(
            f"of the shape {tuple(output.shape)} that it has for {rows} images, {counted} count neither images nor "
            "positions (steps and channels?)"
        )
    if len(positions) == len(sides):
        expected = [dim for dim, side in zip(positions, sides, strict=True) if side > 1]
    else:
        expected = [dim for dim in positions if sizes[dim] > 1]
    if along != expected:
        raise UnknownAxesError(f"its positions, in the shape {tuple(output.shape)}, are not in the picture's order")
    dims = [dim for dim in range(output.dim()) if dim != images[0]]
    return Layout(tuple(sizes[dim] for dim in positions), output.dim(), images[0], dims[channels[0]])


def _find_moved(near: Tensor, far: Tensor) -> int:
    """Return the axis along which the changes move from one end to the other.

    Raises:
        UndecidedAxesError: there is none, or more than one.
    """
    moves = torch.stack([_centre(far, dim) - _centre(near, dim) for dim in range(near.dim())])
    best = int(moves.argmax())
    beside = float(moves.abs().index_fill(0, torch.tensor(best, device=moves.device), 0).max())
    if not float(moves[best]) >= _MOVES or beside > _BESIDE * float(moves[best]):
        raise UndecidedAxesError(f"no axis alone of {tuple(near.shape)} follows the picture")
    return best


def _centre(change: Tensor, dim: int) -> Tensor:
    """Return where along an axis, from 0 to 1, the centre of changes lies."""
    profile = change.movedim(dim, 0).flatten(1).sum(1)
    places = (torch.arange(len(profile)).to(profile) + 0.5) / len(profile)
    return (profile * places).sum() / profile.sum()


def _change_ends(rows: int, seed: int, x: Tensor) -> Tensor:
    """Return so many images of noise: in each draw one, and it with other numbers at each end of each axis."""
    if not x.is_floating_point() or x.dim() < 3:
        return x[:1].expand(rows, *x.shape[1:])
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.randn((_DRAWS, 2, *x.shape[1:]), generator=generator, device="cpu").to(x)
    parts = []
    for usual, other in noise:
        images = usual.repeat(1 + 2 * (x.dim() - 2), *[1] * usual.dim())
        for number, dim in enumerate(find_sides(x.shape)):
            side = x.shape[dim]
            quarter = -(-side // 4)
            for row, first in enumerate((0, side - quarter), 2 * number + 1):
                images[row].narrow(dim - 1, first, quarter).copy_(4 * other.narrow(dim - 1, first, quarter))
        parts.append(images)
    drawn = torch.cat(parts)
    return torch.cat([drawn, drawn[-1:].expand(rows - len(drawn), *x.shape[1:])])
