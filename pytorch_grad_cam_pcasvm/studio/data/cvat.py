"""Annotations of CVAT for images: one file of XML for all photos, with shapes of all kinds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pytorch_grad_cam_pcasvm.studio.data.drawings import Drawing, Shape, read_number, read_points, read_size, read_xml
from pytorch_grad_cam_pcasvm.studio.data.run_lengths import is_count
from pytorch_grad_cam_pcasvm.studio.data.shapes import Ellipse, Form, Polyline, Rings, Runs


def read_cvat(file: Path) -> list[Drawing]:
    """Return a drawing for each photo that a file lists; an empty one, if it has no shapes.

    A photo that only has tags is left out: they say what it shows, and not where.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none of CVAT for images, or a shape has no label, is of an unknown kind, or has no place.
    """
    root = read_xml(file)
    if root.tag != "annotations":
        raise ValueError(f"{file} is no file of CVAT's, <annotations>, but <{root.tag}>: export 'CVAT for images'")
    if root.find("track") is not None:
        raise ValueError(f"{file} has tracks through a video: export 'CVAT for images', or COCO, in CVAT")
    drawings = []
    for place, image in enumerate(root.iter("image"), 1):
        name = (image.get("name") or "").strip()
        if not name:
            raise ValueError(f"image {place} in {file} has no name: export 'CVAT for images' anew")
        elements = [element for element in image if element.tag != "tag"]
        if not elements and len(image):
            continue
        shapes = [_read_shape(f"shape {number} of {name}", file, one) for number, one in enumerate(elements, 1)]
        drawings.append(Drawing(file, [name], shapes, read_size(image.get("width"), image.get("height"))))
    return drawings


def _read_shape(where: str, file: Path, element: ElementTree.Element) -> Shape:
    name, form = (element.get("label") or "").strip(), _FORMS.get(element.tag)
    if form is None:
        raise ValueError(
            f"{where} in {file} is a <{element.tag}>, which is not read, but {', '.join(_FORMS)}: draw it as one of "
            "these, or delete it"
        )
    if not name:
        raise ValueError(f"{where} in {file} has no label: name its class, or delete it")
    return Shape(name, where, form(f"{where} in {file}", element.attrib))


def _read_numbers(where: str, values: Mapping[str, str], names: str) -> Any:
    """Return attributes that are numbers.

    Raises:
        ValueError: one is none.
    """
    numbers = [read_number(values.get(name)) for name in names.split()]
    if None in numbers:
        missing = names.split()[numbers.index(None)]
        raise ValueError(f"{where} has no number {missing}, but {values.get(missing)}: export 'CVAT for images' anew")
    return numbers


def _read_corners(where: str, values: Mapping[str, str], fewest: int) -> Any:
    """Return points that are written as ``"x,y;x,y"``."""
    return read_points(where, [pair.split(",") for pair in (values.get("points") or "").split(";")], fewest=fewest)


def _read_box(where: str, values: Mapping[str, str]) -> Rings:
    left, top, right, bottom = _read_numbers(where, values, "xtl ytl xbr ybr")
    return Rings.from_edges(left, top, right, bottom, read_number(values.get("rotation", 0)) or 0)


def _read_ellipse(where: str, values: Mapping[str, str]) -> Ellipse:
    x, y, width, height = _read_numbers(where, values, "cx cy rx ry")
    return Ellipse((x, y), (abs(width), abs(height)), read_number(values.get("rotation", 0)) or 0)


def _read_mask(where: str, values: Mapping[str, str]) -> Runs:
    """Return a mask within its box, whose runs go along each row.

    Raises:
        ValueError: the runs are not of all its pixels.
    """
    left, top, width, height = map(round, _read_numbers(where, values, "left top width height"))
    counts = [part.strip() for part in (values.get("rle") or "").split(",")]
    if not all(map(is_count, counts)):
        raise ValueError(f"{where} has run lengths that are no whole numbers: export 'CVAT for images' anew")
    runs = list(map(int, counts))
    if sum(runs) != width * height or min(width, height) < 1:
        raise ValueError(
            f"{where} has run lengths of {sum(runs)} pixels, but {width} x {height} are {width * height}: is it cut "
            "off? Export 'CVAT for images' anew"
        )
    return Runs(runs, (width, height), (left, top), by_column=False)


_FORMS: dict[str, Callable[[str, Mapping[str, str]], Form]] = {
    "polygon": lambda where, values: Rings([_read_corners(where, values, 3)]),
    "box": _read_box,
    "polyline": lambda where, values: Polyline(_read_corners(where, values, 2)),
    "ellipse": _read_ellipse,
    "mask": _read_mask,
    "points": lambda where, values: Polyline(_read_corners(where, values, 1), is_joined=False),
}
