"""Features of a whole data set, extracted once by the atlas's engines, kept in files, and read back in parts."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, compute_features
from pytorch_grad_cam_pcasvm.network.layer_means import LayerMeans
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_network
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
from pytorch_grad_cam_pcasvm.runtime import digests
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.studio.atlas import disk, run
from pytorch_grad_cam_pcasvm.studio.atlas.columns import Table
from pytorch_grad_cam_pcasvm.studio.atlas.explainer import fill_block
from pytorch_grad_cam_pcasvm.studio.data.images import Batch, Images

OF_TOTALS = "total/"  # in front of a layer's name
_OF_MEANS = "mean/"  # in files of version 0.5


class Extractor:
    """Extracts the features of a batch. The network sees ``block`` images at a time, as for an atlas.

    Args:
        backbone: the network.
        layer: where the features come from.
        pool: how positions become features.
        block: number of images.
        means: layers whose means are kept, too.
        x: images of the kind to come.
    """

    def __init__(self, backbone: nn.Module, layer: Any, pool: Any, block: int, means: Sequence[str], x: Tensor) -> None:
        self.net, self.layer, self.pool, self.block = backbone, layer, pool, block
        if isinstance(means, str) or not all(isinstance(name, str) for name in means):
            raise TypeError(f"means must be a list of layers' names, got {means!r:.80}")
        with evaluation_mode(backbone), torch.no_grad():
            self.means = LayerMeans(backbone, means, x)
        self.kept = list(means)

    def source(self) -> FeatureSource:
        """Return where the features come from."""
        return FeatureSource.of(self.net, self.layer, self.pool)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the columns of a batch: arrays of n rows, and lists."""
        count, images = len(batch.images), fill_block(batch.images, self.block)
        with evaluation_mode(self.net), torch.no_grad(), self.means.counting(count):
            features = compute_features(self.net, self.source().at(self.net, images), images)[:count]
        features = features.to(torch.promote_types(features.dtype, torch.float32)).cpu()
        if not bool(features.isfinite().all()):
            raise ValueError("the features are not finite: the network returns NaN or infinite values")
        totals = {
            OF_TOTALS + name: total.cpu() for name, total in self.means.take_totals().items() if name in self.kept
        }
        return {"row": np.array(batch.rows, np.int64), "features": features.numpy(), **totals, "label": batch.labels}


