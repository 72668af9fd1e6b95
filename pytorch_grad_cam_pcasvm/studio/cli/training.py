"""Training sets: features and labels of a folder, and means of layers, extracted once and kept for the next command."""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pytorch_grad_cam_pcasvm import extract_features
from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, compute_features
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.layer_means import BlockMeans
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device
from pytorch_grad_cam_pcasvm.runtime.digests import described, digest_of_module
from pytorch_grad_cam_pcasvm.runtime.files import with_reason
from pytorch_grad_cam_pcasvm.studio import atlas
from pytorch_grad_cam_pcasvm.studio.atlas.shards import KEPT
from pytorch_grad_cam_pcasvm.studio.cli.arguments import BACKGROUND, COVERAGE
from pytorch_grad_cam_pcasvm.studio.cli.folders import refuse_bad
from pytorch_grad_cam_pcasvm.studio.data.images import Images
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation

_AMONG = 4  # layers that are compared, the coarsest
_SAME = 1e-4  # relative difference of features that is rounding, on a GPU as well
_FORMAT = "pytorch_grad_cam_pcasvm features 4"


@dataclass(frozen=True)
class PatchOptions:
    """Which rows of dense features are kept, and the source of their labels.

    Attributes:
        masks: a :class:`.MaskFolder`; None: the label of a patch is that of its image.
        resize: how pictures are resized, as in ``export.onnx``; for masks.
        purity: the least share of a patch that its label must have.
        coverage: the least share of a patch that a class of small things needs.
        normal: the name of what is outside of masks.
        sample: how many patches of each image: a number or a fraction; None: as many as ``most`` in all.
        coreset: how many are kept of all; None: all.
        most: number of patches, if ``sample`` is not given.
    """

    masks: Any = None
    resize: Any = None
    purity: float = 0.0
    coverage: float = COVERAGE
    normal: str = BACKGROUND
    sample: float | None = None
    coreset: float | None = None
    most: int = 20_000

    def at(self, count: int, backbone: Any, source: Any, x: Any) -> "PatchOptions":
        """Return it with the number of patches of each of so many images."""
        if self.sample is not None:
            return self
        with evaluation_mode(backbone), torch.no_grad():
            positions = compute_features(backbone, source, x)[0, 0].numel()
        return self if count * positions <= self.most else replace(self, sample=max(1, self.most // count))

    @property
    def arguments(self) -> dict[str, Any]:
        """What it is for ``extract_features``."""
        amounts = {"sample": self.sample, "coreset": self.coreset, "places": True}
        if self.masks is None:
            return amounts
        return amounts | {"purity": self.purity, "coverage": self.coverage, "ignore_index": self.masks.unlabelled}

    def labels(self, rows: Sequence[int], numbers: Sequence[Any], size: Any) -> Any:
        """Return the labels of images: their classes, or masks (N, H, W); None without classes."""
        if self.masks is None:
            return None if numbers[0] is None else torch.tensor(numbers)
        masks = np.stack([self.masks.of(row, size, self.resize) for row in rows]).astype(np.int64)
        if self.masks.values == [1] and numbers[0] is not None:  # the class is that of the folder
            masks = np.where(masks == 1, 1 + np.reshape(numbers, (-1, 1, 1)), masks)
        return torch.from_numpy(masks)

    def find_faults(self, row: int, size: Any) -> Any:
        """Return the inside of a picture's mask, boolean, (H, W); unlabelled pixels are outside."""
        return self.masks.find_inside(row, size, self.resize)

    def names(self, classes: Sequence[str] | None) -> list[str]:
        """Return the names of the labels from 0 on, of pictures in the folders of some classes."""
        if self.masks is None:
            return list(classes or [])
        if self.masks.values == [1]:
            return [self.normal, *(classes or [self.masks.classes.names.get(1, "defect")])]
        last = max(number for number in self.masks.values if number != self.masks.unlabelled)
        return [self.normal, *(self.masks.titles.get(number, str(number)) for number in range(1, 1 + last))]

    def name_marked(self, names: Sequence[str]) -> list[str]:
        """Return the labels, without the background, that masks show anywhere."""
        if self.masks.values != [1] or len(names) <= 2:
            return list(names[1:])
        marked = {name.split("/")[0] for name, file in zip(self.masks.names, self.masks.files, strict=True) if file}
        return [name for name in names[1:] if name in marked]


@dataclass
class TrainingFeatures:
    """What a network makes of a folder of pictures.

    Attributes:
        features: shape (R, D), a tensor; of dense features a row for each patch that is kept.
        numbers: of the class of each row, shape (R,), a tensor; -1 without classes. With masks, 0 is outside of them.
        rows: the number of each row's picture in the folder.
        places: of dense features the positions, shape (R, 2), a tensor; else (R, 0).
        bad: names of the pictures that cannot be read.
        means: of layers, by name, as :class:`.LayerMeans` has them.
        blocks: the last blocks of the network.
        read_all: yields the features of some pictures after the others, (n, D), or of all positions (n, D, h, w), with
            the numbers of these pictures in the folder; only while the training set is open.
        spread: takes maps of positions, (N, K, h, w), to a size (H, W), over the pictures that the network sees.
    """

    features: Any
    numbers: Any
    rows: list[int]
    places: Any
    bad: list[str]
    means: dict[str, Any]
    blocks: Any
    read_all: Callable[[], Iterator[tuple[Any, list[int]]]]
    spread: Callable[[Any, Any], Any]

    def without(self, photos: Collection[int]) -> "TrainingFeatures":
        """Return it without some photos, by their numbers in the folder; means of layers stay those of all."""
        kept = [row for row, photo in enumerate(self.rows) if photo not in photos]

        def read_some() -> Iterator[tuple[Any, list[int]]]:
            for features, numbers in self.read_all():
                some = [place for place, number in enumerate(numbers) if number not in photos]
                if some:
                    yield features[some], [numbers[place] for place in some]

        return replace(
            self, features=self.features[kept], numbers=self.numbers[kept], rows=[self.rows[row] for row in kept],
            places=self.places[kept], read_all=read_some,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Return how many photos and rows there are, as a model's file holds it."""
        return {"images": len(set(self.rows)), "rows": len(self.features), "left_out": self.blocks.left_out}


def layers_for_maps(backbone: Any, source: Any, x: Any) -> list[str]:
    """Return the layers that ``--layer auto`` compares, from the finest to the coarsest."""
    with evaluation_mode(backbone):
        return find_last_blocks(backbone, source, x)[-_AMONG:]


@contextmanager
def training_set(
    options: Any, root: Path, backbone: Any, preparation: Preparation, layer: Any, pool: Any, also: Sequence[str] = (),
    patches: PatchOptions | None = None,
) -> Iterator[TrainingFeatures]:  # fmt: skip
    """Yield the features of the pictures in a folder, and the means of the layers that maps may be of.

    Args:
        options: ``batch_size``, ``workers``, ``skip_bad_images`` and ``no_cache`` of the command line; ``engine`` and
            ``processes`` if it has them.
        root: the folder.
        backbone: the network.
        preparation: of the pictures.
        layer: where the features come from.
        pool: of the features.
        also: further layers whose means are wanted.
        patches: of dense features, which rows are kept, and their labels; None: a few are enough.

    Raises:
        OSError: a picture cannot be read, and is not to be skipped.
        ValueError: none can be read.
    """
    images = Images(preparation.folder(root), thumbnails=0)
    first = images.first()
    source = FeatureSource.of(backbone, layer, pool)
    x = first.to(find_device(backbone))
    blocks = BlockMeans(backbone, source, also)
    blocks.begin_batch(x)
    wanted = blocks.wanted
    patches = (patches or PatchOptions(sample=1)) if source.dense else None
    if patches is not None:
        patches = patches.at(len(images), backbone, source.at(backbone, x), x)
    probe = _probe(backbone, source, preparation, first)
    with _stored(options, images, backbone, layer, source, pool, preparation, wanted, probe) as stored:
        refuse_bad(options, stored.manifest["bad"])
        loader: Any = _Labelled(stored, patches)
        features, numbers, *places = extract_features(
            backbone, loader, layer, pool=pool, as_numpy=False, progress=False, **(patches.arguments if patches else {})
        )
        bad, rows, means = list(stored.manifest["bad"]), stored.rows, stored.means
        if numbers is None:
            numbers = torch.full((len(features),), -1)
        origins = places[0] if places else np.arange(len(features))[:, None]
        at = torch.from_numpy(np.ascontiguousarray(origins[:, 1:]))
        own = rows[origins[:, 0]].tolist()
        read_all = partial(_read_all, stored, backbone, source)
        cells = source.at(backbone, x).cells
        spread = upsample_maps if cells is None else cells.spread
        yield TrainingFeatures(features.cpu(), numbers.cpu(), own, at, bad, means, blocks, read_all, spread)


def _read_all(stored: Any, backbone: Any, source: Any) -> Iterator[tuple[Any, list[int]]]:
    """Yield features with the numbers of their photos in the folder."""
    for features, rows, _ in _read_numbered(stored, backbone, source):
        yield features, rows


def _read_numbered(stored: Any, backbone: Any, source: Any) -> Iterator[tuple[Any, list[int], Any]]:
    """Yield features with the numbers of their photos in the folder, and the names of their classes or None."""
    rows = iter(stored.rows.tolist())
    for features, labels in stored.stored_batches(backbone, source):
        yield features, list(islice(rows, len(features))), labels


class _Labelled:
    """Stored features with the labels that a command wants: numbers of classes, or masks.

    Args:
        stored: the features.
        patches: of dense features, what labels them; else None.
    """

    def __init__(self, stored: Any, patches: PatchOptions | None) -> None:
        self._stored, self._patches = stored, patches or PatchOptions()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one image, (C, H, W)."""
        return self._stored.input_shape

    def stored_batches(self, backbone: Any, source: Any) -> Iterator[tuple[Any, Any]]:
        """Yield features and labels, as :meth:`.Features.stored_batches` does."""
        numbers = {name: number for number, name in enumerate(self._stored.manifest["names"] or [])}
        size = self.input_shape[1:]
        for features, rows, labels in _read_numbered(self._stored, backbone, source):
            of_images = [None] * len(rows) if labels is None else [numbers[name] for name in labels.tolist()]
            yield features, self._patches.labels(rows, of_images, size)


@contextmanager
def _stored(
    options: Any, images: Any, backbone: Any, layer: Any, source: Any, pool: Any, preparation: Preparation,
    wanted: Sequence[str], probe: Any,
) -> Iterator[Any]:  # fmt: skip
    """Yield the features of the images: kept ones, or ones extracted now and kept where possible."""
    with tempfile.TemporaryDirectory() as nowhere:
        folder = cache_folder() / _name_for(backbone, source, pool, preparation, images, wanted)
        if not options.no_cache:
            stored = _read_stored(folder, probe)
            if stored is not None and _are_bad(stored, images):
                print(f"features: taken from {folder} (extract them anew with --no-cache)")
                yield stored
                return
        if not options.no_cache and _can_keep(folder, probe):
            try:
                stored = _extracted(options, images, backbone, layer, pool, wanted, folder)
            except OSError as error:  # no room
                _tell_not_kept(error)
                shutil.rmtree(folder, ignore_errors=True)
            else:
                yield stored
                return
        with _told_of_temporary(Path(nowhere)):
            stored = _extracted(options, images, backbone, layer, pool, wanted, Path(nowhere) / "features")
        yield stored


@contextmanager
def _told_of_temporary(folder: Path) -> Iterator[None]:
    """Say of errors where features are stored for this command alone, of which nothing is kept."""
    try:
        yield
    except Exception as error:
        refusal: Any = error
        if isinstance(error, OSError) and hasattr(error, "reason"):
            way = f"make room, or name a folder for temporary files in TMPDIR (it is {folder.parent} now)"
            raise with_reason(error.errno, refusal.reason.removesuffix(KEPT), way) from error
        error.args = tuple(part.replace(KEPT, "") if isinstance(part, str) else part for part in error.args)
        if hasattr(error, "reason"):
            refusal.reason = refusal.reason.replace(KEPT, "")
        raise


def _are_bad(stored: Any, images: Any) -> bool:
    """Return whether pictures that could not be read cannot be now either."""
    bad = [row for row in range(len(images)) if images.id(row) in stored.manifest["bad"]]
    return not (bad and images.read(bad).rows)


def _tell_not_kept(error: OSError) -> None:
    reason = str(getattr(error, "reason", error)).removesuffix(KEPT)
    print(f"features are not kept for the next command: {reason}", file=sys.stderr)


def _extracted(
    options: Any, images: Any, backbone: Any, layer: Any, pool: Any, wanted: Sequence[str], folder: Path
) -> Any:
    """Return the features, extracted into a folder; an interrupted command's are not extracted again."""

    def extract() -> Any:
        return atlas.extract(
            backbone,
            images.data,
            layer,
            out=folder,
            pool=pool,
            means=wanted,
            batch_size=options.batch_size,
            workers=options.workers,
            engine=getattr(options, "engine", "local"),
            processes=getattr(options, "processes", None),
            skip_bad_images=True,  # all of them are named below, at once
        )

    begun = folder.exists()
    try:
        return extract()
    except ValueError:
        if not begun:
            raise
    shutil.rmtree(folder)  # it was damaged, or has features of something else
    return extract()


def _probe(backbone: Any, source: Any, preparation: Preparation, first: Any) -> Any:
    """Return the features of a picture of the folder and of noise, (1, .), by which a network's code is recognised.

    A folder's name cannot say what hooks, attributes and transforms do.
    """
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    rows = []
    with evaluation_mode(backbone), torch.no_grad():
        picture = Image.fromarray(noise).resize(preparation.enlarge(480, 320))
        for x in (first, preparation.transform(picture)[None]):
            x = x.to(find_device(backbone))
            rows.append(compute_features(backbone, source.at(backbone, x), x).float().cpu().flatten(1))
    return torch.cat(rows, 1).numpy()  # the noise may have another size, as of a transform of one's own


def cache_folder() -> Path:
    """Return the folder in which features are kept, beside the weights that torch downloads."""
    return Path(torch.hub.get_dir()).parent / "pytorch_grad_cam_pcasvm"


def _name_for(
    backbone: Any, source: Any, pool: Any, preparation: Preparation, images: Any, wanted: Sequence[str]
) -> str:
    """Return a name made of everything that decides the features, but for code."""
    paths = images.data.paths
    stats = [path.stat() if path.exists() else path.lstat() for path in paths]
    classes = {type(module) for module in backbone.modules()}
    sources = sorted({
        file for cls in classes if (file := getattr(sys.modules.get(cls.__module__), "__file__", None)) is not None
    })
    decisive = [
        _FORMAT,
        torch.__version__,
        digest_of_module(backbone),
        [(file, Path(file).stat().st_mtime_ns) for file in sources],  # the code of a network of one's own
        repr(source),
        described(pool),
        preparation.recorded,
        list(wanted),
        str(Path(images.data.root).resolve()),
        [(images.id(row), stat.st_size, stat.st_mtime_ns) for row, stat in enumerate(stats)],
    ]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]


def _file_of_probe(folder: Path) -> Path:
    return folder.with_name(folder.name + ".npy")


def _can_keep(folder: Path, probe: Any) -> bool:
    """Return whether features can be kept in a folder; another network's are removed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_file():
            folder.unlink()
        if folder.exists() and not _fits_probe(folder, probe):
            shutil.rmtree(folder)
        np.save(_file_of_probe(folder), probe)
    except OSError as error:
        _tell_not_kept(error)
        return False
    return True


def _fits_probe(folder: Path, probe: Any) -> bool:
    """Return whether the network still makes the same of two pictures as when a folder was begun."""
    try:
        before = np.load(_file_of_probe(folder))
    except (OSError, ValueError, EOFError):
        return False
    return before.shape == probe.shape and bool(np.linalg.norm(before - probe) <= _SAME * np.linalg.norm(probe))


def _read_stored(folder: Path, probe: Any) -> Any:
    """Return the features in a folder, if all are there and the network still makes the same of pictures; or None."""
    if not _fits_probe(folder, probe):
        return None
    try:
        stored = atlas.Features(folder)
    except (OSError, ValueError):  # damaged, or not finished
        return None
    try:
        for _ in stored.blocks():
            pass
        _ = stored.means
    except ValueError:  # damaged within, which no one else finds before it is too late
        shutil.rmtree(folder)
        return None
    return stored
