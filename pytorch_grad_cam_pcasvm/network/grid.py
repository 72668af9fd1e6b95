"""Grid: the positions of dense features on a picture, in reading order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torchvision.transforms.v2.functional import gaussian_blur

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.anomalies import anomaly_range
from pytorch_grad_cam_pcasvm.network.cells import Cells

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
        maps = gaussian_blur(maps, size, [sigma] * 2)
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
