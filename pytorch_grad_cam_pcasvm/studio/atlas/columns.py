"""The columns of a finished atlas: numbers, names and pictures of each image, besides its maps; and all its rows."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.studio.atlas import disk
from pytorch_grad_cam_pcasvm.studio.atlas.shards import ROW_GROUP, Shard, name_shard, open_shard

HEAD = "head.safetensors"
# Of the predicted class: where the sign of its map is sure, and the standard error of its value.
SURE, ERROR = "decision_sure", "decision_error"


class Table:
    """The R rows of an atlas whose shards are complete.

    Args:
        folder: folder of the atlas.
        entries: entries of its manifest.

    Raises:
        ValueError: a shard is missing, truncated, or from another atlas.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Any]) -> None:
        self.folder, self.columns, self._format = folder, entries["columns"], entries["format"]
        digest, counts = disk.digest_manifest(entries), []
        for number in range(-(-entries["images"] // entries["shard_size"])):
            path = folder / name_shard(number, entries["format"])
            if not path.exists():
                raise ValueError(f"the shard {path} is missing: run the same build again to make it")
            with open_shard(path, digest, number) as shard:
                counts.append(shard.count)
        # Positions where each shard begins.
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        if len(self) != entries["rows"]:
            raise ValueError(f"{folder} has {len(self)} rows, but should have {entries['rows']}")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _open(self, number: int) -> AbstractContextManager[Shard]:
        return open_shard(self.folder / name_shard(number, self._format))

    def column(self, name: str) -> Any:
        """Return a whole column."""
        return np.concatenate([block[name] for _, block in self.blocks([name])])

    def groups(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield columns of the files, one row group at a time."""
        for number in np.flatnonzero(np.diff(self._starts)).tolist():
            with self._open(number) as shard:
                yield from (shard.read(names, [group]) for group in range(-(-shard.count // ROW_GROUP)))

    def blocks(self, names: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield columns of the files, one shard at a time, each with the position of its first row."""
        for number, start in enumerate(self._starts[:-1]):
            if self._starts[number + 1] > start:
                with self._open(number) as shard:
                    yield int(start), shard.read(names)

    def of_rows(self, positions: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Return columns of some rows; only the row groups that contain one of them are read."""
        names = list(dict.fromkeys(names))
        shard = np.searchsorted(self._starts, positions, side="right") - 1
        columns: dict[str, np.ndarray] = {}
        for number in np.unique(shard):
            (places,) = np.nonzero(shard == number)
            offsets = positions[places] - self._starts[number]
            groups, of_place = np.unique(offsets // ROW_GROUP, return_inverse=True)
            with self._open(int(number)) as opened:
                read = opened.read(names, groups.tolist())
            chosen = of_place * ROW_GROUP + offsets % ROW_GROUP
            for name in names:
                values = read[name]
                values = np.array(values, dtype=object) if isinstance(values, list) else values
                if name not in columns:
                    columns[name] = np.empty((len(positions), *values.shape[1:]), values.dtype)
                elif columns[name].dtype != values.dtype:  # strings of another length
                    columns[name] = columns[name].astype(np.promote_types(columns[name].dtype, values.dtype))
                columns[name][places] = values[chosen]
        return columns


class StoredColumns:
    """What is stored of R images.

    Args:
        folder: the atlas's folder.
        trusted: types of estimators that its head may have, as in ``Head.load``.

    Raises:
        ValueError: the atlas is not finished, or its head is missing or another one.
    """

    def __init__(self, folder: str | Path, trusted: Sequence[str] = ()) -> None:
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = disk.read_manifest(self.folder)
        if not self.manifest["complete"]:
            count = len(list(self.folder.glob("part-*.parquet")))
            total = -(-self.manifest["images"] // self.manifest["shard_size"])
            raise ValueError(
                f"the atlas in {folder} is not finished, {count} of {total} shards are there: run the same build "
                "again to resume it"
            )
        if not (self.folder / HEAD).exists():
            raise ValueError(f"{self.folder / HEAD} is missing: run the same build again to write it")
        self.head = Head.load(self.folder / HEAD, trusted)
        if self.head.digest() != self.manifest["head"]:
            raise ValueError(
                f"{self.folder / HEAD} is not the head of this atlas: delete it, and run the same build again"
            )
        self.table = Table(self.folder, self.manifest)

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def components(self) -> np.ndarray:
        """The components p, shape (R, B), float64."""
        return self.table.column("components")

    @cached_property
    def scores(self) -> np.ndarray:
        """The head's scores, shape (R, C), float64: scikit-learn's decision values."""
        return self.table.column("scores")

    @cached_property
    def decision_errors(self) -> np.ndarray | None:
        """The standard errors of the predicted class's values, shape (R,), float64; None without resampled heads."""
        return self.table.column(ERROR) if ERROR in self.table.columns else None

    def sure(self, rows: np.ndarray) -> np.ndarray | None:
        """Return where the sign of the predicted class's map is sure, (n, h, w); None without resampled heads."""
        return self.table.of_rows(rows, [SURE])[SURE] if SURE in self.table.columns else None

    @cached_property
    def labels(self) -> np.ndarray | None:
        """The labels, shape (R,), or None if the data set has none.

        Class numbers become names if the head was fitted on names.
        """
        if "label" not in self.manifest["kinds"]:
            return None
        labels = self.table.column("label")
        names, classes = self.manifest["names"], self.manifest["classes"] or []
        # Also where they are other names: as numbers they would be neither classes nor what the user called them.
        has_names = labels.dtype.kind in "iu" and names and any(isinstance(label, str) for label in classes)
        return np.array(self.names(labels)) if has_names else labels

    @cached_property
    def predictions(self) -> np.ndarray | None:
        """The head's predictions, shape (R,), or None without a classifier or regressor."""
        return self.table.column("prediction") if "prediction" in self.manifest["kinds"] else None

    @cached_property
    def rows(self) -> np.ndarray:
        """The number of each row in the data set, shape (R,)."""
        return self.table.column("row")

    @cached_property
    def ids(self) -> np.ndarray:
        """The path of each image in its folder, or its number in the data set, shape (R,), strings.

        Of dense features with the position of the patch, such as ``"hole/1.png (3, 4)"``.
        """
        return self.table.column("id")

    @cached_property
    def places(self) -> np.ndarray | None:
        """Of dense features, the position of each row's patch, (row, column), shape (R, 2); else None."""
        return self.table.column("place") if "place" in self.manifest["columns"] else None

    @cached_property
    def nu(self) -> np.ndarray:
        """The largest value of each component map, shape (R, B); 0 where it is blank."""
        return self.table.column("nu")

    @cached_property
    def log_scale(self) -> np.ndarray:
        """The natural logarithm of the factor taken out of each component map, shape (R, B); usually 0."""
        return self.table.column("log_scale")

    @cached_property
    def baseline_values(self) -> np.ndarray | None:
        """The components at the baseline, shape (R, B), for maps that add up; else None."""
        return self.table.column("baseline_values") if "baseline_values" in self.manifest["columns"] else None

    @cached_property
    def remainder(self) -> np.ndarray | None:
        """The contribution of activations not on the maps, shape (R, B), for maps that add up; else None."""
        return self.table.column("remainder") if "remainder" in self.manifest["columns"] else None

    def names(self, values: Any) -> list[str]:
        """Return labels or predictions as text to display, as class names if the data set has any."""
        names = self.manifest["names"]

        def name(value: Any) -> str:
            numbered = names is not None and isinstance(value, int | np.integer) and 0 <= value < len(names)
            return str(names[int(value)]) if numbered else str(value)

        return [name(value) for value in values]

    def thumbnails(self, rows: Any) -> list[bytes]:
        """Return small pictures of some rows, as WebP files; empty for rows without one."""
        return self.table.of_rows(self._positions(rows), ["thumbnail"])["thumbnail"].tolist()

    def pictures(self, rows: Any) -> Tensor:
        """Return the thumbnails of some rows in the form that the figures expect, shape (n, 3, h, w), in [0, 1].

        Raises:
            ValueError: the atlas was built without thumbnails.
        """
        written = self.thumbnails(rows)
        if not all(written):
            raise ValueError("the atlas was built with thumbnails=False: give figures the images themselves")
        arrays = [np.array(Image.open(io.BytesIO(thumbnail)).convert("RGB")) for thumbnail in written]
        return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2) / 255

    @property
    def correct(self) -> np.ndarray:
        """Whether the prediction equals the label, shape (R,); always False for a label that is not a class."""
        if self.labels is None or self.predictions is None:
            raise ValueError("nothing to compare: the data set has no labels, or the head no predictions")
        if self.places is not None:
            raise ValueError("nothing to compare: labels are those of images, and predictions those of patches")
        present, classes = set(self.labels.tolist()), self.manifest["classes"]
        if self.labels.dtype.kind != self.predictions.dtype.kind or not (classes is None or present & set(classes)):
            shown = sorted(present)[:5]
            numbered = self.manifest["names"] and self.labels.dtype.kind in "iu"
            names = f", named {self.names(shown)}," if numbered else ""
            raise ValueError(
                f"the labels {shown}{names} of the data are not classes of the head, which are {classes}: rename them, "
                "or fit the head on them"
            )
        return self.labels == self.predictions

    def _grouping(self, by: Any) -> np.ndarray:
        if by is None:
            return np.zeros(len(self), np.int64)
        if isinstance(by, str):
            column = {"label": self.labels, "prediction": self.predictions}.get(by)
            if column is None:
                raise ValueError(f"by={by!r}: must be 'label' or 'prediction', if there are any, or one value per row")
            return column
        values = np.asarray(by)
        if values.shape != (len(self),):
            raise ValueError(f"by must have one value for each of the {len(self)} rows, got the shape {values.shape}")
        return values

    def _check_component(self, component: int) -> None:
        count = self.manifest["columns"]["components"][1]
        if isinstance(component, bool) or not isinstance(component, int | np.integer) or not 0 <= component < count:
            raise ValueError(f"there are {count} components, numbered from 0: {component!r} is out of range")

    def _positions(self, rows: Any) -> np.ndarray:
        """Return rows that are given by an integer, a slice, a list or a mask, as positions."""
        index = rows if isinstance(rows, slice) else np.asarray(rows)
        if not isinstance(index, slice) and index.dtype.kind == "U":
            index = np.array([self._by_name(str(name)) for name in index.reshape(-1)])
        if not isinstance(index, slice) and (index.ndim > 1 or (index.ndim == 0 and index.dtype == bool)):
            raise IndexError(f"rows must be an integer, a slice, a list or a mask, got {rows!r:.80}")
        if not isinstance(index, slice) and index.size == 0:
            index = index.astype(np.int64)
        try:
            positions = np.atleast_1d(np.arange(len(self))[index])
        except IndexError as error:
            raise IndexError(f"there are {len(self)} rows, numbered from 0; got {rows!r:.80}") from error
        if not len(positions):
            raise ValueError("no rows were given")
        return positions

    def _by_name(self, name: str) -> int:
        (matches,) = np.nonzero(self.ids == name)
        if not len(matches):
            raise KeyError(f"no image is named {name!r}: store.ids has the names, such as {self.ids[0]!r}")
        return int(matches[0])
