"""Whether a data set is still the one that existing shards were made from."""

from collections.abc import Collection
from random import Random
from typing import Any, NamedTuple

from pytorch_grad_cam_pcasvm.atlas import shards
from pytorch_grad_cam_pcasvm.atlas.engines import Job
from pytorch_grad_cam_pcasvm.atlas.manifest import ANOTHER_FOLDER
from pytorch_grad_cam_pcasvm.runtime.errors import Way, refuse
from pytorch_grad_cam_pcasvm.runtime.progress import progress_bar


class _Image(NamedTuple):
    shard: str
    row: int
    digest: str
    label: Any


def compare(job: Job, missing: Collection[int], verify: bool, workers: int, progress: bool) -> None:
    """Refuse shards that were made from other images or labels.

    Args:
        job: the build.
        missing: numbers of the shards that are not there.
        verify: compare every image; otherwise a sample, files whose size differs, and labels known without images.
        workers: number of processes that read images to verify them.
        progress: show a progress bar while images are verified.

    Raises:
        ValueError: an image or label differs, or a shard has nothing to verify it by.
    """
    different: dict[str, str] = {}  # by shard
    images = [
        image
        for number in job.shards
        if number not in missing
        for image in _list_images(job, number, verify, different)
    ]
    blocks = [[image.row] for image in images]  # one at a time: their shapes may differ by now
    with progress_bar(verify and progress, total=len(images), desc="verify", unit="image") as bar:
        for image, (batch, digests) in zip(images, job.read(blocks, workers if verify else 0), strict=True):
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
            ANOTHER_FOLDER,
            f"delete {files}, and run the same build again",
            *([] if verify else [Way("compare every image before that, with verify=True", "verify")]),
        )


def _list_images(job: Job, number: int, verify: bool, different: dict[str, str]) -> list[_Image]:
    """Return the images of a shard that are to be read and compared; compare the labels that are known without."""
    shard = shards.name_shard(number)
    path = job.folder / shard
    with shards.open_shard(path) as file:
        first = shards.read_marks(file).get("first")
        names = [name for name in ("row", "label", "digest", "file_size") if name in file.schema_arrow.names]
        columns = {name: values.tolist() for name, values in shards.read(path, file, names).items()}
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
                Way("leave out verify=True", "not verify"),
                ANOTHER_FOLDER,
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
