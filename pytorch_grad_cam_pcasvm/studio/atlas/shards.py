"""Shards: the rows of some images, in one file. Those of an atlas are Parquet files, those of features NumPy's.

They are written atomically. Parquet alone needs pyarrow, which is imported when the first such file is.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pytorch_grad_cam_pcasvm.runtime.files import atomically, with_reason
from pytorch_grad_cam_pcasvm.studio.atlas import disk

KEPT = "; all finished shards are kept"  # behind the reason of an error, unless their folder goes away, too
ROW_GROUP = 256  # rows that are read together where maps of single rows are asked for
REPAIR = "delete it, and run the same build again, which makes only what is missing"


class Shard(Protocol):
    """A shard that is open.

    Attributes:
        names: of its columns.
        count: number of rows.
        marks: ``atlas``, the digest of what it belongs to, its ``number``, and ``bad``, the unreadable images.
    """

    names: list[str]
    count: int
    marks: dict[str, Any]

    def read(self, names: Sequence[str], groups: Iterable[int] | None = None) -> dict[str, Any]:
        """Return columns of some row groups: arrays of the shapes that were written, or lists of bytes.

        Raises:
            ValueError: the file was changed since it was written.
        """


def require_parquet() -> None:
    """Check that an atlas can be written and read.

    Raises:
        ImportError: pyarrow is missing.
    """
    _of_suffix(Path("part.parquet"))


def name_shard(number: int, file_format: str) -> str:
    """Return the file name of a shard, by the format in its manifest."""
    return f"part-{number:05d}.{'npz' if file_format == disk.OF_FEATURES else 'parquet'}"


def write_shard(path: Path, columns: Mapping[str, Any], kinds: Mapping[str, str], marks: Mapping[str, Any]) -> None:
    """Write a shard atomically.

    Args:
        path: the file, whose suffix says how.
        columns: arrays of n rows, or lists of bytes, strings or labels.
        kinds: ``"bool"``, ``"int"``, ``"float"`` or ``"str"`` for lists that are not of bytes.
        marks: metadata to keep beside the columns, as JSON.

    Raises:
        OSError: it cannot be written, for example because the disk is full; nothing of it is left.
        ValueError: a label is too large an integer, or no valid text.
    """
    written = _of_suffix(path)
    arrays = {
        name: values if isinstance(values, np.ndarray) else _convert(written, name, values, kinds, columns["id"])
        for name, values in columns.items()
    }
    try:
        with atomically(path) as file:
            written.write(file, arrays, {key: json.dumps(value) for key, value in marks.items()})
    except OSError as error:
        reason = getattr(error, "reason", None) or f"{path} cannot be written: {error.strerror or error}"
        refused = with_reason(error.errno, f"the shard {reason}{KEPT}", "make room and run the same build again")
        raise refused from error


def _convert(written: Any, name: str, values: Sequence[Any], kinds: Mapping[str, str], ids: Sequence[str]) -> Any:
    """Return a list as a column; an error names the image whose value it is."""
    try:
        return written.make_column(values, kinds.get(name))
    except (OverflowError, ValueError) as error:
        if len(values) == 1:
            problem = f"image {ids[0]!r} has the {name} {values[0]!r:.80}, which {written.NAME} cannot hold ({error})"
            raise ValueError(f"{problem}: give it another one, and run the same build again") from error
        for value, image in zip(values, ids, strict=True):
            _convert(written, name, [value], kinds, [image])
        raise


def _of_suffix(path: Path) -> Any:
    """Return the module that writes and reads such a file."""
    return import_module(f"{__package__}.{'parquet' if path.suffix == '.parquet' else 'npz'}")


@contextmanager
def open_shard(path: Path, owner: str | None = None, number: int | None = None) -> Iterator[Shard]:
    """Open a shard.

    Args:
        path: the file.
        owner: the digest of the atlas or the features that it must be of.
        number: the number that it must have.

    Yields:
        The shard.

    Raises:
        ValueError: it is truncated, changed, not a shard, or not the one that it must be.
    """
    with _of_suffix(path).open_file(path) as shard:
        if "atlas" not in shard.marks:
            raise ValueError(f"{path} is not a shard of an atlas: {REPAIR}")
        if owner is not None and shard.marks["atlas"] != owner:
            raise ValueError(f"{path} is a shard of another atlas: {REPAIR}")
        if number is not None and shard.marks["number"] != number:
            raise ValueError(f"{path} is a copy of shard {shard.marks['number']}: {REPAIR}")
        yield shard
