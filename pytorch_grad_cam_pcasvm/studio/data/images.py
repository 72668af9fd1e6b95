"""Images: the rows of a data set as tensors for the network, with labels, names and small pictures."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import DatasetFolder, ImageFolder

from pytorch_grad_cam_pcasvm.network.inputs import LABEL_KEYS, image_and_label
from pytorch_grad_cam_pcasvm.runtime.errors import warn
from pytorch_grad_cam_pcasvm.studio.data import arranged, class_folders, list_photos, name_classes
from pytorch_grad_cam_pcasvm.studio.data.files import list_files
from pytorch_grad_cam_pcasvm.studio.data.transforms import unpack
from pytorch_grad_cam_pcasvm.studio.pictures.read import open_picture, read_orientation, read_picture

THUMBNAIL = 96  # pixels, the longer side


@dataclass
class Batch:
    """Rows read from a data set.

    Attributes:
        rows: their row numbers in the data set.
        images: the network's input, shape (n, C, H, W) or (n, C, D, H, W).
        labels: one for each image; None for an image without a label.
        thumbnails: WebP images; empty if none are kept.
        bad: for each row that could not be read, by number, the reason; these rows are not in the lists above.
    """

    rows: list[int]
    images: Tensor
    labels: list[Any]
    thumbnails: list[bytes]
    bad: dict[int, str] = field(default_factory=dict)


class LabelError(TypeError):
    """A data set's labels are no single numbers or strings."""


