"""Boxes: files of Pascal VOC's annotations, which say where objects are, and of which class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

ENDING = ".xml"
_EDGES = "xmin", "ymin", "xmax", "ymax"


@dataclass(frozen=True)
class Box:
    """An object.

    Attributes:
        name: its class.
        edges: the first and last column and row of its pixels, counted from 1: (xmin, ymin, xmax, ymax).
    """

    name: str
    edges: tuple[int, int, int, int]

    @property
    def area(self) -> int:
        """Number of its pixels."""
        left, top, right, bottom = self.edges
        return (right - left + 1) * (bottom - top + 1)


@dataclass(frozen=True)
class Boxes:
    """The objects in a picture.

    Attributes:
        file: that says so.
        size: (width, height) of the picture; None: the file does not say.
        boxes: of the objects.
    """

    file: Path
    size: tuple[int, int] | None
    boxes: Sequence[Box]

    def draw(self, numbers: Mapping[str, int], size: tuple[int, int]) -> np.ndarray:
        """Return the number of the class at every pixel, int64, shape (H, W): 0 outside, of two boxes the smaller's.

        Args:
            numbers: of the classes.
            size: (width, height) of the picture, if the file does not say.
        """
        width, height = self.size or size
        pixels = np.zeros((height, width), np.int64)
        for box in sorted(self.boxes, key=lambda box: -box.area):
            left, top, right, bottom = box.edges
            pixels[max(0, top - 1) : bottom, max(0, left - 1) : right] = numbers[box.name]
        return pixels


def read_boxes(file: Path) -> Boxes:
    """Return the boxes in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no annotation of Pascal VOC, or a box has no name or no pixels.
    """
    try:
        root = ElementTree.parse(file).getroot()
    except (ElementTree.ParseError, OSError, ValueError, LookupError) as error:
        raise OSError(f"the boxes {file} cannot be read ({error})") from error
    if root.tag != "annotation":
        raise ValueError(
            f"{file} is no annotation of Pascal VOC, <annotation>, but <{root.tag}>: export boxes in that format, or "
            "draw masks"
        )
    size = _read_number(root, "size/width"), _read_number(root, "size/height")
    boxes = [_read_box(file, number, element) for number, element in enumerate(root.iter("object"), 1)]
    return Boxes(file, (size[0], size[1]) if size[0] and size[1] else None, boxes)


def _read_box(file: Path, number: int, element: ElementTree.Element) -> Box:
    name = (element.findtext("name") or "").strip()
    edges = [_read_number(element, f"bndbox/{edge}") for edge in _EDGES]
    if not name or any(edge is None for edge in edges):
        raise ValueError(f"object {number} in {file} has no <name>, or no <bndbox> of {', '.join(_EDGES)}")
    left, top, right, bottom = (edge or 0 for edge in edges)
    if left > right or top > bottom or right < 1 or bottom < 1:
        raise ValueError(
            f"object {number} in {file}, {name!r}, has no pixels: x from {left} to {right}, y from {top} to {bottom}"
        )
    return Box(name, (left, top, right, bottom))


def _read_number(element: ElementTree.Element, path: str) -> int | None:
    """Return a whole number in an element, rounded; None: there is none."""
    try:
        return round(float(element.findtext(path) or ""))
    except (ValueError, OverflowError):
        return None
