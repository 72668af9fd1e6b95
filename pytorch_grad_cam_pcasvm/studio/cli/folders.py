"""Folders of photos: their classes and objects, and what lies in them that is no photo."""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.studio.cli.arguments import GOOD_PARTS, write_line
from pytorch_grad_cam_pcasvm.studio.data import PHOTOS, arranged, class_folders, name_classes
from pytorch_grad_cam_pcasvm.studio.data.files import NORMAL, Listing, is_hidden, list_files

_BLOCK = 16  # images that are read at once
# Folders of these names are hardly classes: also test_public of MVTec AD 2, val2017 of COCO.
_OF = r"(?:[ _-]?(?:set|data|images?|split|public|private|mixed|\d{4}))*"
_SPLIT = re.compile(rf"(?:train(?:ing)?|val(?:id(?:ation)?)?|test(?:ing)?){_OF}", re.IGNORECASE)


def classes_in(root: Path, wanted: str) -> Sequence[str] | None:
    """Return the names of the classes in a folder of images, or None; before a network is loaded.

    Raises:
        ValueError: there are no images, some of them lie beside the folders of others, or folders are named as the
            parts of a data set; the message says which of these was meant.
    """
    splits = list_splits(root)
    if splits:
        meant = next((name for name in splits if name.lower().startswith(wanted)), splits[0])
        split_names = " and ".join([", ".join(splits[:-1]), splits[-1]] if len(splits) > 1 else splits)
        phrase = "look like splits, not classes" if len(splits) > 1 else "looks like a split, not a class"
        are = "folders are" if len(splits) > 1 else "only folder is"
        raise ValueError(f"the {are} named {split_names}, which {phrase}: did you mean {root / meant}?")
    return name_classes(root)


def list_splits(root: Path) -> list[str]:
    """Return the folders that are parts of a data set, such as train and test, and no classes; empty: none are."""
    folders = class_folders(root) if root.is_dir() else []
    splits = [name for name in folders if _SPLIT.fullmatch(name)]
    return splits if len(splits) > 1 or splits == folders else []  # one among others may be a class: bus, car, train


def find_normal(names: Sequence[str] | None) -> str | None:
    """Return the first class that may be an absence, by its name; None: none is called so."""
    return next((name for name in names or () if name.lower() in NORMAL), None)