class Images:
    """A data set, read by row number.

    Args:
        source: a map-style data set of ``(image, label)`` or images, or of dicts with ``image`` and ``label``; a
            Hugging Face ``Dataset`` with an image column; or a folder of images, or with one folder per class.
        transform: turns a PIL image into a tensor for the network; for a folder or a data set of PIL images.
        picture: turns a tensor for the network, (C, H, W), into a picture in [0, 1]; None: undo the transform's
            Normalize, or if it has none, stretch each image from its smallest to its largest value.
        thumbnails: largest side of the thumbnails, in pixels; 0: no thumbnails.
        exif: turn the photos of a folder as their EXIF orientation says. The head decides, whose features were
            extracted in one way or the other; a data set of one's own does as it likes.

    Raises:
        TypeError: the data set has another type.
        ValueError: the data set is empty, or a folder has no images or comes without a transform.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Any], Tensor] | None = None,
        picture: Callable[[Tensor], Tensor] | None = None,
        *,
        thumbnails: int = THUMBNAIL,
        exif: bool = False,
    ) -> None:
        data: Any = image_folder(Path(source), transform, exif=exif) if isinstance(source, str | Path) else source
        if isinstance(source, str | Path) and (masks := list_files(source)).masks:
            warn(masks.describe()[0], UserWarning)
        by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if isinstance(data, IterableDataset | str | bytes | Mapping) or not by_number:
            raise TypeError(
                f"images are read by row number, which a {type(source).__name__} does not have: give a "
                "map-style data set (with __len__ and __getitem__), a folder, or a Hugging Face Dataset"
            )
        if not len(data):
            raise ValueError("the data set is empty: there is nothing to explain")
        self.data = data
        self.transform = None if isinstance(source, str | Path) else unpack(transform)
        self.picture = picture if picture is not None else _unnormalised(transform or _find_transform(data))
        self.thumbnails = thumbnails

    def __len__(self) -> int:
        return len(self.data)

    @property
    def names(self) -> list[str] | None:
        """The names of the classes that integer labels stand for, or None."""
        data = self.data
        while isinstance(data, Subset):
            data = data.dataset
        features = getattr(data, "features", None)
        if isinstance(features, Mapping):
            feature = next((features[key] for key in LABEL_KEYS if key in features), None)
            return getattr(feature, "names", None)
        names = getattr(data, "classes", None)
        return [str(name) for name in names] if isinstance(names, list | tuple) else None

    @property
    def exif(self) -> bool:
        """Whether they are the photos of a folder, turned as EXIF says."""
        return isinstance(origin := self._origin(0)[0], _Classes | _Flat) and origin.exif

    def id(self, row: int) -> str:
        """Return the path of an image in its folder, or else its number."""
        data, row, file = self._origin(row)
        return str(row) if file is None else file.relative_to(data.root).as_posix()

    def file_size(self, row: int) -> int | None:
        """Return the size of an image's file in bytes, or None if it comes from no folder."""
        *_, file = self._origin(row)
        return file.stat().st_size if file is not None and file.exists() else None

    def _origin(self, row: int) -> tuple[Any, int, Path | None]:
        data: Any = self.data
        while isinstance(data, Subset):
            data, row = data.dataset, int(data.indices[row])
        if isinstance(data, ImageFolder):
            return data, row, Path(data.samples[row][0])
        return data, row, data.paths[row] if isinstance(data, _Flat) else None

    def labels(self, rows: Sequence[int]) -> list[Any] | None:
        """Return the labels without reading images, or None if the user's data set only gives labels with images."""
        data: Any = self.data
        while (getter := getattr(type(data), "__getitem__", None)) is Subset.__getitem__:
            data, rows = data.dataset, [int(data.indices[row]) for row in rows]
        labels: Any
        if getter is DatasetFolder.__getitem__:
            labels = map(data.target_transform or (lambda label: label), (data.samples[row][1] for row in rows))
        elif getter is TensorDataset.__getitem__:
            labels = data.tensors[1][list(rows)] if len(data.tensors) > 1 else [None] * len(rows)
        elif getter in (list.__getitem__, tuple.__getitem__):
            labels = [image_and_label(data[row])[1] for row in rows]
        elif getter is _Flat.__getitem__:
            labels = [None] * len(rows)
        elif isinstance(form := getattr(data, "format", None), Mapping) and form.get("type", "") is None:
            keys = [key for key in LABEL_KEYS if key in form["columns"]]
            columns = data.select_columns(keys)[list(rows)] if keys else {"label": [None] * len(rows)}
            labels = [
                next((label for label in values if label is not None), None)
                for values in zip(*columns.values(), strict=True)
            ]
        else:
            return None
        return [_as_plain(image_and_label((None, label))[1]) for label in labels]

    def digest(self) -> str:
        """Return a digest of the rows' names and order."""
        digest = hashlib.sha256(str(len(self)).encode())
        for row in range(len(self)):
            digest.update(self.id(row).encode() + b"\0")
        return digest.hexdigest()

    def read(self, rows: Sequence[int]) -> Batch:
        """Return some rows; unreadable ones are listed in ``bad``."""
        read, images, labels, bad = [], [], [], {}
        for row in rows:
            try:
                image, label = self._item(row)
            except LabelError:
                raise  # the data set's, not this picture's
            # Whatever a file, a decoder or a transform raises: the caller decides whether to go on.
            except Exception as error:
                bad[row] = getattr(error, "reason", "") or f"{type(error).__name__}: {error}"
                continue
            if not bool(image.isfinite().all()):
                bad[row] = "it has NaN or infinite values"
                continue
            read.append(row)
            images.append(image)
            labels.append(label)
        shapes = {tuple(image.shape): row for row, image in zip(read, images, strict=True)}
        if len(shapes) > 1:
            (one, first), (other, second) = list(shapes.items())[:2]
            raise ValueError(
                f"images {self.id(first)} and {self.id(second)} have the shapes {one} and {other}: bring all to one "
                "size in the transform, for example with torchvision.transforms.Resize((224, 224))"
            )
        small = [_thumbnail(image, self.picture, self.thumbnails) if self.thumbnails else b"" for image in images]
        return Batch(read, torch.stack(images) if images else torch.empty(0), labels, small, bad)

    def first(self, count: int = 1) -> Tensor:
        """Return the first images that can be read, (n, C, ...), at most as many as these.

        Raises:
            ValueError: there are none.
        """
        images: list[Tensor] = []
        bad = dict[int, str]()
        for row in range(len(self)):
            batch = self.read([row])
            images, bad = [*images, *batch.images.unbind()], bad | batch.bad
            if len(images) == count:
                break
        if not images:
            where = f" in {self.data.root}" if hasattr(self.data, "root") else ""
            raise ValueError(f"none of the {len(self)} images{where} can be read: {self.id(0)} ({bad[0]})")
        return torch.stack(images)

    def _item(self, row: int) -> tuple[Tensor, Any]:
        image, label = image_and_label(self.data[row])
        if self.transform is not None:
            # A palette's numbers are no colours. Everything else is left to the transform, as for the head's features.
            palette = isinstance(image, Image.Image) and image.mode in ("P", "PA")
            image = self.transform(image.convert("RGB") if palette else image)
        if isinstance(image, Mapping | list | tuple):
            raise TypeError("only explain and extract_features take several inputs for a network: loop over batches")
        if not isinstance(image, Tensor):
            raise TypeError(
                f"the image is a {type(image).__name__}, but the network takes tensors: pass transform=, as in "
                "atlas.build(..., transform=weights.transforms())"
            )
        if not image.is_floating_point():
            raise TypeError(f"the image is {image.dtype}, but the network takes floating-point values: scale it")
        return image_and_label(image)[0], _as_plain(label)


