"""Shards in NumPy's npz, a zip archive with a checksum of each column."""

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from pytorch_grad_cam_pcasvm.studio.atlas.shards import REPAIR, ROW_GROUP

_DTYPES = {"bool": np.bool_, "int": np.int64, "float": np.float64, "str": np.str_}
NAME = "npz"
_LENGTHS = " lengths"  # behind the name of a column of bytes


def make_column(values: Sequence[Any], kind: str | None) -> Any:
    """Return a list as an array; of bytes it stays a list, which :func:`write` joins."""
    if kind is None:
        return values
    array: Any = np.array(values, _DTYPES[kind])
    if any(kept != value and value == value for kept, value in zip(array.tolist(), values, strict=True)):
        raise ValueError("NumPy would keep another value")
    return array


def write(file: IO[bytes], columns: Mapping[str, Any], marks: Mapping[str, str]) -> None:
    """Write columns and marks as an npz file."""
    arrays: dict[str, Any] = {"marks": np.array(json.dumps(marks))}
    for name, values in columns.items():
        if isinstance(values, np.ndarray):
            arrays[name] = values
        else:
            arrays[name + _LENGTHS] = np.array([len(value) for value in values])
            arrays[name] = np.frombuffer(b"".join(values), np.uint8)
    np.savez(file, **arrays)


class NumPyShard:
    """A shard in an npz file, whose columns are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrays: dict[str, Any] = {}
        with ExitStack() as opened:
            try:
                self._file = opened.enter_context(np.load(path))
                self.marks = {key: json.loads(value) for key, value in json.loads(str(self._file["marks"])).items()}
            except (OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} is not a shard, or is truncated ({error}): {REPAIR}") from error
            self.names = [name for name in self._file.files if name != "marks" and not name.endswith(_LENGTHS)]
            self.count = len(self._column("row"))
            opened.pop_all()

    def __enter__(self) -> "NumPyShard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, names: Sequence[str], groups: Iterable[int] | None = None) -> dict[str, Any]:
        """Return columns, see :class:`Shard`."""
        if groups is None:
            return {name: self._column(name) for name in names}
        rows = [range(self.count)[group * ROW_GROUP : (group + 1) * ROW_GROUP] for group in groups]
        columns = {name: self._column(name) for name in names}
        return {
            name: [values[row] for part in rows for row in part]
            if isinstance(values, list)
            else np.concatenate([values[part.start : part.stop] for part in rows])
            for name, values in columns.items()
        }

    def _column(self, name: str) -> Any:
        if name not in self._arrays:
            try:
                values = self._file[name]
                if name + _LENGTHS in self._file.files:
                    ends = np.cumsum(self._file[name + _LENGTHS])
                    values = [part.tobytes() for part in np.split(values, ends[:-1])]
            except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
                raise ValueError(f"{self._path} was changed since it was written ({error}): {REPAIR}") from error
            self._arrays[name] = values
        return self._arrays[name]


open_file = NumPyShard
