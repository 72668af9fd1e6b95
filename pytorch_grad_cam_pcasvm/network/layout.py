"""Layout: how the activations of a target layer, and derivatives by them, become numbers in the shape of maps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.grid import Cells
from pytorch_grad_cam_pcasvm.network.tiling import Crops


@dataclass(frozen=True)
class Layout:
    """How the activations of a layer lie on the image. Maps are (N, T, H, W), (N, T, D, H, W) or (N, T, L).

    Attributes:
        grid: the positions, (H, W), (D, H, W) or (L,); () where only a function knows them.
        dims: number of dimensions of the activations.
        batch: the dimension that counts the images.
        channels: the dimension that counts the channels; the others are positions, row by row.
        before: number of tokens before those of the grid: class, distillation, registers.
        after: number of tokens after them.
        cells: where on the picture the positions lie; None: they share it out evenly.
        function: a user's ``reshape_transform``, which alone knows how they lie; None: it is known.
        crops: of a network that runs on tiles, where these lie; the rest is of one tile, and in the shape of maps the
            tiles of an image are side by side, (N, T, tiles H, W). None: there is a row for each image.
    """

    grid: tuple[int, ...]
    dims: int
    batch: int = 0
    channels: int = 1
    before: int = 0
    after: int = 0
    cells: Cells | None = None
    function: Callable[[Tensor], Tensor] | None = None
    crops: Crops | None = None

    @property
    def is_known(self) -> bool:
        """Whether it is known where on the image each number lies."""
        return self.function is None

    @cached_property
    def is_map_shaped(self) -> bool:
        """Whether nothing has to be moved."""
        return self.has_channels_first and self.crops is None

    @cached_property
    def has_channels_first(self) -> bool:
        """Whether nothing has to be moved within a row."""
        return self.function is None and (self.batch, self.channels) == (0, 1)

    @cached_property
    def tokens(self) -> tuple[int, int, int] | None:
        """The dimension of tokens, the first one on the grid, and their number; None where there are none."""
        if self.dims != 3 or self.function is not None or self.has_channels_first:
            return None
        return 1 - self.batch, self.before, math.prod(self.grid)

    @property
    def extra_tokens(self) -> int:
        """Number of tokens that are on no position of the grid."""
        return self.before + self.after

    @property
    def tile_count(self) -> int:
        """Number of rows of activations of each image: 1, or one for each of its tiles."""
        return 1 if self.crops is None else self.crops.count

    def add_tiles(self, maps: Tensor) -> Tensor:
        """Return maps (N, K, H, W), of tiles side by side, added on their common grid; of others they stay."""
        return maps if self.crops is None else self.crops.add_tiles(maps)

    def __call__(self, activations: Tensor) -> Tensor:
        """Return activations, or numbers in their places, as maps lie; if it is known, more dimensions may lead."""
        if self.crops is None:
            return self._arrange(activations)
        if activations.shape[activations.dim() - self.dims + self.batch] == 1:  # the same in all tiles
            sizes = [-1] * activations.dim()
            sizes[activations.dim() - self.dims + self.batch] = self.crops.count
            activations = activations.expand(sizes)
        return self.crops.put_side_by_side(self._arrange(activations))

    def _arrange(self, activations: Tensor) -> Tensor:
        """Return each row as maps lie."""
        if self.function is not None:
            return self.function(activations)
        return activations if self.has_channels_first else self.split_tokens(activations)[1].unflatten(-1, self.grid)

    def split_tokens(self, activations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens before, on and after the grid, shape (..., N, T, number) each."""
        first = activations.dim() - self.dims
        channels_first = activations.movedim((first + self.batch, first + self.channels), (first, first + 1)).flatten(
            first + 2
        )
        return channels_first.split([self.before, channels_first.shape[-1] - self.extra_tokens, self.after], -1)

    def of_targets(self, pulled: Tensor) -> Tensor:
        """Return numbers for each of K targets, (K, *activations), in the shape of maps, (K, N, T, H, W)."""
        return self(pulled) if self.is_known else torch.stack([self(part) for part in pulled])

    def expand_means(self, means: Tensor) -> Tensor:
        """Return activations with the same numbers at all positions, where these are known.

        Args:
            means: shape (N, T, others + 1), in the order of tokens; that of the grid is one of them.
        """
        before, of_grid, after = means.split([self.before, 1, self.after], -1)
        shape = self.grid if self.dims > 3 else (math.prod(self.grid),)
        rows = of_grid.unflatten(-1, [1] * len(shape)).expand(-1, -1, *shape)
        whole = torch.cat([before, rows, after], -1) if self.extra_tokens else rows
        return whole.movedim((0, 1), (self.batch, self.channels))

    def gradients(self, pullback: Any) -> Any:
        """Return the derivatives of K targets in the shape of maps, (K, N, T, H, W)."""
        return pullback.whole if self.is_map_shaped else pullback.arranged(self.of_targets)

    def sums(self, pullback: Any) -> Tensor:
        """Return the derivatives of K targets summed over the positions of every channel, (K, N, T)."""
        if self.tokens is not None:
            whole = pullback.token_sums(*self.tokens).squeeze(self.tokens[0] + 1)
        elif self.has_channels_first:
            whole = pullback.sums()
        else:
            return self.gradients(pullback).over_positions()
        return whole if self.crops is None else self.crops.sum_tiles(whole, 1)


def lay_out_maps(shape: Sequence[int]) -> Layout:
    """Return the layout of activations of a shape that are maps already."""
    return Layout(tuple(shape[2:]), len(shape))


_STRIP = 4  # times as long as wide, beyond which numbers are signals, such as those of electrodes


def has_other_readings(shape: Sequence[int], image: Sequence[int]) -> bool:
    """Return whether the shape of an output does not tell that its channels come first, (N, T, ...)."""
    if math.prod(shape[2:]) == 1:
        return False
    if len(shape) != len(image):
        return True
    sides = [image[dim] for dim in find_sides(image)]
    return _in_proportion(shape[1:-1], sides) or not _in_proportion(shape[2:], sides)


def find_sides(image: Sequence[int]) -> range:
    """Return the dimensions of an image that are positions: behind its channels, or before them if these come last.

    Channels come last if they are at most 4, and the others are the sides of a picture: larger, and no strip.
    """
    sides = image[1:-1]
    has_channels_last = len(image) > 3 and image[-1] <= 4 < min(sides) and max(sides) <= _STRIP * min(sides)
    return range(1, len(image) - 1) if has_channels_last else range(2, len(image))


def list_readings(shape: Sequence[int], image: Sequence[int]) -> list[Layout]:
    """Return how an output may lie on an image by its proportions: with its channels first, or last."""
    if len(shape) != len(image):
        return []
    last = Layout(tuple(shape[1:-1]), len(shape), 0, len(shape) - 1)
    sides = [image[dim] for dim in find_sides(image)]
    return [layout for layout in (lay_out_maps(shape), last) if _in_proportion(layout.grid, sides)]


def _in_proportion(sizes: Sequence[int], sides: Sequence[int]) -> bool:
    """Return whether sizes have the proportions of an image, but for a position."""
    pairs = combinations(zip(sizes, sides, strict=True), 2)
    return all(abs(size * side - other * length) <= side + length for (size, length), (other, side) in pairs)
