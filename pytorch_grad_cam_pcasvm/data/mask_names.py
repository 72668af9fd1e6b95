"""Names of masks: which files in a folder of masks belong to which picture."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from pytorch_grad_cam_pcasvm.data.boxes import ENDING
from pytorch_grad_cam_pcasvm.data.photo_files import is_photo

# Of a mask's name, behind that of its picture; several are numbered.
_ENDING = re.compile(r"[_-](?:mask|gt|label|seg)(?P<number>[_-]?\d+)?$", re.IGNORECASE)


def masks_by_picture(root: Path, names: Sequence[str], paths: Sequence[Path]) -> list[list[Path]]:
    """Return the masks of each picture.

    Args:
        root: the folder of masks.
        names: the paths of the pictures in theirs, such as ``"crack/007.jpg"``.
        paths: the pictures' files.

    Raises:
        FileNotFoundError: there is no such folder, or no mask in it belongs to a picture.
        ValueError: two masks belong to one picture, or a mask to none.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder of masks {root}")
    pictures = {path.resolve() for path in paths}
    found = sorted(path for path in root.rglob("*") if _is_mask_file(path) and path.resolve() not in pictures)
    keys = _keys(names, flat=all(path.parent == root for path in found))
    known, of_key = set(keys), defaultdict[str, list[Path]](list)
    unknown = []
    for path in found:
        key = _find_picture(path, root, known)
        if key is None:
            unknown.append(path)
        else:
            of_key[key].append(path)
    example = Path(names[0]).with_suffix(".png")
    if not of_key:
        raise FileNotFoundError(f"no file in {root} is the mask of a picture: that of {names[0]} would be {example}")
    if unknown:
        raise ValueError(
            f"{unknown[0]} is the mask of no picture: a mask is named as its picture, such as {example} or "
            f"{example.stem}_mask.png for {names[0]}, or lies in a folder of that name, {example.with_suffix('')}"
        )
    for key, masks in of_key.items():
        _check_one_kind(root, key, masks)
    return [of_key.get(key, []) for key in keys]


def _is_mask_file(path: Path) -> bool:
    return is_photo(path) or path.suffix.lower() == ENDING


def _keys(names: Sequence[str], *, flat: bool) -> list[str]:
    """Return the names that masks of each picture may have, without an ending."""
    keys = [Path(name).stem if flat else Path(name).with_suffix("").as_posix() for name in names]
    for key, count in Counter(keys).items():
        if count > 1:
            shared = " and ".join(name for name, other in zip(names, keys, strict=True) if other == key)
            raise ValueError(
                f"{shared} would have the same mask, {key}.png: put masks into folders as the pictures are, and "
                "name pictures differently"
            )
    return keys


def _find_picture(path: Path, root: Path, known: set[str]) -> str | None:
    """Return which picture a mask is of: the one of its name, with or without an ending, or of its folder's."""
    stem = path.relative_to(root).with_suffix("").as_posix()
    folder = path.parent.relative_to(root).as_posix()
    return next((key for key in (stem, _ENDING.sub("", stem), folder) if key in known), None)


def _check_one_kind(root: Path, key: str, masks: Sequence[Path]) -> None:
    """Refuse several masks of a picture, unless they are numbered, or in a folder of its own."""
    if len(masks) == 1 or all(path.parent.relative_to(root).as_posix() == key for path in masks):
        return
    endings = [_ENDING.search(path.stem) for path in masks]
    if len({path.parent for path in masks}) == 1 and all(ending and ending["number"] for ending in endings):
        return
    raise ValueError(
        f"{masks[0]} and {masks[1]} are masks of the same picture: delete one of them, or if what is inside of any is "
        f"wanted, put them into a folder of their own, {root / key}"
    )
