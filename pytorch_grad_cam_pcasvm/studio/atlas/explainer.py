"""The explainer: from a batch of images to the columns of an atlas, of images or patches. The same for every engine."""

import inspect
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.anomalies import measure_anomaly, tells_anomalies
from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, HeadRun
from pytorch_grad_cam_pcasvm.runtime.errors import BlankMapWarning
from pytorch_grad_cam_pcasvm.studio.atlas.columns import ERROR, SURE
from pytorch_grad_cam_pcasvm.studio.data.images import Batch, as_webp
from pytorch_grad_cam_pcasvm.targets import PCATarget, SVMTarget, Target
from pytorch_grad_cam_pcasvm.targets.places import ImagePositions

# What is kept of the maps of targets other than components has this in front of its name.
OF_TARGETS = "target_"
_BYTES = 1 << 27  # of all components' gradients that are held at once: of layers in front of a long path they are large


class ImageExplainer:
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
        # Errors are those of the predicted class: others are not known to a page, which adds up component maps.
        self.tells_errors = method.has_errors and not net.is_dense and net.head.resamples is not None
        self.tells_errors = self.tells_errors and net.head.decision_position is not None
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
            self._cam.has_errors = self.tells_errors
            self._cam.first_with_errors = -1  # the predicted class is asked last
        return self._cam

    def explain(self, images: Tensor, targets: Sequence[Any]) -> SignedMaps:
        """Return the maps of targets of at most ``block`` images."""
        count, images = len(images), fill_block(images, self.block)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BlankMapWarning)  # the atlas tells by nu
            maps = self.cam.explain(images, targets)
        self.linear, self.neutral = maps.linear, maps.neutral
        return maps[:count]

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the columns of a batch: arrays of n rows, and lists."""
        asked = [*self.targets, SVMTarget()] if self.tells_errors else self.targets
        maps = self.explain(batch.images, asked)
        columns = self.columns(batch, maps[:, : len(self.targets)])
        if maps.values_error is not None:
            columns[SURE] = _array(maps.sure()[:, -1], np.uint8)
            columns[ERROR] = _array(maps.values_error[:, -1], np.float64)
        return columns

    def columns(self, batch: Batch, maps: SignedMaps) -> dict[str, Any]:
        """Return the columns of a batch by its maps."""
        output: HeadOutput = maps.output
        components = self.components
        columns: dict[str, Any] = {
            "row": np.array(batch.rows, np.int64),
            "scores": _array(output.as_subclass(Tensor), np.float64),
            "components": _array(output.components, np.float64),
            **_store_maps(maps[:, :components]),
            "thumbnail": batch.thumbnails,
            "label": batch.labels,
        }
        if output.decision is not None:
            columns["prediction"] = output.labels().tolist()
        if len(self.targets) > components:
            columns |= {OF_TARGETS + name: array for name, array in _store_maps(maps[:, components:]).items()}
            columns[OF_TARGETS + "values"] = _array(maps.values[:, components:], np.float64)
        return columns


def fill_block(images: Tensor, block: int) -> Tensor:
    """Return a block of images, filled up with copies of all in turn: one that is unlike must not become most."""
    missing = max(0, block - len(images))
    return torch.cat([images, images[torch.arange(missing, device=images.device) % len(images)]]) if missing else images


def _store_maps(maps: SignedMaps) -> dict[str, np.ndarray]:
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


_LEAST = 6  # pixels of an outline


class PatchExplainer(ImageExplainer):
    """Explains some patches of each image, in one pass: every component there, and further targets.

    Args:
        patches: K, the number of patches of each image, see :func:`chosen_patches`.
        *arguments: as for :class:`ImageExplainer`.
    """

    def __init__(self, patches: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.patches = patches

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return the columns of a batch: arrays of n K rows, the patches of an image behind each other, and lists."""
        with evaluation_mode(self.net), torch.no_grad():
            output: HeadOutput = self.net(fill_block(batch.images, self.block))
        assert output.grid is not None
        places = chosen_patches(output, batch.rows, self.patches)
        corners = np.stack(np.unravel_index(places.numpy(), output.grid.shape), -1)
        of_block = corners[np.arange(self.block) % len(places)]  # as it is filled up
        at = [ImagePositions(tuple(map(tuple, of_block[:, k].tolist()))) for k in range(of_block.shape[1])]
        maps = self.explain(batch.images, [target.at_place(place) for place in at for target in self.targets])
        images = np.repeat(np.arange(len(batch.rows)), places.shape[1])
        rows = Batch(
            [batch.rows[image] for image in images],
            batch.images,
            [batch.labels[image] for image in images],
            [
                _outlined(batch.thumbnails[image], corner, output.grid.shape)
                for image, corner in zip(images, corners.reshape(len(images), -1), strict=True)
            ],
        )
        return self.columns(rows, self._split_patches(maps, places)) | {"place": corners.reshape(len(images), -1)}

    def _split_patches(self, maps: SignedMaps, places: Tensor) -> SignedMaps:
        """Return the maps of n K rows from maps of targets at K patches of n images."""
        shape = (places.shape[1], len(self.targets))
        tensors = {name: tensor.unflatten(1, shape).flatten(0, 1) for name, tensor in maps.columns.items()}
        trace, count = maps.output.head_trace, maps.output.grid.count
        index = (places + count * torch.arange(len(places)).unsqueeze(1)).flatten().to(trace.values[0].device)
        at_patches = HeadTrace([value[index] for value in trace.values], [], trace.eps)
        return replace(maps, **tensors, targets=self.targets, output=HeadOutput.of(maps.output.head, at_patches))


