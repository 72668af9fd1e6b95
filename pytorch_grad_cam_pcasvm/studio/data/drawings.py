"""What files of annotations say is on photos: shapes with the names of their classes, and how they become pixels."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from pytorch_grad_cam_pcasvm.studio.data.shapes import Canvas, Form, Patch

_FARTHEST = 1e9  # pixels, beyond which nothing is a place on a photo
_FEWEST = 3  # corners of a polygon
_PIXELS = Image.MAX_IMAGE_PIXELS or 1 << 27  # of a photo that was annotated, as Pillow takes them


@dataclass(frozen=True)
class Shape:
    """A thing on a photo.

    Attributes:
        name: its class.
        where: what it is in its file, in words, such as ``"shape 3"``.
        form: where it is on the photo.
    """

    name: str
    where: str
    form: Form


@dataclass(frozen=True)
class Drawing:
    """All that is on a photo, as a file says; nothing, if there are no shapes.

    Attributes:
        file: that says so.
        names: of the photo, in which its file's are looked for one after the other, such as ``"crack/007.jpg"``.
        shapes: on it.
        size: (width, height) of the photo that was annotated; None: the file does not say.
        is_stored: places are of the photo as it is stored, whatever EXIF says of how to turn it, and have no size.
    """

    file: Path
    names: Sequence[str]
    shapes: Sequence[Shape] = field(default_factory=list)
    size: tuple[int, int] | None = None
    is_stored: bool = False

    def draw(self, numbers: Mapping[str, int], size: tuple[int, int]) -> tuple[np.ndarray, list[Shape]]:
        """Return the number of the class at every pixel, and the shapes that are too thin for a pixel of their own.

        Args:
            numbers: of the classes, by name.
            size: (width, height) of the photo.

        Returns:
            Numbers, int64, shape (H, W): 0 outside; of shapes that lie over one another, the smallest one's.

        Raises:
            ValueError: a shape lies beyond the photo, or is not what its file says.
        """
        width, height = self.size or size
        if width * height > max(_PIXELS, size[0] * size[1]):
            raise ValueError(
                f"{self.file} says that {self.names[0]} has {width} x {height} pixels, more than a photo has: annotate "
                f"the photo, which has {size[0]} x {size[1]}"
            )
        canvas = Canvas(*size, size[0] / width, size[1] / height)
        patches = [(shape, self._draw(shape, canvas)) for shape in self.shapes]
        pixels = np.zeros((size[1], size[0]), np.int64)
        for shape, patch in sorted(patches, key=lambda one: -int(one[1].inside.sum())):
            rows, columns = patch.inside.shape
            pixels[patch.top :, patch.left :][:rows, :columns][patch.inside] = numbers[shape.name]
        return pixels, [shape for shape, patch in patches if patch.is_thin]

    def _draw(self, shape: Shape, canvas: Canvas) -> Patch:
        where = f"{shape.where} in {self.file}, {shape.name!r} on {self.names[0]},"
        try:
            patch = shape.form.draw(canvas)
        except ValueError as error:
            raise ValueError(f"{where} {error}: export the annotations anew, or delete it") from error
        if not patch.inside.any():
            width, height = canvas.annotated
            raise ValueError(
                f"{where} has no pixels on the photo of {width} x {height}: was it drawn on another photo, or on one "
                "of another size? Delete it, or mend its place"
            )
        return patch


def read_text(file: Path) -> str:
    """Return the text of a file, without the mark that Windows puts at its start.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no text.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8 ({error}): save it so, or export the annotations anew") from error


def read_json(file: Path) -> Any:
    """Return the content of a file of JSON.

    Raises:
        OSError: it cannot be read, or is cut off.
        ValueError: it is no text.
    """
    text = read_text(file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits
        raise OSError(
            f"the annotations {file} cannot be read ({error}): is the file cut off? Export it anew"
        ) from error


def read_xml(file: Path) -> ElementTree.Element:
    """Return the root of a file of XML.

    Raises:
        OSError: it cannot be read, or is cut off.
    """
    try:
        return ElementTree.parse(file).getroot()
    except (ElementTree.ParseError, OSError, ValueError, LookupError) as error:
        raise OSError(f"the annotations {file} cannot be read ({error})") from error


def read_number(value: Any) -> float | None:
    """Return a number of a file, which may be written as text; None: it is none, or none of a place on a photo."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) <= _FARTHEST and not isinstance(value, bool) else None


def read_size(width: Any, height: Any) -> tuple[int, int] | None:
    """Return the size of a photo, (width, height); None: it is not said."""
    sides = [round(read_number(side) or 0) for side in (width, height)]
    return (sides[0], sides[1]) if min(sides) > 0 else None


def read_points(where: str, values: Any, *, fewest: int = _FEWEST) -> np.ndarray:
    """Return points, (x, y), shape (n, 2).

    Args:
        where: they are, for messages.
        values: pairs of numbers, or numbers one after the other.
        fewest: how many there must be.

    Raises:
        ValueError: they are no numbers, or too few.
    """
    parts: list[Any] = list(values) if isinstance(values, list | tuple) else [None]
    if all(isinstance(part, list | tuple) and len(part) == 2 for part in parts):
        parts = [number for pair in parts for number in pair]
    if not all(type(part) in (int, float) for part in parts):
        parts = [read_number(part) for part in parts]
    try:
        numbers = np.array(parts, float)  # NaN in the place of None
    except OverflowError:
        numbers = np.full(len(parts), np.nan)
    if len(numbers) % 2 or not (np.abs(numbers) <= _FARTHEST).all():
        raise ValueError(f"{where} has points that are no pairs of numbers, {values!s:.60}: draw it anew")
    if len(numbers) < 2 * fewest:
        raise ValueError(
            f"{where} has {len(numbers) // 2} point{'s' * (len(numbers) != 2)}, but needs {fewest}: delete it, or "
            "draw it anew"
        )
    return numbers.reshape(-1, 2)
