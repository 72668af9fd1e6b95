"""An atlas on disk: its manifest, and the lock of its folder.

The manifest has the sources of an atlas, so that no others are mixed into it. One build at a time writes into a folder;
the system takes the lock from a process that dies.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse, warn
from pytorch_grad_cam_pcasvm.runtime.files import atomically

FORMAT = "pytorch_grad_cam_pcasvm atlas 1"
_WITH_CHECKSUM = "pytorch_grad_cam_pcasvm atlas 2"  # in the file alone: shards go on knowing their atlas by the former
OF_FEATURES = "pytorch_grad_cam_pcasvm features 2"
_FEATURES_IN_PARQUET = "pytorch_grad_cam_pcasvm features 1"  # of version 0.5
_FEATURES = OF_FEATURES, _FEATURES_IN_PARQUET
NAME = "manifest.json"
ANOTHER_FOLDER = Fix("give another folder as out=", "out")

# What may differ between two runs of one build.
_OF_THE_RUN = ("versions", "complete", "rows", "bad", "first", "preparation")  # the first image is of the last one


_FOLLOWING = ("adds_up", "columns", "input", "kinds", "linear", "neutral")

# What is kept as a digest, which says nothing to a reader.
_DIGESTS = {
    "first_image": "another first image (is a transform random?)",
    "head": "another head",
    "ids": "other images",
    "weights": "other weights",
}


def digest_manifest(entries: Mapping[str, Any]) -> str:
    """Return the digest by which shards know their atlas."""
    same = {key: value for key, value in entries.items() if key not in _OF_THE_RUN}
    return _checksum(same)


def _checksum(entries: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the manifest of an atlas, with a checksum, atomically."""
    entries = {**entries, "format": _WITH_CHECKSUM if entries["format"] == FORMAT else entries["format"]}
    entries["sha256"] = _checksum(entries)
    with atomically(folder / NAME) as file:
        file.write(json.dumps(entries, indent=1, sort_keys=True).encode() + b"\n")


def read_manifest(folder: Path, of: str = FORMAT) -> dict[str, Any]:
    """Return the manifest of an atlas, or of features.

    Args:
        folder: the folder.
        of: ``FORMAT`` of an atlas, or ``OF_FEATURES``.

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: it is not the manifest of an atlas, was changed, or comes from a later version.
    """
    path = folder / NAME
    if not path.is_file() and of == OF_FEATURES:
        way = f"extract them, atlas.extract(..., out={str(folder)!r})"
        refuse(FileNotFoundError, f"there are no features in {folder}", way)
    if not path.is_file():
        way = Fix(f"make one with atlas.build(..., out={str(folder)!r})", "build")
        refuse(FileNotFoundError, f"there is no atlas in {folder}", way)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        file_format, checksum = entries["format"], entries.pop("sha256", None)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{path} is not the manifest of an atlas, or is damaged"
        raise ValueError(f"{problem}: delete {folder}, and build it again") from error
    if (of == OF_FEATURES) != (file_format in _FEATURES):
        nouns = ("features", "an atlas") if file_format in _FEATURES else ("an atlas", "features")
        refuse(ValueError, f"{folder} has {nouns[0]}, and not {nouns[1]}", ANOTHER_FOLDER)
    if file_format == FORMAT:
        problem = f"{path} is of version 0.2 and has no checksum, by which damage would be seen"
        warn(f"{problem}: run the same build again, which adds one", UserWarning)
    elif file_format not in (_WITH_CHECKSUM, *_FEATURES):
        problem = f"{path} has format {file_format!r}, but this version reads {_WITH_CHECKSUM!r}"
        raise ValueError(f"{problem}: update the package, or if it is damaged, delete {folder}, and build it again")
    elif checksum != _checksum(entries):
        problem = f"{path} was changed since it was written: its checksum does not match"
        raise ValueError(f"{problem}; delete {folder}, and build it again")
    return {**entries, "format": file_format if file_format in _FEATURES else of}


def check_same(folder: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to resume an atlas of another network, head, data set or option.

    Raises:
        ValueError: something differs; the message says what.
    """
    noun = "features" if wanted.get("format") == OF_FEATURES else "an atlas"
    keys = [key for key in sorted({*saved, *wanted}) if key not in _OF_THE_RUN and saved.get(key) != wanted.get(key)]
    if keys:
        # What follows from another difference is told only where there is none.
        keys = sorted(set(keys) - set(_FOLLOWING)) or keys
        differences = "; ".join(
            _DIGESTS.get(key, f"{key}: {_difference(saved.get(key), wanted.get(key))}") for key in keys
        )
        refuse(ValueError, f"{folder} has {noun} of something else ({differences})", ANOTHER_FOLDER, "delete it")
    for name, numbers in wanted["first"].items():
        # Relative to the largest: what is nearly 0 beside it may be all rounding, which is another one elsewhere.
        size = np.abs(numbers).max(initial=0.0)
        if not np.allclose(saved["first"][name], numbers, rtol=1e-3, atol=1e-5 * max(1.0, size)):
            refuse(
                ValueError,
                f"{folder} has {noun} of something else (the first image's {name}: {_short(saved['first'][name])} "
                f"there, {_short(numbers)} now: have hooks, attributes or functions of the network changed?)",
                ANOTHER_FOLDER,
                "delete it",
            )
    differing = [
        f"{name} {saved['versions'].get(name)} (now {version})"
        for name, version in wanted["versions"].items()
        if saved["versions"].get(name) != version
    ]
    if differing:
        warn(f"{folder} was started with {', '.join(differing)}: the last bits of its numbers may differ", UserWarning)


def _difference(stored: Any, wanted: Any) -> str:
    """Return the difference of two entries: of dicts, only the items that differ."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        names = [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]
        stored, wanted = ({name: entry.get(name) for name in names} for entry in (stored, wanted))
    return f"{_short(stored)} there, {_short(wanted)} now"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


LOCK = ".lock"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is not there, alone: wait until no other build in any process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        warn(f"another build is under way in {folder}: waiting until it ends", UserWarning)
        lock.acquire()
    except OSError as error:  # some network file systems have no locks
        problem = f"{folder / LOCK} cannot be locked ({error})"
        warn(f"{problem}: start no other build there until this one ends", UserWarning)
    try:
        yield
    finally:
        lock.release()
