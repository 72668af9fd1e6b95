"""Masks: the files that say where defects are, beside a folder of pictures, and which belong to which picture."""

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.studio.data.files import NORMAL, describe_others, is_photo, walk
from pytorch_grad_cam_pcasvm.studio.data.images import size_and_orientation
from pytorch_grad_cam_pcasvm.studio.data.mask_classes import MOST_CLASSES, UNLABELLED, MaskClasses, MaskFacts
from pytorch_grad_cam_pcasvm.studio.data.mask_files import (
    ENDING,
    Boxes,
    MaskPixels,
    read_boxes,
    read_mask,
    turned,
    turned_back,
)
from pytorch_grad_cam_pcasvm.studio.data.mask_search import is_numbered, names_masks, picture_stems
from pytorch_grad_cam_pcasvm.studio.pictures.frames import frame_picture
from pytorch_grad_cam_pcasvm.studio.pictures.read import ON_ITS_SIDE

_CORNERS = np.ones((3, 3))  # neighbours of a pixel
_ASPECT = 0.01  # relative difference of a mask's shape from its picture's that is rounding


class MaskFolder:
    """The true masks of a folder of pictures: 0 where there is nothing, other numbers inside.

    The mask of ``crack/007.jpg`` is ``crack/007.png``, or ``crack/007_mask.png`` (``_gt``, ``_label``, ``_seg``), in
    the folder of masks; or ``007.png``, or beside its picture. Several masks of a picture, in a folder ``crack/007``,
    or numbered, ``crack/007_mask_1.png``, are taken together. A picture of the normal class without a mask has nothing
    on it, as one with an empty mask. What is on another one without a mask is unknown, and it is left out.

    A mask is black and white, or has a number for each class; in a palette these are the indexes, unless its colours
    are black and white. A mask in colours has a class for each. Where the transparency varies, and the colours do not,
    the transparency is the mask. Boxes are read, too, from files of Pascal VOC's annotations (``007.xml``): what is in
    a box is of its class.

    Args:
        root: the folder of masks.
        names: the paths of the pictures in theirs, such as ``"crack/007.jpg"``.
        paths: the pictures' files.
        exif: the pictures are turned as their EXIF orientation says, and masks with them; False: neither are.
        only_inside: no classes are wanted, only what is inside of any.
        normal: the folder of pictures on which there is nothing; None: those named ``good``, ``normal``, ``ok``,
            ``healthy`` and so on.
        page: of pictures that are TIFFs of several pages the one that is read, from 1 on.

    Raises:
        FileNotFoundError: there is no such folder, or no mask in it belongs to a picture.
        ValueError: two masks belong to one picture, or a mask to none.

    Attributes:
        names: of the pictures.
        files: the mask of each picture, of several the first; or None.
        unknown: the numbers of pictures without a mask that may have anything on them.
        unlabelled: the number of what nobody has labelled, beside those of classes.
    """

    unlabelled = UNLABELLED

    def __init__(
        self,
        root: str | Path,
        names: Sequence[str],
        paths: Sequence[Path],
        *,
        exif: bool = True,
        only_inside: bool = False,
        normal: str | None = None,
        page: int | None = None,
    ) -> None:
        self.root, self.names, self._paths = Path(root), list(names), list(paths)
        self._masks = masks_by_picture(self.root, self.names, self._paths)
        self.files: list[Path | None] = [masks[0] if masks else None for masks in self._masks]
        self.unknown = [
            row
            for row, (name, path) in enumerate(zip(self.names, self._paths, strict=True))
            if self.files[row] is None and not _is_normal((*Path(name).parts[:-1], path.parent.name), normal)
        ]
        self._is_unknown = np.isin(np.arange(len(self.names)), self.unknown)
        self._exif, self._only_inside, self._page = exif, only_inside, page
        self._classes: MaskClasses | None = None
        self._boxes: dict[Path, Boxes] = {}
        self._numbers_of_boxes: dict[str, int] = {}
        self._pictures: dict[int, tuple[tuple[int, int], int]] = {}  # their sizes and orientations

    def __len__(self) -> int:
        return len(self.names)

    @property
    def count(self) -> int:
        """How many pictures have a mask."""
        return sum(file is not None for file in self.files)

    def describe(self) -> str:
        """Say how many pictures have a mask, how many have nothing on them, and which are left out."""
        left_out, good = len(self.unknown), len(self) - self.count - len(self.unknown)
        said = f"masks: {self.count} of {len(self)} photos have one"
        if good:
            said += f"; on {good} without one, of the normal class, there is nothing"
        if left_out:
            what = "are left out, for what is on them" if left_out > 1 else "is left out, for what is on it"
            said += (
                f"; {left_out} without one {what} is unknown, such as {self.names[self.unknown[0]]}: give an empty "
                "mask where nothing is" + ("" if good else ", or name the folder of good photos, --normal NAME")
            )
        others = [path for path in walk(self.root)[0] if not _is_mask_file(path)]
        if others and not self._paths[0].is_relative_to(self.root):  # of which is told where photos are
            said += f"; not read: {describe_others(others, self.root)}"
        return said

    @property
    def values(self) -> list[int]:
        """The numbers in all masks but 0, in order; [1] where masks only tell inside from outside.

        Raises:
            OSError: a mask cannot be read.
            ValueError: a mask has another shape than its picture, or nobody can say what its numbers or colours mean.
        """
        return self.classes.values

    @property
    def titles(self) -> dict[int, str]:
        """The names of the classes, by number: of masks in colours these, as ``#800000``; else the numbers."""
        return self.classes.titles

    @property
    def classes(self) -> MaskClasses:
        """What the numbers of all masks mean."""
        if self._classes is None:
            self._read_all_boxes()
            facts = [MaskFacts.of(self._read(row, file)) for row, files in enumerate(self._masks) for file in files]
            if self._boxes:
                names = {number: name for name, number in self._numbers_of_boxes.items()}
                classes = MaskClasses([1] if self._only_inside else [*names], names=names)
            else:
                classes = MaskClasses.of(self.root, facts, only_inside=self._only_inside)
            for row, masks in enumerate(self._masks):
                if len(masks) > 1:  # which may contradict each other
                    self._merge_numbers(row, classes)
            if classes.hint:
                warn(classes.hint, UserWarning)
            self._classes = classes
        return self._classes

    def of(self, row: int, size: tuple[int, int], resize: int | str | None) -> np.ndarray:
        """Return the mask of a picture as the network sees it: of every pixel the number of the nearest.

        Args:
            row: number of the picture.
            size: (H, W) of the network's input.
            resize: as for :func:`.framed`: the picture's own.

        Returns:
            Numbers, uint8, shape (H, W); 1 inside of masks that only tell that; ``unlabelled`` where it is unknown.
        """
        classes = self.classes
        if self.files[row] is None:
            return np.full(size, UNLABELLED if self._is_unknown[row] else 0, np.uint8)
        return np.asarray(frame_picture(Image.fromarray(self._merge_numbers(row, classes)), size, resize, "nearest"))

    def find_inside(self, row: int, size: tuple[int, int], resize: int | str | None) -> np.ndarray:
        """Return the inside of a picture's mask as the network sees it, no region of it lost or broken.

        Args:
            row: number of the picture.
            size: (H, W) of the network's input.
            resize: as for :func:`.framed`: the picture's own.

        Returns:
            Boolean, shape (H, W): the nearest pixel of the mask, or, of a region too thin for that, if any pixel of
            it is there. Unlabelled pixels are outside.
        """
        classes = self.classes
        if self.files[row] is None:
            return np.zeros(size, bool)
        numbers = self._merge_numbers(row, classes)
        return _shrink((numbers > 0) & (numbers != UNLABELLED), size, resize)

    def _read_all_boxes(self) -> None:
        """Read the files of boxes, and number their classes by name.

        Raises:
            OSError: one cannot be read.
            ValueError: one is no annotation of Pascal VOC, there are too many classes, or other masks beside them.
        """
        files = [file for masks in self._masks for file in masks]
        of_boxes = [file for file in files if file.suffix.lower() == ENDING]
        if not of_boxes:
            return
        if len(of_boxes) < len(files):
            other = next(file for file in files if file not in of_boxes)
            raise ValueError(f"{self.root} has boxes, {of_boxes[0]}, and masks, {other}: keep one kind in a folder")
        self._boxes = {file: read_boxes(file) for file in of_boxes}
        names = sorted({box.name for boxes in self._boxes.values() for box in boxes.boxes})
        if not 0 < len(names) <= MOST_CLASSES:
            raise ValueError(
                f"the boxes in {self.root} have {len(names) or 'no'} names of classes: from 1 to {MOST_CLASSES} are "
                "expected"
            )
        self._numbers_of_boxes = {name: number for number, name in enumerate(names, 1)}

    def _merge_numbers(self, row: int, classes: MaskClasses) -> np.ndarray:
        """Return the numbers of a picture's masks together, uint8, as large as the files have them."""
        masks = self._masks[row]
        parts = [classes.numbered(self._read(row, file)) for file in masks]
        if len({part.shape for part in parts}) > 1:
            raise ValueError(f"the masks of {self.names[row]}, {masks[0]} and others, differ in size: save all in one")

        def joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
            both = (one != other) & (one > 0) & (other > 0) & (one != UNLABELLED) & (other != UNLABELLED)
            if both.any() and not self._only_inside:
                labels = " and ".join(classes.titles[int(numbers[both][0])] for numbers in (one, other))
                raise ValueError(
                    f"the masks of {self.names[row]}, {masks[0]} and others, have the classes {labels} at the same "
                    "place: give every pixel one class"
                )
            return np.where((one == 0) | ((one == UNLABELLED) & (other > 0)), other, one)

        return reduce(joined, parts)

    def _read(self, row: int, file: Path) -> MaskPixels:
        """Return a mask as its file has it, turned as its picture is.

        People draw on the photo that they see. A mask that only fits the photo as it is stored, lying on its side, was
        drawn there, or by a program that does not know EXIF.

        Raises:
            OSError: it, or its picture, cannot be read.
            ValueError: it has another shape than its picture, or nobody can say what is inside.
        """
        if row not in self._pictures:
            try:
                self._pictures[row] = size_and_orientation(self._paths[row], self._page)
            except Exception as error:  # Pillow has no common name for what it raises
                raise OSError(f"the picture {self._paths[row]} cannot be read ({error})") from error
        stored, orientation = self._pictures[row]
        on_its_side = orientation in ON_ITS_SIDE
        size_seen = stored[::-1] if on_its_side else stored
        if file in self._boxes:
            mask = MaskPixels(file, self._boxes[file].draw(self._numbers_of_boxes, size_seen))
        else:
            mask = read_mask(file)
        numbers = turned(mask.numbers, mask.orientation)
        if on_its_side and mask.orientation == 1 and not _fits(numbers, size_seen) and _fits(numbers, stored):
            numbers = turned(numbers, orientation)
        if not _fits(numbers, size_seen):
            height, width = numbers.shape
            raise ValueError(
                f"the mask {file} has {width} x {height} pixels, but its picture {size_seen[0]} x {size_seen[1]}: save "
                "it in the picture's size"
            )
        if not self._exif:
            numbers = turned_back(numbers, orientation)
        return mask.with_numbers(np.ascontiguousarray(numbers))


