"""Layouts: what brings the activations of a target layer to the shape of maps, and derivatives with them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.cells import Cells


class Layout(ABC):
    """How the activations of a layer lie on the image.

    Attributes:
        batch: the dimension that counts the images.
        channels: the dimension that counts the channels.
        before: number of tokens before those of the grid.
        is_known: whether it is known where on the image each number lies.
        is_that_of_maps: whether nothing has to be moved.
    """

    batch: int
    channels: int
    is_known = True
    is_that_of_maps = False
    before = 0

    @property
    def tokens(self) -> tuple[int, int, int] | None:
        """The dimension of tokens, the first one on the grid, and their number; None where there are none."""
        return None

    @property
    def others(self) -> int:
        """Number of tokens that are on no position of the grid."""
        return 0

    @abstractmethod
    def __call__(self, activations: Tensor) -> Tensor:
        """Return activations, or numbers in their places, as maps lie: (N, T, H, W), (N, T, D, H, W) or (N, T, L)."""

    def of_targets(self, pulled: Tensor) -> Tensor:
        """Return numbers for each of K targets, (K, *activations), in the shape of maps, (K, N, T, H, W)."""
        return torch.stack([self(part) for part in pulled])

    def filled(self, means: Tensor, shape: Sequence[int]) -> Tensor:
        """Return activations of a shape with the same numbers at all positions, where these are known.

        Args:
            means: shape (N, T, others + 1), in the order of tokens; that of the grid is one of them.
            shape: of activations.
        """
        raise NotImplementedError

    def gradients(self, pullback: Any) -> Any:
        """Return the derivatives of K targets in the shape of maps, (K, N, T, H, W)."""
        return pullback.arranged(self.of_targets)

    def sums(self, pullback: Any) -> Tensor:
        """Return the derivatives of K targets summed over the positions of every channel, (K, N, T)."""
        return self.gradients(pullback).over_positions()  # type: ignore[no-any-return]


class MapLayout(Layout):
    """That of maps: (N, T, H, W), (N, T, D, H, W) or (N, T, L)."""

    batch, channels = 0, 1
    is_that_of_maps = True

    def __call__(self, activations: Tensor) -> Tensor:
        """Return the activations."""
        return activations

    def parts(self, output: Tensor) -> tuple[Tensor, ...]:
        """Return the numbers at the positions, (N, T, positions)."""
        return (output.flatten(2),)

    def filled(self, means: Tensor, shape: Sequence[int]) -> Tensor:
        return means.unflatten(2, (1,) * (len(shape) - 2)).expand(1, -1, *shape[2:])

    def gradients(self, pullback: Any) -> Any:
        return pullback.whole

    def sums(self, pullback: Any) -> Tensor:
        return pullback.sums()


class UserLayout(Layout):
    """One that only a function of the user's knows.

    Args:
        function: ``reshape_transform``.
    """

    batch, channels = 0, 1
    is_known = False

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, activations: Tensor) -> Tensor:
        """Return what the function makes of activations."""
        return self._function(activations)


@dataclass(frozen=True)
class GridLayout(Layout):
    """How the output of a layer lies on the image.

    Attributes:
        grid: its positions, (H, W), (D, H, W) or (L,).
        dims: number of its dimensions.
        batch: the dimension that counts the images.
        channels: the dimension that counts the channels; the others are positions, row by row.
        before: number of tokens before those of the grid: class, distillation, registers.
        after: number of tokens after them.
        cells: where on the picture the positions lie; None: they share it out evenly.
    """

    grid: tuple[int, ...]
    dims: int
    batch: int
    channels: int
    before: int = 0
    after: int = 0
    cells: Cells | None = None

    @property
    def tokens(self) -> tuple[int, int, int] | None:
        if self.dims != 3 or (self.batch, self.channels) == (0, 1):  # a signal's channels come first
            return None
        return 1 - self.batch, self.before, math.prod(self.grid)

    @property
    def others(self) -> int:
        return self.before + self.after

    def parts(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens before, on and after the grid, shape (..., N, T, number) each."""
        first = output.dim() - self.dims
        moved = output.movedim((first + self.batch, first + self.channels), (first, first + 1)).flatten(first + 2)
        return moved.split([self.before, math.prod(self.grid), self.after], -1)  # type: ignore[return-value]

    def filled(self, means: Tensor, shape: Sequence[int]) -> Tensor:
        before, of_grid, after = means.split([self.before, 1, self.after], -1)
        rows = torch.cat([before, of_grid.expand(-1, -1, math.prod(self.grid)), after], -1)
        moved = rows if self.dims == 3 else rows.unflatten(-1, self.grid)
        return moved.movedim((0, 1), (self.batch, self.channels))

    def __call__(self, output: Tensor) -> Tensor:
        """Return the numbers at the positions of the grid, shape ``(..., N, T, *grid)``; other dimensions may lead."""
        if (self.batch, self.channels) == (0, 1) and self.tokens is None:
            return output
        return self.parts(output)[1].unflatten(-1, self.grid)

    def of_targets(self, pulled: Tensor) -> Tensor:
        return self(pulled)

    def sums(self, pullback: Any) -> Tensor:
        if self.tokens is None:
            return super().sums(pullback)
        return pullback.token_sums(*self.tokens).squeeze(self.tokens[0] + 1)