def chosen_patches(output: HeadOutput, rows: Sequence[int], count: int) -> Tensor:
    """Return which patches of each image are kept: n images in their order, the same for every run.

    In turn, each predicted class of an image gives its patch of the largest margin, and then others at random; heads
    that tell anomalies give the least normal patch, and then others at random.

    Args:
        output: the output for at least n images, dense.
        rows: the numbers of the n images.
        count: K; all of them if there are fewer.

    Returns:
        Positions in reading order, shape (n, K), on the CPU.
    """
    head, trace = output.head, output.head_trace
    total = len(trace.values[0]) // output.count
    values, classes = np.zeros(len(trace.values[0])), np.zeros(len(trace.values[0]), int)
    if tells_anomalies(head):
        values = measure_anomaly(head, trace).cpu().numpy()
    elif head.decision_position is not None:
        values = SVMTarget().value(HeadRun(head, trace)).cpu().numpy()
        if head.classes_ is not None:
            classes = output.predicted().cpu().numpy()
    chosen = []
    for image, row in enumerate(rows):
        part = slice(image * total, (image + 1) * total)
        order = np.random.default_rng(row).permutation(total)
        queues = []
        for number in np.unique(classes[part]):
            of_class = order[classes[part][order] == number]
            strongest = of_class[values[part][of_class].argmax()]
            queues.append([strongest, *of_class[of_class != strongest]])
        queues.sort(key=lambda queue, of_image=values[part]: -of_image[queue[0]])  # type: ignore[misc]
        turns = sorted((turn, number) for number, queue in enumerate(queues) for turn in range(len(queue)))
        chosen.append(sorted(int(queues[number][turn]) for turn, number in turns[:count]))
    return torch.tensor(chosen)


def _outlined(thumbnail: bytes, corner: np.ndarray, shape: tuple[int, ...]) -> bytes:
    """Return a small picture, a WebP file, with the outline of a patch in it; pictures of two dimensions alone."""
    if not thumbnail or len(shape) != 2:
        return thumbnail
    picture = Image.open(io.BytesIO(thumbnail)).convert("RGB")
    size = np.array([picture.width / shape[1], picture.height / shape[0]])
    middle, half = (corner[::-1] + 0.5) * size, np.maximum(size, _LEAST) / 2
    draw = ImageDraw.Draw(picture)
    for margin, colour in ((1, "black"), (0, "yellow")):
        low, high = np.round(middle - half - margin), np.round(middle + half + margin - 1)
        draw.rectangle([*low.tolist(), *high.tolist()], outline=colour)
    return as_webp(picture)
