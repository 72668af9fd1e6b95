"""LabelMe's annotations, which X-AnyLabeling writes, too: a file of JSON for each photo."""

import base64
import binascii
import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.studio.data.drawings import Drawing, Shape, read_json, read_points, read_size
from pytorch_grad_cam_pcasvm.studio.data.shapes import Ellipse, Form, Polyline, Rings, Stored


def read_labelme(file: Path, name: str) -> list[Drawing]:
    """Return the drawing of a file, in a list.

    Args:
        file: the file.
        name: its path below the folder of annotations, without ending.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none of LabelMe's, or a shape has no class, is of an unknown kind, or has no place.
    """
    text = read_json(file)
    shapes = text.get("shapes") if isinstance(text, dict) else None
    if not isinstance(shapes, list):
        raise ValueError(f'{file} is no file of LabelMe\'s, for it has no list of "shapes": export it anew')
    read = [_read_shape(f"shape {place}", file, shape) for place, shape in enumerate(shapes, 1)]
    names, photo = [name], text.get("imagePath")
    if isinstance(photo, str) and photo.strip():
        names.insert(0, posixpath.normpath(posixpath.join(posixpath.dirname(name), photo.replace("\\", "/"))))
    return [Drawing(file, names, read, read_size(text.get("imageWidth"), text.get("imageHeight")))]


def _read_shape(where: str, file: Path, shape: Any) -> Shape:
    """Return a shape of a file."""
    entry: dict[str, Any] = shape if isinstance(shape, dict) else {}
    name, form_name = str(entry.get("label") or "").strip(), str(entry.get("shape_type") or "polygon")
    if not name:
        raise ValueError(f'{where} in {file} has no "label": name its class, or delete it')
    if form_name == "mask":
        return Shape(name, where, _read_mask(where, file, entry))
    if form_name not in _FORMS:
        raise ValueError(
            f"{where} in {file} is a {form_name!r}, which is not read, but {', '.join((*_FORMS, 'mask'))}: draw it "
            "as one of these"
        )
    fewest, form = _FORMS[form_name]
    return Shape(
        name, where, form(read_points(f"{where} in {file}, a {form_name},", entry.get("points"), fewest=fewest))
    )


def _read_mask(where: str, file: Path, shape: dict[str, Any]) -> Stored:
    """Return a mask within its box, which is stored as a picture.

    Raises:
        ValueError: it is none, or does not fit its box.
    """
    (left, top), (right, bottom) = read_points(f"{where} in {file}, a mask,", shape.get("points"), fewest=2)[:2]
    try:
        data = base64.b64decode(shape.get("mask") or "", validate=True)
        mask = Stored(file, data, (round(left), round(top)))
        width, height = mask.size
    except (TypeError, ValueError, binascii.Error) as error:
        reason = error if str(error).startswith("has") else f"has a mask that is no text in base64 ({error})"
        raise ValueError(f"{where} in {file} {reason}: export it anew") from error
    if abs(right - left + 1 - width) > 1 or abs(bottom - top + 1 - height) > 1:
        raise ValueError(
            f"{where} in {file} has a mask of {width} x {height} pixels in a box from ({left:g}, {top:g}) to "
            f"({right:g}, {bottom:g}): draw it anew"
        )
    return mask


def _draw_box(points: np.ndarray) -> Rings:
    """Return a rectangle: of two corners that lie across from one another, or of four."""
    return Rings.from_edges(*points.min(0), *points.max(0))


def _draw_circle(points: np.ndarray) -> Ellipse:
    """Return a circle of its centre and a point on it."""
    radius = float(np.hypot(*(points[1] - points[0])))
    return Ellipse((float(points[0, 0]), float(points[0, 1])), (radius, radius))


# Of each kind, how many points it needs at least, and what they are.
_FORMS: dict[str, tuple[int, Callable[[np.ndarray], Form]]] = {
    "polygon": (3, lambda points: Rings([points])),
    "rectangle": (2, _draw_box),
    "oriented_rectangle": (4, lambda points: Rings([points], is_box=True)),  # LabelMe 6
    "rotation": (4, lambda points: Rings([points], is_box=True)),  # X-AnyLabeling
    "circle": (2, _draw_circle),
    "line": (2, Polyline),
    "linestrip": (2, Polyline),
    "point": (1, Polyline),
    "points": (1, lambda points: Polyline(points, is_joined=False)),
}
