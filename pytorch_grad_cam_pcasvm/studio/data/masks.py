"""Masks: the files that say where defects are, beside a folder of pictures, and which belong to which picture."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.studio.data.annotation_files import Drawings
from pytorch_grad_cam_pcasvm.studio.data.files import NORMAL, describe_others, is_photo, walk
from pytorch_grad_cam_pcasvm.studio.data.images import size_and_orientation
from pytorch_grad_cam_pcasvm.studio.data.mask_classes import MOST_CLASSES, UNLABELLED, MaskClasses, MaskFacts
from pytorch_grad_cam_pcasvm.studio.data.mask_files import MaskPixels, read_mask, turned, turned_back
from pytorch_grad_cam_pcasvm.studio.data.mask_owners import find_annotations, masks_by_picture
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
    the transparency is the mask. Annotations are masks, too, in files of COCO, LabelMe, YOLO, Pascal VOC, CVAT for
    images, or run lengths in a table: what is in a shape is of its class, where shapes lie over one another of the
    smallest one's. A picture that such a file names without shapes has nothing on it.

    Args:
        root: the folder of masks or annotations; or a file of annotations.
        names: the paths of the pictures in theirs, such as ``"crack/007.jpg"``.
        paths: the pictures' files.
        exif: the pictures are turned as their EXIF orientation says, and masks with them; False: neither are.
        only_inside: no classes are wanted, only what is inside of any.
        normal: the folder of pictures on which there is nothing; None: those named ``good``, ``normal``, ``ok``,
            ``healthy`` and so on.
        page: of pictures that are TIFFs of several pages the one that is read, from 1 on.

    Raises:
        FileNotFoundError: there is no such folder, or no mask in it belongs to a picture.
        OSError: annotations cannot be read.
        ValueError: two masks belong to one picture, or a mask to none; or annotations are not what they should be.

    Attributes:
        names: of the pictures.
        files: the file of each picture's mask, of several the first; or None.
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
        self._drawings = find_annotations(self.root, self.names, self._paths)
        if self._drawings is None:
            self._masks = masks_by_picture(self.root, self.names, self._paths)
        else:
            drawn = self._drawings.of_row
            self._masks = [[drawn[row].file] if row in drawn else [] for row in range(len(self.names))]
        self.files: list[Path | None] = [masks[0] if masks else None for masks in self._masks]
        self.unknown = [
            row
            for row, (name, path) in enumerate(zip(self.names, self._paths, strict=True))
            if self.files[row] is None and not _is_normal((*Path(name).parts[:-1], path.parent.name), normal)
        ]
        self._is_unknown = np.isin(np.arange(len(self.names)), self.unknown)
        self._exif, self._only_inside, self._page = exif, only_inside, page
        self._classes: MaskClasses | None = None
        self._pictures: dict[int, tuple[tuple[int, int], int]] = {}  # their sizes and orientations
        self._thin: dict[int, list[str]] = {}  # shapes without a pixel of their own

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
        said += "" if self._drawings is None else self._drawings.describe()
        if good:
            said += f"; on {good} without one, of the normal class, there is nothing"
        if left_out:
            what = "are left out, for what is on them" if left_out > 1 else "is left out, for what is on it"
            way = "give an empty mask where nothing is" if self._drawings is None else self._drawings.to_say_nothing
            said += f"; {left_out} without one {what} is unknown, such as {self.names[self.unknown[0]]}: {way}"
            said += "" if good else ", or name the folder of good photos, --normal NAME"
        seen = walk(self.root)[0] if self.root.is_dir() else []
        read = () if self._drawings is None else self._drawings.files
        others = [path for path in seen if not (is_photo(path) or path in read)]
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
            if self._drawings is None:
                facts = [MaskFacts.of(self._read(row, file)) for row, files in enumerate(self._masks) for file in files]
                classes = MaskClasses.of(self.root, facts, only_inside=self._only_inside)
            else:
                classes = self._class_shapes(self._drawings)
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

    def _class_shapes(self, drawings: Drawings) -> MaskClasses:
        """Return the classes of annotations, numbered by name, having drawn all.

        Raises:
            OSError: a picture cannot be read.
            ValueError: there are too many classes or none, or a shape or a size does not fit its picture.
        """
        names = drawings.names
        if not 0 < len(names) <= MOST_CLASSES:
            raise ValueError(
                f"the annotations in {self.root} have {len(names) or 'no'} names of classes: from 1 to {MOST_CLASSES} "
                "are expected"
            )
        for row, drawing in drawings.of_row.items():
            self._read(row, drawing.file)
        thin = [words for row in sorted(self._thin) for words in self._thin[row]]
        hint = ""
        if thin:
            are = "1 shape is" if len(thin) == 1 else f"{len(thin)} shapes are"
            hint = f"{are} too thin for a pixel, such as {thin[0]}: the pixels that it passes are of its class"
        titles = dict(enumerate(names, 1))
        return MaskClasses([1] if self._only_inside else [*titles], hint=hint, names=titles)

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
        mask = read_mask(file) if self._drawings is None else self._draw(row, self._drawings, size_seen, stored)
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

    def _draw(self, row: int, drawings: Drawings, size_seen: tuple[int, int], stored: tuple[int, int]) -> MaskPixels:
        """Return the drawing on a picture as people see it, or as it is stored, if the drawing only fits that.

        Raises:
            ValueError: it fits neither.
        """
        drawing = drawings.of_row[row]
        if drawing.is_stored and size_seen != stored:
            raise ValueError(
                f"{drawing.names[0]} lies on its side, by EXIF, and {drawing.file} does not say whether its runs are "
                "of it as people see it: save the picture turned, without EXIF, and export the annotations anew"
            )
        width, height = drawing.size or size_seen
        fits = next((size for size in (size_seen, stored) if _have_one_shape((width, height), size)), None)
        if fits is None:
            raise ValueError(
                f"{drawing.file} says that {drawing.names[0]} has {width} x {height} pixels, but its picture "
                f"{size_seen[0]} x {size_seen[1]}: was it cropped or turned since? Take the picture that was "
                "annotated, or annotate this one"
            )
        pixels, thin = drawing.draw({name: number for number, name in enumerate(drawings.names, 1)}, fits)
        self._thin[row] = [f"{shape.where}, {shape.name!r} on {drawing.names[0]}" for shape in thin]
        return MaskPixels(drawing.file, pixels)


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
    return _have_one_shape((numbers.shape[1], numbers.shape[0]), size)


def _have_one_shape(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether one width and height are in the proportion of others."""
    return abs(one[0] * other[1] / (one[1] * other[0]) - 1) <= _ASPECT
