"""Model: a backbone, the preparation of pictures, and the head fitted behind it, as one thing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods import ContributionCAM
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.studio.data import image_paths
from pytorch_grad_cam_pcasvm.studio.model.description import Origin
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation, describe_transform, record_preparation
from pytorch_grad_cam_pcasvm.studio.model.writing import write_model

M = TypeVar("M", bound=ClosedFormCAM)
_TENSORS = Tensor, np.ndarray, Inputs, list, tuple, Mapping  # whose messages are those of the methods
Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


@dataclass(eq=False)
class Model:
    """A backbone, the preparation of pictures, and the head fitted behind it: made by :func:`fit_model`.

    Attributes:
        net: the network with its head.
        preparation: how pictures become images; None: not known, so that only tensors can be explained.
        layers: names of the layers that maps are of by default.
        tokens: whether these return tokens, as those of transformers do.
        origin: where the backbone comes from.
        inputs: for each input of the network ``name`` (None for a tensor alone, or one of a tuple), ``shape`` of one
            row, and ``dtype``.
        about: what the head was fitted with: ``estimator``, ``images``, ``classes``, ``versions``, ``left_out`` (why
            blocks have no means), what the command line's ``fit`` has measured, and ``photos``, hashes of its photos.

    Example:
        >>> model = fit_model(backbone, loader, SVC(), layer="layer2", pool="mean", progress=False)
        >>> model.explain(images).maps.shape
        torch.Size([2, 1, 8, 8])
    """

    net: PCASVMNet
    preparation: Preparation | None
    layers: tuple[str, ...]
    tokens: bool
    origin: Origin
    inputs: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    _cam: Any = field(default=None, init=False, repr=False)
    _made_of: Any = field(default=None, init=False, repr=False)

    @property
    def transform(self) -> Callable[[Any], Tensor] | None:
        """The transform that turns a picture into an image, (C, H, W); None: not known. It may be reassigned."""
        return None if self.preparation is None else self.preparation.transform

    @transform.setter
    def transform(self, transform: Callable[[Any], Tensor] | None) -> None:
        before, self.preparation = self.preparation, None if transform is None else describe_transform(transform)
        if before is not None and self.preparation is not None:  # files are read as before
            self.preparation = replace(self.preparation, **before.reading)
        record_preparation(self.net.head.training_set, self.preparation)

    @property
    def classes(self) -> list[Any]:
        """The labels of the classes, in the head's order; empty without a classifier."""
        labels = self.net.head.classes_
        return [] if labels is None else labels.tolist()

    @property
    def normal(self) -> Any:
        """The class that is an absence, such as ``"good"``; None: there is none."""
        return self.net.head.normal

    @property
    def threshold(self) -> float | None:
        """The largest :meth:`.PCASVMNet.anomaly_score` with which a photo passes; None: not known.

        The command line's ``fit`` stores it with heads of good parts alone, by the scores of good photos left out.
        """
        return self.net.head.threshold

    @property
    def means(self) -> Mapping[str, Tensor]:
        """The means of the training images at layers, by name, near which contributions start.

        Each is float32, in the shape of the layer's output for one image, (T, H, W), or (L, D) for tokens, and may be
        passed as ``mean=``. Where training images had several sizes, it has one number a channel in the place of all
        positions, (T, 1, 1), and is of use for heads on pooled features alone.
        """
        return self.net.head.training_set.means

    def cam(self, method: type[M] = ContributionCAM, layers: Any = "auto", **options: Any) -> M:
        """Return a method for this network.

        Args:
            method: its class.
            layers: the layers of the maps, as ``target_layers``; ``"auto"``: those stored with the model, which never
                depend on the images.
            **options: further arguments of the method.

        Raises:
            ValueError: the model has no such layers.

        Example:
            >>> model = fit_model(backbone, loader, SVC(), layer="layer2", pool="mean", progress=False)
            >>> cam = model.cam(ClosedFormGradCAM, layers=["layer1"])
        """
        if isinstance(layers, str) and layers == "auto":
            layers = list(self.layers)
            if not layers:
                raise ValueError("this model has no layer whose output has positions: name one, layers=[...]")
        if self.tokens:
            options = {"reshape_transform": "tokens"} | options
        return method(self.net, layers, **options)

    def explain(
        self, images: Tensor | Paths, targets: Any = None, *, layers: Any = "auto", **options: Any
    ) -> SignedMaps | list[SignedMaps]:
        """Return the signed maps of images by :class:`.ContributionCAM`.

        Args:
            images: shape (N, ...), as for :meth:`.ContributionCAM.explain`; or a picture of PIL, a file of one, a list
                of either, or a folder, whose pictures are taken in the order of their names.
            targets: K targets, each for all images; None: every component, then the predicted class.
            layers: as for :meth:`cam`.
            **options: further arguments of the method.

        Returns:
            Signed maps of shape (N, K, H, W).

        Raises:
            OSError: pictures cannot be read; all of these are named.
            TypeError: they are no images.
            ValueError: pictures or paths are given, but the model knows no transform; or what
                :meth:`.ContributionCAM.explain` raises.
        """
        if options or layers != "auto":
            return self.cam(ContributionCAM, layers, **options).explain(self._images(images), targets)
        made_of = self.net, tuple(self.layers), self.tokens
        if self._cam is None or self._made_of != made_of:
            self._cam, self._made_of = self.cam(ContributionCAM), made_of
        return self._cam.explain(self._images(images), targets)

    def predict(self, images: Tensor | Paths) -> np.ndarray:
        """Return the predicted labels of images, or of pictures in files, shape (N,); see :meth:`explain`."""
        return self.net.predict(self._images(images))

    def read(self, paths: Paths) -> Tensor:
        """Return pictures in files as images, (N, C, H, W), prepared as for the fit of the head.

        Raises:
            OSError: some cannot be read; all of these are named.
            ValueError: the model knows no transform.
        """
        return self._require_preparation(_name_first(paths)).read(image_paths(paths))

    def _images(self, images: Any) -> Any:
        """Return images as they are passed to the network; pictures, also in files, are prepared.

        Raises:
            TypeError: they are no images; the message says what to pass.
        """
        listed = images if isinstance(images, list | tuple) else [images]
        if listed and all(isinstance(one, str | PathLike) for one in listed):
            return self.read(images)
        if listed and all(isinstance(one, Image.Image) for one in listed):
            transform = self._require_preparation("a picture").transform
            return torch.stack([transform(one.convert("RGB")) for one in listed])
        expected = "what is explained are images: tensors (N, ...), pictures of PIL, or paths"
        if images is None or not listed:
            raise TypeError(f"{expected}; got {'nothing' if images is None else 'an empty list'}")
        if not isinstance(images, _TENSORS) and (hasattr(images, "__iter__") or hasattr(images, "__getitem__")):
            raise TypeError(
                f"{expected}; of a {type(images).__name__} take the batches, model.explain(images) for each"
            )
        alone = len(self.inputs) == 1 and self.inputs[0]["name"] is None
        if alone and len(listed) == 2 and isinstance(images, tuple):
            raise TypeError(
                f"{expected}; this network takes one tensor, got two: leave out labels, model.explain(images)"
            )
        return images

    def _require_preparation(self, caller: str) -> Preparation:
        """Return how pictures become images.

        Raises:
            ValueError: it is not known; the message names a picture.
        """
        if self.preparation is None:
            refuse(
                ValueError,
                f"how {caller} becomes an image is not known, as this model has no transform",
                Fix("pass it, fit_model(..., transform=...) or load_model(path, transform=...)", "transform"),
                "explain tensors, model.explain(images)",
            )
        return self.preparation

    def save(self, path: str | PathLike[str]) -> None:
        """Write the model to one file: safetensors with a JSON header, no pickle. The backbone's weights are not in it.

        Raises:
            TypeError: a stage of the head is not from this package.
            ValueError: the pool is a function, which no file can hold.
            FileNotFoundError: the folder does not exist.
        """
        write_model(self, Path(path))

    def __repr__(self) -> str:
        head = self.about.get("estimator", type(self.net.head).__name__)
        classes = f", classes {', '.join(map(str, self.classes))}" if self.classes else ""
        where = "its output" if self.net.layer is None else repr(self.net.layer)
        return (
            f"Model({self.origin.typed or self.origin.name}, features of {where}, pool={self.net.pool!r}, {head}"
            f"{classes})"
        )


def _name_first(paths: Any) -> str:
    return str(paths if isinstance(paths, str | PathLike) else next(iter(paths), "nothing"))


def refuse_dense(net: Any, caller: str) -> None:
    """Refuse a head that decides at every position.

    Raises:
        ValueError: it is one.
    """
    if isinstance(net, PCASVMNet) and net.is_dense:
        raise ValueError(
            f"{caller} takes a head that decides once for each image, but this one decides at every position, "
            f"pool={net.pool!r}: explain it with cam.explain, and draw it with figures.plot_positions"
        )
