"""Shards: some rows of an atlas in a Parquet file, written atomically, and read a shard or some row groups at a time.

Every column with several numbers per row is a flat list of fixed length, which pandas, DuckDB, Ray and Hugging Face
``datasets`` can read without this package; its shape is in the field's metadata.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pytorch_grad_cam_pcasvm.atlas import manifest, shards
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
            array = _listed(name, values, arrow_type, columns["id"])
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


def _listed(name: str, values: Sequence[Any], arrow_type: Any, ids: Sequence[str]) -> Any:
    """Return a list as a column; an error names the image whose value it is."""
    try:
        return pa.array(values, arrow_type)
    except (OverflowError, ValueError) as error:
        if len(values) == 1:
            problem = f"image {ids[0]!r} has the {name} {values[0]!r:.80}, which Parquet cannot hold ({error})"
            raise ValueError(f"{problem}: give it another one, and run the same build again") from error
        for value, image in zip(values, ids, strict=True):
            _listed(name, [value], arrow_type, [image])
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


class Table:
    """The R rows of an atlas whose shards are complete.

    Args:
        folder: folder of the atlas.
        entries: entries of its manifest.

    Raises:
        ValueError: a shard is missing, truncated, or from another atlas.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Any]) -> None:
        self.folder, self.columns = folder, entries["columns"]
        digest, counts = manifest.digest_manifest(entries), []
        for number in range(-(-entries["images"] // entries["shard_size"])):
            path = folder / shards.name_shard(number)
            if not path.exists():
                raise ValueError(f"the shard {path} is missing: run the same build again to make it")
            with shards.open_shard(path, digest, number) as file:
                counts.append(file.metadata.num_rows)
        # Positions where each shard begins.
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        if len(self) != entries["rows"]:
            raise ValueError(f"{folder} has {len(self)} rows, but should have {entries['rows']}")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def column(self, name: str) -> Any:
        """Return a whole column."""
        return np.concatenate([block[name] for _, block in self.blocks([name])])

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield columns of the files, one shard at a time, each with the position of its first row."""
        for number, start in enumerate(self._starts[:-1]):
            if self._starts[number + 1] > start:
                path = self.folder / shards.name_shard(number)
                with shards.open_shard(path) as file:
                    yield int(start), shards.read(path, file, names)

    def of_rows(self, positions: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return columns of some rows; only the row groups that contain one of them are read."""
        names = list(dict.fromkeys(names))
        shard = np.searchsorted(self._starts, positions, side="right") - 1
        columns: dict[str, np.ndarray] = {}
        for number in np.unique(shard):
            (places,) = np.nonzero(shard == number)
            offsets = positions[places] - self._starts[number]
            groups, of_place = np.unique(offsets // shards.ROW_GROUP, return_inverse=True)
            path = self.folder / shards.name_shard(int(number))
            with shards.open_shard(path) as file:
                read = shards.read(path, file, names, groups.tolist())
            chosen = of_place * shards.ROW_GROUP + offsets % shards.ROW_GROUP
            for name in names:
                values = read[name]
                values = np.array(values, dtype=object) if isinstance(values, list) else values
                if name not in columns:
                    columns[name] = np.empty((len(positions), *values.shape[1:]), values.dtype)
                elif columns[name].dtype != values.dtype:  # strings of another length
                    columns[name] = columns[name].astype(np.promote_types(columns[name].dtype, values.dtype))
                columns[name][places] = values[chosen]
        return columns
