"""Tiling: where tiles lie on a canvas, and how the numbers of all tiles become one grid."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.runtime.device import full_precision, kept_on_devices

Size = tuple[int, int]


def spread_tiles(length: int, side: int, stride: int, overlap: float) -> tuple[int, ...]:
    """Return where tiles begin along an axis: whole strides, evenly spread, the fewest with at least an overlap.

    Args:
        length: of the canvas, whole strides and at least a tile.
        side: of a tile, whole strides.
        stride: of the network.
        overlap: least share of a tile that the next one sees, too, below 1.
    """
    rest, longest = (length - side) // stride, _longest_step(side, stride, overlap) // stride
    steps = -(-rest // longest)
    return tuple((2 * number * rest + steps) // (2 * steps) * stride for number in range(steps + 1)) if steps else (0,)


def measure_canvas(count: int, side: int, stride: int, overlap: float) -> int:
    """Return the length of a canvas for a number of tiles along an axis, the longest with at least an overlap."""
    return side + (count - 1) * _longest_step(side, stride, overlap)


def _longest_step(side: int, stride: int, overlap: float) -> int:
    return max(1, math.floor(side * (1 - overlap) / stride + 1e-9)) * stride


def scale_photo(width: int, height: int, tile: int, size: Size, stride: Size) -> Size:
    """Return the canvas (H, W) of a photo, of which so many pixels become a tile's side.

    Args:
        width: of the photo.
        height: of the photo.
        tile: pixels of the photo.
        size: of a tile, (H, W).
        stride: of the network, (H, W).

    Raises:
        ValueError: the photo is smaller than a tile.
    """
    if min(width, height) < tile:
        raise ValueError(
            f"the photo of {width}x{height} pixels is smaller than a tile of {tile}: choose a smaller tile, --tile or "
            "tile=, or leave such photos out"
        )
    sides = zip((height, width), size, stride, strict=True)
    high, wide = (max(side, round(pixels * side / tile / step) * step) for pixels, side, step in sides)
    return high, wide


@dataclass(frozen=True)
class Crops:
    """The grids of an image's tiles on their common grid, of tiles in reading order.

    Attributes:
        rows: the position at which each row of tiles begins.
        columns: that of each column.
        shape: the grid of a tile, (h, w).
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    shape: Size

    @property
    def count(self) -> int:
        """Number of tiles T."""
        return len(self.rows) * len(self.columns)

    @property
    def first(self) -> "Crops":
        """The first tile alone."""
        return Crops((0,), (0,), self.shape)

    @property
    def grid(self) -> Size:
        """The common grid, (H, W)."""
        return self.rows[-1] + self.shape[0], self.columns[-1] + self.shape[1]

    def put_side_by_side(self, tiles: Tensor) -> Tensor:
        """Return numbers of tiles (..., N T, C, h, w), as of N images, (..., N, C, T h, w)."""
        first = tiles.dim() - 4
        return tiles.unflatten(first, (-1, self.count)).transpose(first + 1, first + 2).flatten(first + 2, first + 3)

    def take_apart(self, images: Tensor) -> Tensor:
        """Return the numbers of tiles, (N T, C, h, w), from (N, C, T h, w)."""
        return images.unflatten(2, (self.count, -1)).transpose(1, 2).flatten(0, 1)

    def repeat(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Return a row for each of N images as one for each of their tiles, the same, counted by a dimension."""
        sizes = [-1] * (rows.dim() + 1)
        sizes[dim + 1] = self.count
        return rows.unsqueeze(dim + 1).expand(sizes).flatten(dim, dim + 1)

    def sum_tiles(self, of_tiles: Tensor, dim: int) -> Tensor:
        """Return numbers of N T tiles, counted by a dimension, summed over the tiles of each image."""
        return of_tiles.unflatten(dim, (-1, self.count)).sum(dim + 1)

    def add_tiles(self, maps: Tensor) -> Tensor:
        """Return maps of tiles side by side, (N, K, T h, w), added on the common grid, (N, K, H, W)."""
        with full_precision(maps.device):
            return self._lay(maps.unflatten(2, (len(self.rows), len(self.columns), self.shape[0])), _add_along)

    def merge(self, features: Tensor) -> Tensor:
        """Return features of the common grid, (N, D, H, W), from features of tiles, (N T, D, h, w).

        A position that several tiles see has the weighted mean of theirs, whose weights are larger the further it is
        from the border of a tile.
        """
        tiles = features.unflatten(0, (-1, len(self.rows), len(self.columns)))
        return self._lay(tiles.permute(0, 3, 1, 2, 4, 5), _average_along)

    def pull_merge(self, grads: Tensor) -> Tensor:
        """Return gradients by tiles' features, (K, N T, D, h, w), from gradients by merged ones, (K, N, D, H, W)."""
        (high, wide), (height, width) = self.shape, self.grid
        of_rows = _average_along(self.rows, high, height, like=grads)
        of_columns = _average_along(self.columns, wide, width, like=grads)
        places = [(r, row, c, column) for r, row in enumerate(self.rows) for c, column in enumerate(self.columns)]
        parts = []
        for r, row, c, column in places:
            down = of_rows[row : row + high, r * high : (r + 1) * high].diagonal().unsqueeze(1)
            across = of_columns[column : column + wide, c * wide : (c + 1) * wide].diagonal()
            parts.append(grads[..., row : row + high, column : column + wide] * (down * across))
        return torch.stack(parts, 2).flatten(1, 2)

    def _lay(self, tiles: Tensor, along: Callable[..., Tensor]) -> Tensor:
        """Return sums of (N, D, R, C, h, w) on the common grid, by weights: first of columns, then of rows."""
        (high, wide), (height, width) = self.shape, self.grid
        of_columns = along(self.columns, wide, width, like=tiles)
        of_rows = along(self.rows, high, height, like=tiles)
        lines = F.linear(tiles.transpose(3, 4).flatten(4), of_columns)  # (N, D, R, h, W)
        return F.linear(lines.flatten(2, 3).mT, of_rows).mT


def _mark_places(begins: tuple[int, ...], length: int, total: int) -> Any:
    """Return ones where a position of a tile lies on the grid, (total, tiles length)."""
    weights, places = np.zeros((total, len(begins), length)), np.arange(length)
    for tile, begin in enumerate(begins):
        weights[begin + places, tile, places] = 1
    return weights.reshape(total, -1)


def _weight_places(begins: tuple[int, ...], length: int, total: int) -> Any:
    """Return the weights of positions of tiles on the grid, by their distance to the border, which sum to 1."""
    places = np.arange(length)
    nearest = np.minimum(places, length - 1 - places) + 0.5
    weights = _mark_places(begins, length, total) * np.tile(nearest, len(begins))
    return weights / weights.sum(1, keepdims=True)


_add_along, _average_along = kept_on_devices(_mark_places), kept_on_devices(_weight_places)


@dataclass(frozen=True)
class Tiling:
    """Where tiles lie on a canvas.

    Attributes:
        rows: the pixel at which each row of tiles begins.
        columns: that of each column.
        size: of a tile, (h, w).
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    size: Size

    @property
    def count(self) -> int:
        """Number of tiles T."""
        return len(self.rows) * len(self.columns)

    def cut(self, x: Tensor, tiles: Sequence[int] | None = None) -> Tensor:
        """Return the tiles of images (N, C, H, W), (N T, C, h, w): image by image, in reading order.

        Args:
            x: images.
            tiles: numbers of some tiles, of N T; None: all.
        """
        height, width = self.size
        places = [(row, column) for row in self.rows for column in self.columns]
        if tiles is None:
            parts = [x[..., row : row + height, column : column + width] for row, column in places]
            return torch.stack(parts, 1).flatten(0, 1)
        chosen = [(tile // self.count, *places[tile % self.count]) for tile in tiles]
        return torch.stack([x[n, :, row : row + height, column : column + width] for n, row, column in chosen])

    def place(self, grid: Sequence[int]) -> Crops:
        """Return where the grids of tiles lie, if a tile has this one.

        Raises:
            ValueError: the tiles do not lie on one grid.
        """
        begins = []
        for pixels, side, positions in zip((self.rows, self.columns), self.size, grid, strict=True):
            if any(pixel * positions % side for pixel in pixels):
                raise ValueError(
                    f"tiles of {self.size[1]}x{self.size[0]} pixels with {grid[1]}x{grid[0]} positions do not lie on "
                    "one grid, as their steps are no whole strides of it: choose an earlier layer"
                )
            begins.append(tuple(pixel * positions // side for pixel in pixels))
        return Crops(begins[0], begins[1], (grid[0], grid[1]))


class Tiled(nn.Module):
    """A network that runs another one, ``net``, on tiles of its images."""

    net: nn.Module
    source: Any  # of the features of a tile
    block: int  # how many tiles run together where no layer is watched
    prefix = "net."  # of the names of its layers

    @property
    def canvas(self) -> Size | None:
        """The size of images, (H, W); None: not the same for all."""
        raise NotImplementedError

    def find_tiling(self, x: Tensor) -> Tiling:
        """Return where the tiles of images lie."""
        raise NotImplementedError

    def prepare(self, x: Tensor) -> None:
        """Prepare to run on images of the shape of x, while nothing is watched."""
        raise NotImplementedError

    def find_layout(self, x: Tensor) -> Any:
        """Return how its output lies on images of the shape of x; None: it has no positions."""
        raise NotImplementedError


def look_inside(backbone: nn.Module, name: str, x: Any) -> tuple[nn.Module, str, Any]:
    """Return the network in which a layer runs, the layer's name there, and images: tiles, if it runs on these.

    Args:
        backbone: the network.
        name: of the layer.
        x: images.
    """
    if not isinstance(backbone, Tiled):
        return backbone, name, x
    return backbone.net, name.removeprefix(backbone.prefix), backbone.find_tiling(x).cut(x)
