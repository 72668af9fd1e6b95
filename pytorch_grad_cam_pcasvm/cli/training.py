"""Training sets: the features of a folder and the means of layers, extracted once and kept for the next command."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.cli.folders import refuse_bad
from pytorch_grad_cam_pcasvm.cli.patches import PatchOptions
from pytorch_grad_cam_pcasvm.cli.preparation import Preparation

_AMONG = 4  # layers that are compared, the coarsest
_SAME = 1e-4  # relative difference of features that is rounding, on a GPU as well
_FORMAT = "pytorch_grad_cam_pcasvm features 2"


@dataclass
class TrainingSet:
    """What a network makes of a folder of pictures.

    Attributes:
        features: shape (R, D), a tensor; of dense features a row for each patch that is kept.
        numbers: of the class of each row, shape (R,), a tensor; -1 without classes. With masks, 0 is outside of them.
        rows: the number of each row's picture in the folder.
        places: of dense features the positions, shape (R, 2), a tensor; else (R, 0).
        bad: names of the pictures that cannot be read.
        means: of layers, by name, as :class:`.ChannelMeans` has them.
        probe: the features of two pictures, the same for every folder but for the first of these.
    """

    features: Any
    numbers: Any
    rows: list[int]
    places: Any
    bad: list[str]
    means: dict[str, Any]
    probe: Any


def layers_for_maps(backbone: Any, source: Any, x: Any) -> list[str]:
    """Return the layers that ``--layer auto`` compares, from the finest to the coarsest."""
    from pytorch_grad_cam_pcasvm.network.auto_layers import last_blocks
    from pytorch_grad_cam_pcasvm.network.modules import evaluating

    with evaluating(backbone):
        return last_blocks(backbone, source, x)[-_AMONG:]


def training_set(
    options: Any, root: Path, backbone: Any, preparation: Preparation, layer: Any, pool: Any, also: Sequence[str] = (),
    patches: PatchOptions | None = None,
) -> TrainingSet:  # fmt: skip
    """Return the features of the pictures in a folder, and the means of the layers that maps may be of.

    Args:
        options: ``batch_size``, ``workers``, ``skip_bad_images`` and ``no_cache`` of the command line.
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
    from pytorch_grad_cam_pcasvm.data.images import Images
    from pytorch_grad_cam_pcasvm.network.features import FeatureSource
    from pytorch_grad_cam_pcasvm.network.modules import device_of

    images = Images(preparation.folder(root), thumbnails=0)
    first = None
    for row in range(len(images)):
        batch = images.read([row])
        _refuse_bad(options, batch, images)
        if batch.rows:
            first = batch.images
            break
    if first is None:
        raise ValueError(f"none of the {len(images)} images in {root} can be read")
    source = FeatureSource.of(backbone, layer, pool)
    x = first.to(device_of(backbone))
    try:
        wanted = layers_for_maps(backbone, source.at(backbone, x), x)
    except ValueError:  # the features may be all that is wanted
        wanted = []
    own = [part.layer for part in source.parts or (source,) if part.layer]
    wanted = list(dict.fromkeys([*wanted, *own, *also]))
    patches = (patches or PatchOptions(sample=1)) if source.dense else None
    if patches is not None:
        patches = patches.at(len(images), backbone, source.at(backbone, x), x)
    file = _file_for(backbone, source, pool, preparation, images, wanted, patches)
    probe = _probe(backbone, source, preparation, first)
    if not options.no_cache and (cached := _kept(file, probe)) is not None:
        if cached.bad and not options.skip_bad_images:
            _refuse_bad(options, images.read(sorted(set(range(len(images))) - set(cached.rows))[:1]), images)
        print(f"features: taken from {file} (extract them anew with --no-cache)")
        return cached
    extracted = _extracted(options, images, backbone, layer, pool, wanted, first, probe, patches)
    if not options.no_cache:
        _keep(file, extracted)
    return extracted


def _extracted(
    options: Any, images: Any, backbone: Any, layer: Any, pool: Any, wanted: Sequence[str], first: Any, probe: Any,
    patches: PatchOptions | None,
) -> TrainingSet:  # fmt: skip
    import numpy as np
    import torch

    from pytorch_grad_cam_pcasvm import extract_features
    from pytorch_grad_cam_pcasvm.network.channel_means import ChannelMeans
    from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating

    blocks = _Blocks(images, options, patches)
    with evaluating(backbone), torch.no_grad():
        means = ChannelMeans(backbone, wanted, first.to(device_of(backbone)))
    with means.counting():
        rows = patches.arguments if patches else {}
        features, numbers, *places = extract_features(backbone, blocks, layer, pool=pool, as_numpy=False, **rows)
    if numbers is None:
        numbers = torch.full((len(features),), -1)
    origins = places[0] if places else np.arange(len(features))[:, None]
    of_rows = np.array(blocks.rows)[origins[:, 0]].tolist()
    at = torch.from_numpy(np.ascontiguousarray(origins[:, 1:]))
    return TrainingSet(features.cpu(), numbers.cpu(), of_rows, at, blocks.bad, means.means, probe)


