"""Copies of one photo among others: by small hashes of pictures, also turned and mirrored, and by names."""

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_SIDE, _KEPT = 64, 16  # pixels of the small picture; its frequencies in a direction
_BITS = _KEPT**2
_EQUAL = 16  # bits that differ: of copies up to 15, but for stronger changes; of digits from 21 on, of photos from 58
_ALIKE = 45  # the same of pictures whose names say that they may be copies
_FAINT, _DETAILED = 0.1, 0.75  # a wave that is rounding; the share of others in a picture that has details
_BLOCK = 512  # pictures that are compared at once
_FEW = 8  # photos of one beginning that may be all of a folder
_SEVERAL = 3  # groups, whose names and pictures agree too often to do so by chance
_SHARE = 0.25  # of a folder, beyond which a beginning is that of a series
_VERSIONS = 3, 8  # of one photo, that are few, and the most; more photos that are alike are those of a fixed camera
_SMALL, _PART = 20, 0.1  # photos of a small set; the part of a larger one that may be versions of one photo

_WORD = (
    r"(?:aug(?:ment(?:ed|ation)?)?|rot(?:ated?|ation)?|turned|[hv]?[ _-]?flip(?:ped|[hvlrud]{1,2})?|mirror(?:ed)?|"
    r"crop(?:ped)?|copy|kopie|copie|copia|dup(?:licate)?|jitter|zoom(?:ed)?|shear(?:ed)?|bright(?:ness|er)?|"
    r"dark(?:er)?|contrast|nois[ey]|blur(?:red)?)"
)
_HASHED = re.compile(r"(.+)\.rf\.[0-9a-z]{8,}", re.IGNORECASE)  # of Roboflow
_BEFORE = re.compile(rf"{_WORD}[ ._-]*\d*[ ._-]+(?:of |von |de )?(.+)", re.IGNORECASE)
_BEHIND = re.compile(rf"(.+?)[ ._-]+\(?{_WORD}(?:[\d ._()-].*)?", re.IGNORECASE)
_COUNTED = re.compile(r"(.+?)(?:[ ._-]+|(?=\())\(?(?:\d+|[0-9a-f]{8,})\)?", re.IGNORECASE)


