"""The grid: the positions of dense features on a picture, and the pixels that each position is made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torchvision.transforms.v2.functional import gaussian_blur

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.anomalies import anomaly_range

_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
_POOLS = nn.MaxPool1d | nn.MaxPool2d | nn.MaxPool3d | nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d
_FACTORS = (2, 4, 8, 16, 32)  # by which a function that is no layer may make a grid coarser

Axis = tuple[float, float]  # the pixel at which the first position begins, and the pixels of each


@dataclass(frozen=True)
class Cells:
    """The pixels of each position: along an axis, the cell of position i begins at ``start + i step``.

    Attributes:
        axes: start and step along each axis of the picture; empty: not known.
        picture: the picture's size.
    """

    axes: tuple[Axis, ...]
    picture: tuple[int, ...]

    def shares(self, masks: Tensor, shape: Sequence[int]) -> Tensor:
        """Return how much of each position's cell masks of pictures (N, *picture) cover, (N, *shape).

        Only pixels of the picture count; where there are none, 0.
        """
        shares = masks.float()
        for dim, (size, length, axis) in enumerate(zip(shape, self.picture, self._require_axes(), strict=True), 1):
            shares = _sum_along(shares, dim, _overlaps(axis, size, length))
        return shares

    def spread(self, maps: Tensor, size: Sequence[int]) -> Tensor:
        """Return maps (N, K, *shape) over the picture, (N, K, *size), linear between the centres of cells."""
        for dim, (pixels, length, axis) in enumerate(zip(size, self.picture, self._require_axes(), strict=True), 2):
            maps = _sum_along(maps, dim, _interpolate(axis, maps.shape[dim], length, pixels))
        return maps

    def _require_axes(self) -> tuple[Axis, ...]:
        if not self.axes:
            raise ValueError(
                f"it is not known where the positions lie on a picture of {' x '.join(map(str, self.picture))}, which "
                "the network does not divide evenly: resize pictures to a multiple of its stride or patches, or give "
                "masks of the grid, and no size="
            )
        return self.axes


def _sum_along(tensor: Tensor, dim: int, weights: Tensor) -> Tensor:
    """Return a tensor with weighted sums, (new size, size), along a dimension."""
    return torch.tensordot(tensor, weights.to(tensor), dims=([dim], [1])).movedim(-1, dim)


def _overlaps(axis: Axis, count: int, length: int) -> Tensor:
    """Return how much of each pixel belongs to each cell, (count, length), as parts of 1."""
    start, step = axis
    first = start + step * torch.arange(count, dtype=torch.float64)[:, None]
    pixels = torch.arange(length, dtype=torch.float64)
    parts = (torch.minimum(first + step, pixels + 1) - torch.maximum(first, pixels)).clamp(min=0)
    return parts / parts.sum(1, keepdim=True).clamp(min=1e-9)


def _interpolate(axis: Axis, count: int, length: int, pixels: int) -> Tensor:
    """Return the weights of positions, (pixels, count), at the centres of pixels of a picture in another size."""
    start, step = axis
    centres = (torch.arange(pixels, dtype=torch.float64) + 0.5) * (length / pixels)
    places = ((centres - start) / step - 0.5).clamp(0, count - 1)
    return (1 - (places[:, None] - torch.arange(count)).abs()).clamp(min=0)


class Geometry:
    """Where the grids of a network's layers lie on the picture, by the strides and paddings of its layers.

    Args:
        picture: the picture's size.
    """

    def __init__(self, picture: Sequence[int]) -> None:
        self.picture = tuple(picture)
        self._axes: dict[tuple[int, ...], tuple[Axis, ...]] = {self.picture: ((0.0, 1.0),) * len(self.picture)}
        self._changes: dict[tuple[int, ...], Tensor] = {}  # by how much each position has changed, (N, *grid)
        self._is_lost = False  # whether it is not known where the input of the first layer lies on the picture

    def see(self, module: nn.Module, x: Any, y: Any) -> None:
        """Note a layer that has run on images of noise, of which some were changed in a corner."""
        if not isinstance(module, _CONVOLUTIONS | _POOLS) or not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return
        if x.dim() != y.dim() or x.dim() != len(self.picture) + 2:
            return
        before, after = tuple(x.shape[2:]), tuple(y.shape[2:])
        if before not in self._axes and not self._changes:  # the first layer: of a padded, cropped or resized picture
            axes = _shifted(_change(x), self.picture)
            self._is_lost = axes is None
            if axes is not None:
                self._axes[before] = axes
        axes = self._find_place(before)
        if axes is not None and after not in self._axes:
            self._axes[after] = tuple(
                starmap(_behind, zip(axes, *_options(module, len(axes)), before, after, strict=True))
            )
        self._changes.setdefault(after, _change(y))

    def cells(self, grid: Sequence[int]) -> Cells | None:
        """Return the cells of a grid; None: the picture is shared out evenly."""
        axes = self._find_place(tuple(grid))
        sides = list(zip(grid, self.picture, strict=True))
        if axes is None or not self._agrees(tuple(grid), axes):
            even = not self._is_lost and all(length % size == 0 for size, length in sides)
            return None if even else Cells((), self.picture)
        if all(math.isclose(step * size, length) for (size, length), (_, step) in zip(sides, axes, strict=True)):
            return None
        return Cells(axes, self.picture)

    def _find_place(self, grid: tuple[int, ...]) -> tuple[Axis, ...] | None:
        """Return the place of a grid on the image; a grid that no layer made is a function's, such as a pooling one."""
        if grid in self._axes:
            return self._axes[grid]
        for factor in _FACTORS:
            for finer, axes in reversed(self._axes.items()):
                sides = list(zip(finer, grid, strict=True))
                if any(
                    all(round_(fine / factor) == size for fine, size in sides) for round_ in (math.ceil, math.floor)
                ):
                    return tuple((start, step * factor) for start, step in axes)
        return None

    def _agrees(self, grid: tuple[int, ...], axes: tuple[Axis, ...]) -> bool:
        """Return whether the far end of the picture moves the far end of the grid, as its cells say."""
        change = self._changes.get(grid)
        for dim, (start, step) in enumerate(axes) if change is not None else ():
            profile = change[2 + dim].movedim(dim, 0).reshape(grid[dim], -1).sum(1)  # type: ignore[index]
            centre = float((profile * torch.arange(len(profile)).to(profile)).sum() / profile.sum().clamp(min=1e-30))
            length = self.picture[dim]
            expected = (length - math.ceil(length / 4) / 2 - start) / step - 0.5
            if abs(centre - min(expected, len(profile) - 1)) > max(1.0, len(profile) / 6):
                return False
        return True