def _shrink(inside: np.ndarray, size: tuple[int, int], resize: int | str | None) -> np.ndarray:
    """Return a mask as the network sees it; each connected region, also by corners, stays one."""
    regions, count = ndimage.label(inside, _CORNERS)
    nearest = np.asarray(frame_picture(Image.fromarray(regions.astype(np.float32)), size, resize, "nearest"))
    thin = [number for number in range(1, count + 1) if ndimage.label(nearest == number, _CORNERS)[1] != 1]
    if not thin:
        return nearest > 0
    some = Image.fromarray(np.isin(regions, thin).astype(np.float32))
    return (nearest > 0) | (np.asarray(frame_picture(some, size, resize, "box")) > 0)


def _is_normal(folders: Sequence[str], normal: str | None) -> bool:
    """Return whether a picture in these folders has nothing on it."""
    return any(name == normal if normal is not None else name.lower() in NORMAL for name in folders)


def _fits(numbers: np.ndarray, size: tuple[int, int]) -> bool:
    """Return whether a mask has the shape of a picture of this width and height."""
    height, width = numbers.shape
    return abs(width * size[1] / (height * size[0]) - 1) <= _ASPECT


def masks_by_picture(root: Path, names: Sequence[str], paths: Sequence[Path]) -> list[list[Path]]:
    """Return the masks of each picture.

    Args:
        root: the folder of masks; they may lie beside the pictures.
        names: the paths of the pictures in theirs, such as ``"crack/007.jpg"``.
        paths: the pictures' files.

    Raises:
        FileNotFoundError: there is no such folder, or no mask in it belongs to a picture.
        ValueError: two masks belong to one picture, or a mask to none or to several.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder of masks {root}")
    seen, _ = walk(root)
    pictures = {path.resolve() for path in paths}
    files = [path for path in seen if _is_mask_file(path) and path.resolve() not in pictures]
    pictures_of, of_row, unknown = _Pictures(names), defaultdict[int, list[Path]](list), list[Path]()
    for path in files:
        row = pictures_of.find(path.relative_to(root))
        if row is None:
            unknown.append(path)
        else:
            of_row[row].append(path)
    example = Path(names[0]).with_suffix(".png")
    if not of_row:
        others = describe_others([path for path in seen if not is_photo(path)], root)
        raise FileNotFoundError(
            f"no file in {root} is the mask of a picture: that of {names[0]} would be {root / example}"
            + (f"; it has {others}" if others else "")
        )
    if unknown:
        raise ValueError(
            f"{unknown[0]} is the mask of no picture: a mask is named as its picture, such as {example} or "
            f"{example.stem}_mask.png for {names[0]}, or lies in a folder of that name, {example.with_suffix('')}; "
            "masks of other pictures, such as those to test on, need a folder of their own"
        )
    for row, masks in of_row.items():
        _check_one_kind(root, Path(names[row]), masks)
    return [of_row.get(row, []) for row in range(len(names))]


def _is_mask_file(path: Path) -> bool:
    return is_photo(path) or path.suffix.lower() == ENDING


class _Pictures:
    """Pictures, found by the names of their masks.

    Args:
        names: the paths of the pictures in their folder.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._rows = names, defaultdict[str, list[int]](list)
        self._parts = [Path(name).with_suffix("").parts for name in names]
        for row, parts in enumerate(self._parts):
            self._rows[parts[-1]].append(row)

    def find(self, mask: Path) -> int | None:
        """Return the number of the picture that a mask is of: the one of its name, or of its folder's; None: none.

        Folders that are named as those of masks do not count, and of two paths, the shorter is the end of the longer:
        the mask of ``images/crack/007.jpg`` is ``crack/007.png``, ``007.png`` or ``crack/masks/007_mask.png``.

        Raises:
            ValueError: it may be of several.
        """
        folders = tuple(part for part in mask.parent.parts if not names_masks(part))
        all_parts = [*((*folders, stem) for stem in picture_stems(mask.with_suffix("").name)), folders]
        for fits in (tuple.__eq__, _ends, lambda own, parts: _ends(parts, own)):
            for parts in filter(None, all_parts):
                rows = [row for row in self._rows[parts[-1]] if fits(self._parts[row], parts)]
                if len(rows) > 1:
                    shared = " and ".join(self._names[row] for row in rows[:2])
                    raise ValueError(
                        f"{shared} would have the same mask, {'/'.join(parts)}.png: put masks into folders as the "
                        "pictures are, and name pictures differently"
                    )
                if rows:
                    return rows[0]
        return None


def _ends(path: tuple[str, ...], end: tuple[str, ...]) -> bool:
    """Return whether a path has this end."""
    return path[-len(end) :] == end


def _check_one_kind(root: Path, name: Path, masks: Sequence[Path]) -> None:
    """Refuse several masks of a picture, unless they are numbered, or in a folder of its own."""
    if len(masks) == 1 or all(path.parent.name == name.stem for path in masks):
        return
    if len({path.parent for path in masks}) == 1 and all(is_numbered(path.stem) for path in masks):
        return
    raise ValueError(
        f"{masks[0]} and {masks[1]} are masks of the same picture: delete one of them, or name the folder of one kind; "
        f"or if what is inside of any is wanted, put them into a folder of their own, {root / name.with_suffix('')}"
    )
