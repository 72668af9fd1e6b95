"""The command that looks at photos before any work, for broken, odd and doubled ones."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.cli.arguments import RUN, CheckOptions
from pytorch_grad_cam_pcasvm.cli.folders import list_splits
from pytorch_grad_cam_pcasvm.data.photo_files import SUFFIXES, list_photos

_SHOWN = 5  # names of a kind
_TINY = 32  # pixels of a side
_UNREAD = (".heic", ".heif", ".avif", ".gif", ".jxl", ".jp2", ".dng", ".cr2", ".nef", ".arw", ".svg", ".pdf", ".dcm")
_FEW = 10  # photos of a class, from which choices can be made


def check(options: CheckOptions) -> None:
    """Describe a folder of photos."""
    root = options.images
    paths = list_photos(root)
    if not paths:
        raise ValueError(f"the folder {root} has no photos ({', '.join(SUFFIXES)})")
    looked = {path: _look_at(path) for path in paths}
    splits = list_splits(root)
    findings = [*_tell_broken(root, looked), *_tell_depth(root, looked), *_tell_turned(root, looked)]
    findings += [*_tell_tiny(root, looked), *_tell_unread(root), *_tell_doubled(root, looked, splits)]
    for part in splits:
        of_part = [path for path in paths if path.is_relative_to(root / part)]
        print(f"{part}: {len(of_part)} photos")
        findings += [f"{part}: {remark}" for remark in _tell_classes(root / part, of_part)]
    findings += [*([] if splits else _tell_classes(root, paths)), *_tell_masks(options.masks, root, paths)]
    good = [size for size in (one.get("size") for one in looked.values()) if size]
    print(f"{len(paths)} photos{_describe_sizes(good)}")
    for finding in findings:
        print(finding)
    print("nothing odd was found" if not findings else "nothing was written")
    broken = any(line.startswith("broken") for line in findings)
    training = root / next((part for part in splits if part.lower().startswith("train")), "")
    if not broken and len(_list_classes(training, [path for path in paths if path.is_relative_to(training)])) > 1:
        print(f"next: {RUN} fit {training}")


def _look_at(path: Path) -> dict[str, Any]:
    """Return the size, depth, orientation and digest of a photo, or why it is broken."""
    from PIL import Image

    from pytorch_grad_cam_pcasvm.export.explainer import deep_numbers, read_orientation

    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        with Image.open(path) as picture:
            picture.load()
            numbers, _ = deep_numbers(picture)
            turned = read_orientation(picture) != 1
            return {"size": picture.size, "digest": digest, "turned": turned, "deep": numbers is not None}
    except Exception as error:  # whatever a decoder raises
        return {"broken": getattr(error, "reason", "") or str(error) or type(error).__name__}


def _describe_sizes(sizes: Sequence[tuple[int, int]]) -> str:
    if not sizes:
        return ""
    counts = Counter(sizes)
    if len(counts) == 1:
        return ", {}x{} pixels".format(*sizes[0])
    widths, heights = zip(*sizes, strict=True)
    return f", {min(widths)}x{min(heights)} to {max(widths)}x{max(heights)} pixels, of {len(counts)} sizes"


def _name_some(root: Path, paths: Iterable[Path]) -> str:
    names = [path.relative_to(root).as_posix() for path in paths]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _tell_broken(root: Path, looked: dict[Path, dict[str, Any]]) -> list[str]:
    broken = {path: one["broken"] for path, one in looked.items() if "broken" in one}
    listed = ", ".join(f"{path.relative_to(root).as_posix()} ({why})" for path, why in broken.items())
    return [f"broken: {listed}; mend or delete, or add --skip-bad-images"] if broken else []


def _tell_depth(root: Path, looked: dict[Path, dict[str, Any]]) -> list[str]:
    deep = [path for path, one in looked.items() if one.get("deep")]
    if not deep:
        return []
    return [
        f"more than 8 bits: {len(deep)} photos, such as {_name_some(root, deep[:1])}; fit takes the largest number "
        "that is possible for white, such as 65535; less is named with --white-level"
    ]


def _tell_turned(root: Path, looked: dict[Path, dict[str, Any]]) -> list[str]:
    turned = [path for path, one in looked.items() if one.get("turned")]
    if not turned:
        return []
    return [f"turned by EXIF: {len(turned)} photos, such as {_name_some(root, turned[:1])}; fit turns them, too"]


def _tell_tiny(root: Path, looked: dict[Path, dict[str, Any]]) -> list[str]:
    tiny = [path for path, one in looked.items() if "size" in one and min(one["size"]) < _TINY]
    return [f"smaller than {_TINY} pixels: {_name_some(root, tiny)}"] if tiny else []


def _tell_unread(root: Path) -> list[str]:
    """Name the pictures in formats that are not read, such as some phones'."""
    unread = sorted(path for path in root.rglob("*") if path.suffix.lower() in _UNREAD)
    return [f"not read: {_name_some(root, unread)}; save them as JPEG or PNG"] if unread else []


def _tell_doubled(root: Path, looked: dict[Path, dict[str, Any]], splits: Sequence[str]) -> list[str]:
    """Say which files are the same, and first which of these have different labels, or are in two parts of the set."""
    same = defaultdict(list)
    for path, one in looked.items():
        if "digest" in one:
            same[one["digest"]].append(path)
    groups = [paths for paths in same.values() if len(paths) > 1]
    across = [paths for paths in groups if len({_name_class(root, path) for path in paths}) > 1]
    where = f"{' and '.join(splits)}, so that scores are too good" if splits else "two classes"
    findings = [f"the same photo in {where}: {_name_some(root, paths)}" for paths in across]
    inside = [paths for paths in groups if paths not in across]
    if inside:
        findings.append(
            f"doubled: {len(inside)} photo{'s are' if len(inside) > 1 else ' is'} there more than once, such as "
            f"{' = '.join(path.relative_to(root).as_posix() for path in inside[0])}; scores count them as new ones"
        )
    return findings


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
    empty = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in counts
                   and not path.name.startswith("."))  # fmt: skip
    return [*findings, *([f"without photos: {', '.join(empty)}"] if empty else [])]


def _tell_masks(masks: Path | None, root: Path, paths: Sequence[Path]) -> list[str]:
    """Say which masks belong to no photo, and how many photos have one."""
    if masks is None:
        return []
    from pytorch_grad_cam_pcasvm.data.masks import masks_by_picture

    try:
        files = masks_by_picture(masks, [path.relative_to(root).as_posix() for path in paths], paths)
    except (ValueError, OSError) as error:
        return [f"masks: {error}"]
    print(f"masks: {sum(map(bool, files))} of {len(paths)} photos have one; on the others there is nothing")
    return []
