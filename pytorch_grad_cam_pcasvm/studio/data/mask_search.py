"""The search for masks among pictures: by the names of folders and files, and by what the pictures show."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

_WORDS = r"(?:masks?|gts?|ground[ ._-]?truths?|labels?|lbls?|annotations?|annots?|segs?|segmentations?)"
# Of a mask's name, behind that of its picture or before it; several are numbered.
_BEHIND = re.compile(rf"[ ._-]+{_WORDS}(?P<number>[ ._-]*\d+)?$", re.IGNORECASE)
_BEFORE = re.compile(rf"^{_WORDS}[ ._-]+", re.IGNORECASE)
_FOLDER = re.compile(rf"{_WORDS}(?:class|object)?", re.IGNORECASE)
_PART = re.compile(_WORDS, re.IGNORECASE)  # of a folder's name that may say so: train_masks, but with_mask, too
_PHOTOS = re.compile(r"(?:jpe?g|png)?(?:images?|imgs?|photos?|pictures?)", re.IGNORECASE)  # of a folder of photos alone
_LAST = re.compile(r"(.+)[ ._-]+([^ ._-]+)$")
_LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif", ".avif", ".jp2")
_LOOKED_AT = 8  # pictures of a group
_ENOUGH = 0.5  # of a group that have the names of photos
_FEW, _COLOURS = 8, 100  # that any mask has, and that most of its pixels have
_MOST, _FLAT = 0.99, 0.9  # of the pixels: of these colours; like their neighbour
_BLURRED, _NOISE, _SMOOTH = 24, 2, 0.8  # of 255: black or white that JPEG has changed; like a neighbour, so many
_PIXELS = 1 << 18  # that are looked at
_SMALL, _SAME = 32, 16  # pixels of a side; of 255: by which a picture that was saved twice differs at most


def names_masks(folder: str) -> bool:
    """Return whether a folder is named as one of masks."""
    return _FOLDER.fullmatch(re.sub(r"[\W\d_]+", "", folder)) is not None


def names_photos(folder: str) -> bool:
    """Return whether a folder is named as one of photos of any class."""
    return _PHOTOS.fullmatch(folder) is not None


def picture_stems(stem: str) -> list[str]:
    """Return the names of pictures that a mask of this name may be of, without endings: the most likely first."""
    return list(dict.fromkeys([stem, _BEHIND.sub("", stem), _BEFORE.sub("", stem)]))


def is_numbered(stem: str) -> bool:
    """Return whether a mask is one of several of its picture, by its name."""
    match = _BEHIND.search(stem)
    return match is not None and match["number"] is not None


@dataclass(frozen=True)
class _Group:
    """Pictures that are masks all together, or none is.

    Attributes:
        where: they are, in words.
        folder: of all of them.
        masks: the pictures.
        certain: whether their name says that they are masks; False: that they may be.
        way: how they are made photos by a name.
    """

    where: str
    folder: Path
    masks: list[Path]
    certain: bool
    way: str


def find_masks(root: Path, pictures: Sequence[Path]) -> tuple[set[Path], Path | None]:
    """Return which of the pictures in a folder are masks of others, and the folder of all of them.

    Raises:
        ValueError: some are masks by their names, and photos by what they show, or the other way round.
    """
    groups = list(_group(root, pictures))
    named = {path for group in groups if group.certain for path in group.masks}
    photos = [path for path in pictures if path not in named]
    if not photos:  # which masks could be of
        return set(), None
    masks = _find_named_alike(root, photos)
    folders = [root] * bool(masks)
    for group in groups:
        own = set(group.masks)
        of_stem = _by_stem([path for path in photos if path not in own and path not in masks])
        why = _why_photos(group.masks, of_stem)
        if why is None:
            _refuse_drawings(root, group, of_stem)
        if why is None and own < set(photos) | named:
            masks |= own
            folders.append(group.folder)
        elif group.certain:
            raise ValueError(
                f"{group.where} by name, but {why}: if they are photos, {group.way}; if they are masks, save them as "
                f"PNG, in few colours, with the names and sizes of their photos, or move them out of {root}"
            )
    _refuse_unnamed(root, [path for path in pictures if path not in masks])
    return masks, _choose_folder(root, folders, masks) if folders else None


def _find_named_alike(root: Path, photos: Sequence[Path]) -> set[Path]:
    """Return the pictures that are masks of others in their folders with names that differ by the ending alone.

    Raises:
        ValueError: both may be masks by what they show.
    """
    of_name, pairs = defaultdict[Any, list[Path]](list), defaultdict[Any, list[tuple[Path, Path]]](list)
    for path in photos:
        of_name[path.parent, path.stem].append(path)
    for own in of_name.values():
        for pair in combinations(own, 2):
            pairs[tuple(path.suffix.lower() for path in pair)].append(pair)
    masks = set[Path]()
    for of_endings in pairs.values():
        kinds = [_have_few_colours(*pair) for pair in _some(of_endings)]
        if len({*kinds}) > 1:  # some are copies
            kinds = [_have_few_colours(*pair) for pair in of_endings]
        counts = [sum(kind[place] for kind in kinds) for place in (0, 1)]
        if not any(counts):
            continue
        if 2 * min(counts) > max(counts):
            one, other = of_endings[0]
            raise ValueError(
                f"{one} and {other} have one name, and few colours both: if one is the mask of the other, end its name "
                f"in _mask, as in {other.stem}_mask{other.suffix}; if both are photos, name them differently"
            )
        place = counts.index(max(counts))
        kinds *= len(of_endings) if len({*kinds}) == 1 else 1
        masks |= {pair[place] for pair, kind in zip(of_endings, kinds, strict=False) if kind[place]}
    return masks


def _have_few_colours(one: Path, other: Path) -> tuple[bool, bool]:
    """Return which of two pictures may be the mask of the other, by their colours; none if they show the same."""
    import numpy as np
    from PIL import Image

    from pytorch_grad_cam_pcasvm.studio.pictures.read import open_picture

    if not _have_one_shape(one, other):
        return False, False
    try:
        small = []
        for path in (one, other):
            with open_picture(path) as picture:
                small.append(np.asarray(picture.convert("L").resize((_SMALL, _SMALL), Image.Resampling.BOX), float))
    except Exception:  # who reads it says so
        return False, False
    same = np.abs(small[0] - small[1]).mean() < _SAME
    return (False, False) if same else (has_few_colours(one), has_few_colours(other))


def _refuse_drawings(root: Path, group: _Group, of_stem: Mapping[str, Path]) -> None:
    """Refuse masks of photos that have few colours, too: both may be classes, as of drawings.

    Raises:
        ValueError: the names of files and of the folder of photos do not say which of them are masks.
    """
    pairs = [(mask, photo) for mask in group.masks if (photo := of_stem.get(mask.stem)) is not None]
    if len(pairs) < len(group.masks) or any(map(names_photos, pairs[0][1].relative_to(root).parts[:-1])):
        return
    if all(has_few_colours(photo) for _, photo in _some(pairs)):
        mask, photo = pairs[0]
        raise ValueError(
            f"{group.where} by name, but {photo.name} in {photo.parent} has few colours, too: if both are photos, "
            f"rename the folder {group.folder}; if {mask} is a mask, move all masks out of "
            f"{root}, and name them with --masks"
        )


def _choose_folder(root: Path, folders: Sequence[Path], masks: set[Path]) -> Path:
    """Return the folder of all masks; where there are several of each photo, the first of these kinds' folders."""
    if len(set(folders)) == 1:
        return folders[0]
    names = defaultdict[tuple[str, ...], int](int)
    for mask in masks:
        parts = mask.relative_to(root).parts
        own = (*(part for part in parts[:-1] if not names_masks(part)), mask.stem)
        names[own] += 1
    return folders[0] if max(names.values()) > 1 else root