def read_hashes(paths: Sequence[Path], **reading: Any) -> tuple[np.ndarray, dict[int, str]]:
    """Return the hashes of photos, uint8, (N, 32), and by number the reasons why others cannot be read.

    Args:
        paths: of the photos.
        **reading: arguments of :func:`.read_picture`, which reads them later.
    """
    hashes, bad = np.zeros((len(paths), _BITS // 8), np.uint8), dict[int, str]()
    with ThreadPoolExecutor() as pool:  # decoders leave Python's lock
        for row, found in enumerate(pool.map(partial(_read_hash, reading=reading), paths)):
            if isinstance(found, str):
                bad[row] = found
            else:
                hashes[row] = found
    return hashes, bad


def _read_hash(path: Path, reading: dict[str, Any]) -> Any:
    """Return the hash of a photo, (32,), or in words why it cannot be read."""
    from pytorch_grad_cam_pcasvm.studio.pictures.read import UnreadableImageError, read_picture

    try:
        picture = _read_small(path)
        return hash_picture(read_picture(path, **reading) if picture is None else picture, path)
    except UnreadableImageError as error:
        return error.reason
    except OSError as error:
        return str(error)


def _read_small(path: Path) -> Any:
    """Return a JPEG's grey picture, decoded at a small size; None: it is another format, or damaged."""
    try:
        with Image.open(path) as picture:
            if picture.format != "JPEG" or picture.mode not in ("L", "RGB"):
                return None
            picture.draft("L", (2 * _SIDE, 2 * _SIDE))
            return picture.convert("L")
    except Exception:  # Pillow has no common name for what it raises; the reader of all commands says why
        return None


def hash_picture(picture: Any, path: Path) -> np.ndarray:
    """Return the hash of a picture, uint8, (32,): the signs of its low frequencies.

    Brightness, contrast, size and compression hardly change it, and turned pictures have the same bits in other places.
    Of a picture that is tiny or has no details, it is a digest of its file.
    """
    from scipy.fft import dctn

    grey = picture.convert("L").convert("F").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    waves = dctn(np.rint(np.asarray(grey, np.float64)), norm="ortho")[:_KEPT, :_KEPT]
    if min(picture.size) < _KEPT or (np.abs(waves) > _FAINT).mean() < _DETAILED:
        return digest_file(path)
    signs = waves > 0
    signs[0, 0] = False  # the brightness
    return np.packbits(signs)


def digest_file(path: Path) -> np.ndarray:
    """Return a digest of a file, uint8, (32,), which is near no other and no hash of a picture."""
    return np.frombuffer(hashlib.sha256(path.read_bytes()).digest(), np.uint8)


def name_file(path: Path) -> str:
    """Return a short digest of a file, by which it is known again."""
    return digest_file(path).tobytes()[:8].hex()


def separate_alike(paths: Sequence[Path], hashes: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return hashes, (N, 32), that tell photos of one scene apart, and the numbers of these photos.

    Small pictures of one part under a fixed camera are nearly equal. More photos are so than there are versions of one
    photo, and their hashes are digests of their files: their names and equal files alone say which are copies.

    Args:
        paths: of the photos.
        hashes: of their pictures, (N, 32).
    """
    count, hashes = len(paths), hashes.copy()
    few, most = _VERSIONS
    limit = min(most, max(few, count / 2 if count < _SMALL else _PART * count))
    rows = list[int]()
    for own in join_pairs(find_near(hashes, most=_ALIKE)[0].tolist()):
        if len(own) > limit:
            digests = np.stack([digest_file(paths[row]) for row in own])
            if len(np.unique(digests, axis=0)) > limit:
                hashes[own] = digests
                rows += own
    return hashes, rows


def _turn(signs: np.ndarray) -> Iterable[np.ndarray]:
    """Yield the signs of pictures, (N, 16, 16), in their 8 positions: a mirrored wave of odd frequency is negative."""
    mirror = np.where(np.arange(_KEPT) % 2, -1, 1).astype(np.float32)
    for lying in (signs, signs.transpose(0, 2, 1)):
        for upright in (lying, lying * mirror):
            yield upright
            yield upright * mirror[:, None]


def find_near(
    hashes: np.ndarray, others: np.ndarray | None = None, most: int = _EQUAL
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of pictures that are nearly equal, also turned or mirrored, (P, 2), and how far they are, (P,).

    Args:
        hashes: shape (N, 32).
        others: the pictures to compare with, (M, 32); None: the same, each pair once.
        most: how many bits may differ.
    """
    first, second = (_read_signs(some) for some in (hashes, hashes if others is None else others))
    flat, pairs, distances = second.reshape(-1, _BITS), [np.empty((0, 2), int)], [np.empty(0)]
    for start in range(0, len(first), _BLOCK):
        after = start if others is None else 0
        block = first[start : start + _BLOCK]
        equal = np.full((len(block), len(second) - after), -np.inf, np.float32)  # less those that differ
        for turned in _turn(block):
            np.maximum(equal, turned.reshape(-1, _BITS) @ flat[after:].T, out=equal)
        found = np.argwhere(equal >= _BITS - 2 * most)
        if others is None:
            found = found[found[:, 0] < found[:, 1]]
        pairs.append(found + np.array([start, after]))
        distances.append((_BITS - equal[tuple(found.T)]) / 2)
    return np.concatenate(pairs), np.concatenate(distances)


def _read_signs(hashes: np.ndarray) -> np.ndarray:
    """Return the signs of hashes, 1 or -1, float32, (N, 16, 16)."""
    return np.unpackbits(hashes, axis=1).reshape(-1, _KEPT, _KEPT).astype(np.float32) * 2 - 1


def find_copies(paths: Sequence[Path], hashes: np.ndarray) -> list[list[int]]:
    """Return the numbers of the photos that are copies of one another, a list for each photo that has copies.

    Nearly equal pictures are copies, wherever they lie, unless :func:`separate_alike` takes them apart. So are photos
    in a folder whose names are one name and what tools add to copies, such as ``_aug1``, ``_rot90``, ``copy of`` or
    ``.rf.`` and a hash: crops have other pictures.
    Photos with one beginning and a number are so only if the pictures of most of them are alike, or if some are in most
    of several such groups.

    Args:
        paths: of the photos.
        hashes: of them, (N, 32).
    """
    alike, distances = find_near(hashes, most=_ALIKE)
    joined = alike[distances <= _EQUAL].tolist()
    folders = defaultdict[Path, list[int]](list)
    for row, path in enumerate(paths):
        folders[path.parent].append(row)
    near = defaultdict[int, set[int]](set)
    for one, other in alike.tolist():
        near[one].add(other)
    for rows in folders.values():
        named = _group_names(paths, rows, _name_original)
        groups = [(own, len(own) <= max(_FEW, _SHARE * len(rows))) for own in named]
        for times in (1, 2):
            numbered = _group_names(paths, rows, partial(_name_beginning, times=times))
            agreeing = sum(_count_alike(own, near) > 0 for own in numbered)
            agree = len(numbered) >= _SEVERAL and 2 * agreeing > len(numbered)  # numbers are those of copies
            groups += [(own, agree and len(own) <= _FEW) for own in numbered]  # more may be a series
        for own, trusted in groups:
            if trusted or 2 * _count_alike(own, near) > len(own):
                joined += [(own[0], row) for row in own[1:]]
    return join_pairs(joined)


def _count_alike(rows: Sequence[int], near: Mapping[int, set[int]]) -> int:
    """Return how many of some photos are alike, each one of them at least to another."""
    pairs = [(one, other) for one in rows for other in near.get(one, set()) & {*rows}]
    return max(map(len, join_pairs(pairs)), default=0)


def _group_names(paths: Sequence[Path], rows: Sequence[int], name: Any) -> list[list[int]]:
    """Return the numbers of the photos of a folder that have one name, for each name that several have."""
    groups = defaultdict[str, list[int]](list)
    for row in rows:
        groups[name(paths[row].stem)].append(row)
    return [own for own in groups.values() if len(own) > 1]


def _name_original(stem: str) -> str:
    """Return the name of the photo that a file is a copy of, as far as words in its name say so; else its own."""
    hashed = _HASHED.fullmatch(stem)
    stem = hashed[1] if hashed else stem
    for pattern in (_BEFORE, _BEHIND):
        if match := pattern.fullmatch(stem):
            return match[1].lower()
    return stem.lower()


def _name_beginning(stem: str, times: int) -> str:
    """Return the name of a file before a number or a hash at its end, or before so many of them."""
    for _ in range(times):
        match = _COUNTED.fullmatch(stem)
        stem = match[1] if match else stem
    return stem.lower()


def join_pairs(pairs: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the numbers that pairs connect, each list in order, and the lists in the order of their first."""
    part_of = dict[int, set[int]]()
    for one, other in pairs:
        first, second = part_of.setdefault(one, {one}), part_of.setdefault(other, {other})
        if first is not second:
            small, large = sorted((first, second), key=len)
            large |= small
            part_of |= dict.fromkeys(small, large)
    return sorted(map(sorted, {id(part): part for part in part_of.values()}.values()))


def write_hashes(hashes: np.ndarray) -> str:
    """Return hashes as a text, as a model's file holds them."""
    return base64.b64encode(hashes.tobytes()).decode()


def parse_hashes(text: Any) -> np.ndarray:
    """Return the hashes in a text, (N, 32); none of a file that has none, or damaged ones."""
    try:
        numbers = np.frombuffer(base64.b64decode(text or "", validate=True), np.uint8)
        return numbers.reshape(-1, _BITS // 8)
    except (TypeError, ValueError):
        return np.empty((0, _BITS // 8), np.uint8)
