"""Files of regions, which a labelling tool opens as suggestions: COCO's, LabelMe's or YOLO's."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.runtime.files import name_path
from pytorch_grad_cam_pcasvm.studio.data.contours import outline_region, split_regions
from pytorch_grad_cam_pcasvm.version import __version__

TOOLS = ("coco", "labelme", "yolo")
_ONE = "region"  # the class of masks that have no names
_MADE = f"regions that pytorch_grad_cam_pcasvm {__version__} found: suggestions, which nobody has looked at"
_LABELME = "5.5.0"  # the version of the format
_DECIMALS = 7  # of a side


@dataclass(frozen=True)
class MarkedRegion:
    """A connected region of a photo.

    Attributes:
        name: its class.
        ring: its outline, (x, y), shape (n, 2); see :func:`.outline_region`.
        area: how many pixels it has.
        score: the largest number in it, of six digits; None: there are no numbers.
    """

    name: str
    ring: np.ndarray
    area: int
    score: float | None

    @property
    def box(self) -> list[int]:
        """Left, top, width and height."""
        low, high = self.ring.min(0), self.ring.max(0)
        return [*low.tolist(), *(high - low).tolist()]


@dataclass(frozen=True)
class RegionsOfPhoto:
    """The regions of a photo.

    Attributes:
        name: its path in the folder of photos.
        file: the photo.
        width: as people see it.
        height: as people see it.
        regions: those of the first class before others.
    """

    name: str
    file: Path
    width: int
    height: int
    regions: Sequence[MarkedRegion]


def find_regions(numbers: np.ndarray, names: Mapping[int, str], values: np.ndarray | None = None) -> list[MarkedRegion]:
    """Return the regions of each class on a photo.

    Args:
        numbers: of the class of each pixel, shape (H, W); those without a name are outside of all regions.
        names: of the classes, by number.
        values: a number for each pixel, shape (H, W), of which the largest is a region's score.
    """
    regions = []
    for number, name in names.items():
        for top, left, inside in split_regions(numbers == number):
            score = None
            if values is not None:
                own = values[top : top + inside.shape[0], left : left + inside.shape[1]][inside]
                score = float(f"{np.nan_to_num(own).max():.6g}")
            ring = outline_region(inside) + np.array([left, top])
            regions.append(MarkedRegion(name, ring, int(inside.sum()), score))
    return regions


class RegionFiles:
    """Regions of photos, collected to be written to files of one format.

    Args:
        out: the folder for the files.
        tool: ``"coco"``, ``"labelme"`` or ``"yolo"``.

    Raises:
        ValueError: the format is another one.
    """

    def __init__(self, out: Path, tool: str) -> None:
        if tool not in TOOLS:
            raise ValueError(f"regions are written for {', '.join(TOOLS)}, got {tool!r}")
        self._out, self._tool = out, tool
        self._photos: list[RegionsOfPhoto] = []
        self._classes: dict[str, int] = {}  # their numbers, by name

    def add(
        self, name: str, file: Path, numbers: np.ndarray, names: Mapping[int, str], values: np.ndarray | None = None
    ) -> None:
        """Add a photo, which may have no regions.

        Args:
            name: its path in the folder of photos.
            file: the photo.
            numbers: of the class of each of its pixels, as of :func:`find_regions`.
            names: as of :func:`find_regions`.
            values: as of :func:`find_regions`.
        """
        for one in names.values():
            self._classes.setdefault(one, len(self._classes))
        height, width = numbers.shape
        self._photos.append(RegionsOfPhoto(name, file, width, height, find_regions(numbers, names, values)))

    @property
    def count(self) -> int:
        """How many regions there are."""
        return sum(len(photo.regions) for photo in self._photos)

    @property
    def count_photos(self) -> int:
        """How many photos have some."""
        return sum(bool(photo.regions) for photo in self._photos)

    def write(self) -> Path:
        """Write the files.

        Returns:
            What ``--masks`` takes: the file of all photos, or the folder of one for each.

        Raises:
            OSError: a file cannot be written.
        """
        if self._tool == "coco":
            return _write(self._out / "regions.json", _write_json(self._list_coco()))
        if self._tool == "labelme":
            folder = self._out / "regions"
            for photo, file in self._name_files(folder, ".json"):
                _write(file, _write_json(_list_labelme(photo, file)))
            return folder
        lines = "".join(f"  {number}: {_quote(name)}\n" for name, number in self._classes.items())
        _write(self._out / "data.yaml", f"# {_MADE}\nnames:{' {}' * (not lines)}\n{lines}")
        folder = self._out / "labels"
        for photo, file in self._name_files(folder, ".txt"):
            _write(file, "".join(self._write_yolo(photo)))
        return folder

    def _name_files(self, folder: Path, ending: str) -> Iterable[tuple[RegionsOfPhoto, Path]]:
        """Return each photo and its file, which has the photo's ending, too, where photos differ by nothing else."""
        files = [folder / Path(photo.name).with_suffix(ending) for photo in self._photos]
        shared = Counter(files)
        for photo, file in zip(self._photos, files, strict=True):
            yield photo, file if shared[file] == 1 else folder / f"{photo.name}{ending}"

    def _list_coco(self) -> dict[str, Any]:
        """Return what COCO's file has."""
        images, annotations = [], list[dict[str, Any]]()
        for number, photo in enumerate(self._photos, 1):
            images.append({"id": number, "file_name": photo.name, "width": photo.width, "height": photo.height})
            for region in photo.regions:
                entry = {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": self._classes[region.name] + 1,
                    "segmentation": [region.ring.ravel().tolist()],
                    "bbox": region.box,
                    "area": region.area,
                    "iscrowd": 0,
                }
                annotations.append(entry | ({} if region.score is None else {"score": region.score}))
        categories = [{"id": number + 1, "name": name} for name, number in self._classes.items()]
        return {
            "info": {"description": _MADE},
            "categories": categories,
            "images": images,
            "annotations": annotations,
        }

    def _write_yolo(self, photo: RegionsOfPhoto) -> Iterable[str]:
        """Return a line for each region of a photo: the number of its class, and its corners as shares of the sides."""
        for region in photo.regions:
            shares = (region.ring / (photo.width, photo.height)).ravel()
            numbers = (f"{share:.{_DECIMALS}f}".rstrip("0").rstrip(".") for share in shares)
            yield f"{self._classes[region.name]} {' '.join(numbers)}\n"


