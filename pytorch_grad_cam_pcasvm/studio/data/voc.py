"""Pascal VOC's annotations, as many tools write them: a file of XML for each photo, with boxes and polygons."""

from pathlib import Path
from xml.etree import ElementTree

from pytorch_grad_cam_pcasvm.studio.data.drawings import Drawing, Shape, read_number, read_points, read_size, read_xml
from pytorch_grad_cam_pcasvm.studio.data.shapes import Form, Rings

_EDGES = "xmin", "ymin", "xmax", "ymax"
# Where tools begin to count, and whether the last pixel is within a box, by the name of the database that they write.
_FIRST_OF = {
    "unknown": (0, False),  # labelImg and CVAT: edges from 0 on
    "roboflow": (1, False),  # edges from 1 on: what is 52 pixels wide goes from 179 to 231
}
_ORIGINAL = (1, True)  # pixels, counted from 1 on: from 179 to 230


def read_voc(file: Path, name: str) -> list[Drawing]:
    """Return the drawing of a file, in a list.

    Args:
        file: the file.
        name: its path below the folder of annotations, without ending.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no annotation of Pascal VOC, or an object has no name or no pixels.
    """
    root = read_xml(file)
    if root.tag != "annotation":
        raise ValueError(
            f"{file} is no annotation of Pascal VOC, <annotation>, but <{root.tag}>: export boxes in that format, or "
            "draw masks"
        )
    database = (root.findtext("source/database") or "").strip().lower()
    convention = next((one for word, one in _FIRST_OF.items() if database.startswith(word)), _ORIGINAL)
    shapes = [_read_object(file, place, element, *convention) for place, element in enumerate(root.iter("object"), 1)]
    return [Drawing(file, [name], shapes, read_size(root.findtext("size/width"), root.findtext("size/height")))]


def _read_object(file: Path, place: int, element: ElementTree.Element, first: int, is_last_within: bool) -> Shape:
    name, where = (element.findtext("name") or "").strip(), f"object {place}"
    polygon = element.find("polygon")
    edges = [read_number(element.findtext(f"bndbox/{edge}")) for edge in _EDGES]
    if not name or (None in edges and polygon is None):
        raise ValueError(f"{where} in {file} has no <name>, or no <bndbox> of {', '.join(_EDGES)}")
    if polygon is not None:
        return Shape(name, where, _read_polygon(f"{where} in {file}", polygon, first))
    left, top, right, bottom = (edge or 0.0 for edge in edges)
    if left > right or top > bottom:
        raise ValueError(
            f"{where} in {file}, {name!r}, has no pixels: x from {left:g} to {right:g}, y from {top:g} to {bottom:g}"
        )
    if is_last_within:
        left, top, right, bottom = round(left), round(top), round(right) + 1, round(bottom) + 1
    return Shape(name, where, Rings.from_edges(left - first, top - first, right - first, bottom - first))


def _read_polygon(where: str, polygon: ElementTree.Element, first: int) -> Form:
    """Return a polygon of corners <x1>, <y1>, <x2> and so on, as Roboflow writes it, or of <pt> with <x> and <y>."""
    numbers: list[str | None] = []
    while polygon.find(f"x{len(numbers) // 2 + 1}") is not None:
        numbers += [polygon.findtext(f"{axis}{len(numbers) // 2 + 1}") for axis in "xy"]
    for point in polygon.iter("pt"):
        numbers += [point.findtext(axis) for axis in "xy"]
    return Rings([read_points(where, numbers) - first])
