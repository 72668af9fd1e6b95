"""Shards: some rows of an atlas in a Parquet file, written atomically, and read.

Every column with several numbers per row is a flat list of fixed length, which pandas, DuckDB, Ray and Hugging Face
``datasets`` can read without this package; its shape is in the field's metadata.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pytorch_grad_cam_pcasvm.runtime.files import atomically, with_reason

KEPT = "; all finished shards are kept"  # behind the reason of an error, unless their folder goes away, too
ROW_GROUP = 256  # rows that are read together where maps of single rows are asked for
_KINDS = {"bool": pa.bool_(), "int": pa.int64(), "float": pa.float64(), "str": pa.string()}


def name_shard(number: int) -> str:
    """Return the file name of a shard."""
    return f"part-{number:05d}.parquet"


def write(
    folder: Path, number: int, columns: Mapping[str, Any], kinds: Mapping[str, str], marks: Mapping[str, Any]
) -> None:
    """Write a shard atomically.

    Args:
        folder: folder of the atlas.
        number: number of the shard.
        columns: arrays of n rows, or lists of bytes, strings or labels.
        kinds: ``"bool"``, ``"int"``, ``"float"`` or ``"str"`` for lists that are not of bytes.
        marks: metadata to keep beside the schema, as JSON.

    Raises:
        OSError: it cannot be written, for example because the disk is full; nothing of it is left.
        ValueError: a label is too large an integer, or no valid text.
    """
    arrays, fields = [], []
    for name, values in columns.items():
        shape: tuple[int, ...] = ()
        if isinstance(values, np.ndarray):
            shape = values.shape[1:]
            array = pa.array(np.ascontiguousarray(values).reshape(-1))
            if shape:
                array = pa.FixedSizeListArray.from_arrays(array, int(np.prod(shape)))
        else:
            arrow_type = _KINDS[kinds[name]] if name in kinds else pa.binary()
            array = _make_list_column(name, values, arrow_type, columns["id"])
        arrays.append(array)
        fields.append(pa.field(name, array.type, metadata={"shape": json.dumps(shape)}))
    metadata = {key: json.dumps(value) for key, value in marks.items()}
    table = pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))
    path = folder / name_shard(number)
    try:
        with atomically(path) as file:
            # Maps hardly shrink: what compresses is the few labels.
            pq.write_table(
                table,
                file,
                row_group_size=ROW_GROUP,
                compression="NONE",
                use_dictionary=[name for name in ("label", "prediction") if name in columns],
                write_page_checksum=True,
            )
    except OSError as error:
        reason = getattr(error, "reason", None) or f"{path} cannot be written: {error.strerror or error}"
        refused = with_reason(error.errno, f"the shard {reason}{KEPT}", "make room and run the same build again")
        raise refused from error


def _make_list_column(name: str, values: Sequence[Any], arrow_type: Any, ids: Sequence[str]) -> Any:
    """Return a list as a column; an error names the image whose value it is."""
    try:
        return pa.array(values, arrow_type)
    except (OverflowError, ValueError) as error:
        if len(values) == 1:
            problem = f"image {ids[0]!r} has the {name} {values[0]!r:.80}, which Parquet cannot hold ({error})"
            raise ValueError(f"{problem}: give it another one, and run the same build again") from error
        for value, image in zip(values, ids, strict=True):
            _make_list_column(name, [value], arrow_type, [image])
        raise


def open_shard(path: Path, atlas: str | None = None, number: int | None = None) -> pq.ParquetFile:
    """Open a shard, its columns memory-mapped.

    Returns:
        The file, to be closed.

    Raises:
        ValueError: it is truncated, changed, not a shard, or a shard of another atlas than that of the digest.
    """
    try:
        file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not a shard, or is truncated ({error}): {_REPAIR}") from error
    owner = read_marks(file).get("atlas")
    if owner is None:
        raise ValueError(f"{path} is not a shard of an atlas: {_REPAIR}")
    if atlas is not None and owner != atlas:
        raise ValueError(f"{path} is a shard of another atlas: {_REPAIR}")
    if number is not None and read_marks(file)["number"] != number:
        raise ValueError(f"{path} is a copy of shard {read_marks(file)['number']}: {_REPAIR}")
    return file


_REPAIR = "delete it, and run the same build again, which makes only what is missing"


_MARKS = (b"atlas", b"number", b"bad", b"first")


def read_marks(file: pq.ParquetFile) -> dict[str, Any]:
    """Return the metadata written beside the schema."""
    metadata = file.schema_arrow.metadata or {}
    return {key.decode(): json.loads(value) for key, value in metadata.items() if key in _MARKS}


def read(path: Path, file: pq.ParquetFile, names: Sequence[str], groups: Iterable[int] | None = None) -> dict[str, Any]:
    """Return columns of some row groups: arrays of the shapes that were written, or lists; the path is for messages.

    Raises:
        ValueError: the file was changed since it was written.
    """
    try:
        table = file.read(list(names)) if groups is None else file.read_row_groups(list(groups), list(names))
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} was changed since it was written ({error}): {_REPAIR}") from error
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
