"""A first look at the photos of a command: which cannot be read, are copies of others, or were trained on."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pytorch_grad_cam_pcasvm.studio.cli.folders import name_first, refuse_bad
from pytorch_grad_cam_pcasvm.studio.data.copies import (
    digest_file,
    find_copies,
    find_near,
    name_file,
    parse_hashes,
    read_hashes,
    separate_alike,
)

_FLOAT_WHITE = 255.0  # the largest that is white in floating-point pictures


class Whites(NamedTuple):
    """What is typed of the numbers in pictures: which one is white, and the page of files with several."""

    white_level: float | None
    page: int | None


def hash_photos(options: Any, paths: Sequence[Path]) -> dict[Path, np.ndarray]:
    """Return the hashes of the photos of ``fit`` that can be read, having said how many are too alike to have any.

    Raises:
        OSError: others cannot be, and are not to be skipped; all of them are named.
        ValueError: none can be read, or the white level is below their numbers.
    """
    root = options.images
    hashes, bad = read_hashes(paths, white_level=options.white_level, float_white=_FLOAT_WHITE, page=options.tiff_page)
    if bad and options.white_level is not None:
        from pytorch_grad_cam_pcasvm.studio.cli.preparation import tell_whites

        tell_whites(Whites(options.white_level, options.tiff_page), [paths[row] for row in bad])
    if paths and len(bad) == len(paths):
        name = paths[0].relative_to(root).as_posix()
        raise ValueError(f"none of the {len(paths)} images in {root} can be read: {name} ({bad[0]})")
    refuse_bad(options, {paths[row].relative_to(root).as_posix(): why for row, why in bad.items()})
    found, told = separate_scenes({path: hashes[row] for row, path in enumerate(paths) if row not in bad})
    print(*told, sep="\n", end="\n" * bool(told))
    return found


def separate_scenes(hashes: Mapping[Path, np.ndarray]) -> tuple[dict[Path, np.ndarray], list[str]]:
    """Return the hashes of photos, digests in place of those of one scene, and what to say of these; maybe nothing."""
    if not hashes:
        return {}, []
    own, alike = separate_alike([*hashes], np.stack([*hashes.values()]))
    told = (
        f"{len(alike)} of {len(hashes)} photos look alike, as under a fixed camera: only names and equal files say "
        "which are copies (--groups keeps photos of one object together)"
    )
    return dict(zip(hashes, own, strict=True)), [told] * bool(alike)


def list_copies(paths: Sequence[Path], hashes: Mapping[Path, np.ndarray]) -> list[list[int]]:
    """Return the numbers of the photos that are copies of one another; those that cannot be read are none."""
    rows = [row for row, path in enumerate(paths) if path in hashes]
    if not rows:
        return []
    readable = [paths[row] for row in rows]
    return [
        [rows[place] for place in own] for own in find_copies(readable, np.stack([hashes[path] for path in readable]))
    ]


def describe_labels(root: Path, groups: Sequence[Sequence[Path]], level: int = 0) -> list[str]:
    """Return what to say of photos that have two labels.

    Args:
        root: the folder of the photos.
        groups: of the photos that are copies of one another.
        level: how many folders above those of the classes there are.

    Returns:
        A line; none without such photos.
    """

    def name_class(path: Path) -> str:
        return path.relative_to(root).parts[level]

    labelled = [[path for path in own if len(path.relative_to(root).parts) > level + 1] for own in groups]
    across = [one for own in labelled if len(one := pick_first(own, name_class)) > 1]
    if not across:
        return []
    return [
        f"one photo, two labels, as far as small pictures tell: {name_equal(root, across)}; keep the one that is "
        "labelled rightly"
    ]


def describe_copies(root: Path, groups: Sequence[Sequence[Path]]) -> list[str]:
    """Return what to say of photos that look like copies of others; see :func:`describe_labels`."""
    if not groups:
        return []
    return [
        f"copies: {sum(map(len, groups))} photos look like copies of {len(groups)} (the same, turned, mirrored, cut or "
        f"saved again), such as {name_equal(root, [groups[0][:2]])}"
    ]


def pick_first(paths: Sequence[Path], key: Callable[[Path], Any]) -> list[Path]:
    """Return the first photo of each class, or of whatever a key says."""
    first = dict[Any, Path]()
    for path in paths:
        first.setdefault(key(path), path)
    return [*first.values()]


def name_equal(root: Path, groups: Sequence[Sequence[Path]]) -> str:
    """Return the names of photos that are the same."""
    return name_first([" = ".join(path.relative_to(root).as_posix() for path in paths) for paths in groups])


def find_trained(model: Any, paths: Sequence[Path]) -> set[Path]:
    """Return the photos that a model was fitted on, or copies of such, as far as its file says so."""
    good = ((model.net.head.training_set.preparation or {}).get("good") or {}).get("files", [])
    learned = {path for path in paths if good and name_file(path) in good}
    known = parse_hashes(model.about.get("photos"))
    if not len(known) or not paths:
        return learned
    hashes, bad = read_hashes(paths, **model.preparation.reading)
    near, files = {*find_near(hashes, known)[0][:, 0].tolist()}, {own.tobytes() for own in known}
    return learned | {
        path
        for row, path in enumerate(paths)
        if row not in bad and (row in near or digest_file(path).tobytes() in files)
    }
