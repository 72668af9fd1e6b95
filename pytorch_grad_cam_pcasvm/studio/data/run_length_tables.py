"""Run lengths in tables of CSV, as of Kaggle's Severstal: a row for each photo and class."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytorch_grad_cam_pcasvm.studio.data.drawings import Drawing, Shape, read_text
from pytorch_grad_cam_pcasvm.studio.data.run_lengths import is_count
from pytorch_grad_cam_pcasvm.studio.data.shapes import Runs

_RUNS = re.compile(r"encoded_?pixels", re.IGNORECASE)
_PHOTOS = re.compile(r"(image|img|file)(_?(id|name))?", re.IGNORECASE)
_CLASSES = re.compile(r"class(_?(id|name))?|label", re.IGNORECASE)
_BOTH = re.compile(r"image(_?id)?_(class(_?id)?|label)", re.IGNORECASE)  # name and class, joined by the last _
_NOTHING = ("", "nan")
_ONE = "1"  # the class of tables that have no classes


def read_run_table(file: Path) -> list[Drawing]:
    """Return a drawing for each photo in a table; an empty one, if it has only rows without runs.

    Runs are pairs of a first pixel and a length, counted from 1 on down each column of the photo.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no such columns, or a row has no photo, or runs that cannot be.
    """
    rows = _read_rows(file)
    columns = next(rows, list[str]())
    places = {name: _find_column(columns, pattern) for name, pattern in _COLUMNS.items()}
    if places["runs"] is None or (places["photo"] is None and places["both"] is None):
        raise ValueError(
            f"{file} has the columns {', '.join(columns):.200}: ImageId, ClassId and EncodedPixels are expected, or "
            "ImageId_ClassId in place of the first two"
        )
    shapes: dict[str, list[Shape]] = {}
    for place, row in enumerate(rows, 2):
        where = f"row {place}"
        photo, name, text = _read_row(f"{where} in {file}", row, places)
        own = shapes.setdefault(photo, [])
        if text.lower() not in _NOTHING:
            own.append(Shape(name, where, Runs(_read_counts(f"{where} in {file}", text), None)))
    return [Drawing(file, [photo], own, is_stored=True) for photo, own in shapes.items()]


_COLUMNS = {"runs": _RUNS, "photo": _PHOTOS, "class": _CLASSES, "both": _BOTH}


def _read_rows(file: Path) -> Iterator[list[str]]:
    """Yield the rows of a table that are not empty.

    Raises:
        OSError: it is no table.
    """
    text = read_text(file)
    limit = csv.field_size_limit(max(len(text), csv.field_size_limit()))
    try:
        yield from ([cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if any(row))
    except csv.Error as error:
        raise OSError(f"the annotations {file} cannot be read ({error}): save it as CSV anew") from error
    finally:
        csv.field_size_limit(limit)


def _find_column(columns: Sequence[str], pattern: re.Pattern[str]) -> int | None:
    return next((place for place, name in enumerate(columns) if pattern.fullmatch(name)), None)


def _read_row(where: str, row: Sequence[str], places: Mapping[str, int | None]) -> tuple[str, str, str]:
    """Return the photo, the class and the runs of a row.

    Raises:
        ValueError: it has no photo, or no class where others have.
    """
    cells = {name: "" if place is None or place >= len(row) else row[place] for name, place in places.items()}
    photo, name = cells["photo"], cells["class"]
    if places["both"] is not None:
        photo, _, name = cells["both"].rpartition("_")
    elif places["class"] is None:
        name = _ONE
    if not photo or not name:
        raise ValueError(f"{where}, {', '.join(row):.60}, has no photo, or no class: name both, or delete it")
    return photo, name, cells["runs"]


def _read_counts(where: str, text: str) -> list[int]:
    """Return the lengths of runs of zeros and ones from pairs of a first pixel and a length.

    Raises:
        ValueError: they are no pairs of whole numbers, or do not follow one another.
    """
    words = text.split()
    if len(words) % 2 or not all(map(is_count, words)):
        raise ValueError(
            f"{where} has the runs {text!s:.60}, but pairs of a first pixel (from 1 on) and a length are expected, and "
            "nothing where nothing is"
        )
    counts, end = list[int](), 1
    for first, length in zip(map(int, words[::2]), map(int, words[1::2]), strict=True):
        if first < end:
            raise ValueError(
                f"{where} has a run from pixel {first} on, but the one before it ends at {end - 1}: are these "
                "distances between runs, as of SIIM-ACR's tables? Write first pixels, from 1 on down each column"
            )
        counts += [first - end, length]
        end = first + length
    return counts