def _group(root: Path, pictures: Sequence[Path]) -> Iterator[_Group]:
    """Yield the groups of pictures that may be masks by the names of their folders, or by their own."""
    alone, in_folder = list[Path](), defaultdict[Path, list[Path]](list)
    folder_of = {parent: _find_named(root, parent) for parent in {path.parent for path in pictures}}
    for path in pictures:
        own_folder = folder_of[path.parent]
        (alone if own_folder is None else in_folder[own_folder]).append(path)
    for folder, own in in_folder.items():
        where = f"the pictures in {folder} are masks"
        yield _Group(where, folder, own, names_masks(folder.name), "rename the folder")
    beside = {(path.parent, path.stem) for path in alone}
    own = [path for path in alone if any((path.parent, stem) in beside for stem in picture_stems(path.stem)[1:])]
    if own:
        yield _Group(f"{len(own)} pictures, such as {own[0]}, are masks", root, own, True, "rename them")


def _find_named(root: Path, parent: Path) -> Path | None:
    """Return the first folder below the root, down to one of pictures, that may be of masks by its name; None: none."""
    folders = [root / part for part in reversed(parent.relative_to(root).parents)][1:] + [parent] * (parent != root)
    for fits in (names_masks, _PART.search):
        if folder := next((one for one in folders if fits(one.name)), None):
            return folder
    return None


def _by_stem(paths: Sequence[Path]) -> dict[str, Path]:
    return {path.stem: path for path in paths}


def _find_photo(mask: Path, of_stem: Mapping[str, Path]) -> Path | None:
    """Return a photo that has the name of a mask, or of its folder."""
    return next((of_stem[stem] for stem in [*picture_stems(mask.stem), mask.parent.name] if stem in of_stem), None)


