"""Files below a folder, and the part of each: a photo, the mask of one, hidden, or of another format."""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path

from pytorch_grad_cam_pcasvm.studio.data.annotations import (
    CLASS_LISTS,
    CLASS_TABLES,
    OF_ALL,
    READ,
    name_annotation,
    name_annotations,
)
from pytorch_grad_cam_pcasvm.studio.pictures.dicom_files import is_dicom

SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".avif", ".jp2",
    ".tga",
)  # fmt: skip
# What Jupyter, macOS, Windows and disk stations put beside the files of people, who have names with @, $ and ~, too.
_FOREIGN = re.compile(
    r"\..*|~\$.*|@(eadir|tmp|recycle|sharebin|recently-snapshot|syno.*)|\$recycle\.bin|__macosx|__pycache__|#recycle|#snapshot|recycle[rd]|lost\+found|found\.\d+|"
    r"system volume information|network trash folder|temporary items|(eh)?thumbs.*\.db|desktop\.ini|icon\r",
    re.IGNORECASE,
)
NORMAL = ("good", "normal", "ok", "healthy", "negative", "background", "clean")  # folders of what has no fault
_INDEX = "DICOMDIR"  # of a disk, which has no picture
_SHOWN = 3  # names of a kind
_ENDING = re.compile(r"(?<=.)(?:\.(?:nii|tar))?\.[^.]+$|$")  # .gz says nothing of what it holds


@dataclass(frozen=True)
class Listing:
    """The files below a folder by their parts, each in the order of its paths.

    Attributes:
        root: the folder; or the file of one picture.
        photos: pictures that are no masks of others.
        masks: pictures that are.
        mask_folder: where all masks lie: a folder of them, or the root if they lie beside photos; None: there are none.
        hidden: files that are hidden, or of another system, or lie in folders that are.
        others: files that are no pictures by their endings.
    """

    root: Path
    photos: list[Path]
    masks: list[Path]
    mask_folder: Path | None
    hidden: list[Path]
    others: list[Path]

    @property
    def classes(self) -> list[str]:
        """The names of the folders with photos in the folder, in order; empty if it has none.

        A single one beside a folder of masks, such as ``images`` and ``masks``, is no class, nor is ``images`` where
        there are annotations.
        """
        from pytorch_grad_cam_pcasvm.studio.data.mask_search import names_photos

        root = self.photo_folder
        of_name = sorted({path.relative_to(root).parts[0] for path in self.photos if root not in (path, path.parent)})
        beside = self.mask_folder is not None and self.mask_folder.parent == root
        flat = len({path.parent for path in self.photos}) == 1
        of_photos = flat and len(of_name) == 1 and names_photos(of_name[0]) and bool(self.annotations)
        return [] if (beside and flat and not self.beside) or of_photos else of_name

    @property
    def photo_folder(self) -> Path:
        """The folder of those of classes: the root, or one alone in it that has folders, and is no class.

        It is none if it is named as one of photos, such as ``images``, or has the masks in it or beside it.
        """
        from pytorch_grad_cam_pcasvm.studio.data.mask_search import names_photos

        folder, masks = self.root, self.mask_folder
        while self.root not in self.photos:
            names = {path.relative_to(folder).parts[0] for path in self.photos}
            inside = folder / next(iter(names), "")
            is_class = not names_photos(inside.name) and (masks is None or folder not in masks.parents)
            if len(names) != 1 or is_class or any(path.parent in (folder, inside) for path in self.photos):
                break
            folder = inside
        return folder

    @cached_property
    def annotations(self) -> dict[Path, str]:
        """The files of annotations that are read, and their formats; of YOLO also the empty ones."""
        kinds = {path: kind for path in self.others if (kind := name_annotation(path)) in READ}
        stems = {path.stem for path in self.photos} if "YOLO" in kinds.values() else set()
        kinds |= {path: "YOLO" for path in self.others if path.suffix.lower() == ".txt" and path.stem in stems}
        return dict(sorted(kinds.items()))

    @property
    def drawn(self) -> Path | None:
        """The folder of masks, or else the folder or file of annotations; None: there are none."""
        return self.mask_folder or (self._find_annotations() if self.annotations else None)

    @property
    def beside(self) -> list[Path]:
        """The photos in the folder itself."""
        return [path for path in self.photos if path.parent == self.root]

    def describe(self, use: Callable[[Path], str] = "use them with --masks {}".format) -> list[str]:
        """Return a line for each part that is left out: its number, and the way to use it.

        Args:
            use: says how the masks of a folder are used.
        """
        lines = []
        if self.mask_folder is not None:
            are = "1 picture is a mask" if len(self.masks) == 1 else f"{len(self.masks)} pictures are masks"
            lines.append(f"left out: {are}, such as {self._name(self.masks[0])}; {use(self.mask_folder)}")
        if self.hidden:
            tops = Counter(_find_hidden(path.relative_to(self.root)) for path in self.hidden)
            what = "1 file that is" if len(self.hidden) == 1 else f"{len(self.hidden)} files that are"
            lines.append(f"ignored: {what} hidden or of another system ({_name_first([*tops])})")
        if annotations := self.annotations:
            are = "1 file has" if len(annotations) == 1 else f"{len(annotations)} files have"
            kinds = ", ".join(dict.fromkeys(annotations.values()))
            first = self._name(next(iter(annotations)))
            lines.append(f"{are} annotations ({kinds}), such as {first}; {use(self._find_annotations())}")
        names = (*CLASS_LISTS, *CLASS_TABLES) if "YOLO" in annotations.values() else ()
        if others := [path for path in self.others if path not in annotations and path.name not in names]:
            lines.append(f"not read: {describe_others(others, self.root)}")
        return lines

    def _find_annotations(self) -> Path:
        """Return the file of all annotations, or their folder: the highest without photos, or the root.

        Of several formats, these are the annotations of the first one.
        """
        (first, kind), *_ = self.annotations.items()
        own = [path for path, other in self.annotations.items() if other == kind]
        if kind in OF_ALL and len(own) == 1:
            return first
        with_photos = {parent for path in self.photos for parent in path.parents}
        folders = [one for one in first.parents if one.is_relative_to(self.root) and one not in with_photos]
        alone = folders and all(path.is_relative_to(folders[-1]) for path in own)
        return folders[-1] if alone else self.root

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def list_files(root: str | Path) -> Listing:
    """Return the files below a folder by their parts; all commands, and folders in Python, go by it.

    Raises:
        OSError: a folder cannot be read.
        ValueError: pictures are masks by their names, and photos by what they show, or the other way round.
    """
    from pytorch_grad_cam_pcasvm.studio.data.mask_search import find_masks

    root = Path(root)
    if root.is_file():
        return Listing(root, [root], [], None, [], [])
    seen, hidden = walk(root)
    pictures = [path for path in seen if is_photo(path)]
    masks, folder = find_masks(root, pictures)
    photos = [path for path in pictures if path not in masks]
    others = [path for path in seen if not is_photo(path)]
    return Listing(root, photos, sorted(masks), folder, hidden, others)


