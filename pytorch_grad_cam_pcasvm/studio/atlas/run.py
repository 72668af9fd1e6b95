"""Runs: the job of building an atlas or extracting features, and its course from first image to finished manifest.

Before more shards are made, the data set is compared with the one that the existing ones were made from.
"""

import math
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import pytorch_grad_cam_pcasvm
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.runtime import files
from pytorch_grad_cam_pcasvm.runtime.digests import digest_of_tensor
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.runtime.log import progress_bar
from pytorch_grad_cam_pcasvm.studio.atlas import disk, engines
from pytorch_grad_cam_pcasvm.studio.atlas.columns import HEAD
from pytorch_grad_cam_pcasvm.studio.atlas.engines import ForwardedWarning, tell
from pytorch_grad_cam_pcasvm.studio.atlas.explainer import ImageExplainer
from pytorch_grad_cam_pcasvm.studio.atlas.shards import KEPT, name_shard, open_shard, write_shard
from pytorch_grad_cam_pcasvm.studio.data.images import Batch, Images

# Images that the network sees at once: rounding depends on it, so it depends on nothing else.
BLOCK = {"cpu": 16, "cuda": 64}
SHARD_BYTES = 64 * 2**20  # of maps, which are held in memory until a shard is complete


def read_first(images: Images) -> Batch:
    """Return the first image that can be read."""
    for row in range(len(images)):
        batch = images.read([row])
        if batch.rows:
            if not torch.equal(images.read([row]).images, batch.images):
                raise ValueError(
                    f"image {images.id(row)} is different each time it is read: use a transform without randomness, as "
                    "for evaluation"
                )
            return batch
        if row == 0:
            why = batch.bad[0]
    raise RuntimeError(f"none of the {len(images)} images can be read; the first, {images.id(0)}: {why}")


def find_kind(value: Any, name: str) -> str:
    """Return how a label or a prediction is kept.

    Raises:
        TypeError: it is neither a number nor a string.
    """
    type_name = type(value).__name__
    if type_name not in ("bool", "int", "float", "str"):
        raise TypeError(f"a {name} must be a number or a string, got a {type_name}")
    return type_name