def _why_photos(masks: Sequence[Path], of_stem: Mapping[str, Path]) -> str | None:
    """Return why pictures are hardly masks of these photos, in words; None: they are."""
    pairs = [(mask, photo) for mask in masks if (photo := _find_photo(mask, of_stem)) is not None]
    colourful = next((path for path in _some(masks) if not has_few_colours(path)), None)
    if colourful is not None:
        return f"{colourful.name} has as many colours as a photo"
    if len(pairs) < _ENOUGH * len(masks):
        return f"{len(masks) - len(pairs)} of {len(masks)} have the name of no photo, such as {masks[-1].name}"
    odd = next((mask for mask, photo in _some(pairs) if not _have_one_shape(mask, photo)), None)
    return None if odd is None else f"{odd.name} has another shape than its photo"


def _some(items: Sequence[Any]) -> Sequence[Any]:
    return items[:: max(1, len(items) // _LOOKED_AT)]


def _refuse_unnamed(root: Path, photos: Sequence[Path]) -> None:
    """Refuse pictures that look like masks of others, and are not named so.

    Raises:
        ValueError: there are some.
    """
    in_folder, behind = defaultdict[Path, list[Path]](list), defaultdict[str, list[Path]](list)
    beside = {(path.parent, path.stem): path for path in photos}
    for path in photos:
        in_folder[path.parent].append(path)
        match = _LAST.fullmatch(path.stem)
        if match and (path.parent, match[1]) in beside:
            behind[match[2]].append(path)
    stems = defaultdict[str, list[Path]](list)
    for path in photos:
        stems[path.stem].append(path)
    for folder, own in in_folder.items():
        pairs = [(path, next((one for one in stems[path.stem] if one.parent != folder), None)) for path in own]
        if folder != root and all(photo is not None for _, photo in pairs):
            _refuse_alike(f"the pictures in {folder}", pairs, f"rename the folder to {folder.with_name('masks')}")
    for word, own in behind.items():
        pairs = [(path, beside[path.parent, _LAST.fullmatch(path.stem)[1]]) for path in own]  # type: ignore[index]
        _refuse_alike(
            f"pictures such as {own[0]}", pairs, f"end their names in _mask in place of {own[0].stem[-len(word) - 1 :]}"
        )


def _refuse_alike(which: str, pairs: Sequence[Any], way: str) -> None:
    """Refuse pictures of few colours that have the names and shapes of photos of many.

    Raises:
        ValueError: they do.
    """
    if any(mask.suffix.lower() in _LOSSY for mask, _ in pairs):
        return
    some = _some(pairs)
    if not all(has_few_colours(mask) and _have_one_shape(mask, photo) for mask, photo in some):
        return
    if sum(has_few_colours(photo) for _, photo in some) > len(some) / 2:
        return
    _, photo = pairs[0]
    raise ValueError(
        f"{which} are photos by name, but have few colours, and the names and sizes of others, such as {photo}: if "
        f"they are masks, {way}; if they are photos, name the files otherwise, as in new_{photo.name}"
    )


def _have_one_shape(mask: Path, photo: Path) -> bool:
    """Return whether a mask has the shape of a photo, which may lie on its side; unreadable ones are told elsewhere."""
    from pytorch_grad_cam_pcasvm.studio.pictures.read import open_picture

    try:
        with open_picture(mask) as one, open_picture(photo) as other:
            ratio = one.width * other.height / (one.height * other.width)
            turned = one.width * other.width / (one.height * other.height)
    except Exception:  # Pillow has no common name for what it raises
        return True
    return min(abs(ratio - 1), abs(turned - 1)) < 0.01


def has_few_colours(path: Path) -> bool:
    """Return whether a picture has few colours, in areas, as masks have; one that cannot be read has."""
    import numpy as np

    from pytorch_grad_cam_pcasvm.studio.pictures.read import open_picture

    try:
        with open_picture(path) as picture:
            plain = picture.mode in ("1", "L", "P", "I", "F") or picture.mode.startswith("I;16")
            pixels = np.asarray(picture if plain else picture.convert("RGBA"))
    except Exception:  # Pillow has no common name for what it raises
        return True
    pixels = pixels[:: max(1, pixels.shape[0] * pixels.shape[1] // _PIXELS)]
    if path.suffix.lower() in _LOSSY:
        shades = (pixels[..., :3].max(-1) if pixels.ndim == 3 else pixels).astype(int)
        dark, light = shades <= _BLURRED, shades >= shades.max() - _BLURRED
        alike = np.abs(np.diff(shades, axis=1)) <= _NOISE
        return bool(dark.any() and (dark | light).mean() >= _FLAT and alike.mean() >= _SMOOTH)
    numbers = np.ascontiguousarray(pixels).view(np.uint32)[..., 0] if pixels.ndim == 3 else pixels
    counts = np.sort(np.unique(numbers, return_counts=True)[1])[::-1]
    if len(counts) <= _FEW:
        return True
    alike = (numbers[:, 1:] == numbers[:, :-1]).mean()
    return bool(alike >= _FLAT and counts[:_COLOURS].sum() >= _MOST * counts.sum())
