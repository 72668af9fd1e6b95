"""Shards in Parquet, which pandas, DuckDB, Ray and Hugging Face ``datasets`` can read without this package.

Every column with several numbers per row is a flat list of fixed length; its shape is in the field's metadata.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from pytorch_grad_cam_pcasvm.studio.atlas.shards import REPAIR, ROW_GROUP

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise ImportError("an atlas is kept in Parquet files: pip install 'pytorch_grad_cam_pcasvm[atlas]'") from error

NAME = "Parquet"
_KINDS = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string()}
_MARKS = (b"atlas", b"number", b"bad", b"first")


def make_column(values: Sequence[Any], kind: str | None) -> Any:
    """Return a list as a column, of bytes if it has no kind."""
    return pa.array(values, pa.binary() if kind is None else _KINDS[kind])


def write(file: IO[bytes], columns: Mapping[str, Any], marks: Mapping[str, str]) -> None:
    """Write columns and marks as a Parquet file."""
    arrays, fields = [], []
    for name, values in columns.items():
        array, shape = values, ()
        if isinstance(values, np.ndarray):
            array, shape = pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1:]
            if shape:
                array = pa.FixedSizeListArray.from_arrays(array, int(np.prod(shape)))
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata={"shape": json.dumps(shape)}))
    # Maps hardly shrink: what compresses is the few labels.
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=marks)),
        file,
        row_group_size=ROW_GROUP,
        compression="NONE",
        use_dictionary=[name for name in ("label", "prediction") if name in columns],
        write_page_checksum=True,
    )


class ParquetShard:
    """A shard in Parquet, its columns memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a shard, or is truncated ({error}): {REPAIR}") from error
        metadata = self._file.schema_arrow.metadata or {}
        self.marks = {key.decode(): json.loads(value) for key, value in metadata.items() if key in _MARKS}
        self.names = list(self._file.schema_arrow.names)
        self.count = self._file.metadata.num_rows

    def __enter__(self) -> "ParquetShard":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, names: Sequence[str], groups: Iterable[int] | None = None) -> dict[str, Any]:
        """Return columns, see :class:`~pytorch_grad_cam_pcasvm.studio.atlas.shards.Shard`."""
        names = list(names)
        try:
            table = self._file.read(names) if groups is None else self._file.read_row_groups(list(groups), names)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{self._path} was changed since it was written ({error}): {REPAIR}") from error
        return {name: _array(table.column(name), table.schema.field(name)) for name in names}


def _array(column: Any, field: Any) -> Any:
    if pa.types.is_binary(field.type):
        return column.to_pylist()
    shape = tuple(json.loads(field.metadata[b"shape"]))
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # of no rows
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_fixed_size_list(field.type):
        return array.flatten().to_numpy(zero_copy_only=False).reshape(-1, *shape)
    if array.null_count:
        return np.array(array.to_pylist(), dtype=object)
    if pa.types.is_string(field.type):
        return np.array(array.to_pylist(), dtype=str)
    return array.to_numpy(zero_copy_only=False)


open_file = ParquetShard
