"""Names of photos: which photo a mask or an annotation is of, by the ends of paths."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from pytorch_grad_cam_pcasvm.studio.data.files import is_photo
from pytorch_grad_cam_pcasvm.studio.data.mask_search import names_masks, picture_stems

_Parts = tuple[str, ...]
_ENDING = re.compile(r"(?<=.)\.[a-z]{3,5}$", re.IGNORECASE)  # of a photo in a format that is not read, such as .heic


class PhotoNames:
    """Photos, found by the names of their masks, or by the names that annotations have for them.

    Args:
        names: the paths of the photos in their folder.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._rows = names, defaultdict[str, list[int]](list)
        self._parts = [Path(name).with_suffix("").parts for name in names]
        for row, parts in enumerate(self._parts):
            self._rows[parts[-1]].append(row)

    def find_masked(self, mask: Path) -> int | None:
        """Return the number of the photo that a mask is of: the one of its name, or of its folder's; None: none.

        Folders that are named as those of masks do not count, and of two paths, the shorter is the end of the longer:
        the mask of ``images/crack/007.jpg`` is ``crack/007.png``, ``007.png`` or ``crack/masks/007_mask.png``.

        Raises:
            ValueError: it may be of several.
        """
        folders = tuple(part for part in mask.parent.parts if not names_masks(part))
        all_parts = [*((*folders, stem) for stem in picture_stems(mask.with_suffix("").name)), folders]
        rows, parts = self._find(all_parts)
        if len(rows) > 1:
            shared = " and ".join(self._names[row] for row in rows[:2])
            raise ValueError(
                f"{shared} would have the same mask, {'/'.join(parts)}.png: put masks into folders as the "
                "pictures are, and name pictures differently"
            )
        return rows[0] if rows else None

    def find_annotated(self, name: str, file: Path) -> int | None:
        """Return the number of the photo that an annotation is of, by the name that it has for it; None: none.

        The name may have folders, also of another computer, or none, and another ending than the photo.

        Args:
            name: as the file has it.
            file: of the annotation, for messages.

        Raises:
            ValueError: it may be of several.
        """
        path = PurePosixPath(name.strip().replace("\\", "/"))
        folders = tuple(part for part in path.parent.parts if part not in ("/", "..") and not names_masks(part))
        stems = [path.stem] if is_photo(Path(path.name)) else [path.name, _ENDING.sub("", path.name)]
        rows, _ = self._find([(*folders, stem) for stem in dict.fromkeys(stems)])
        if len(rows) > 1:
            rows = [row for row in rows if Path(self._names[row]).name == path.name] or rows
        if len(rows) > 1:
            shared = " and ".join(self._names[row] for row in rows[:2])
            raise ValueError(
                f"{file} has annotations of {name}, which may be {shared}: name photos there with their folders, or "
                "name pictures differently"
            )
        return rows[0] if rows else None

    def _find(self, all_parts: Sequence[_Parts]) -> tuple[list[int], _Parts]:
        """Return the photos whose paths fit best, and the path that they fit."""
        ways: list[Callable[[_Parts, _Parts], bool]] = [tuple.__eq__, _ends, lambda own, parts: _ends(parts, own)]
        for fits in ways:
            for parts in filter(None, all_parts):
                rows = [row for row in self._rows[parts[-1]] if fits(self._parts[row], parts)]
                if rows:
                    return rows, parts
        return [], ()


def _ends(path: _Parts, end: _Parts) -> bool:
    """Return whether a path has this end."""
    return path[-len(end) :] == end