def extract(
    backbone: nn.Module,
    dataset: Any,
    layer: Any = None,
    *,
    out: str | Path,
    pool: Any = None,
    means: Sequence[str] = (),
    transform: Callable[[Any], Tensor] | None = None,
    exif: bool = False,
    batch_size: int = 64,
    block: int | None = None,
    shard_size: int | None = None,
    workers: int = 0,
    engine: str = "local",
    processes: int | None = None,
    skip_bad_images: bool = False,
    verify: bool = False,
    progress: bool = True,
) -> "Features":
    """Extract the features of a whole data set once, and save them in files (of NumPy, npz).

    To resume an interrupted extraction, run it again with the same arguments. Read them back with
    ``extract_features(backbone, store, layer, pool=pool)``, which takes what this function returns in the place of a
    loader, refuses features of another network, layer or pool, and may draw ``sample=`` and ``coreset=`` of patches.

    Args:
        backbone: the network, also the one of a :class:`PCASVMNet`.
        dataset: as for :func:`build`.
        layer: as for :func:`extract_features`.
        out: the folder; every machine must have access to it.
        pool: as for :func:`extract_features`; with ``"dense"``, all positions are kept.
        means: dotted names of layers whose means over images and positions are wanted, see :attr:`Features.means`.
        transform: turns a PIL image into a tensor for the network; for a folder or a data set of PIL images.
        exif: turn the photos of a folder as their EXIF orientation says. A head that is fitted on these features does
            not know it: give ``exif=True`` to :func:`build` and ``export.onnx``, too.
        batch_size: number of images that a process reads ahead.
        block: number of images that the network gets at once. None: 16, on CUDA 64.
        shard_size: images per file, rounded up to a multiple of ``block``. None: a sixteenth of them, at most 2,048,
            and fewer for large features.
        workers: number of processes that read images, for each process that extracts.
        engine: ``"local"`` or ``"ray"``, as for :func:`build`.
        processes: number of processes that extract, as for :func:`build`.
        skip_bad_images: leave out images that cannot be read, and list them in the manifest.
        verify: compare every image and label with those that existing files were made from, as for :func:`build`.
        progress: show a progress bar.

    Returns:
        The features.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the folder contains features of something else, or an argument has an invalid value.
        RuntimeError: an image cannot be read, or a process died; finished files are kept.
        OSError: a file cannot be written; finished files are kept.

    Example:
        >>> stored = atlas.extract(backbone, dataset, "layer2", pool="dense", out="features", progress=False)
        >>> rows, labels = extract_features(backbone, stored, "layer2", pool="dense", sample=10, progress=False)
        >>> rows.shape
        (120, 8)
    """
    if torch.is_autocast_enabled(find_device(backbone).type):
        raise ValueError("extract features outside autocast, which would not apply to other processes")
    if engine not in ("local", "ray"):
        raise ValueError(f"engine must be 'local' or 'ray', got {engine!r}")
    network = find_network(backbone)
    images = Images(dataset, transform, thumbnails=0, exif=exif)
    varies = isinstance(network, TiledNet) and network.canvas is None  # with the size of photos, which come one by one
    block = 1 if varies else block or run.BLOCK.get(find_device(network).type, run.BLOCK["cuda"])
    source = FeatureSource.of(network, layer, pool)
    first = run.read_first(images)
    extractor = Extractor(network, source.where, pool, block, means, first.images.to(find_device(network)))
    for _ in range(2):  # only the first pass runs what is behind the features, whose means would be those of one image
        probe = extractor(Batch(first.rows, first.images.to(find_device(network)), first.labels, [], {}))
    totals = {name: list(total.shape) for name, total in probe.items() if isinstance(total, Tensor)}
    extractor.kept = [name.removeprefix(OF_TOTALS) for name in totals]
    shard_size = run.choose_shard_size(shard_size, {"features": probe["features"]}, len(images), block)
    label = probe["label"][0]
    kinds = {} if label is None else {"label": run.find_kind(label, "label")}
    entries = {
        "format": disk.OF_FEATURES,
        "backbone": type(network).__name__,
        **_describe_source(network, source),
        **run.describe_images(images, first, probe, kinds, block, shard_size),
        "first": {"features": probe["features"][0].ravel()[:64].tolist()},
    } | ({"totals": totals} if totals else {})
    folder = Path(out)
    job = run.Job(
        images, extractor, folder.absolute(), disk.OF_FEATURES,  # type: ignore[arg-type]
        disk.digest_manifest(entries), shard_size, batch_size,
        () if varies else tuple(first.images.shape[1:]), kinds, skip_bad_images,
    )  # fmt: skip
    making = run.BuildOptions(engine, processes, workers, verify, progress, "features")
    with run.completed(folder, job, entries, making, WarnOnce()):
        return Features(folder)


def _describe_source(backbone: nn.Module, source: FeatureSource) -> dict[str, Any]:
    """Return the manifest's entries that tell features from others."""
    pool = (source.parts or (source,))[0].pool
    return {
        "weights": digests.digest_of_module(backbone), "features": repr(source), "pool": digests.described(pool),
    }  # fmt: skip


