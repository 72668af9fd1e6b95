"""Which mask, and which annotations, are of which picture."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pytorch_grad_cam_pcasvm.studio.data.annotation_files import Drawings, find_drawings
from pytorch_grad_cam_pcasvm.studio.data.annotations import refuse_unread
from pytorch_grad_cam_pcasvm.studio.data.files import describe_others, is_photo, walk
from pytorch_grad_cam_pcasvm.studio.data.mask_search import is_numbered
from pytorch_grad_cam_pcasvm.studio.data.photo_names import PhotoNames


def find_annotations(root: Path, names: Sequence[str], paths: Sequence[Path]) -> Drawings | None:
    """Return the annotations of pictures; None: there are none, but masks.

    Raises:
        FileNotFoundError: they are of none of the pictures.
        OSError: they cannot be read.
        ValueError: they are not what they should be, or lie beside masks of the pictures.
    """
    if root.is_file():
        refuse_unread(root)
    drawings = find_drawings(root, names) if root.exists() else None
    if drawings is None:
        return None
    mask = _find_mask(root, names, paths)
    if drawings.of_row and mask is not None:
        first = next(iter(drawings.of_row.values())).file
        raise ValueError(
            f"{root} has annotations, {first}, and masks, {mask}: keep one kind in a folder, or name a file of "
            "annotations"
        )
    if not drawings.of_row and mask is None:
        has = f"has {drawings.absent[0]}" if drawings.absent else "has none"
        raise FileNotFoundError(
            f"{root} has annotations of {drawings.tool}, but none of a picture here: the first of these is {names[0]}, "
            f"and it {has}; name pictures as the annotations do"
        )
    return drawings if drawings.of_row else None


def _find_mask(root: Path, names: Sequence[str], paths: Sequence[Path]) -> Path | None:
    """Return the first picture below a folder that has the name of a mask of a picture; None: none has."""
    pictures, photos = {path.resolve() for path in paths}, PhotoNames(names)
    readable = (path for path in (walk(root)[0] if root.is_dir() else []) if is_photo(path))
    own = (path for path in readable if path.resolve() not in pictures)
    return next((path for path in own if photos.find_masked(path.relative_to(root)) is not None), None)


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
    files = [path for path in seen if is_photo(path) and path.resolve() not in pictures]
    photos, of_row, unknown = PhotoNames(names), defaultdict[int, list[Path]](list), list[Path]()
    for path in files:
        row = photos.find_masked(path.relative_to(root))
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
