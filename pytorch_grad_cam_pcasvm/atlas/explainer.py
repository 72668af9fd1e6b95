"""The explainer: from a batch of images to the columns of an atlas. The same for every engine."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.data.images import Batch
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.errors import BlankMapWarning
from pytorch_grad_cam_pcasvm.targets import PCATarget, Target

# What is kept of the maps of targets other than components has this in front of its name.
OF_TARGETS = "target_"
_BYTES = 1 << 27  # of all components' gradients that are held at once: of layers in front of a long path they are large


class Explainer:
    """Explains every component of a batch, and further targets.

    The network sees ``block`` images at a time, the last block filled up with copies: rounding depends on their number,
    which is thus the same whichever process reads them.

    Args:
        net: the network.
        method: a class of :mod:`~pytorch_grad_cam_pcasvm.methods`.
        target_layer: name of the layer.
        options: options of the method.
        targets: targets to keep besides the components.
        components: number of components.
        block: number of images.

    Attributes:
        linear: whether maps of decisions are sums of component maps, as the last maps told.
        neutral: whether decisions can start on their boundaries, as the last maps told.
    """

    def __init__(
        self,
        net: PCASVMNet,
        method: type[ClosedFormCAM],
        target_layer: str,
        options: Mapping[str, Any],
        targets: Sequence[Target],
        components: int,
        block: int,
    ) -> None:
        self.net, self.method, self.target_layer, self.options = net, method, target_layer, dict(options)
        self.targets: list[Any] = [*map(PCATarget, range(components)), *targets]
        self.components, self.block = components, block
        self.linear = self.neutral = False
        self._cam: ClosedFormCAM | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cam": None}

    @property
    def cam(self) -> ClosedFormCAM:
        """The method, created in the process that uses it."""
        if self._cam is None:
            limits = {"max_bytes": _BYTES} if "max_bytes" in inspect.signature(self.method).parameters else {}
            self._cam = self.method(self.net, [self.target_layer], **limits | self.options)
        return self._cam

    def explain(self, images: Tensor, targets: Sequence[Any]) -> SignedMaps:
        """Return the maps of targets of at most ``block`` images."""
        count, images = len(images), filled(images, self.block)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BlankMapWarning)  # the atlas tells by nu
            maps = self.cam.explain(images, targets)
        self.linear, self.neutral = maps.linear, maps.neutral
        return maps[:count]

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the columns of a batch: arrays of n rows, and lists."""
        return self.columns(batch, self.explain(batch.images, self.targets))

    def columns(self, batch: Batch, maps: SignedMaps) -> dict[str, Any]:
        """Return the columns of a batch by its maps."""
        output: HeadOutput = maps.output
        components = self.components
        columns: dict[str, Any] = {
            "row": np.array(batch.rows, np.int64),
            "scores": _array(output.as_subclass(Tensor), np.float64),
            "components": _array(output.components, np.float64),
            **_kept(maps[:, :components]),
            "thumbnail": batch.thumbnails,
            "label": batch.labels,
        }
        if output.decision is not None:
            columns["prediction"] = output.labels().tolist()
        if len(self.targets) > components:
            columns |= {OF_TARGETS + name: array for name, array in _kept(maps[:, components:]).items()}
            columns[OF_TARGETS + "values"] = _array(maps.values[:, components:], np.float64)
        return columns


def filled(images: Tensor, block: int) -> Tensor:
    """Return a block of images, filled up with copies of all in turn: one that is unlike must not become most."""
    missing = max(0, block - len(images))
    return torch.cat([images, images[torch.arange(missing, device=images.device) % len(images)]]) if missing else images


def _kept(maps: SignedMaps) -> dict[str, np.ndarray]:
    """Return maps in half precision, divided by nu or by a scale of their own, with the columns beside them."""
    columns, scale = {}, maps.nu
    if maps.opposite is not None:  # whose values may be larger than those that count
        scale = torch.maximum(*(tensor.flatten(2).abs().amax(-1) for tensor in (maps.maps, maps.opposite)))
        columns["scale"] = _array(scale, np.float32)
    divisor = scale.reshape(*scale.shape, *[1] * (maps.maps.dim() - 2))
    for name, numbers in (("maps", maps.maps), ("opposite", maps.opposite)):
        if numbers is not None:
            columns[name] = _array(torch.where(divisor > 0, numbers / divisor, 0.0), np.float16)
    columns["nu"] = _array(maps.nu, np.float32)
    columns["log_scale"] = _array(maps.log_scale, np.float64)
    for name in ("baseline_values", "remainder"):
        numbers = getattr(maps, name)
        if numbers is not None:
            columns[name] = _array(numbers, np.float64)
    return columns


def _array(tensor: Any, dtype: Any) -> np.ndarray:
    array = tensor.detach().cpu().numpy().astype(dtype)
    if not np.isfinite(array).all():
        raise ValueError(
            "the maps are not finite: the network returns NaN or infinite values, or values too large for float32"
        )
    return array
