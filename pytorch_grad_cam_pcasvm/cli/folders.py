"""Folders of photos: their classes and objects, and the command that looks at them before any work."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.cli.arguments import RUN, CheckOptions
from pytorch_grad_cam_pcasvm.data import PHOTOS, arranged, class_folders, name_classes
from pytorch_grad_cam_pcasvm.data.files import NORMAL, SUFFIXES, Listing, is_hidden, list_files

_BLOCK = 16  # images that are read at once
# Folders of these names are hardly classes.
_SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")


def classes_in(root: Path, wanted: Sequence[str]) -> Sequence[str] | None:
    """Return the names of the classes in a folder of images, or None; before a network is loaded.

    Raises:
        ValueError: there are no images, some of them lie beside the folders of others, or folders are named as the
            parts of a data set; the message says which of these was meant.
    """
    splits = list_splits(root)
    if splits:
        meant = next((name for name in splits if name.lower() in wanted), splits[0])
        split_names = " and ".join([", ".join(splits[:-1]), splits[-1]] if len(splits) > 1 else splits)
        phrase = "look like splits, not classes" if len(splits) > 1 else "looks like a split, not a class"
        are = "folders are" if len(splits) > 1 else "only folder is"
        raise ValueError(f"the {are} named {split_names}, which {phrase}: did you mean {root / meant}?")
    return name_classes(root)


def list_splits(root: Path) -> list[str]:
    """Return the folders that are parts of a data set, such as train and test, and no classes; empty: none are."""
    folders = class_folders(root) if root.is_dir() else []
    splits = [name for name in folders if name.lower() in _SPLITS]
    return splits if len(splits) > 1 or splits == folders else []  # one among others may be a class: bus, car, train


def find_normal(names: Sequence[str] | None) -> str | None:
    """Return the first class that may be an absence, by its name; None: none is called so."""
    return next((name for name in names or () if name.lower() in NORMAL), None)


def two_classes(root: Path, names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of classes to fit a head on; refuse images without classes, or of only one."""
    if names is None:
        raise ValueError(f"the images in {root} have no classes: put them into {arranged(root)}")
    if len(names) < 2:
        inside = class_folders(root / names[0])
        meant = f"did you mean {root / names[0]}?" if len(inside) > 1 else f"it needs {arranged(root)}"
        raise ValueError(f"{root} has one class only, {names[0]}, but a classifier needs two: {meant}")
    return names


def tell_empty(root: Path, names: Collection[str]) -> None:
    """Say which folders are no classes, having no images."""
    if empty := _name_empty(root, names):
        print(f"ignored: {', '.join(empty)}, without images ({PHOTOS})")


def _name_empty(root: Path, names: Collection[str]) -> list[str]:
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
    for line in _describe_left_out(listing, options) if listing.photos else ():
        print(line)


def _describe_left_out(listing: Listing, options: Any) -> list[str]:
    """Return a line for each part of a folder that is no photos."""
    if getattr(options, "masks", None):
        return listing.describe("--masks says which are used")
    way = f"fit {listing.root} --pool dense:3" if options.name in ("check", "fit") else f"evaluate {listing.root}"
    return listing.describe(f"to use them: {RUN} {way} --masks {{}}")


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
    from pytorch_grad_cam_pcasvm.data.images import Images

    images, rows = Images(folder, thumbnails=0), range(len(folder))
    return {row: why for start in rows[::_BLOCK] for row, why in images.read(rows[start : start + _BLOCK]).bad.items()}


@contextmanager
def naming_all_bad(options: Any, folder: Any) -> Iterator[None]:
    """Name all images that cannot be read where the first of them ends a command.

    Raises:
        OSError: some cannot be read.
        RuntimeError: the command has ended by something else.
    """
    from pytorch_grad_cam_pcasvm.data.images import Images

    try:
        yield
    except RuntimeError as error:
        if "cannot be read" in str(error):
            images = Images(folder, thumbnails=0)
            refuse_bad(options, {images.id(row): reason for row, reason in list_bad(folder).items()})
        raise


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


