"""Files of annotations: a drawing for each photo of a folder."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pytorch_grad_cam_pcasvm.studio.data.annotations import READ, name_annotation
from pytorch_grad_cam_pcasvm.studio.data.coco import read_coco
from pytorch_grad_cam_pcasvm.studio.data.cvat import read_cvat
from pytorch_grad_cam_pcasvm.studio.data.drawings import Drawing
from pytorch_grad_cam_pcasvm.studio.data.files import walk
from pytorch_grad_cam_pcasvm.studio.data.labelme import read_labelme
from pytorch_grad_cam_pcasvm.studio.data.photo_names import PhotoNames
from pytorch_grad_cam_pcasvm.studio.data.run_length_tables import read_run_table
from pytorch_grad_cam_pcasvm.studio.data.voc import read_voc
from pytorch_grad_cam_pcasvm.studio.data.yolo import ClassNames, read_yolo

_SHOWN = 3  # names of photos
_OF_ALL: dict[str, Callable[[Path], list[Drawing]]] = {  # one file for all photos
    "COCO": read_coco,
    "CVAT": read_cvat,
    "run lengths": read_run_table,
}
_OF_ONE: dict[str, Callable[[Path, str], list[Drawing]]] = {"LabelMe": read_labelme, "Pascal VOC": read_voc}
# Beside annotations of such a format, a file of this ending with the name of a photo is one, too, if empty or broken.
_ENDINGS = {"YOLO": ".txt", "Pascal VOC": ".xml"}
_NOTHING = {  # how a file says that nothing is on a photo
    "COCO": 'list those with nothing on them under "images" there',
    "CVAT": "let CVAT export all images",
    "run lengths": "give those with nothing on them a row without runs",
    "LabelMe": "save a file without shapes for those with nothing on them",
    "Pascal VOC": "save a file without objects for those with nothing on them",
    "YOLO": "give those with nothing on them an empty .txt",
}


@dataclass(frozen=True)
class Drawings:
    """What files of annotations say of the photos of a folder.

    Attributes:
        tool: the format.
        of_row: what is on a photo, by its number; photos without a number here are in no file.
        absent: the names of photos in the files that are not in the folder.
        files: all that are read.
        classes: the names of YOLO's classes; None: of other formats.
    """

    tool: str
    of_row: Mapping[int, Drawing]
    absent: Sequence[str]
    files: Collection[Path]
    classes: ClassNames | None = None

    @cached_property
    def names(self) -> list[str]:
        """The names of the classes on these photos, in order: of numbers, by size."""
        names = {shape.name for drawing in self.of_row.values() for shape in drawing.shapes}
        return sorted(names, key=lambda name: (len(name), name) if all(map(str.isdecimal, names)) else (0, name))

    @property
    def to_say_nothing(self) -> str:
        """How its files say that nothing is on a photo, in words."""
        return _NOTHING[self.tool]

    def describe(self) -> str:
        """Say on how many photos there is nothing, how many shapes are boxes, and which photos are not there."""
        said = f" ({self.tool})"
        empty = sum(not drawing.shapes for drawing in self.of_row.values())
        if empty:
            said += f"; on {empty} of them there is nothing"
        shapes = [shape for drawing in self.of_row.values() for shape in drawing.shapes]
        boxes = sum(shape.form.is_box for shape in shapes)
        if boxes:
            which = f"{boxes} of {len(shapes)} shapes are" if boxes < len(shapes) else "all shapes are"
            said += f"; {which} boxes, and all that is in a box is of its class"
        if self.classes is not None:
            file = self.classes.file
            said += f"; classes have the names of {file}" if file else "; no file has names of classes, but numbers"
        if self.absent:
            are = "photos in the annotations are" if len(self.absent) > 1 else "photo in the annotations is"
            said += f"; {len(self.absent)} {are} not in the folder, such as {', '.join(self.absent[:_SHOWN])}"
        return said


def find_drawings(root: Path, names: Sequence[str]) -> Drawings | None:
    """Return the drawings of photos in a file, or in the files below a folder; None: no annotations that are read.

    Args:
        root: the file or folder.
        names: the paths of the photos in theirs.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is not what it should be, there are several formats, two say what is on one photo, or one may be
            of several photos.
    """
    files_below = [root] if root.is_file() else walk(root)[0]
    photos, folder = PhotoNames(names), root.parent if root.is_file() else root
    tool, files = _find_files(
        root, files_below, lambda path: photos.find_annotated(_name(path, folder), path) is not None
    )
    if not files:
        return None
    classes = ClassNames.of(files[0].parent, folder) if tool == "YOLO" else None
    of_row, absent = dict[int, Drawing](), list[str]()
    for file in files:
        for drawing in _read(tool, file, _name(file, folder), classes):
            row = _find_row(photos, drawing, names)
            if row is None:
                absent.append(drawing.names[0])
            elif row in of_row:
                raise ValueError(
                    f"{of_row[row].file} and {file} both say what is on {names[row]} (as {of_row[row].names[0]} and "
                    f"{drawing.names[0]}): keep one of them, or name its file or folder"
                )
            else:
                of_row[row] = drawing
    lists = [classes.file.resolve()] if classes is not None and classes.file is not None else []
    return Drawings(tool, of_row, absent, {*files, *(file for file in files_below if file.resolve() in lists)}, classes)


def _read(tool: str, file: Path, name: str, classes: ClassNames | None) -> list[Drawing]:
    if classes is not None:
        return read_yolo(file, name, classes)
    return _OF_ALL[tool](file) if tool in _OF_ALL else _OF_ONE[tool](file, name)


def _find_files(root: Path, files_below: Sequence[Path], is_named: Callable[[Path], bool]) -> tuple[str, list[Path]]:
    """Return the format of annotations among files, and the files that have it.

    Args:
        root: the folder, for messages.
        files_below: the files of the folder.
        is_named: returns whether a file has the name of a photo.

    Raises:
        ValueError: there are several formats.
    """
    tools = {file: tool for file in files_below if (tool := name_annotation(file)) in READ}
    for tool, ending in _ENDINGS.items():
        if tool in tools.values():
            unknown = [file for file in files_below if file not in tools and file.suffix.lower() == ending]
            tools |= {file: tool for file in unknown if is_named(file)}
    first = {tool: file for file, tool in reversed(tools.items())}
    if len(first) > 1:
        listed = " and ".join(f"{tool}, such as {file}" for tool, file in sorted(first.items())[:2])
        raise ValueError(f"{root} has annotations of {listed}: name a file or a folder of one kind")
    return next(iter(first), ""), sorted(tools)


def _name(file: Path, folder: Path) -> str:
    """Return the path of a file in a folder, without its ending."""
    return file.relative_to(folder).with_suffix("").as_posix()


def _find_row(photos: PhotoNames, drawing: Drawing, names: Sequence[str]) -> int | None:
    """Return the number of the photo of a drawing; None: it is not there.

    Raises:
        ValueError: its names are of different photos.
    """
    rows = [row for name in drawing.names if (row := photos.find_annotated(name, drawing.file)) is not None]
    if len({*rows}) > 1:
        raise ValueError(
            f"{drawing.file} says that it is of {drawing.names[0]}, but has the name of {names[rows[1]]}: rename it, "
            "or mend what it says"
        )
    return rows[0] if rows else None
