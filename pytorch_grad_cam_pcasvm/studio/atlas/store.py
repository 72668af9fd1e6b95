"""The store: a finished atlas, and the questions that it answers without the network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.recombination import recombined
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.studio.atlas.columns import StoredColumns, Table
from pytorch_grad_cam_pcasvm.studio.atlas.explainer import OF_TARGETS
from pytorch_grad_cam_pcasvm.targets import PCATarget, ResidualTarget, SVMTarget, Target, decoded


@dataclass(frozen=True)
class MeanMaps:
    """Mean maps of a component, one for each group of images.

    Attributes:
        groups: what the images of a group have in common, length G.
        maps: signed means, shape (G, H, W), divided by ``exp(log_scale)``; for a method with opposite maps, what raises
            the component minus what lowers it.
        standard_errors: standard errors of the means, of the same shape; NaN for a group of one image.
        counts: number of images in each group, shape (G,).
        log_scale: the natural logarithm of the factor taken out of each mean, shape (G,); usually 0.

    Example:
        >>> store.mean_map(0, by="label").groups
        ['cat', 'dog', 'elk']
    """

    groups: list[Any]
    maps: np.ndarray
    standard_errors: np.ndarray
    counts: np.ndarray
    log_scale: np.ndarray


def average_maps(table: Table, values: np.ndarray, chosen: slice) -> list[MeanMaps]:
    """Return the mean maps of some components, grouped by values (R,); reads the files twice, a shard at a time."""
    groups, of_row = np.unique(values, return_inverse=True)
    of_row = of_row.reshape(-1)
    # The largest factor of each group, so that a mean has the units of its maps.
    factors = np.full((len(groups), table.columns["components"][1]), -np.inf)
    for start, block in table.blocks(["log_scale"]):
        np.maximum.at(factors, of_row[start : start + len(block["log_scale"])], block["log_scale"])
    counts = np.bincount(of_row, minlength=len(groups))
    shape = (len(groups), factors[:, chosen].shape[1], *table.columns["maps"][2:])
    totals, squares = np.zeros(shape), np.zeros(shape)
    names = [name for name in ("maps", "opposite", "nu", "scale", "log_scale") if name in table.columns]
    for start, block in table.blocks(names):
        scale = block.get("scale", block["nu"])[:, chosen]
        group = of_row[start : start + len(scale)]
        scale = scale * np.exp(block["log_scale"][:, chosen] - factors[group][:, chosen])
        maps = block["maps"][:, chosen].astype(np.float64)
        if "opposite" in block:
            maps = np.maximum(maps, 0) - np.maximum(block["opposite"][:, chosen].astype(np.float64), 0)
        maps *= scale.reshape(*scale.shape, *[1] * (len(shape) - 2))
        for g in np.unique(group):
            totals[g] += maps[group == g].sum(0)
            squares[g] += (maps[group == g] ** 2).sum(0)
    sizes = counts.reshape(-1, *[1] * (len(shape) - 1))
    means = totals / sizes
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.maximum(squares / sizes - means**2, 0) * sizes / (sizes - 1)
        errors = np.where(sizes > 1, np.sqrt(variance / sizes), np.nan)
    return [
        MeanMaps(groups.tolist(), means[:, b], errors[:, b], counts, factors[:, chosen][:, b]) for b in range(shape[1])
    ]


_OF_MAPS = ("maps", "opposite", "scale", "nu", "log_scale", "baseline_values", "remainder")


class Extremes(NamedTuple):
    """Rows at the two ends of a component, the most extreme first.

    Example:
        >>> low, high = store.extremes(0, count=3)
    """

    low: np.ndarray
    high: np.ndarray


class Neighbours(NamedTuple):
    """Rows near a given row, nearest first, and their distances.

    Example:
        >>> rows, distances = store.nearest(0, count=3)
    """

    rows: np.ndarray
    distances: np.ndarray


def load(folder: str | Path, trusted: Sequence[str] = ()) -> "Atlas":
    """Open an atlas that :func:`build` has finished.

    Args:
        folder: that of the atlas.
        trusted: types of estimators that its head may have, as in ``Head.load``.

    Returns:
        The atlas; its maps stay in the files until they are needed.

    Raises:
        FileNotFoundError: there is no atlas in the folder.
        ValueError: the atlas is not finished, or a shard is missing, truncated, or from another atlas.

    Example:
        >>> atlas.load("atlas").components.shape
        (12, 3)
    """
    return Atlas(folder, trusted)


class Atlas(StoredColumns):
    """An explained data set: R rows of B components each. Opened by :func:`load`.

    A row is an image, or of a head for every position a patch, whose place is in :attr:`places`.

    Rows are counted from 0 in the order of the data set, without images that could not be read. Maps are read from the
    files on demand, so memory use does not grow with R; columns with one number per row stay in memory once read.

    Attributes:
        folder: the atlas's folder.
        manifest: what the atlas was made from.
        head: the head that the atlas was built with, on the CPU.
        table: the atlas's rows in the files.

    Example:
        >>> store = atlas.load("atlas")
        >>> store.explain(store.disagreements("boundary", count=4), SVMTarget("cat")).maps.shape
        torch.Size([4, 1, 8, 8])
        >>> page = store.to_html("page")
    """

    def __repr__(self) -> str:
        columns = self.manifest["columns"]
        rows = "images" if self.places is None else "patches"
        return (
            f"Atlas({str(self.folder)!r}: {len(self)} {rows}, {columns['components'][1]} components, "
            f"{self.manifest['method']} at {self.manifest['target_layer']!r}, maps {tuple(columns['maps'][2:])})"
        )

    def maps(self, rows: Any) -> SignedMaps:
        """Return the signed maps of all components for some rows, as ``cam.explain`` does, in float32.

        Args:
            rows: an integer, a slice, a list or a mask; or a name, or a list of names, as in ``ids``.

        Returns:
            Signed maps, (n, B, H, W), exact up to the half precision of storage (5e-4 of nu), without weights.
        """
        targets = [PCATarget(b) for b in range(self.manifest["columns"]["components"][1])]
        return self._maps(rows, "", targets, "components")

    def explain(self, rows: Any, targets: Sequence[Target] | Target | None = None, head: Any = None) -> SignedMaps:
        """Return the signed maps of any targets, of this or another head, without the network.

        ``S = sum_b g_b P_b`` (see :func:`recombined`). If the method's maps of decisions are not sums of component
        maps, only the components and the stored targets are available.

        Args:
            rows: an integer, a slice, a list or a mask.
            targets: K targets, each for all images; None: the predicted class.
            head: a fitted estimator, pipeline or :class:`Head`, either with the reduction that the atlas was built
                with, or fitted on its components, such as ``SVC().fit(store.components, store.labels)``; None: the
                atlas's own.

        Returns:
            Signed maps, (n, K, H, W), exact up to the half precision of storage.

        Raises:
            ValueError: the head takes other components, or the method allows only the stored targets.
        """
        positions = self._positions(rows)
        listed: list[Any] = [SVMTarget() if targets is None else targets]
        if isinstance(targets, list | tuple):
            listed = list(targets)
        if not listed:
            raise ValueError("targets is empty: pass None for the predicted class, or at least one target")
        if not self.manifest["linear"] or any(isinstance(target, ResidualTarget) for target in listed):
            return self._as_kept(positions, listed, head)
        fitted = self.head if head is None else Head.of(head)
        size = self.manifest["shard_size"]  # what is read at a time
        blocks = [positions[start : start + size] for start in range(0, len(positions), size)]
        return SignedMaps.cat([recombined(self.maps(block), fitted, listed) for block in blocks])

    def extremes(self, component: int, count: int = 12) -> Extremes:
        """Return the rows at the two ends of a component, the most extreme first."""
        self._check_component(component)
        _check_count(count)
        order = np.argsort(self._measure(lambda components: components[:, component]), kind="stable")
        return Extremes(order[:count], order[::-1][:count])

    def mean_map(self, component: int, by: Any = None) -> MeanMaps:
        """Return the mean signed map of a component, one for each group of images.

        Args:
            component: the component's number, from 0.
            by: ``"label"``, ``"prediction"``, or a value for each row, shape (R,); None: all images together.

        Returns:
            Means, standard errors and counts, with the groups in order.

        Raises:
            ValueError: there is no such component, there are no labels, or the numbers of values and rows differ.
        """
        self._check_component(component)
        return average_maps(self.table, self._grouping(by), slice(component, component + 1))[0]

    def mean_maps(self, by: Any = None) -> list[MeanMaps]:
        """Return the result of :meth:`mean_map` for every component, reading the files once."""
        return average_maps(self.table, self._grouping(by), slice(None))

    def nearest(self, row: int | str, count: int = 12) -> Neighbours:
        """Return the rows whose components are nearest to a given row's, without that row."""
        if isinstance(row, bool) or not isinstance(row, int | np.integer | str):
            raise TypeError(f"row must be an integer or a name, got {row!r:.80}")
        (position,) = self._positions(row)
        _check_count(count)
        point = self.table.of_rows(np.array([position]), ["components"])["components"][0]
        distances = self._measure(lambda components: np.linalg.norm(components - point, axis=1))
        rows = np.argsort(distances, kind="stable")
        rows = rows[rows != position][:count]
        return Neighbours(rows, distances[rows])

    def disagreements(self, kind: str = "wrong", count: int | None = None) -> np.ndarray:
        """Return the rows that are worth a second look.

        Args:
            kind: ``"wrong"``: the prediction differs from the label (always, if the label is not a class), the most
                confident first; ``"boundary"``: the scores of the two highest classes are close, the closest first.
            count: how many; None: all that are wrong, or all rows.

        Raises:
            ValueError: the kind is unknown, there are no classes, or no label is a class of the head.
        """
        if kind not in ("wrong", "boundary"):
            raise ValueError(f"kind must be 'wrong' or 'boundary', got {kind!r}")
        if self.head.classes_ is None or self.predictions is None:
            raise ValueError("the head has no classes to disagree about")
        ordered = np.sort(self.scores, axis=1)
        ahead = ordered[:, -1] - ordered[:, -2]
        if kind == "boundary":
            return np.argsort(ahead, kind="stable")[:count]
        (wrong,) = np.nonzero(~self.correct)
        return wrong[np.argsort(-ahead[wrong], kind="stable")][:count]

    @cached_property
    def margins(self) -> np.ndarray:
        """The margin of the class predicted for each image, or the value of a regressor, shape (R,)."""
        return self._measure(lambda components: SVMTarget()(self._make_output(torch.tensor(components))).numpy())

    def _measure(self, number: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return a number of each row, by a function of components, (n, B), which are read a file at a time."""
        return np.concatenate([number(block["components"]) for _, block in self.table.blocks(["components"])])

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for each image: id, label, prediction, scores, and components p1, p2, ...

        Raises:
            ImportError: pandas is not installed.
        """
        from pytorch_grad_cam_pcasvm.studio.atlas.export import make_frame

        return make_frame(self)

    def export(self, kind: str, path: str | Path) -> Path:
        """Export the atlas for another tool, one block of rows at a time; all kinds go in version 0.7.

        The atlas itself is Parquet, which other tools read; :meth:`to_pandas` gives its numbers, :meth:`maps` its maps.

        Args:
            kind: ``"npz"`` (numpy), ``"zarr"`` (needs zarr), or ``"virelay"``: the HDF5 files and the project of
                ViRelAy (needs h5py).
            path: the file or folder to write; it must not exist.

        Returns:
            The path.

        Raises:
            ImportError: the required package is not installed.
            ValueError: the kind is unknown.
            FileExistsError: the path already exists.

        Warns:
            FutureWarning: always.
        """
        from pytorch_grad_cam_pcasvm.studio.atlas.export import export

        return export(self, kind, Path(path))

    def to_html(
        self,
        out: str | Path,
        *,
        heads: Mapping[str, Any] | None = None,
        single_file: bool = False,
        normal: Any = None,
    ) -> Path:
        """Write a page for browsing the atlas: a folder that opens from the file system, offline.

        Args:
            out: a folder that is new, empty or contains an earlier page; with ``single_file``, it may also be a file
                name.
            heads: further heads on the same components, by the name to show.
            single_file: write everything into one file, to send to a colleague.
            normal: the class that is an absence, such as ``"good"``: the page then first shows the evidence for any
                other class against it. None: the one that the head knows, if any.

        Returns:
            The path of the page.

        Raises:
            ValueError: the folder contains something else, a head takes other components, or the maps are of volumes.
        """
        from pytorch_grad_cam_pcasvm.studio.atlas.explorer import write_page

        return write_page(self, out, heads=heads, single_file=single_file, normal=normal)

    def _maps(self, rows: Any, prefix: str, targets: list[Any], values: str) -> SignedMaps:
        names = [name for name in _OF_MAPS if prefix + name in self.manifest["columns"]]
        read = self.table.of_rows(self._positions(rows), [*(prefix + name for name in names), values, "components"])
        scale = torch.from_numpy(read[prefix + "scale" if "scale" in names else prefix + "nu"])
        scale = scale.reshape(*scale.shape, *[1] * (len(self.manifest["columns"]["maps"]) - 2))
        columns: dict[str, Any] = {}
        for name in (name for name in names if name != "scale"):
            tensor = torch.from_numpy(read[prefix + name])
            columns[name] = tensor.float() * scale if name in ("maps", "opposite") else tensor
        maps = columns["maps"]
        return SignedMaps(
            **columns,
            weights=maps.new_zeros(*maps.shape[:2], 0),
            values=torch.from_numpy(read[values]),
            targets=targets,
            output=self._make_output(torch.from_numpy(read["components"])),
            linear=self.manifest["linear"],
            neutral=self.manifest.get("neutral", False) and not prefix,
            layers=(self.manifest["target_layer"],),
        )

    def _make_output(self, components: Tensor) -> HeadOutput:
        with torch.no_grad():
            return HeadOutput.of(self.head, self.head.resume(self.head.component_position or 0, components))

    def _as_kept(self, positions: np.ndarray, targets: list[Any], head: Any) -> SignedMaps:
        """Return maps of targets that were kept, of a method that allows no others."""
        stored = [decoded(target) for target in self.manifest["targets"]]
        count = self.manifest["columns"]["components"][1]
        available: list[Any] = [*map(PCATarget, range(count)), *stored]
        missing = [target for target in targets if target not in available]
        if head is not None or missing:
            refused = "another head" if head is not None else missing[0]
            raise ValueError(
                f"maps of {self.manifest['method']} for decisions are not sums of component maps, so {refused} cannot "
                f"be explained; the atlas has components 0 to {count - 1} and {stored}: build with targets=[...], or "
                "with ContributionCAM or ClosedFormGradCAM, which can explain any target"
            )
        parts = [self.maps(positions)]
        if stored:
            parts.append(self._maps(positions, OF_TARGETS, stored, OF_TARGETS + "values"))
        columns = []
        for target in targets:
            k = available.index(target)
            columns.append(parts[0][:, k] if k < count else parts[1][:, k - count])
        names = [name for name in (*_OF_MAPS, "weights", "values") if getattr(columns[0], name, None) is not None]
        joined: Any = {name: torch.cat([getattr(column, name) for column in columns], 1) for name in names}
        return replace(columns[0], **joined, targets=targets)


def _check_count(count: Any) -> None:
    if not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"count must be a positive integer, got {count!r}")