def group_photos(paths: Sequence[Path], objects: Sequence[str] | None = None) -> Any:
    """Return the number of the group of each photo, shape (N,): of one object, or the same file; None: all differ.

    Args:
        paths: of the photos.
        objects: the name of the object of each; None: each is its own.
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
    pairs = [(rows[0], row) for rows in alike.values() for row in rows[1:]]
    if not pairs and objects is None:
        return None
    count, (first, second) = len(paths), np.array(pairs, int).reshape(-1, 2).T
    edges = coo_array((np.ones(len(pairs)), (first, second)), shape=(count, count))
    return connected_components(edges, directed=False)[1]


_SHOWN = 5  # names of a kind
_TINY = 32  # pixels of a side
_FLOAT_WHITE = 255.0  # the largest that is white in floating-point pictures
_SHALLOW = 14  # bits, of 16: who uses no more of them takes black pictures for his own
_FEW = 10  # photos of a class, from which choices can be made
_KINDS = {  # of photos that need attention
    "deep": "more than 8 bits: {count} photos, such as {first}; fit takes the largest number that is possible for "
    "white, such as 65535; less is named with --white-level",
    "moving": "moving: {count} photos, such as {first}; the first frame is taken",
    "turned": "turned by EXIF: {count} photos, such as {first}; fit turns them, too",
    "tiny": f"smaller than {_TINY} pixels: {{names}}",
}


def check(options: CheckOptions) -> None:
    """Describe a folder of photos."""
    root = options.images
    listing = list_files(root)
    paths, left_out = listing.photos, _describe_left_out(listing, options)
    if not paths:
        found = "".join(f"; {line}" for line in left_out)
        raise ValueError(f"the folder {root} has no photos ({', '.join(SUFFIXES)}){found}")
    splits = list_splits(root)
    beside = sorted({_name_class(root, path) for path in paths} - set(splits)) if splits else []
    paths = [path for path in paths if _name_class(root, path) not in beside]
    looked = {path: _look_at(path, options.tiff_page) for path in paths}
    if beside:
        print(f"ignored: {', '.join(name or 'photos' for name in beside)}, beside {' and '.join(splits)}")
    findings = [*left_out, *_tell_odd(root, looked), *_tell_doubled(root, looked, splits)]
    for part in splits:
        of_part = [path for path in paths if path.is_relative_to(root / part)]
        print(f"{part}: {len(of_part)} photos")
        findings += [f"{part}: {remark}" for remark in _tell_classes(root / part, of_part)]
    findings += [*([] if splits else _tell_classes(root, paths)), *_tell_masks(options, paths)]
    good = [size for size in (one.get("size") for one in looked.values()) if size]
    print(f"{len(paths)} photos{_describe_sizes(good)}")
    for finding in findings:
        print(finding)
    print("nothing odd was found" if not findings else "nothing was written")
    broken = any(line.startswith("broken") for line in findings)
    training = root / next((part for part in splits if part.lower().startswith("train")), "")
    if not broken and len(_list_classes(training, [path for path in paths if path.is_relative_to(training)])) > 1:
        white = _find_white(looked)
        more = f" --white-level {white}" * (white is not None) + f" --page {options.tiff_page}" * bool(options.tiff_page)
        print(f"next: {RUN} fit {training}{more}")


def _look_at(path: Path, page: int | None) -> dict[str, Any]:
    """Return the size and the digest of a photo, and of which kinds it is; or why it is broken."""
    from PIL import Image

    from pytorch_grad_cam_pcasvm.export.explainer import choose_page, deep_numbers, read_orientation

    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with Image.open(path) as picture:
            choose_page(picture, page)
            moving, size = is_moving(picture), picture.size
            numbers, white = deep_numbers(picture)
            picture.load()
            kinds = {"moving": moving, "deep": numbers is not None, "turned": read_orientation(picture) != 1}
        if numbers is not None:
            low, high = float(numbers.min()), float(numbers.max())
            if not (low >= 0 and (white > 1 or high <= _FLOAT_WHITE)):
                raise ValueError("no greys")
            kinds["top"] = high if white > 1 else 0  # type: ignore[assignment]
        return {"size": size, "digest": digest, "tiny": min(size) < _TINY} | kinds
    except Exception as error:  # whatever a decoder raises
        return {"broken": _find_reason(path, page) or str(error) or type(error).__name__}


def _find_reason(path: Path, page: int | None) -> str:
    """Return why the reader of all commands does not take a picture; empty: it does."""
    from pytorch_grad_cam_pcasvm.export.explainer import UnreadableImageError, read_picture

    try:
        read_picture(path, float_white=_FLOAT_WHITE, page=page)
    except UnreadableImageError as error:
        return error.reason
    return ""


def suggest_white(top: float) -> int | None:
    """Return the white level of pictures of up to 14 bits in 16, by their largest number; None: they use all bits."""
    bits = max(1, math.ceil(math.log2(top + 1)))
    return 2**bits - 1 if bits <= _SHALLOW else None


def is_moving(picture: Any) -> bool:
    """Return whether an opened picture is an animation, of which the first frame is read."""
    return picture.format not in ("TIFF", "MPO") and getattr(picture, "n_frames", 1) > 1


def _describe_sizes(sizes: Sequence[tuple[int, int]]) -> str:
    if not sizes:
        return ""
    counts = Counter(sizes)
    if len(counts) == 1:
        return ", {}x{} pixels".format(*sizes[0])
    widths, heights = zip(*sizes, strict=True)
    return f", {min(widths)}x{min(heights)} to {max(widths)}x{max(heights)} pixels, of {len(counts)} sizes"


def _name_some(root: Path, paths: Iterable[Path]) -> str:
    return name_first([path.relative_to(root).as_posix() for path in paths])


def name_first(names: Sequence[str], most: int = _SHOWN) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _tell_odd(root: Path, looked: dict[Path, dict[str, Any]]) -> list[str]:
    """Say which photos are broken, and of which kinds others are that need attention."""
    broken = {path: one["broken"] for path, one in looked.items() if "broken" in one}
    listed = name_first([f"{path.relative_to(root).as_posix()} ({why})" for path, why in broken.items()])
    findings = [f"broken: {listed}; mend or delete, or add --skip-bad-images"] if broken else []
    kinds = {name: [path for path, one in looked.items() if one.get(name)] for name in ("deep", "moving", "turned", "tiny")}
    if (white := _find_white(looked)) is not None:
        findings.append(f"dark: no photo of more than 8 bits has larger numbers than {white}: fit --white-level {white}")
    return findings + [
        _KINDS[name].format(count=len(paths), first=_name_some(root, paths[:1]), names=_name_some(root, paths))
        for name, paths in kinds.items()
        if paths
    ]


def _find_white(looked: Mapping[Path, Mapping[str, Any]]) -> int | None:
    """Return the white level that photos of more than 8 bits need; None: none."""
    tops = [one["top"] for one in looked.values() if one.get("top")]
    return suggest_white(max(tops)) if tops else None


def _tell_doubled(root: Path, looked: dict[Path, dict[str, Any]], splits: Sequence[str]) -> list[str]:
    """Say which files are the same, and first which of these have different labels, or are in two parts of the set."""
    same = defaultdict(list)
    for path, one in looked.items():
        if "digest" in one:
            same[one["digest"]].append(path)
    groups = [paths for paths in same.values() if len(paths) > 1]
    across = [paths for paths in groups if len({_name_class(root, path) for path in paths}) > 1]
    where = f"{' and '.join(splits)}, so that scores are too good" if splits else "two classes"
    inside = [paths for paths in groups if paths not in across]
    findings = [f"the same photo in {where}: {_name_equal(root, across)}"] if across else []
    if inside:
        findings.append(
            f"doubled: {len(inside)} photo{'s are' if len(inside) > 1 else ' is'} there more than once, "
            f"{_name_equal(root, inside)}; keep one of each: fit leaves them in one fold, but counts them all"
        )
    return findings


def _name_equal(root: Path, groups: Sequence[Sequence[Path]]) -> str:
    return name_first([" = ".join(path.relative_to(root).as_posix() for path in paths) for paths in groups])


def _name_class(root: Path, path: Path) -> str:
    return path.relative_to(root).parts[0] if path.parent != root else ""


def _list_classes(root: Path, paths: Sequence[Path]) -> Counter[str]:
    return Counter(name for path in paths if (name := _name_class(root, path)))


def _tell_classes(root: Path, paths: Sequence[Path]) -> list[str]:
    """Say how many photos each class has, and which classes have too few."""
    counts, findings = _list_classes(root, paths), []
    beside = [path for path in paths if path.parent == root]
    if counts and beside:
        findings.append(f"beside the folders of classes: {_name_some(root, beside)}")
    if not counts:
        return [*findings, "no classes: a classifier needs one subfolder for each"]
    print("classes: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    single = sorted(name for name, count in counts.items() if count == 1)
    small_classes = sorted(name for name, count in counts.items() if 1 < count < _FEW)
    if single:
        findings.append(f"one photo only: {', '.join(single)}; a class needs two to be validated")
    if small_classes:
        findings.append(
            f"fewer than {_FEW} photos: {', '.join(small_classes)}; nothing is chosen by cross-validation then"
        )
    empty = _name_empty(root, counts)
    return [*findings, *([f"without photos: {', '.join(empty)}"] if empty else [])]


def _tell_masks(options: CheckOptions, paths: Sequence[Path]) -> list[str]:
    """Say which masks belong to no photo, how many photos have one, and what is known of the others."""
    if options.masks is None:
        return []
    from pytorch_grad_cam_pcasvm.data.masks import MaskFolder

    names = [path.relative_to(options.images).as_posix() for path in paths]
    try:
        print(MaskFolder(options.masks, names, paths, normal=options.normal, page=options.tiff_page).describe())
    except (ValueError, OSError) as error:
        return [f"masks: {error}"]
    return []
