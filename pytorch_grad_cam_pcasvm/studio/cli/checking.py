"""The command that looks at a folder of photos before any work."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.studio.cli.arguments import CheckOptions, write_line
from pytorch_grad_cam_pcasvm.studio.cli.copies import (
    describe_copies,
    describe_labels,
    list_copies,
    name_equal,
    pick_first,
    separate_scenes,
)
from pytorch_grad_cam_pcasvm.studio.cli.corner_text import find_text, tell_text
from pytorch_grad_cam_pcasvm.studio.cli.dicom_checking import tell_machines, tell_windows
from pytorch_grad_cam_pcasvm.studio.cli.folders import (
    describe_left_out,
    is_moving,
    is_test,
    list_splits,
    name_empty,
    name_first,
    suggest_white,
    use_drawn,
    use_good,
)
from pytorch_grad_cam_pcasvm.studio.data import class_folders, describe_none
from pytorch_grad_cam_pcasvm.studio.data.copies import hash_picture
from pytorch_grad_cam_pcasvm.studio.data.files import NORMAL, Listing, list_files

_TINY = 32  # pixels of a side
_FLOAT_WHITE = 255.0  # the largest that is white in floating-point pictures
_FEW = 10  # photos of a class, from which choices can be made
_KINDS = {  # of photos that need attention
    "deep": "more than 8 bits: {photos}, such as {first}; fit takes the largest number that is possible for "
    "white, such as 65535; less is named with --white-level",
    "unit": "floating-point: {photos}, such as {first}, with numbers up to 1; fit takes 1 for white",
    "wide": "floating-point: {photos}, such as {first}, with numbers up to 255; fit takes 255 for white",
    "moving": "moving: {photos}, such as {first}; the first frame is taken",
    "turned": "turned by EXIF: {photos}, such as {first}; fit turns them, too",
    "tiny": f"smaller than {_TINY} pixels: {{names}}",
}


def check(options: CheckOptions) -> None:
    """Describe a folder of photos."""
    root = options.images
    listing = list_files(root)
    paths, left_out = listing.photos, describe_left_out(listing, options)
    if not paths:
        raise ValueError(describe_none(listing))
    root = listing.photo_folder
    splits = list_splits(root)
    beside = sorted({_name_class(root, path) for path in paths} - set(splits)) if splits else []
    paths = [path for path in paths if _name_class(root, path) not in beside]
    with ThreadPoolExecutor() as pool:  # decoders leave Python's lock
        looked = dict(zip(paths, pool.map(partial(_look_at, page=options.tiff_page), paths), strict=True))
    if beside:
        print(f"ignored: {', '.join(name or 'photos' for name in beside)}, beside {' and '.join(splits)}")
    findings = [*left_out, *_tell_odd(root, looked), *_tell_doubled(root, looked, splits)]
    for part in splits:
        of_part = [path for path in paths if path.is_relative_to(root / part)]
        print(f"{part}: {len(of_part)} photos")
        own = {path: looked[path] for path in of_part}
        remarks = [*_tell_classes(root / part, of_part), *tell_text(own, root / part)]
        findings += [f"{part}: {remark}" for remark in remarks]
    findings += [] if splits else [*_tell_classes(root, paths), *tell_text(looked, root)]
    dicom, *hints = tell_windows(paths, options.window, options.tiff_page) or [""]
    print(dicom, end="\n" * bool(dicom))
    findings += hints
    wrong_masks = _tell_masks(options, root, paths)
    findings += wrong_masks
    good = [size for size in (one.get("size") for one in looked.values()) if size]
    print(f"{len(paths)} photos{_describe_sizes(good)}")
    for finding in findings:
        print(finding)
    print("nothing odd was found" if not findings else "nothing was written")
    if any(line.startswith("broken") for line in findings):
        return
    if not wrong_masks:
        _tell_next(options, listing, splits, _find_white(looked))


def _tell_next(options: CheckOptions, listing: Listing, splits: Sequence[str], white: int | None) -> None:
    """Say which command comes next."""
    root, more = listing.photo_folder, {"white_level": white}
    training = list_files(root / next((part for part in splits if part.lower().startswith("train")), ""))
    photos, drawn = training.photo_folder, options.masks or listing.drawn
    classes = class_folders(photos)
    of_all = bool(training.photos) and len(training.masks) >= len(training.photos)  # as of folders of parts
    elsewhere = root != listing.root or photos != training.root
    if drawn is not None and (options.masks or elsewhere or of_all or len(classes) < 2):
        line = use_drawn(listing, drawn, options, **more)
        if not splits or f" fit {photos}" in line:
            print(f"next: {line}")
            return
    if is_test(photos):
        print(f"next: {write_line(options, 'evaluate', images=photos)}")
    elif len(classes) > 1:
        print(f"next: {write_line(options, 'fit', images=photos, **more)}")
    elif len(classes) == 1 and classes[0].lower() not in NORMAL and len(class_folders(photos / classes[0])) > 1:
        inside = photos / classes[0]
        print(f"next, if the folders in {inside} are the classes: {write_line(options, 'check', images=inside)}")
    elif (inside := photos / next(iter(classes), "")).name.lower() in NORMAL:
        print(f"next, of good photos alone: {write_line(options, 'fit', images=inside, **more)}")
    else:
        print(f"next, {use_good(inside, options, **more)}")


def _look_at(path: Path, page: int | None) -> dict[str, Any]:
    """Return the size and the digest of a photo, and of which kinds it is; or why it is broken."""
    from pytorch_grad_cam_pcasvm.studio.pictures.read import (
        deep_numbers,
        open_picture,
        read_orientation,
        read_picture,
        refuse_bands,
    )

    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with open_picture(path, page) as picture:
            moving, size = is_moving(picture), picture.size
            numbers, white = deep_numbers(picture)
            picture.load()
            refuse_bands(picture)
            own, text = (hash_picture(picture, path), find_text(picture)) if numbers is None else (None, None)
            kinds = {"moving": moving, "deep": numbers is not None, "turned": read_orientation(picture) != 1}
        if numbers is not None:
            low, high = float(numbers.min()), float(numbers.max())
            if not (low >= 0 and (white > 1 or high <= _FLOAT_WHITE)):
                raise ValueError("no greys")
            kinds |= {"top": high if white > 1 else 0, "deep": white > 1}  # type: ignore[dict-item]
            kinds |= {"unit": white == 1 and high <= 1, "wide": white == 1 and high > 1}
            shown = read_picture(path, float_white=_FLOAT_WHITE, page=page)
            own, text = hash_picture(shown, path), find_text(shown)
        return {"size": size, "digest": digest, "hash": own, "text": text, "tiny": min(size) < _TINY} | kinds
    except Exception as error:  # whatever a decoder raises
        return {"broken": _find_reason(path, page) or str(error) or type(error).__name__}


def _find_reason(path: Path, page: int | None) -> str:
    """Return why the reader of all commands does not take a picture; empty: it does."""
    from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError, read_picture

    try:
        read_picture(path, float_white=_FLOAT_WHITE, page=page)
    except UnreadableImageError as error:
        return error.reason
    return ""


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


def _tell_odd(root: Path, looked: dict[Path, dict[str, Any]]) -> list[str]:
    """Say which photos are broken, and of which kinds others are that need attention."""
    broken = {path: one["broken"] for path, one in looked.items() if "broken" in one}
    listed = name_first([f"{path.relative_to(root).as_posix()} ({why})" for path, why in broken.items()])
    findings = [f"broken: {listed}; mend or delete, or add --skip-bad-images"] if broken else []
    kinds = {name: [path for path, one in looked.items() if one.get(name)] for name in _KINDS}
    if (white := _find_white(looked)) is not None:
        findings.append(
            f"dark: no photo of more than 8 bits has larger numbers than {white}: fit --white-level {white}"
        )
    return findings + [
        _KINDS[name].format(
            photos=f"{len(paths)} photo{'s' * (len(paths) != 1)}",
            first=_name_some(root, paths[:1]),
            names=_name_some(root, paths),
        )
        for name, paths in kinds.items()
        if paths
    ]


def _find_white(looked: Mapping[Path, Mapping[str, Any]]) -> int | None:
    """Return the white level that photos of more than 8 bits need; None: none."""
    tops = [one["top"] for one in looked.values() if one.get("top")]
    return suggest_white(max(tops)) if tops else None


def _tell_doubled(root: Path, looked: dict[Path, dict[str, Any]], splits: Sequence[str]) -> list[str]:
    """Say which photos are the same, and first which of these are in two parts of the set, or have two labels."""
    readable = {path: one for path, one in looked.items() if "hash" in one}
    paths = [*readable]
    hashes, findings = separate_scenes({path: one["hash"] for path, one in readable.items()})
    groups = [[paths[row] for row in own] for own in list_copies(paths, hashes)]
    across = [one for own in groups if len(one := pick_first(own, partial(_name_class, root))) > 1]
    if splits and across:
        where = " and ".join(splits)
        findings.append(f"the same photo in {where}, so that scores are too good: {name_equal(root, across)}")
    findings += describe_labels(root, groups, level=int(bool(splits)))
    same, count = defaultdict[str, list[Path]](list), 2 if splits else 1
    for path in paths:
        same[readable[path]["digest"]].append(path)
    doubled = [own for own in same.values() if len(own) > len(pick_first(own, partial(_name_folders, root, count)))]
    if doubled:
        findings.append(
            f"doubled: {len(doubled)} photo{'s are' if len(doubled) > 1 else ' is'} there more than once, "
            f"{name_equal(root, doubled)}; keep one of each: fit leaves them in one fold, but counts them all"
        )
    altered = [own for own in groups if len({readable[path]["digest"] for path in own}) > 1]
    return [*findings, *(f"{line}; fit leaves those of one in one fold" for line in describe_copies(root, altered))]


def _name_class(root: Path, path: Path) -> str:
    return path.relative_to(root).parts[0] if path.parent != root else ""


def _name_folders(root: Path, count: int, path: Path) -> tuple[str, ...]:
    return path.relative_to(root).parent.parts[:count]


def _list_classes(root: Path, paths: Sequence[Path]) -> Counter[str]:
    names = {*list_files(root).classes}  # of which the folder of photos beside masks is none
    return Counter(name for path in paths if (name := _name_class(root, path)) in names)


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
    empty = name_empty(root, counts)
    findings += [f"without photos: {', '.join(empty)}"] if empty else []
    return [*findings, *tell_machines([path for path in paths if path not in beside], root)]


def _tell_masks(options: CheckOptions, root: Path, paths: Sequence[Path]) -> list[str]:
    """Say which masks belong to no photo, how many photos have one, and what is known of the others."""
    if options.masks is None:
        return []
    from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder

    names = [path.relative_to(root).as_posix() for path in paths]
    try:
        print(MaskFolder(options.masks, names, paths, normal=options.normal, page=options.tiff_page).describe())
    except (ValueError, OSError) as error:
        return [f"masks: {error}"]
    return []
