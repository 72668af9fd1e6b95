"""COCO's annotations: one file of JSON for all photos, with polygons, run lengths and boxes."""

from collections import Counter
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.studio.data.drawings import (
    Drawing,
    Shape,
    read_json,
    read_number,
    read_points,
    read_size,
)
from pytorch_grad_cam_pcasvm.studio.data.run_lengths import expand_counts
from pytorch_grad_cam_pcasvm.studio.data.shapes import Form, Rings, Runs

_PARTS = ("images", "annotations", "categories")
_EDGES = 4  # of a box


def read_coco(file: Path) -> list[Drawing]:
    """Return a drawing for each photo that a file lists; an empty one, if it has no annotation.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is none of COCO's, or an annotation is of no photo or class, or has no place.
    """
    text = read_json(file)
    if not isinstance(text, dict) or any(not isinstance(text.get(part, []), list) for part in _PARTS):
        content = "a list, as of results of a detector" if isinstance(text, list) else "something else"
        raise ValueError(
            f"{file} is no file of annotations of COCO, which has lists of {', '.join(_PARTS)}, but {content}: "
            "export the annotations as COCO"
        )
    images, annotations, categories = ([*map(_as_entry, text.get(part, []))] for part in _PARTS)
    _check_names(file, images)
    classes = {_find_key(category): str(category.get("name", "")).strip() for category in categories}
    sizes = {_find_key(image): read_size(image.get("width"), image.get("height")) for image in images}
    shapes: dict[str, list[Shape]] = {_find_key(image): [] for image in images}
    for place, annotation in enumerate(annotations):
        where = f"annotation {annotation.get('id', f'number {place + 1}')}"
        photo, name = _find_key(annotation, "image_id"), classes.get(_find_key(annotation, "category_id"))
        if photo not in shapes:
            raise ValueError(
                f'{where} in {file} is of image {photo:.40}, which "images" has not: export the annotations anew'
            )
        if not name:
            raise ValueError(
                f'{where} in {file} is of category {_find_key(annotation, "category_id"):.40}, which "categories" has '
                "not, or without a name: add it there"
            )
        form = _read_form(f"{where} in {file}", annotation, sizes[photo])
        sizes[photo] = sizes[photo] or (form.size if isinstance(form, Runs) else None)
        shapes[photo].append(Shape(name, where, form))
    return [
        Drawing(file, [image["file_name"]], shapes[key], sizes[key]) for key, image in zip(shapes, images, strict=True)
    ]


def _as_entry(entry: Any) -> dict[str, Any]:
    return entry if isinstance(entry, dict) else {}


def _find_key(entry: dict[str, Any], name: str = "id") -> str:
    """Return a number as text, for some tools write numbers as text in one place, and not in another."""
    return str(entry.get(name))


def _check_names(file: Path, images: list[dict[str, Any]]) -> None:
    """Refuse photos without a name or a number of their own.

    Raises:
        ValueError: there are some.
    """
    for place, image in enumerate(images, 1):
        if not isinstance(image.get("file_name"), str) or not image["file_name"].strip():
            raise ValueError(f'image {place} of "images" in {file} has no "file_name": export the annotations anew')
    for key in ("id", "file_name"):
        value, count = (Counter(str(image.get(key)) for image in images).most_common(1) or [("", 0)])[0]
        if count > 1:
            raise ValueError(
                f'{count} images in {file} have one "{key}", {value}: give each its own, or leave one of them there'
            )


def _read_form(where: str, annotation: dict[str, Any], size: tuple[int, int] | None) -> Form:
    """Return where an annotation is: its segmentation, or without one its box.

    Raises:
        ValueError: it has neither, or one that cannot be read.
    """
    outline = annotation.get("segmentation")
    if isinstance(outline, dict):
        return _read_runs(where, outline, size)
    if isinstance(outline, list) and outline:
        rings = [outline] if all(read_number(part) is not None for part in outline) else outline
        return Rings([read_points(where, ring) for ring in rings])
    if outline:
        raise ValueError(f'{where} has a "segmentation" that is no polygon and no run lengths, {outline!s:.60}')
    edges = annotation.get("bbox")
    box = [read_number(edge) for edge in edges] if isinstance(edges, list) else []
    left, top, width, height = (edge or 0.0 for edge in (*box, *[None] * _EDGES)[:_EDGES])
    if len(box) != _EDGES or None in box or width < 0 or height < 0:
        raise ValueError(
            f'{where} has no "segmentation", and no "bbox" of x, y, width and height: is the file one of keypoints, '
            "captions or panoptic segments? Export instances"
        )
    return Rings.from_edges(left, top, left + width, top + height)


def _read_runs(where: str, outline: dict[str, Any], size: tuple[int, int] | None) -> Runs:
    """Return run lengths, compressed or as a list, down each column.

    Raises:
        ValueError: they are of another size than the photo, or not of all its pixels.
    """
    sides, counts = outline.get("size"), outline.get("counts")
    own = read_size(sides[1], sides[0]) if isinstance(sides, list) and len(sides) == 2 else None
    if own is None or (size is not None and own != size):
        beside = "" if size is None else f", and its photo {size[1]} x {size[0]}"
        raise ValueError(
            f'{where} has run lengths of the "size" {sides} (height, width){beside}: export the annotations anew'
        )
    if isinstance(counts, str):
        try:
            counts = expand_counts(counts)
        except ValueError as error:
            raise ValueError(f"{where} {error}: export the annotations anew") from error
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f'{where} has run lengths whose "counts" are neither a text nor a list of whole numbers')
    if sum(counts) != own[0] * own[1]:
        raise ValueError(
            f"{where} has run lengths of {sum(counts)} pixels, but {own[0]} x {own[1]} are {own[0] * own[1]}: is it "
            "cut off? Export the annotations anew"
        )
    return Runs(counts, own)