def _list_labelme(photo: RegionsOfPhoto, file: Path) -> dict[str, Any]:
    """Return what LabelMe's file of a photo has."""
    shapes = [
        {
            "label": region.name,
            "points": region.ring.astype(float).tolist(),
            "group_id": None,
            "description": ("" if region.score is None else f"score {region.score:g}, ") + f"area {region.area}",
            "shape_type": "polygon",
            "flags": {},
        }
        for region in photo.regions
    ]
    return {
        "version": _LABELME,
        "flags": {},
        "shapes": shapes,
        "imagePath": _lead_to(photo.file, file.parent),
        "imageData": None,
        "imageHeight": photo.height,
        "imageWidth": photo.width,
    }


def _lead_to(file: Path, folder: Path) -> str:
    """Return the path of a file from a folder, or from its own disk, if that is another one."""
    try:
        return Path(os.path.relpath(file.resolve(), folder.resolve())).as_posix()
    except ValueError:  # on Windows
        return file.resolve().as_posix()


def _quote(name: str) -> str:
    """Return a name as YAML has it."""
    if '"' not in name and "\\" not in name:
        return f'"{name}"'
    return f"'{name}'" if "'" not in name else json.dumps(name, ensure_ascii=False)


def _write_json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


def _write(file: Path, text: str) -> Path:
    """Write a file, and return it; folders around it are made."""
    with name_path(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return file


def write_regions(
    numbers: Mapping[str, np.ndarray],
    out: str | os.PathLike[str],
    tool: str = "coco",
    *,
    names: Mapping[int, str] | None = None,
    values: Mapping[str, np.ndarray] | None = None,
    photos: str | os.PathLike[str] = ".",
) -> Path:
    """Write the regions of photos as a labelling tool opens them: polygons along the edges of pixels, class and score.

    A region is what is connected, also by corners, and has one number. ``--masks`` reads the same pixels again.
    COCO's is ``regions.json``, with boxes, areas and scores. LabelMe's are in ``regions/``, one for each photo, with
    scores and areas as descriptions. YOLO's are in ``labels/``, without scores, and the names of classes in
    ``data.yaml``. A polygon has the way to each of its holes, and back. Photos without regions are listed without
    annotations, or have a file without any.

    Args:
        numbers: of the class of each pixel, whole numbers or boolean, shape (H, W), by the photo's path in its folder,
            such as ``"crack/007.jpg"``; 0, and what has no name, is outside of all regions. The photo is as people see
            it, turned as EXIF says.
        out: the folder for the files.
        tool: ``"coco"``, ``"labelme"`` or ``"yolo"``.
        names: of the classes, by number; None: all that is not 0 is ``"region"``.
        values: numbers of the same pixels, such as an anomaly map at the photo's size; a region's score is the largest
            in it. None: there are no scores.
        photos: the folder of photos, which LabelMe's files name.

    Returns:
        What ``--masks`` takes: the file of COCO, or the folder of files.

    Raises:
        OSError: a file cannot be written.
        ValueError: the format is unknown, or a mask or its values have no shape (H, W), or two.

    Example:
        >>> anomalies = np.zeros((16, 20))
        >>> anomalies[2:6, 3:9] = 1.5
        >>> file = write_regions(
        ...     {"crack/007.jpg": anomalies > 1}, "suggestions", names={1: "crack"}, values={"crack/007.jpg": anomalies}
        ... )
        >>> file.name
        'regions.json'
    """
    files = RegionFiles(Path(out), tool)
    for name, array in numbers.items():
        own, of_pixels = np.asarray(array), None if values is None else np.asarray(values[name])
        if own.ndim != 2 or (of_pixels is not None and of_pixels.shape != own.shape):
            beside = "" if of_pixels is None else f", and its values {of_pixels.shape}"
            raise ValueError(f"numbers of the pixels of {name} have the shape {own.shape}{beside}: (H, W) is expected")
        files.add(name, Path(photos) / name, own if names else own != 0, names or {1: _ONE}, of_pixels)
    return files.write()