def two_classes(options: Any, names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of classes to fit a head on; refuse images without classes, or of only one."""
    root = options.images
    listing = list_files(root)
    if names is None:
        way = f"have no classes: put them into {arranged(root)}; {use_good(root, options)}"
        if listing.drawn is not None:
            way = f"have no classes; with what is drawn on them: {use_drawn(listing, listing.drawn, options)}"
        raise ValueError(f"the images in {root} {way}")
    if len(names) < 2:
        inside = class_folders(root / names[0])
        arrangement = f"it needs {arranged(root)}; {use_good(root / names[0], options)}"
        meant = f"did you mean {root / names[0]}?" if len(inside) > 1 else arrangement
        raise ValueError(f"{root} has one class only, {names[0]}, but a classifier needs two: {meant}")
    return names


_OF_GOOD = dict.fromkeys(("normal", "masks", "kernel", "C", "gamma", "search", "class_weight", "purity", "faults"))
_OF_GOOD |= dict.fromkeys(("components", "sample", "coreset"))  # of patches, all of which a PCA learns


def use_good(folder: Path, options: Any, **more: Any) -> str:
    """Return in words how a head is fitted on good photos alone, with the other options that were typed."""
    kept = _OF_GOOD | {"pool": _choose_pool(options), "classifier": GOOD_PARTS[0]} | more
    return f"if there is nothing to find on them: {write_line(options, 'fit', images=folder, **kept)}"


def _choose_pool(options: Any) -> str:
    return options.pool if getattr(options, "is_dense", False) else "dense:3"


def tell_empty(root: Path, names: Collection[str]) -> None:
    """Say which folders are no classes, having no images."""
    if empty := name_empty(root, names):
        print(f"ignored: {', '.join(empty)}, without images ({PHOTOS})")


def name_empty(root: Path, names: Collection[str]) -> list[str]:
    """Return the names of the folders in a folder without photos, masks, or other files of which is told elsewhere."""
    listing = list_files(root)
    told = {path.relative_to(root).parts[0] for path in (*listing.masks, *listing.hidden)}
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in {*names, *told}
                  and not is_hidden(path))  # fmt: skip


def tell_left_out(options: Any) -> None:
    """Say once which files below a folder are no photos to a command: masks, hidden ones, and other formats."""
    root = getattr(options, "images", None)
    if root is None or not root.is_dir():
        return
    listing = list_files(root)
    for line in describe_left_out(listing, options) if listing.photos else ():
        print(line)


def describe_left_out(listing: Listing, options: Any) -> list[str]:
    """Return a line for each part of a folder that is no photos."""
    if getattr(options, "masks", None):
        return listing.describe(lambda folder: "--masks says which are used")
    return listing.describe(lambda folder: f"to use them: {use_drawn(listing, folder, options)}")


def use_drawn(listing: Listing, folder: Path, options: Any, **more: Any) -> str:
    """Return the command that uses masks or boxes in a folder; of a data set in parts, that of the part with some.

    Args:
        listing: of the data set.
        folder: of masks or boxes.
        options: those that were typed.
        **more: other options of ``fit``.
    """
    root = listing.photo_folder
    name = "fit" if options.name == "fit" or (options.name == "check" and not is_test(root)) else "evaluate"
    if splits := list_splits(root):
        own = {part: list_files(root / part).drawn for part in splits}
        own |= {part: folder / part for part in splits if own[part] is None and (folder / part).is_dir()}
        with_masks = {part: masks for part, masks in own.items() if masks is not None}
        wanted = "train" if with_masks and name == "fit" else "test"  # others have masks of photos to test on
        parts = [*(with_masks or splits)]
        part = next((one for one in parts if one.lower().startswith(wanted)), parts[-1])
        name = name if with_masks and part.lower().startswith(wanted) else "evaluate"
        root, folder = list_files(root / part).photo_folder, with_masks.get(part) or folder
    kept: dict[str, Any] = {}
    if name == "fit":
        kept = {"pool": _choose_pool(options), "search": None} | more
        kept |= {"classifier": None} if getattr(options, "classifier", "") in GOOD_PARTS else {}
    return write_line(options, name, images=root, masks=folder, **kept)


def is_test(folder: Path) -> bool:
    """Return whether a folder is named as one of photos to test on."""
    return folder.name.lower().startswith("test") and _SPLIT.fullmatch(folder.name) is not None


def refuse_bad(options: Any, reasons: Mapping[str, str]) -> None:
    """Refuse images that cannot be read, naming all with the reason, unless such images are to be skipped."""
    if reasons and not options.skip_bad_images:
        photos = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
        if len(reasons) > 1:
            raise OSError(
                f"{len(reasons)} photos cannot be read: {photos}; mend or delete them, or add --skip-bad-images"
            )
        ((name, reason),) = reasons.items()
        raise OSError(f"{name} cannot be read ({reason}): mend or delete it, or add --skip-bad-images")


def list_bad(folder: Any) -> dict[int, str]:
    """Return the reasons why images of a folder cannot be read, by number."""
    from pytorch_grad_cam_pcasvm.studio.data.images import Images

    images, rows = Images(folder, thumbnails=0), range(len(folder))
    return {row: why for start in rows[::_BLOCK] for row, why in images.read(rows[start : start + _BLOCK]).bad.items()}


@contextmanager
def naming_all_bad(options: Any, folder: Any) -> Iterator[None]:
    """Name all images that cannot be read where the first of them ends a command.

    Raises:
        OSError: some cannot be read.
        RuntimeError: the command has ended by something else.
    """
    from pytorch_grad_cam_pcasvm.studio.data.images import Images

    try:
        yield
    except RuntimeError as error:
        if "cannot be read" in str(error):
            images = Images(folder, thumbnails=0)
            refuse_bad(options, {images.id(row): reason for row, reason in list_bad(folder).items()})
        raise


def describe_trained(count: int, total: int) -> list[str]:
    """Return what to say of photos that were trained on, whose score is no test score; nothing if none was."""
    if not count:
        return []
    which = f"{count} of {total} photos" if count < total else "all photos" if total > 1 else "the photo"
    were = "was trained on, or is a copy of one that was" if count == 1 else "were trained on, or are copies of such"
    left = "left out of what is counted" if count < total else "so that no count is a test score"
    return [f"{which} {were}: {left}"]


def tell_bad(names: Sequence[str]) -> None:
    """Say which images were left out."""
    if names:
        shown = ", ".join(names)
        print(f"skipped {len(names)} image{'s' if len(names) > 1 else ''} that cannot be read: {shown}")


def accuracy(labels: Sequence[Any], correct: Any) -> str:
    """Return the share of correct images in words: of all, of each class on average, and of each class."""
    counts, hits = Counter(labels), Counter(label for label, is_hit in zip(labels, correct, strict=True) if is_hit)
    of_class = {label: hits[label] / count for label, count in sorted(counts.items())}
    balanced = sum(of_class.values()) / len(of_class)
    by_class = ", ".join(f"{label} {part:.0%}" for label, part in of_class.items())
    return f"{hits.total() / len(labels):.0%} correct, balanced accuracy {balanced:.0%} ({by_class})"


def name_objects(paths: Sequence[Path], root: Path, level: int, *, has_classes: bool) -> list[str]:
    """Return the name of the object of each photo: its folders below its class's, down to a level.

    Args:
        paths: of the photos.
        root: their folder.
        level: 1 is the folders in it, 2 those in these, and so on.
        has_classes: whether the folders of level 1 are the classes.

    Raises:
        ValueError: that level is the classes, or a photo has no folder there.
    """
    if has_classes and level == 1:
        raise ValueError(
            f"--groups 1 is the folders of the classes in {root}: name the level of the objects, such as 2 for "
            f"{root / 'crack' / 'part07' / '3.jpg'}"
        )
    names = []
    for path in paths:
        folders = path.relative_to(root).parent.parts
        if len(folders) < level:
            inside = f"only {'/'.join(folders)}" if folders else "none"
            raise ValueError(f"--groups {level}: {path} has no folder at level {level} below {root}, {inside}")
        names.append("/".join(folders[int(has_classes) : level]))
    return names


def group_photos(
    paths: Sequence[Path], objects: Sequence[str] | None = None, copies: Sequence[Sequence[int]] = ()
) -> Any:
    """Return the number of the group of each photo, shape (N,): of one object, or the same photo; None: all differ.

    Args:
        paths: of the photos.
        objects: the name of the object of each; None: each is its own.
        copies: the numbers of the photos that are copies of one another; files that are the same need not be there.
    """
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    alike = defaultdict[Any, list[int]](list)
    for row, name in enumerate(objects or ()):
        alike[name].append(row)
    sizes = defaultdict[int, list[int]](list)
    for row, path in enumerate(paths):
        if path.is_file():
            sizes[path.stat().st_size].append(row)
    for rows in sizes.values():
        for row in rows if len(rows) > 1 else ():  # files of different sizes differ
            alike[hashlib.sha256(paths[row].read_bytes()).digest()].append(row)
    pairs = [(rows[0], row) for rows in [*alike.values(), *copies] for row in rows[1:]]
    if not pairs and objects is None:
        return None
    count, (first, second) = len(paths), np.array(pairs, int).reshape(-1, 2).T
    edges = coo_array((np.ones(len(pairs)), (first, second)), shape=(count, count))
    return connected_components(edges, directed=False)[1]


_SHOWN = 5  # names of a kind
_SHALLOW = 14  # bits, of 16: who uses no more of them takes black pictures for his own


def name_first(names: Sequence[str], most: int = _SHOWN) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def suggest_white(top: float) -> int | None:
    """Return the white level of pictures of up to 14 bits in 16, by their largest number; None: they use all bits."""
    bits = max(1, math.ceil(math.log2(top + 1)))
    return 2**bits - 1 if bits <= _SHALLOW else None


def is_moving(picture: Any) -> bool:
    """Return whether an opened picture is an animation, of which the first frame is read."""
    return picture.format not in ("TIFF", "MPO") and getattr(picture, "n_frames", 1) > 1
