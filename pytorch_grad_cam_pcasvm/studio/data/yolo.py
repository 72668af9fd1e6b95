"""YOLO's annotations: a file of text for each photo, and the names of the classes in another file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pytorch_grad_cam_pcasvm.studio.data.annotations import CLASS_LISTS, CLASS_TABLES
from pytorch_grad_cam_pcasvm.studio.data.drawings import Drawing, Shape, read_number, read_text
from pytorch_grad_cam_pcasvm.studio.data.shapes import Canvas, Patch, Rings

_BOX, _POLYGON = 4, 6  # numbers
_BEYOND = 0.01  # of a side, by which a polygon may leave the photo
_ABOVE = 2  # folders in which they are looked for
_KEY = re.compile(r"^names[ \t]*:[ \t]*(.*)$", re.MULTILINE)
_ITEM = re.compile(r"^[ \t]*(?:-|(\d+)[ \t]*:)[ \t]*(.+?)[ \t]*$")
_QUOTED = re.compile(r"""^\s*(?:"([^"]*)"|'([^']*)'|([^'"#]*?))\s*(?:\s#.*)?$""")
_SKIPPED = re.compile(r"^\s*(?:#.*)?$")


@dataclass(frozen=True)
class Shares:
    """A shape whose corners are shares of the photo's width and height.

    Attributes:
        corners: (x, y), shape (n, 2).
        is_box: it is a box.
    """

    corners: np.ndarray
    is_box: bool = False

    def draw(self, canvas: Canvas) -> Patch:
        """Return its pixels."""
        return Rings([self.corners * (canvas.width, canvas.height)]).draw(Canvas(canvas.width, canvas.height))


def read_yolo(file: Path, name: str, classes: "ClassNames") -> list[Drawing]:
    """Return the drawing of a file, in a list; of an empty file, one without shapes.

    Args:
        file: the file.
        name: its path below the folder of annotations, without ending.
        classes: the names of the classes.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no box and no polygon of a class.
    """
    lines = [(place, line.split()) for place, line in enumerate(read_text(file).splitlines(), 1) if line.strip()]
    return [Drawing(file, [name], [_read_line(f"line {place}", file, words, classes) for place, words in lines])]


def _read_line(where: str, file: Path, words: Sequence[str], classes: "ClassNames") -> Shape:
    numbers = [read_number(word) for word in words]
    label, shares = numbers[0], numbers[1:]
    if label is None or label < 0 or label != int(label) or None in shares:
        raise ValueError(
            f"{where} in {file} has not the number of a class and shares of the sides, {' '.join(words):.60}: export "
            "it anew"
        )
    own = np.array(shares[: len(shares) - len(shares) % 2], float)  # behind them, how sure a detector is
    if classes.has_poses or len(own) == _BOX:
        own = own[:_BOX]
    elif len(own) < _POLYGON:
        raise ValueError(
            f"{where} in {file} has {len(shares)} numbers behind its class: a box has 4 (centre, width and height), a "
            "polygon 6 or more (corners)"
        )
    if own.min() < -_BEYOND or own.max() > 1 + _BEYOND:
        raise ValueError(
            f"{where} in {file} has the number {own[np.abs(own - 0.5).argmax()]:g}, but they are shares of the photo's "
            "width and height, from 0 to 1: divide pixels by these"
        )
    return Shape(classes.find(int(label), where, file), where, _read_shares(own))


def _read_shares(own: np.ndarray) -> Shares:
    """Return a box of its centre and sides, or a polygon of its corners."""
    if len(own) > _BOX:
        return Shares(own.reshape(-1, 2).clip(0, 1))
    x, y, width, height = own
    left, right, top, bottom = x - width / 2, x + width / 2, y - height / 2, y + height / 2
    return Shares(np.array([(left, top), (right, top), (right, bottom), (left, bottom)]).clip(0, 1), is_box=True)


@dataclass(frozen=True)
class ClassNames:
    """The names of YOLO's classes.

    Attributes:
        file: that has them; None: there is none, and classes are called by their numbers.
        names: by number.
        has_poses: files have the places of joints behind each box.
    """

    file: Path | None
    names: Mapping[int, str]
    has_poses: bool = False

    @classmethod
    def of(cls, folder: Path, root: Path) -> "ClassNames":
        """Return the names that lie beside files of annotations, or in the folders above.

        Args:
            folder: of a file.
            root: of all, in which they may lie, and in the folder above.

        Raises:
            OSError: a file cannot be read.
            ValueError: it has no names.
        """
        for place in [folder, *folder.absolute().parents[:_ABOVE], root, root.absolute().parent]:
            for name in (*CLASS_LISTS, *CLASS_TABLES):
                file = place / name
                if not file.is_file():
                    continue
                text = read_text(file)
                if name in CLASS_TABLES and _KEY.search(text) is None:
                    continue
                names = dict(enumerate(text.splitlines())) if name in CLASS_LISTS else _read_names(file, text)
                titles = {number: title.strip() for number, title in names.items()}
                return cls(file, titles, bool(re.search(r"^kpt_shape\s*:", text, re.MULTILINE)))
        return cls(None, {})

    def find(self, number: int, where: str, file: Path) -> str:
        """Return the name of a class.

        Raises:
            ValueError: it has none, though others have.
        """
        if self.file is None:
            return str(number)
        if not self.names.get(number):
            raise ValueError(
                f"{where} in {file} is of class {number}, for which {self.file} has no name, but for "
                f"{', '.join(map(str, sorted(self.names))) or 'none'}: add it there"
            )
        return self.names[number]


def _read_names(file: Path, text: str) -> dict[int, str]:
    """Return the names of a file of YAML, as tools write it: a list or a table, on one line or on one for each.

    Raises:
        ValueError: it has none, or in another form.
    """
    match = _KEY.search(text)
    start = "" if match is None else re.sub(r"(^|\s)#.*", "", match[1]).strip()
    names = dict[int, str]()
    if match is not None and start[:1] in ("[", "{"):
        end = {"[": "]", "{": "}"}[start[0]]
        inside = text[match.start(1) :].lstrip()[1:].partition(end)[0]
        parts = [part for part in re.findall(r"""(?:"[^"]*"|'[^']*'|[^,])+""", inside) if part.strip()]
        for place, part in enumerate(parts):
            key, colon, value = part.partition(":") if start[0] == "{" else (str(place), ":", part)
            names |= {int(key): _unquote(value)} if colon and key.strip().isdigit() else {}
        parts = parts[: len(names)] if len(names) == len(parts) else []
        names = names if parts else {}
    elif match is not None and not start:
        for line in text[match.end() :].splitlines():
            if _SKIPPED.match(line):
                continue
            item = _ITEM.match(line)
            if item is None:
                break
            names[len(names) if item[1] is None else int(item[1])] = _unquote(item[2])
    if not names:
        raise ValueError(
            f"{file} has no names of classes that can be read: write a line for each below names:, such as '  0: crack'"
        )
    return names


def _unquote(text: str) -> str:
    match = _QUOTED.match(text)
    return text.strip() if match is None else next(part for part in (*match.groups(), "") if part is not None)