def choose_shard_size(wanted: int | None, columns: Mapping[str, Any], images: int, block: int) -> int:
    """Return the number of images per shard, a multiple of ``block``.

    Args:
        wanted: the number that was asked for; None: a sixteenth of the images, at most 2048, fewer of large columns.
        columns: arrays of one image.
        images: number of all images.
        block: number of images that the network gets at once.
    """
    if wanted is None:
        of_image = sum(array.nbytes for array in columns.values() if isinstance(array, np.ndarray))
        wanted = max(1, min(2048, SHARD_BYTES // of_image, -(-images // 16)))  # a stop loses a 16th at most
    return -(-wanted // block) * block


def describe_images(
    images: Images, first: Batch, columns: Mapping[str, Any], kinds: Mapping[str, str], block: int, shard_size: int
) -> dict[str, Any]:
    """Return the entries of a manifest that an atlas and features have in common.

    Args:
        images: the data set.
        first: its first image.
        columns: made of that one.
        kinds: of labels and predictions.
        block: number of images that the network gets at once.
        shard_size: images per shard.
    """
    shapes = {
        name: [str(array.dtype), *array.shape[1:]] for name, array in columns.items() if isinstance(array, np.ndarray)
    }
    return {
        "versions": {library.__name__: library.__version__ for library in (pytorch_grad_cam_pcasvm, torch, np)},
        "images": len(images),
        "ids": images.digest(),
        "first_image": digest_of_tensor(first.images),
        "input": list(first.images.shape[1:]),
        "columns": shapes,
        "kinds": dict(kinds),
        "names": images.names,
        "block": block,
        "shard_size": shard_size,
        "complete": False,
    } | ({"exif": True} if images.exif else {})


def refuse_other(folder: Path, entries: Mapping[str, Any]) -> None:
    """Raise an error for a folder with something else in it."""
    # Hidden files are a lock, or what a killed build left. The manifest comes before all others: look for it last.
    occupied = folder.is_file() or (folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()))
    if occupied and not (folder / disk.NAME).exists():
        refuse(ValueError, f"{folder} is not empty and not an atlas", disk.ANOTHER_FOLDER)
    if occupied:
        disk.check_same(folder, disk.read_manifest(folder, entries["format"]), entries)


def begin(folder: Path, entries: Mapping[str, Any]) -> None:
    """Put the manifest into a folder unless it is there; raise an error if it contains something else."""
    refuse_other(folder, entries)
    files.remove_leftovers(folder)
    if not (folder / disk.NAME).exists():
        disk.write_manifest(folder, entries)


@dataclass
class Job:
    """What every process needs to make shards.

    Attributes:
        images: the data set.
        explainer: from batches to columns.
        folder: folder of the atlas.
        file_format: of its manifest.
        atlas: digest of the atlas.
        shard_size: rows per shard.
        batch_size: number of images to read at a time.
        shape: shape of an image; (): not the same for all.
        kinds: kinds of labels and predictions.
        skip_bad_images: continue without images that cannot be read.
    """

    images: Images
    explainer: ImageExplainer
    folder: Path
    file_format: str
    atlas: str
    shard_size: int
    batch_size: int
    shape: tuple[int, ...]
    kinds: Mapping[str, str]
    skip_bad_images: bool

    @property
    def shards(self) -> range:
        """The numbers of all shards."""
        return range(-(-len(self.images) // self.shard_size))

    def name_shard(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.folder / name_shard(number, self.file_format)

    def list_rows(self, shard: int) -> range:
        """Return the rows of a shard."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, len(self.images)))

    def run(self, numbers: Sequence[int], workers: int = 0) -> Iterator[int]:
        """Make shards one after the other.

        Args:
            numbers: numbers of the shards.
            workers: number of processes that read images.

        Yields:
            The number of images of each step.

        Raises:
            RuntimeError: an image cannot be read.
            OSError: a shard cannot be written.
        """
        blocks = [(shard, block) for shard in numbers for block in self._list_blocks(self.list_rows(shard))]
        columns: list[dict[str, Any]] = []
        bad: dict[int, str] = {}
        device = find_device(self.explainer.net)
        read = self.read([block for _, block in blocks], workers)
        for (shard, rows), (batch, digests) in zip(blocks, read, strict=True):
            self._check(batch)
            bad |= batch.bad
            if batch.rows:
                batch.images = batch.images.to(device)
                block_columns = self.explainer(batch)
                rows_of_image = len(block_columns["row"]) // len(digests)
                columns.append(block_columns | {"digest": [digest for digest in digests for _ in range(rows_of_image)]})
            yield len(rows)
            if rows[-1] == self.list_rows(shard)[-1]:
                self._write(shard, columns, bad)
                columns, bad = [], {}

    def read(self, blocks: Sequence[Sequence[int]], workers: int) -> Iterator[tuple[Batch, list[str]]]:
        """Return an iterator over blocks of rows, each with the digests of its images."""
        loader = DataLoader(
            _Blocks(self.images, blocks),
            batch_size=None,  # a block is a batch
            num_workers=workers,
            prefetch_factor=max(1, math.ceil(self.batch_size / self.explainer.block)) if workers else None,
        )
        return engines.start_whole(lambda: iter(loader))

    def _list_blocks(self, rows: range) -> list[range]:
        return [rows[start : start + self.explainer.block] for start in range(0, len(rows), self.explainer.block)]

    def _check(self, batch: Batch) -> None:
        if batch.bad and not self.skip_bad_images:
            row, reason = next(iter(batch.bad.items()))
            refuse(
                RuntimeError,
                f"image {row} ({self.images.id(row)}) cannot be read: {reason}{KEPT}",
                "mend the image and run the same again",
                Fix("pass skip_bad_images=True to list it in the manifest", "skip_bad_images"),
            )
        if batch.rows and self.shape and batch.images.shape[1:] != self.shape:
            raise ValueError(
                f"image {self.images.id(batch.rows[0])} has the shape {tuple(batch.images.shape[1:])}, but the first "
                f"one {self.shape}: bring all to one size in the transform, for example with Resize((224, 224))"
            )

    def _write(self, shard: int, parts: list[dict[str, Any]], bad: Mapping[int, str]) -> None:
        columns: dict[str, Any] = {"row": np.empty(0, np.int64)}
        for name in parts[0] if parts else ():
            values = [part[name] for part in parts]
            if isinstance(values[0], torch.Tensor):  # a total over images, which the first row holds for the shard
                total = sum(values).float().numpy().tobytes()
                columns[name] = [total, *[b""] * (len(columns["row"]) - 1)]
                continue
            columns[name] = np.concatenate(values) if isinstance(values[0], np.ndarray) else list(chain(*values))
        if parts:
            rows = columns["row"].tolist()
            columns["id"] = [self.images.id(row) for row in rows]
            if "place" in columns:
                columns["id"] = [
                    f"{name} {tuple(at)}" for name, at in zip(columns["id"], columns["place"].tolist(), strict=True)
                ]
            sizes = [self.images.file_size(row) for row in rows]
            columns |= {"file_size": sizes} if sizes[0] is not None else {}
            self._check_labels(columns["id"], columns["label"])
            if "label" not in self.kinds:
                del columns["label"]
        marks = {"atlas": self.atlas, "number": shard, "bad": {str(row): why for row, why in bad.items()}}
        kinds = {**self.kinds, "id": "str", "digest": "str", "file_size": "int"}
        write_shard(self.name_shard(shard), columns, kinds, marks)

    def _check_labels(self, ids: Sequence[str], labels: Sequence[Any]) -> None:
        expected_type = self.kinds.get("label")
        for name, label in zip(ids, labels, strict=True):
            label_type = None if label is None else type(label).__name__
            if label_type != expected_type and (expected_type, label_type) != ("float", "int"):
                one, other = (
                    "no label" if type_name is None else f"a label of type {type_name}"
                    for type_name in (label_type, expected_type)
                )
                raise ValueError(
                    f"image {name} has {one}, but the first one {other}: give all of them labels of one kind"
                )


class _Blocks(Dataset[tuple[Batch, list[str]]]):
    """Blocks of rows with the digests of their images, for the workers of a DataLoader."""

    def __init__(self, images: Images, blocks: Sequence[Sequence[int]]) -> None:
        self.images, self.blocks = images, blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, number: int) -> tuple[Batch, list[str]]:
        batch = self.images.read(self.blocks[number])
        return batch, [digest_of_tensor(image) for image in batch.images]


def list_missing(job: Job) -> list[int]:
    """Return the numbers of the shards that are to be made; refuse one that is broken."""
    missing = []
    for number in job.shards:
        path = job.name_shard(number)
        if not path.exists():
            missing.append(number)
            continue
        with open_shard(path, job.atlas, number) as shard:
            bad = [int(row) for row in shard.marks["bad"]]
        if bad and (not job.skip_bad_images or job.images.read(bad).rows):
            missing.append(number)  # they are to be read now, or can be
    return missing


class BuildOptions(NamedTuple):
    """How shards are made.

    Attributes:
        engine: ``"local"`` or ``"ray"``.
        processes: number of processes; None: one, or of Ray as many as suit the cluster.
        workers: number of processes that read images, for each of these.
        verify: compare every image with existing shards.
        progress: show progress bars.
        name: in front of the bar.
    """

    engine: str
    processes: int | None
    workers: int
    verify: bool
    progress: bool
    name: str = "atlas"


@contextmanager
def completed(
    folder: Path, job: Job, entries: dict[str, Any], making: BuildOptions, register: WarnOnce, head: Head | None = None
) -> Iterator[None]:
    """Hold a folder in which all shards are there, those that were missing made now.

    Args:
        folder: as it was typed, for messages.
        job: what to make.
        entries: of the manifest.
        making: how.
        register: knows which warnings were given.
        head: is stored beside the shards.

    Yields:
        Nothing, while the folder is held.
    """
    refuse_other(folder, entries)  # at once, before waiting for another run
    with disk.alone(folder):
        begin(folder, entries)
        if head is not None and not (folder / HEAD).exists():
            head.save(folder / HEAD)
        missing = list_missing(job)
        compare(job, missing, making)
        if missing:
            _make(job, missing, making, register)
        finish(job, entries)
        yield


def _make(job: Job, missing: Sequence[int], making: BuildOptions, register: WarnOnce) -> None:
    """Make the missing shards, and pass on their warnings unless ``register`` knows them."""
    total, count = len(job.images), sum(len(job.list_rows(number)) for number in missing)
    messages: list[ForwardedWarning] = []
    with progress_bar(making.progress, total=total, initial=total - count, desc=making.name, unit="image") as bar:
        try:
            for done in engines.make_shards(job, missing, making, messages):
                bar.update(done)
        except KeyboardInterrupt as error:
            # An interactive session keeps it, and its frames keep the processes that read images.
            traceback.clear_frames(error.__traceback__)
            raise
    tell(messages, register)  # below the bar, not in it


def finish(job: Job, entries: dict[str, Any]) -> None:
    """Mark the manifest as complete, with the images left out."""
    rows = 0
    bad: dict[str, str] = {}
    for number in job.shards:
        with open_shard(job.name_shard(number), job.atlas, number) as shard:
            rows += shard.count
            bad |= shard.marks["bad"]
    if not rows:
        raise RuntimeError(f"none of the {len(job.images)} images can be read")
    bad_images = {job.images.id(int(row)): why for row, why in bad.items()}
    disk.write_manifest(job.folder, {**entries, "rows": rows, "bad": bad_images, "complete": True})


class _Image(NamedTuple):
    shard: str
    row: int
    digest: str
    label: Any


def compare(job: Job, missing: Collection[int], making: BuildOptions) -> None:
    """Refuse shards that were made from other images or labels.

    Args:
        job: the build.
        missing: numbers of the shards that are not there.
        making: with ``verify`` every image is compared; otherwise a sample, files whose size differs, and labels known
            without images.

    Raises:
        ValueError: an image or label differs, or a shard has nothing to verify it by.
    """
    verify = making.verify
    different: dict[str, str] = {}  # by shard
    images = [
        image
        for number in job.shards
        if number not in missing
        for image in _list_images(job, number, verify, different)
    ]
    blocks = [[image.row] for image in images]  # one at a time: their shapes may differ by now
    with progress_bar(verify and making.progress, total=len(images), desc="verify", unit="image") as bar:
        for image, (batch, digests) in zip(images, job.read(blocks, making.workers if verify else 0), strict=True):
            name = job.images.id(image.row)
            if batch.bad:
                different.setdefault(image.shard, f"image {name} cannot be read now ({batch.bad[image.row]})")
            elif digests != [image.digest]:
                different.setdefault(image.shard, f"the pixels of image {name} differ")
            elif _differ(image.label, batch.labels[0]):
                different.setdefault(image.shard, _describe_change(name, image.label, batch.labels[0]))
            bar.update()
    if different:
        extent = (
            "every image" if verify else "labels known without images, sizes of files, up to four images of each shard"
        )
        files = ", ".join(sorted(different)) if len(different) < 10 else "the folder"
        refuse(
            ValueError,
            f"{job.folder} was made from other images or labels: {next(iter(different.values()))} (compared: {extent})",
            disk.ANOTHER_FOLDER,
            f"delete {files}, and run the same build again",
            *([] if verify else [Fix("compare every image before that, with verify=True", "verify")]),
        )


def _list_images(job: Job, number: int, verify: bool, different: dict[str, str]) -> list[_Image]:
    """Return the images of a shard that are to be read and compared; compare the labels that are known without."""
    path = job.name_shard(number)
    shard = path.name
    with open_shard(path) as opened:
        first = opened.marks.get("first")
        names = [name for name in ("row", "label", "digest", "file_size") if name in opened.names]
        columns = {name: values.tolist() for name, values in opened.read(names).items()}
    rows = columns["row"]
    labels = columns.get("label", [None] * len(rows))
    for row, stored, current in zip(rows, labels, job.images.labels(rows) or labels, strict=True):
        if _differ(stored, current):
            different.setdefault(shard, _describe_change(job.images.id(row), stored, current))
    if first is not None:  # version 0.2.0 kept no other digest
        if verify:
            refuse(
                ValueError,
                f"{job.folder / shard} cannot be verified, as version 0.2.0 made it",
                Fix("leave out verify=True", "not verify"),
                disk.ANOTHER_FOLDER,
            )
        return [_Image(shard, *first)]
    # The same images every time: what was refused once is not accepted by chance.
    of_images = list(dict.fromkeys(rows))  # those of an image's patches are the same
    chosen = {*of_images[:1], *Random(f"{job.atlas} {number}").sample(of_images[1:], min(3, len(of_images[1:])))}
    chosen |= {
        row for row, size in zip(rows, columns.get("file_size", []), strict=False) if size != job.images.file_size(row)
    }
    images = zip(rows, columns.get("digest", []), labels, strict=False)
    return [
        _Image(shard, *image)
        for image in {image[0]: image for image in images if verify or image[0] in chosen}.values()
    ]


def _differ(stored: Any, current: Any) -> bool:
    return stored != current and not (stored != stored and current != current)  # NaN


def _describe_change(name: str, stored: Any, current: Any) -> str:
    return f"the label of image {name} was {stored!r} and is {current!r}"