def walk(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the files below a folder, in order: those that people put there, and those that are hidden or foreign."""
    seen, hidden = list[Path](), list[Path]()

    def refuse(error: OSError) -> None:
        if _find_hidden(Path(error.filename).relative_to(root)) == "":
            raise error

    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        folders[:] = [name for name in folders if not _leads_up(os.path.join(folder, name), real)]
        here = Path(folder)
        within = _find_hidden(here.relative_to(root)) != ""
        for name in names:
            (hidden if within or is_hidden(here / name) else seen).append(here / name)
    return sorted(seen), sorted(hidden)


def _leads_up(folder: str, real: str) -> bool:
    """Return whether a folder is a link to one that it lies in."""
    return os.path.islink(folder) and f"{real}{os.sep}".startswith(f"{os.path.realpath(folder)}{os.sep}")


def is_hidden(path: Path) -> bool:
    """Return whether a file or folder is hidden, or of another system, by its own name."""
    return _FOREIGN.fullmatch(path.name) is not None


def _find_hidden(path: Path) -> str:
    """Return the first part of a path that is hidden or foreign; empty: none is."""
    return next((part for part in path.parts if is_hidden(Path(part))), "")


def is_photo(path: Path) -> bool:
    """Return whether a file is a picture, by its name, or DICOM, if that can be read."""
    if path.suffix.lower() in SUFFIXES:
        return True
    return path.name != _INDEX and _reads_dicom() and is_dicom(path)


@cache
def _reads_dicom() -> bool:
    return find_spec("pydicom") is not None


def describe_others(paths: Sequence[Path], root: Path) -> str:
    """Return how many files there are of each ending, and what to do with those that may be pictures or annotations."""
    if not paths:
        return ""
    counts = Counter(_ENDING.search(path.name.lower())[0] or "without an ending" for path in paths)  # type: ignore[index]
    said = ", ".join(f"{count} {ending}" for ending, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
    said += f", such as {paths[0].relative_to(root).as_posix()}"
    if kinds := name_annotations(paths):
        said += f"; {'; '.join(kinds)}"
    if dicom := sum(map(is_dicom, paths)) * (not _reads_dicom()):
        said += f"; {dicom} DICOM: {TO_PNG}"
    if pictures := sorted(counts.keys() & {*_PICTURES}):
        said += f"; save {', '.join(pictures)} as PNG"
    return said


# Pictures and volumes of formats that Pillow does not read by itself.
_PICTURES = (
    ".heic", ".heif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".raw", ".svg", ".pdf",
    ".npy", ".npz", ".nii", ".nii.gz", ".svs", ".ndpi", ".mrxs", ".czi", ".nd2", ".lif", ".vsi", ".exr", ".hdr", ".psd",
    ".mat", ".fits",
)  # fmt: skip
TO_PNG = "pip install 'pytorch_grad_cam_pcasvm[dicom]' reads them"


def _name_first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