def size_and_orientation(path: str | Path, page: int | None = None) -> tuple[tuple[int, int], int]:
    """Return the width and height of a picture as it is stored, and its orientation; see :func:`.read_orientation`."""
    with open_picture(path, page) as picture:
        if read_orientation(picture) != 1:
            picture.load()  # Pillow turns a TIFF by itself
        return picture.size, read_orientation(picture)


class _Classes(ImageFolder):
    """The images of a folder with one folder for each class."""

    exif = False

    @property
    def paths(self) -> list[Path]:
        """The file of each image."""
        return [Path(path) for path, _ in self.samples]

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return the names of the folders with photos: those of masks, or hidden ones, are not classes."""
        names = class_folders(directory)
        return names, {name: number for number, name in enumerate(names)}

    @staticmethod
    def make_dataset(directory: str | Path, class_to_idx: dict[str, int], *_: Any, **__: Any) -> list[tuple[str, int]]:
        """Return the photos with the numbers of their classes, in torchvision's order."""
        listing = list_files(directory)
        photos = [(path.relative_to(listing.photo_folder).parts[0], path) for path in listing.photos]
        photos.sort(key=lambda one: (one[0], str(one[1].parent), one[1].name))
        return [(str(path), class_to_idx[name]) for name, path in photos]


class _Flat(Dataset[Tensor]):
    """The images of a folder without classes, or one image."""

    exif = False

    def __init__(self, root: Path, transform: Callable[[Any], Tensor], loader: Callable[[Path], Image.Image]) -> None:
        self.root, self.transform, self.loader = root if root.is_dir() else root.parent, transform, loader
        self.paths = list_photos(root)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> Tensor:
        return self.transform(self.loader(self.paths[row]))


def in_colour(path: str | Path, **reading: Any) -> Image.Image:
    """Return a picture in RGB, as networks expect it, and as people see it; see :func:`.read_picture`."""
    return read_picture(path, **reading).convert("RGB")