def _change(tensor: Tensor) -> Tensor:
    """Return by how much the positions of each image differ from the first image's, (N, *grid)."""
    return (tensor - tensor[:1]).abs().amax(1).double()


def _shifted(change: Tensor, picture: tuple[int, ...]) -> tuple[Axis, ...] | None:
    """Return where the input of the first layer lies on the picture, by the pixels that moved; None: not known.

    Image 2 + a was changed in the last quarter of axis a, and the first quarter of the others.
    """
    axes = list[Axis]()
    for dim, length in enumerate(picture):
        quarter, size = math.ceil(length / 4), change.shape[1 + dim]
        far = _reach(change[2 + dim], dim)
        if far is None:
            return None
        # An image in which this is lost has lost its own far end, too.
        near = _reach(change[2 + (dim + 1) % len(picture)], dim) if len(picture) > 1 else None
        shift, ratio = far[0] - (length - quarter), size / length
        if near is None or near[1] - quarter == shift:
            axes.append((float(-shift), 1.0))
        elif abs(far[0] - (length - quarter) * ratio) <= 2 and abs(near[1] - quarter * ratio) <= 2:
            axes.append((0.0, 1 / ratio))
        else:
            return None
    return tuple(axes)


def _reach(change: Tensor, dim: int) -> tuple[int, int] | None:
    """Return the beginning and end of the changed positions along an axis."""
    changed = (change > 1e-6 * change.amax()).movedim(dim, 0).reshape(change.shape[dim], -1).any(1)
    places = changed.nonzero()[:, 0].tolist()
    return (places[0], places[-1] + 1) if places else None


def _options(module: Any, axes: int) -> list[list[Any]]:
    """Return the reach, stride, padding (None: ``"same"``) and ceil mode of a layer along each axis."""
    kernel, dilation = (_expand(getattr(module, name, 1), axes) for name in ("kernel_size", "dilation"))
    padding = {"same": None, "valid": 0}.get(module.padding, 0) if isinstance(module.padding, str) else module.padding
    reach = [1 + d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    ceil = getattr(module, "ceil_mode", False)
    return [reach, *(_expand(option, axes) for option in (module.stride, padding, ceil))]


def _expand(value: Any, axes: int) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value] * axes


def _behind(axis: Axis, reach: int, stride: int, padding: int | None, ceil: bool, before: int, after: int) -> Axis:
    """Return where the output of a layer lies along an axis.

    A position lies in the middle of what the layer looks at; with the usual padding of half a kernel on both sides,
    position i of a stride s begins at pixel i s.
    """
    start, step = axis
    if padding is None:  # "same", which has no stride
        return axis
    rest = before + 2 * padding - reach
    if after != rest // stride + 1 and not (ceil and after == -(-rest // stride) + 1):
        return start, step * stride  # padded in its forward
    usual = padding == 0 if reach <= stride else abs((reach - 1) / 2 - padding) <= 0.5
    return (start if usual else start + ((reach - stride) / 2 - padding) * step), step * stride


MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class Grid:
    """The positions of dense features on a picture.

    Attributes:
        shape: (h, w), (d, h, w) of volumes, or (l,) of signals.
        picture: the picture's own, (H, W), ...
        cells: where on the picture they lie; None: they share it out evenly.
    """

    shape: tuple[int, ...]
    picture: tuple[int, ...]
    cells: Cells | None = None

    @cached_property
    def count(self) -> int:
        """Number of positions P."""
        return math.prod(self.shape)

    def placed(self, rows: Tensor) -> Tensor:
        """Return rows of N images, (N P, C), at their positions, (N, C, *shape)."""
        return rows.unflatten(0, (-1, self.count)).mT.unflatten(-1, self.shape)

    def covered(self, mask: Tensor) -> Tensor:
        """Return which positions, (*shape), are covered by a mask of the grid or the picture: by most of their area."""
        return (
            mask
            if tuple(mask.shape) == self.shape
            else measure_share(mask.unsqueeze(0), self.shape, self.cells)[0] > 0.5
        )

    def spread(self, maps: Tensor, size: Sequence[int]) -> Tensor:
        """Return maps (N, K, *shape) over the picture, (N, K, *size)."""
        return upsample_maps(maps, size) if self.cells is None else self.cells.spread(maps, size)


def measure_share(masks: Tensor, shape: tuple[int, ...], cells: Cells | None = None) -> Tensor:
    """Return how much of each position masks of pictures (N, ...) cover, (N, *shape)."""
    if cells is not None and cells.picture == tuple(masks.shape[1:]):
        return cells.shares(masks, shape)
    pools: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
    share: Tensor = pools[len(shape) - 1](masks.float().unsqueeze(1), shape)
    return share[:, 0]


def rows_of(features: Tensor) -> Tensor:
    """Return dense features (N, D, *shape) as rows in reading order, (N P, D)."""
    return features.flatten(2).mT.flatten(0, 1)


def on_finest(features: list[Tensor]) -> Tensor:
    """Return the dense features of several layers, (N, D_i, *shape_i), as one on the finest of their grids."""
    finest = max((part.shape[2:] for part in features), key=math.prod)
    mode = MODES[len(finest)]
    parts = [
        part if part.shape[2:] == finest else F.interpolate(part, finest, mode=mode, align_corners=False)
        for part in features
    ]
    return torch.cat(parts, 1)


def upsample_maps(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Return maps (N, K, H, W) or (N, K, D, H, W) upsampled to ``size``, in 2-D as pytorch-grad-cam does.

    Args:
        maps: the maps; also (N, K, L) of signals.
        size: of the result, (H, W), (D, H, W) or (L,).

    Example:
        >>> upsample_maps(maps.maps, (32, 32)).shape
        torch.Size([2, 4, 32, 32])
    """
    return F.interpolate(maps, tuple(size), mode=MODES[len(size)], align_corners=False)


def blurred(maps: Tensor, sigma: float) -> Tensor:
    """Return maps (N, 1, H, W) smoothed by a Gaussian of this standard deviation, as PatchCore has it.

    Raises:
        ValueError: the maps are not of pictures, or smaller than the Gaussian.
    """
    reach = int(4.0 * sigma + 0.5)
    if maps.dim() != 4 or not sigma > 0:
        raise ValueError(f"blur= smooths maps of pictures, (N, H, W), by a positive number of pixels, got {sigma!r}")
    if min(maps.shape[2:]) <= reach:
        raise ValueError(
            f"blur={sigma:g} reaches {reach} pixels, and maps are {tuple(maps.shape[2:])}: upsample them, size=(H, W)"
        )
    for size in ([2 * reach + 1, 1], [1, 2 * reach + 1]):  # one axis after the other, which is the same and much less
        maps = gaussian_blur(maps, size, [sigma])
    return maps


class AnomalyMaps(np.ndarray):
    """An array of anomalies that knows the scale of the training set, as do its parts, but not results of arithmetic.

    Attributes:
        head: the head whose anomalies they are, or None: not known.
        cells: where on the picture the positions lie; None: they share it out evenly.

    Example:
        >>> dense = PCASVMNet(backbone, NearestNeighbors().fit(features), layer="layer2", pool="dense").eval()
        >>> isinstance(dense.anomaly_map(images), AnomalyMaps)
        True
    """

    head: Head | None = None
    cells: Cells | None = None

    @classmethod
    def of(cls, values: np.ndarray, head: Head, cells: Cells | None) -> "AnomalyMaps":
        """Return an array with its head and its cells."""
        maps = values.view(cls)
        maps.head, maps.cells = head, cells
        return maps

    def __array_finalize__(self, source: Any) -> None:
        """Take the head along to a part of an array, and the cells to some of the maps."""
        self.head, cells = getattr(source, "head", None), getattr(source, "cells", None)
        self.cells = cells if cells is not None and self.shape[1:] == source.shape[1:] else None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return the result of arithmetic, which has another scale, as a plain array."""
        plain = np.asarray(array)
        return plain[()] if plain.ndim == 0 else plain

    @property
    def ends(self) -> tuple[float, float] | None:
        """Where the scale of the training set starts and ends; None: not known."""
        return None if self.head is None else anomaly_range(self.head)