class Features:
    """The features of a data set, in the files of a folder; opened again by ``Features(folder)``.

    Args:
        folder: that of :func:`extract`.

    Raises:
        FileNotFoundError: there are no features in the folder.
        ValueError: the extraction is not finished, or a file is missing, truncated, or of another one.

    Attributes:
        folder: the folder.
        manifest: what the features were made from.

    Example:
        >>> stored = atlas.extract(backbone, dataset, "layer2", pool="mean", out="pooled", progress=False)
        >>> len(atlas.Features("pooled")), stored.labels.tolist()[:2]
        (12, ['cat', 'dog'])
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = disk.read_manifest(self.folder, disk.OF_FEATURES)
        if not self.manifest["complete"]:
            raise ValueError(f"the features in {folder} are not finished: run the same extraction again to resume it")
        self._table = Table(self.folder, self.manifest)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        _, *shape = self.manifest["columns"]["features"]
        return f"Features({str(self.folder)!r}: {len(self)} images, {self.manifest['features']}, {tuple(shape)})"

    @property
    def labels(self) -> np.ndarray | None:
        """The labels, shape (N,), names of folders for their numbers; None if the data set has none."""
        if "label" not in self.manifest["kinds"]:
            return None
        return self._name_labels(self._table.column("label"))

    @property
    def ids(self) -> np.ndarray:
        """The path of each image in its folder, or its number in the data set, shape (N,), strings."""
        return self._table.column("id")

    @property
    def rows(self) -> np.ndarray:
        """The number of each image in the data set, shape (N,), without unreadable ones."""
        return self._table.column("row")

    @property
    def means(self) -> dict[str, Tensor]:
        """The means of layers over images, by name: float32, in the shape of the layer's output for one image.

        Of pictures of several sizes, where these differ, with one number a channel in the place of all positions.

        Raises:
            ValueError: the features are of version 0.5 or older, which kept one number a channel.
        """
        if any(name.startswith(_OF_MEANS) for name in self.manifest["columns"]):
            raise ValueError(
                f"the features in {self.folder} are of version 0.5 or older, which kept means by channel, not by "
                "position: extract them anew, atlas.extract(..., out=) with another folder"
            )
        shapes = self.manifest.get("totals", {})
        totals: dict[str, Any] = dict.fromkeys(shapes, 0)
        for _, columns in self._table.blocks(list(shapes)) if shapes else ():
            for name, shape in shapes.items():
                totals[name] += np.frombuffer(columns[name][0], np.float32).reshape(shape).astype(np.float64)
        return {
            name.removeprefix(OF_TOTALS): torch.from_numpy(total / len(self)).float() for name, total in totals.items()
        }

    def _name_labels(self, labels: np.ndarray) -> np.ndarray:
        names = self.manifest["names"]
        return np.array(names)[labels] if names and labels.dtype.kind in "iu" else labels

    def blocks(self) -> Iterator[dict[str, Any]]:
        """Yield the columns of all images, a file at a time.

        Raises:
            ValueError: a file was changed since it was written.
        """
        names = [*self.manifest["columns"], *self.manifest["kinds"], "id"]
        yield from (columns for _, columns in self._table.blocks(names))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one image, (C, H, W)."""
        return tuple(self.manifest["input"])

    def stored_batches(self, backbone: nn.Module, source: FeatureSource) -> Iterator[tuple[Tensor, Any]]:
        """Yield the features of some images after the other, (n, D) or (n, D, h, w), with their labels or None.

        Args:
            backbone: the network that they have to be of.
            source: where they have to come from, and how they have to be pooled.

        Raises:
            ValueError: they are of something else.
        """
        wanted = _describe_source(backbone, source)
        differs = [name for name, value in wanted.items() if self.manifest[name] != value]
        if differs:
            refuse(
                ValueError,
                f"{self.folder} has features of something else: {self.manifest['backbone']}, "
                f"{self.manifest['features']}, pool={self.manifest['pool']} (another {', another '.join(differs)})",
                "pass the same network, layer and pool",
                "extract them anew, atlas.extract(..., out=) with another folder",
            )
        names = ["features", *(["label"] if "label" in self.manifest["kinds"] else [])]
        for columns in self._table.groups(names):
            labels = columns.get("label")
            features = torch.from_numpy(columns["features"].copy())  # mapped memory is not to be written
            yield features, None if labels is None else self._name_labels(labels)