def image_folder(root: Path, transform: Callable[[Any], Tensor] | None, *, exif: bool = False, **whites: Any) -> Any:
    """Return the images of a folder, a data set with one class per subfolder if there are any; see :class:`Images`.

    Args:
        root: the folder; or the file of one image.
        transform: turns a PIL image into a tensor.
        exif: turn photos as their EXIF orientation says; False: as up to version 0.4, for heads that say nothing.
        **whites: the levels of white, the page and the window, as arguments of :func:`.read_picture`.

    Raises:
        ValueError: there is no such folder, no transform or no image, or images lie beside the folders of others.
    """
    if not root.exists():
        raise ValueError(f"there is no folder {root}: give a folder of images, or with {arranged(root)}")
    if root.suffix.lower() in (".npz", ".npy"):
        raise ValueError(
            f"{root.name} holds arrays of NumPy's, and is no folder of images: load it, arrays = np.load(...), and "
            "pass a data set of its arrays, such as TensorDataset(images, labels), images of shape (N, C, H, W) as the "
            "network takes them"
        )
    if transform is None:
        raise ValueError(
            "a folder of images needs the transform that the head's features were extracted with: pass "
            "transform=weights.transforms()"
        )
    loader = partial(in_colour, exif=exif, **whites)
    data: Any = _Flat if name_classes(root) is None else _Classes
    images = data(root, unpack(transform), loader=loader)
    images.exif = exif
    return images


def _as_plain(label: Any) -> Any:
    """Return a label as a Python integer, float or string, or None."""
    if isinstance(label, Tensor | np.ndarray | np.generic):
        numbers = label.reshape(-1).tolist()
        label = numbers[0] if len(numbers) == 1 else numbers
    if not isinstance(label, int | float | str | None):
        several = isinstance(label, list)
        one = "label.argmax() of one-hot labels, or label[0] for the first" if several else "a number or a string"
        raise LabelError(
            f"the label of an image is {label!r:.60}{f', {len(label)} numbers' if several else ''}, but one number or "
            f"string is kept for each: let the data set give {one}, or leave labels out"
        )
    return label


def _find_transform(data: Any) -> Any:
    while isinstance(data, Subset):
        data = data.dataset
    return getattr(data, "transform", None)


def _unnormalised(transform: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that undoes a transform's Normalize, or without one, stretches an image to [0, 1]."""
    if getattr(transform, "do_normalize", False):  # an image processor's
        return Unnormalise(list(transform.image_mean), list(transform.image_std))
    mean, std = getattr(transform, "mean", None), getattr(transform, "std", None)
    if mean is not None and std is not None:
        return Unnormalise(list(mean), list(std))
    for part in reversed(list(getattr(transform, "transforms", []) or [])):
        inverse = _unnormalised(part)
        if isinstance(inverse, Unnormalise):
            return inverse
    return stretched


@dataclass(frozen=True)
class Unnormalise:
    """Undoes ``Normalize(mean, std)``."""

    mean: list[float]
    std: list[float]

    def __call__(self, image: Tensor) -> Tensor:
        """Return the picture of an image (C, ...)."""
        shape = (-1, *[1] * (image.dim() - 1))
        return image * torch.tensor(self.std).reshape(shape) + torch.tensor(self.mean).reshape(shape)


def stretched(image: Tensor) -> Tensor:
    """Return an image stretched so that its smallest value is 0 and its largest 1."""
    low, high = image.min(), image.max()
    return (image - low) / (high - low) if high > low else torch.zeros_like(image)


def as_picture(shown: Tensor) -> Image.Image:
    """Return a picture (C, H, W) in [0, 1] as Pillow has it."""
    shown = shown[:3] if len(shown) >= 3 else shown[:1].expand(3, -1, -1)
    array = (shown.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(np.ascontiguousarray(array))


def _thumbnail(image: Tensor, picture: Callable[[Tensor], Tensor], size: int) -> bytes:
    """Return a WebP image of the network's input; for a volume, of its middle slice."""
    shown = picture(image.detach().float().cpu())
    if shown.dim() == 4:
        shown = shown[:, shown.shape[1] // 2]
    if shown.dim() != 3:
        return b""
    small = as_picture(shown)
    small.thumbnail((size, size), Image.Resampling.BILINEAR, reducing_gap=2.0)
    return as_webp(small)


def as_webp(picture: Image.Image) -> bytes:
    """Return a small picture as a WebP file."""
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=80, method=0)
    return file.getvalue()
