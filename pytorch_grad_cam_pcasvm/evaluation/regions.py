"""Regions: the true masks or boxes of a data set, as they were given."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

OF_VOLUMES = "only pictures can be put side by side, or have boxes: give masks of the input's size"


def read_regions(count: int, masks: Any) -> tuple[np.ndarray, bool]:
    """Return masks, or boxes, of so many images as an array, and whether they are boxes.

    Raises:
        ValueError: they are neither, or not of each image.
    """
    kinds = "masks must be an array of shape (R, H, W), nonzero inside, or boxes of shape (R, 4)"
    try:
        regions = np.asarray(masks.cpu() if isinstance(masks, Tensor) else masks)
    except ValueError as error:
        raise ValueError(f"{kinds}; these differ in size: bring them to the size of the input") from error
    if regions.dtype.kind not in "biuf" or not np.isfinite(regions).all():
        raise ValueError(f"{kinds}; these are no finite numbers: use zeros for an image without an object")
    if len(regions) != count:
        raise ValueError(f"{len(regions)} masks for {count} images: give one for each, in order")
    boxes = regions.ndim == 2 and regions.shape[1] == 4
    if boxes:
        _check_boxes(regions)
    return regions, boxes


def draw_masks(regions: np.ndarray, boxes: bool, rows: Sequence[int], size: tuple[int, ...]) -> np.ndarray:
    """Return the masks of some images, (N, H, W).

    Raises:
        ValueError: masks have another size, or boxes lie beyond it.
    """
    if boxes and len(size) != 2:
        raise ValueError(OF_VOLUMES)
    if boxes and (regions[:, 2].max() > size[1] or regions[:, 3].max() > size[0]):
        raise ValueError(
            f"boxes reach x = {regions[:, 2].max():g} and y = {regions[:, 3].max():g}, beyond the input of "
            f"{size[1]} x {size[0]} pixels: scale them as the transform scales the images"
        )
    if not boxes and regions.shape[1:] != size:
        raise ValueError(f"masks of {regions.shape[1:]} for images of {size}: bring them to the size of the input")
    return _draw_boxes(regions[rows].astype(int), size) if boxes else regions[rows].astype(bool)


def _check_boxes(boxes: np.ndarray) -> None:
    if 0 < boxes.max() <= 1:
        raise ValueError("boxes must be in pixels, but none goes beyond 1: multiply x by the width and y by the height")
    if (boxes < 0).any():
        raise ValueError("boxes must lie in the image, but some begin below 0: clip them")
    if (boxes[:, 2:] < boxes[:, :2]).any():
        raise ValueError("boxes must be x0, y0, x1, y1, from one corner to the other: are yours x, y, width, height?")


def _draw_boxes(boxes: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """Return masks (N, H, W) of boxes."""
    y, x = np.ogrid[: size[0], : size[1]]
    x0, y0, x1, y1 = boxes.T[..., None, None]
    return (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)