def _probe(backbone: Any, source: Any, preparation: Preparation, first: Any) -> Any:
    """Return the features of a picture of the folder and of noise, (2, D): what the code of a network makes of them.

    A file's name cannot say what hooks, attributes and transforms do.
    """
    import numpy as np
    import torch
    from PIL import Image

    from pytorch_grad_cam_pcasvm.network.features import features_of
    from pytorch_grad_cam_pcasvm.network.modules import device_of, evaluating

    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    rows = []
    with evaluating(backbone), torch.no_grad():
        for x in (first, preparation.transform(Image.fromarray(noise).resize((480, 320)))[None]):
            x = x.to(device_of(backbone))
            features = features_of(backbone, source.at(backbone, x), x).float().cpu()
            rows.append(features.flatten(2).mean(2) if source.dense else features)
    return torch.cat(rows)


class _Blocks:
    """A loader of images with their labels, without those that cannot be read."""

    def __init__(self, images: Any, options: Any, patches: PatchOptions | None) -> None:
        self._images, self._options, self._patches = images, options, patches or PatchOptions()
        self._parts = _Parts(images, options.batch_size)
        self.rows: list[int] = []
        self.bad: list[str] = []

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        for batch in DataLoader(self._parts, batch_size=None, num_workers=self._options.workers):  # type: ignore[arg-type]
            _refuse_bad(self._options, batch, self._images)
            self.bad += [self._images.id(row) for row in batch.bad]
            self.rows += batch.rows
            if batch.rows:
                labels = self._patches.labels(batch.rows, batch.labels, tuple(batch.images.shape[2:]))
                yield batch.images if labels is None else (batch.images, labels)


class _Parts:
    """Blocks of a folder's images, as many as the network sees at a time; a data set for workers."""

    def __init__(self, images: Any, size: int) -> None:
        self._images, self._size = images, size

    def __len__(self) -> int:
        return -(-len(self._images) // self._size)

    def __getitem__(self, part: int) -> Any:
        return self._images.read(range(len(self._images))[part * self._size : (part + 1) * self._size])


def _refuse_bad(options: Any, batch: Any, images: Any) -> None:
    for row, reason in batch.bad.items():
        refuse_bad(options, images.id(row), reason)


def cache_folder() -> Path:
    """Return the folder in which features are kept, beside the weights that torch downloads."""
    import torch

    return Path(torch.hub.get_dir()).parent / "pytorch_grad_cam_pcasvm"


def _file_for(
    backbone: Any, source: Any, pool: Any, preparation: Preparation, images: Any, wanted: Sequence[str],
    patches: PatchOptions | None,
) -> Path:  # fmt: skip
    """Return the file that is named by everything that decides what the features are, but for code."""
    import torch

    from pytorch_grad_cam_pcasvm.runtime.digests import described, digest_of_module

    paths = images.data.paths
    stats = [path.stat() for path in paths]
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
        None if patches is None else patches.decisive,
        str(Path(images.data.root).resolve()),
        [(images.id(row), stat.st_size, stat.st_mtime_ns) for row, stat in enumerate(stats)],
    ]
    return cache_folder() / f"{hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]}.safetensors"


def _keep(file: Path, extracted: TrainingSet) -> None:
    """Write a training set; where that is not possible, the next command extracts it again."""
    import torch

    from pytorch_grad_cam_pcasvm.head.storage import write

    tensors = {"features": extracted.features, "numbers": extracted.numbers, "rows": torch.tensor(extracted.rows)}
    tensors["places"] = extracted.places
    tensors |= {"probe": extracted.probe} | {f"means/{name}": means for name, means in extracted.means.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, tensors, {"format": _FORMAT, "bad": json.dumps(extracted.bad)})
    except OSError as error:
        print(f"features are not kept for the next command: {error}", file=sys.stderr)


def _kept(file: Path, probe: Any) -> TrainingSet | None:
    """Return the training set in a file, if the network still makes the same of two pictures; or None."""
    from pytorch_grad_cam_pcasvm.head.storage import read

    if not file.is_file():
        return None
    try:
        metadata, tensors = read(file, "fit", [_FORMAT])
    except ValueError:  # damaged: it is written again
        return None
    if tensors["probe"].shape != probe.shape or not (tensors["probe"] - probe).norm() <= _SAME * probe.norm():
        return None
    means = {name.removeprefix("means/"): value for name, value in tensors.items() if name.startswith("means/")}
    rows = tensors["rows"].tolist()
    return TrainingSet(
        tensors["features"], tensors["numbers"], rows, tensors["places"], json.loads(metadata["bad"]), means, probe
    )
