"""Shapes that people draw on photos: where each is, and the pixels that it has."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.data.mask_files import read_mask
from pytorch_grad_cam_pcasvm.studio.data.polygons import fill_ring, walk_line
from pytorch_grad_cam_pcasvm.studio.data.run_lengths import draw_counts


@dataclass(frozen=True)
class Canvas:
    """The pixels of a photo on which shapes are drawn.

    Attributes:
        width: of the photo.
        height: of the photo.
        x: how many of its pixels a pixel of the annotated photo is wide: another number than 1 if it was resized.
        y: how many it is high.
    """

    width: int
    height: int
    x: float = 1.0
    y: float = 1.0

    @property
    def annotated(self) -> tuple[int, int]:
        """The width and height of the photo that was annotated."""
        return round(self.width / self.x), round(self.height / self.y)


@dataclass(frozen=True)
class Patch:
    """The pixels of a shape.

    Attributes:
        top: the first row.
        left: the first column.
        inside: from there on, boolean, shape (rows, columns).
        is_thin: it, or a part of it, has no pixel's centre, so that it marks the pixels that it passes.
    """

    top: int
    left: int
    inside: np.ndarray
    is_thin: bool = False


class Form(Protocol):
    """Where a shape is."""

    @property
    def is_box(self) -> bool:
        """Whether it is a box around a thing, which has an outline of its own."""

    def draw(self, canvas: Canvas) -> Patch:
        """Return the pixels of the shape on a photo; none if it lies beyond it.

        Raises:
            ValueError: it is larger than the photo, or is not what its file says; the message is what it does, a verb.
        """


@dataclass(frozen=True)
class Rings:
    """What is inside of any of some polygons: pixels whose centres are, by even-odd for each.

    Attributes:
        rings: the corners of each, (x, y), shape (n, 2).
        is_box: it is all that is known of where a thing is, which has an outline of its own.
    """

    rings: Sequence[np.ndarray]
    is_box: bool = False

    @classmethod
    def from_edges(cls, left: float, top: float, right: float, bottom: float, angle: float = 0.0) -> "Rings":
        """Return a box by its edges; by its corners, if it is turned around its centre: clockwise, in degrees."""
        corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)], float)
        if angle:
            corners = _turn(corners, corners.mean(0), angle)
        return cls([corners], is_box=True)

    def draw(self, canvas: Canvas) -> Patch:
        """Return its pixels; of a ring without any centre, the pixels on its way."""
        patches = [self._draw_ring(ring * (canvas.x, canvas.y), canvas) for ring in self.rings]
        return _join(patches)

    @staticmethod
    def _draw_ring(ring: np.ndarray, canvas: Canvas) -> Patch:
        top, left, inside = fill_ring(ring, canvas.width, canvas.height)
        if inside.any():
            return Patch(top, left, inside)
        return Patch(*walk_line(np.concatenate([ring, ring[:1]]), canvas.width, canvas.height), is_thin=True)


@dataclass(frozen=True)
class Ellipse:
    """An ellipse, or a circle.

    Attributes:
        centre: (x, y).
        radii: along its own axes.
        angle: by which it is turned, clockwise, in degrees.
    """

    centre: tuple[float, float]
    radii: tuple[float, float]
    angle: float = 0.0
    is_box: bool = field(default=False, init=False)

    def draw(self, canvas: Canvas) -> Patch:
        """Return the pixels whose centres are in it; if none are, the pixels on its longer axis."""
        largest, size = max(self.radii), (canvas.width, canvas.height)
        scales = (canvas.x, canvas.y)
        low, high = (
            [int(np.clip((self.centre[axis] + way * largest) * scales[axis] + way, 0, size[axis])) for axis in (0, 1)]
            for way in (-1, 1)
        )
        x, y = ((np.arange(low[axis], high[axis]) + 0.5) / scales[axis] - self.centre[axis] for axis in (0, 1))
        if min(self.radii) > 0:
            cosine, sine = np.cos(np.radians(self.angle)), np.sin(np.radians(self.angle))
            along, beside = x * cosine + y[:, None] * sine, y[:, None] * cosine - x * sine
            inside = (along / self.radii[0]) ** 2 + (beside / self.radii[1]) ** 2 <= 1
            if inside.any():
                return Patch(low[1], low[0], inside)
        centre = np.array(self.centre)
        axis = np.array([(self.radii[0], 0.0)] if self.radii[0] >= self.radii[1] else [(0.0, self.radii[1])])
        ends = _turn(np.concatenate([centre - axis, centre + axis]), centre, self.angle)
        return Patch(*walk_line(ends * scales, *size), is_thin=True)


@dataclass(frozen=True)
class Polyline:
    """A line, of one pixel's width, or points.

    Attributes:
        points: (x, y), shape (n, 2).
        is_joined: it is a line; False: each point is by itself.
    """

    points: np.ndarray
    is_joined: bool = True
    is_box: bool = field(default=False, init=False)

    def draw(self, canvas: Canvas) -> Patch:
        """Return the pixels that it passes."""
        points = self.points * (canvas.x, canvas.y)
        parts = [points] if self.is_joined else points[:, None]
        return _join([Patch(*walk_line(part, canvas.width, canvas.height)) for part in parts])


@dataclass(frozen=True)
class Runs:
    """A mask of a part of a photo, as the lengths of its runs.

    Attributes:
        counts: of zeros, then ones, and so on.
        size: (width, height) of the part; None: it is the photo.
        corner: its first column and row.
        by_column: the runs go down each column; False: along each row.
    """

    counts: Sequence[int]
    size: tuple[int, int] | None
    corner: tuple[int, int] = (0, 0)
    by_column: bool = True
    is_box: bool = field(default=False, init=False)

    def draw(self, canvas: Canvas) -> Patch:
        """Return its pixels.

        Raises:
            ValueError: it is larger than the photo, or has more runs than pixels.
        """
        width, height = self.size or canvas.annotated
        _check_part((width, height), canvas)
        return _place(draw_counts(self.counts, width, height, by_column=self.by_column), self.corner, canvas)


@dataclass(frozen=True)
class Stored:
    """A mask of a part of a photo, as a picture in a file of annotations.

    Attributes:
        file: of the annotations.
        data: the picture, as PNG.
        corner: its first column and row.
    """

    file: Path
    data: bytes
    corner: tuple[int, int]
    is_box: bool = field(default=False, init=False)

    @property
    def size(self) -> tuple[int, int]:
        """Its width and height.

        Raises:
            ValueError: it is no picture.
        """
        try:
            with Image.open(io.BytesIO(self.data)) as picture:
                return picture.size
        except Exception as error:  # Pillow has no common name for what it raises
            raise ValueError(f"has a mask that cannot be read ({error})") from error

    def draw(self, canvas: Canvas) -> Patch:
        """Return its pixels.

        Raises:
            ValueError: it is larger than the photo, or cannot be read.
        """
        _check_part(self.size, canvas)
        try:
            inside = read_mask(self.file, self.data).numbers > 0
        except (OSError, ValueError) as error:
            raise ValueError(f"has a mask that cannot be read ({error})") from error
        return _place(inside, self.corner, canvas)


def _check_part(size: tuple[int, int], canvas: Canvas) -> None:
    """Refuse a mask of a part that is larger than the photo, before any pixel of it is made.

    Raises:
        ValueError: it is.
    """
    if any(own > whole + 1 for own, whole in zip(size, canvas.annotated, strict=True)):
        width, height = canvas.annotated
        raise ValueError(f"has a mask of {size[0]} x {size[1]} pixels on a photo of {width} x {height}")


def _place(inside: np.ndarray, corner: tuple[int, int], canvas: Canvas) -> Patch:
    """Return a mask of a part where it is on a photo: of each pixel there the nearest of the mask."""
    places, starts = [], []
    whole, scales, lengths = (canvas.width, canvas.height), (canvas.x, canvas.y), inside.shape[::-1]
    for axis in (0, 1):
        first = max(0, int(np.floor(corner[axis] * scales[axis])))
        last = min(whole[axis], int(np.ceil((corner[axis] + lengths[axis]) * scales[axis])))
        own = np.floor((np.arange(first, last) + 0.5) / scales[axis]).astype(int) - corner[axis]
        starts.append(first + int((own < 0).sum()))
        places.append(own[(own >= 0) & (own < lengths[axis])])
    patch = Patch(starts[1], starts[0], inside[np.ix_(places[1], places[0])])
    if patch.inside.any() or not inside.any():
        return patch
    rows, columns = np.nonzero(inside)
    points = np.stack([columns + corner[0] + 0.5, rows + corner[1] + 0.5], 1) * scales
    within = (points >= 0).all(1) & (points < whole).all(1)
    if not within.any():
        return patch
    marks = [Patch(*walk_line(point, *whole), is_thin=True) for point in points[within][:, None]]
    return _join(marks)


def _turn(points: np.ndarray, centre: np.ndarray, angle: float) -> np.ndarray:
    """Return points turned around a centre, clockwise as people see it, in degrees."""
    cosine, sine = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    return (points - centre) @ np.array([(cosine, sine), (-sine, cosine)]) + centre


def _join(patches: Sequence[Patch]) -> Patch:
    """Return the union of some patches."""
    own = [patch for patch in patches if patch.inside.any()]
    if len(own) < 2:
        return own[0] if own else patches[0]
    top, left = min(patch.top for patch in own), min(patch.left for patch in own)
    bottom = max(patch.top + patch.inside.shape[0] for patch in own)
    right = max(patch.left + patch.inside.shape[1] for patch in own)
    inside = np.zeros((bottom - top, right - left), bool)
    for patch in own:
        rows, columns = patch.inside.shape
        inside[patch.top - top :, patch.left - left :][:rows, :columns] |= patch.inside
    return Patch(top, left, inside, any(patch.is_thin for patch in own))
