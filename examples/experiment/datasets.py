"""The data sets of the paper, from the formats they are distributed in."""

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError
from sklearn.model_selection import train_test_split
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS

from experiment.problems import RunError

BLOOD_CELLS = (
    *("basophil", "eosinophil", "erythroblast", "immature granulocyte"),
    *("lymphocyte", "monocyte", "neutrophil", "platelet"),
)


@dataclass(frozen=True)
class Part:
    """Images and their labels.

    Attributes:
        read: gives image i, RGB.
        labels: class indices, shape (R,).
        digests: of the contents of image i: what was computed from it is used again only for the same contents.
    """

    read: Callable[[int], Image.Image]
    labels: np.ndarray
    digests: Sequence[str]

    def rows(self, index: np.ndarray) -> "Part":
        """Return some of the images."""
        return Part(lambda i: self.read(int(index[i])), self.labels[index], [self.digests[i] for i in index])

    def limited(self, per_class: int | None) -> "Part":
        """Return the first images of every class, in their order."""
        if per_class is None:
            return self
        kept = [np.flatnonzero(self.labels == c)[:per_class] for c in np.unique(self.labels)]
        return self.rows(np.sort(np.concatenate(kept)))

    def imbalanced(self, ratio: int) -> "Part":
        """Return the images of the first class, and of every other class one for each ``ratio`` of them."""
        first, *others = (np.flatnonzero(self.labels == c) for c in np.unique(self.labels))
        return self.rows(np.sort(np.concatenate([first, *(rows[: -(-len(first) // ratio)] for rows in others)])))


@dataclass(frozen=True)
class ImageData:
    """A training and a test set, and the names of their classes."""

    classes: Sequence[str]
    train: Part
    test: Part
    dropped: int = 0


def load(name: str, root: Path, *, download: bool = False, limit: int | None = None, seed: int = 0) -> ImageData:
    """Return a data set.

    Args:
        name: ``mnist``, ``fashion-mnist``, ``cifar10``, ``bloodmnist``, or ``chest-xray``, ``dog-vs-cat``, ``folder``.
        root: torchvision's root folder; MedMNIST's ``.npz`` or the folder it is in; for the last three, a folder with
            one folder per class, or ``train`` and ``test`` (or ``val``) folders of these. Such a tree will do for every
            name.
        download: fetch what torchvision can fetch.
        limit: images per class, in training and in test set.
        seed: of the split, where the data has none.

    Returns:
        The data.

    Raises:
        RunError: nothing of that kind is there, or a class has too few images.
    """
    if not root.exists() and not download:
        raise RunError(f"there is no {root}: name the data with --root, or pass --download where there is a network")
    if name in _TORCHVISION and not (root / "train").is_dir():
        data = _from_torchvision(name, root, download)
    elif name == "bloodmnist" and not (root / "train").is_dir():
        data = _medmnist(root)
    else:
        data = _folders(root, seed)
    data = replace(data, train=data.train.limited(limit), test=data.test.limited(limit))
    for label, title in enumerate(data.classes):
        count = int((data.train.labels == label).sum())
        if count < 5:  # a fifth of them is for validation
            raise RunError(
                f"the class {title!r} has {count} training images: at least 5 are needed, one of them for validation. "
                "Add images, or take the folder away"
            )
        if not (data.test.labels == label).any():
            raise RunError(f"the class {title!r} has no test image: add one, or take the class away")
    return data


_TORCHVISION = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST, "cifar10": datasets.CIFAR10}


def _from_torchvision(name: str, root: Path, download: bool) -> ImageData:
    kind = _TORCHVISION[name]
    try:
        train, test = (kind(root, train=part, download=download) for part in (True, False))
    except RuntimeError as error:
        raise RunError(
            f"torchvision finds no {kind.__name__} in {root} ({error}). Pass --download where there is a network, or "
            f"put its files where torchvision does; a tree {root}/train/<class>/ and {root}/test/<class>/ will do, too"
        ) from error
    except OSError as error:  # the network
        raise RunError(
            f"downloading {kind.__name__} failed ({error}): try again, or copy its files to {root}"
        ) from error
    parts = [_arrays(np.asarray(part.data), np.asarray(part.targets)) for part in (train, test)]
    return ImageData(train.classes, *parts)


def _medmnist(root: Path) -> ImageData:
    file = root / "bloodmnist.npz" if root.is_dir() else root
    if not file.is_file():
        raise RunError(f"there is no {file}: download bloodmnist.npz of MedMNIST and name it with --root")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            parts = [_arrays(arrays[f"{part}_images"], arrays[f"{part}_labels"][:, 0]) for part in ("train", "test")]
    except (KeyError, IndexError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RunError(f"{file} is no file of MedMNIST, or damaged ({error}): download it again") from error
    return ImageData(BLOOD_CELLS, *parts)


def _arrays(images: np.ndarray, labels: np.ndarray) -> Part:
    whole = hashlib.sha256(np.ascontiguousarray(images)).hexdigest()
    digests = [f"{whole} {i}" for i in range(len(images))]
    return Part(lambda i: Image.fromarray(images[i]).convert("RGB"), labels.astype(int), digests)


def _folders(root: Path, seed: int) -> ImageData:
    if not root.is_dir():
        raise RunError(f"{root} is no folder: --root must name a folder with one folder of images per class")
    tests = [root / name for name in ("test", "val") if (root / name).is_dir()]
    if (root / "train").is_dir() and not tests:
        raise RunError(f"{root} has a train folder, but neither test nor val: add one of them")
    folders = [root / "train", tests[0]] if tests else [root]
    classes = sorted(folder.name for folder in folders[0].iterdir() if folder.is_dir())
    if len(classes) < 2:
        raise RunError(f"{folders[0]} must have a folder of images for each of at least two classes, it has {classes}")
    missing = [name for folder in folders for name in classes if not (folder / name).is_dir()]
    if missing:
        raise RunError(f"{folders[-1]} has no folder for {missing}: every class needs one")
    found = [
        [(file, label) for label, name in enumerate(classes) for file in _images(folder / name)] for folder in folders
    ]
    # A copy of a test image in the training set would be no test: of equal files the test set keeps its own.
    seen: dict[str, tuple[Path, int]] = {}
    kept = []
    for files in reversed(found):
        unique = []
        for file, label in files:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            first, its_label = seen.setdefault(digest, (file, label))
            if its_label != label:
                raise RunError(f"{first} and {file} are the same image in two classes: delete one of them")
            if first is file:
                unique.append((file, label, digest))
        kept.insert(0, unique)
    dropped = sum(map(len, found)) - sum(map(len, kept))
    if tests:
        parts = [_files(files) for files in kept]
    else:
        whole = _files(kept[0])
        counts = np.bincount(whole.labels, minlength=len(classes))
        if counts.min() < 7:
            name = classes[int(counts.argmin())]
            raise RunError(
                f"the class {name!r} has {counts.min()} images: at least 7 are needed to hold some out for tests"
            )
        split = train_test_split(np.arange(len(whole.labels)), test_size=0.2, stratify=whole.labels, random_state=seed)
        parts = [whole.rows(np.sort(index)) for index in split]
    return ImageData(classes, *parts, dropped=dropped)


def _images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)


def _files(files: Sequence[tuple[Path, int, str]]) -> Part:
    def read(i: int) -> Image.Image:
        try:
            with Image.open(files[i][0]) as image:
                if image.mode.startswith("I"):  # 16 bits, which convert("RGB") would clip
                    image = image.point(lambda value: value / 256).convert("L")
                return image.convert("RGB")
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
            raise RunError(
                f"{files[i][0]} is no readable image ({error}): mend or delete it, and start again. Earlier "
                "results are as they were"
            ) from error

    return Part(read, np.array([label for _, label, _ in files], dtype=int), [digest for _, _, digest in files])
