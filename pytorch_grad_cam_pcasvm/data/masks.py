"""Masks: the files that say where defects are, beside a folder of pictures."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets.folder import is_image_file

from pytorch_grad_cam_pcasvm.export.explainer import framed

_ENDINGS = ("_mask", "_gt", "_label")  # of names, after that of the picture
_SHADES = 20  # a mask of more numbers, beyond those of classes, has been saved as a photo
_MOST_CLASSES = 100
UNLABELLED = 255  # beside the numbers of classes
_ASPECT = 0.01  # relative difference of a mask's shape from its picture's that is rounding


class MaskFolder:
    """The true masks of a folder of pictures: 0 where there is nothing, other numbers inside.

    The mask of ``crack/007.jpg`` is ``crack/007.png``, or ``crack/007_mask.png``, in the folder of masks; or
    ``007.png``, where that has no subfolders. A picture without a mask has nothing on it.

    Args:
        root: the folder of masks.
        names: the paths of the pictures in theirs, such as ``"crack/007.jpg"``.
        paths: the pictures' files.

    Raises:
        FileNotFoundError: there is no such folder, or no mask in it belongs to a picture.
        ValueError: two masks belong to one picture, or a mask to none.

    Attributes:
        names: of the pictures.
        files: the mask of each picture, or None.
        unlabelled: the number of what nobody has labelled, beside those of classes.
    """

    unlabelled = UNLABELLED

    def __init__(self, root: str | Path, names: Sequence[str], paths: Sequence[Path]) -> None:
        self.root, self.names, self._paths = Path(root), list(names), list(paths)
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no folder of masks {root}")
        found = sorted(path for path in self.root.rglob("*") if is_image_file(path.name))
        flat = all(path.parent == self.root for path in found)
        by_stem: dict[str, Path] = {}
        for path in found:
            stem = path.relative_to(self.root).with_suffix("").as_posix()
            if stem in by_stem:
                raise ValueError(f"{by_stem[stem]} and {path} are masks of the same picture: delete one of them")
            by_stem[stem] = path
        keys = [Path(name).stem if flat else Path(name).with_suffix("").as_posix() for name in self.names]
        for key, count in Counter(keys).items():
            if count > 1:
                shared = " and ".join(name for name, other in zip(self.names, keys, strict=True) if other == key)
                raise ValueError(
                    f"{shared} would have the same mask, {key}.png: put masks into folders as the pictures are, and "
                    "name pictures differently"
                )
        self.files: list[Path | None] = [by_stem.pop(key, None) for key in keys]  # before those with an ending
        for row, key in enumerate(keys):
            if self.files[row] is None:
                self.files[row] = next((by_stem.pop(key + end) for end in _ENDINGS if key + end in by_stem), None)
        if not any(self.files):
            raise FileNotFoundError(
                f"no file in {root} is the mask of a picture: that of {self.names[0]} would be "
                f"{Path(self.names[0]).with_suffix('.png')}"
            )
        if by_stem:
            raise ValueError(
                f"{next(iter(by_stem.values()))} is the mask of no picture: a mask is named as its picture, such as "
                f"{Path(self.names[0]).with_suffix('.png')}"
            )
        self._values: list[int] | None = None
        self._inside = 0  # what is larger is inside of masks that only tell that

    def __len__(self) -> int:
        return len(self.names)

    @property
    def count(self) -> int:
        """How many pictures have a mask."""
        return sum(file is not None for file in self.files)

    @property
    def values(self) -> list[int]:
        """The numbers in all masks but 0, in order; [1] where masks only tell inside from outside.

        Raises:
            OSError: a mask cannot be read.
            ValueError: a mask has another shape than its picture.
        """
        if self._values is None:
            numbers = set[int]()
            for row, file in enumerate(self.files):
                if file is not None:
                    numbers |= set(np.unique(self._read(row)).tolist())
            self._values = self._classes(sorted(numbers - {0}))
        return self._values

    def _classes(self, numbers: list[int]) -> list[int]:
        """Return the numbers of classes, of those in all masks but 0."""
        if not numbers:
            raise ValueError(f"all masks in {self.root} are black: what is inside must be white, or have a number")
        if len(numbers) == 1:
            return [1]
        if max(number for number in numbers if number != UNLABELLED) <= _MOST_CLASSES:
            return numbers
        if len(numbers) <= _SHADES:
            raise ValueError(
                f"the masks in {self.root} have the numbers {', '.join(map(str, numbers))} besides 0, which may be "
                "classes, or the soft edge of one: write black and white, or classes as 1, 2, 3 and so on "
                f"({UNLABELLED}: not labelled)"
            )
        self._inside = 127
        return [1]

    def of(self, row: int, size: tuple[int, int], resize: int | str | None) -> np.ndarray:
        """Return the mask of a picture as the network sees it: of every pixel the number of the nearest.

        Args:
            row: number of the picture.
            size: (H, W) of the network's input.
            resize: as for :func:`.framed`: the picture's own.

        Returns:
            Numbers, uint8, shape (H, W); 1 inside of masks that only tell that.
        """
        values = self.values
        if self.files[row] is None:
            return np.zeros(size, np.uint8)
        mask = Image.fromarray(self._read(row))
        numbers = np.asarray(framed(mask, size, resize, "nearest"))
        return (numbers > self._inside).astype(np.uint8) if values == [1] else numbers

    def _read(self, row: int) -> np.ndarray:
        """Return a mask's numbers, as large as its file has them."""
        file: Any = self.files[row]
        try:
            with Image.open(file) as mask:
                numbers = np.asarray(mask if mask.mode in ("L", "P", "1") else mask.convert("L"))
            with Image.open(self._paths[row]) as picture:
                size = picture.size
        except Exception as error:  # Pillow has no common name for what it raises
            raise OSError(f"the mask {file} cannot be read ({error})") from error
        height, width = numbers.shape
        if abs(width * size[1] / (height * size[0]) - 1) > _ASPECT:
            raise ValueError(
                f"the mask {file} has {width} x {height} pixels, but its picture {size[0]} x {size[1]}: save it in the "
                "picture's size"
            )
        return numbers.astype(np.uint8)
