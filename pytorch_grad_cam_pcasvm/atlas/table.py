"""The table: the rows of an atlas in its shards, read a shard or some row groups at a time."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.atlas import manifest, shards


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
