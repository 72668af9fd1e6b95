"""The subject of a measurement: a network, images, one target for each, and the methods that explain it."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils.data import TensorDataset
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.cam import ClosedFormCAM
from pytorch_grad_cam_pcasvm.errors import BlankMapWarning
from pytorch_grad_cam_pcasvm.evaluation.result import Pictures, Result, Row
from pytorch_grad_cam_pcasvm.head.stages import Projection
from pytorch_grad_cam_pcasvm.images import Images
from pytorch_grad_cam_pcasvm.maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods import ClosedFormGradCAM, ContributionCAM
from pytorch_grad_cam_pcasvm.modules import device_of, evaluating
from pytorch_grad_cam_pcasvm.net import HeadOutput, PCASVMNet
from pytorch_grad_cam_pcasvm.targets import ProbabilityTarget, QuadraticTarget, SVMTarget, Target

Method = type[ClosedFormCAM] | tuple[type[ClosedFormCAM], Mapping[str, Any]]
Methods = Sequence[Method] | Mapping[str, Method]
DEFAULT: Methods = (ClosedFormGradCAM, ContributionCAM)


class Subject:
    """What is measured: checked, and read a batch at a time.

    Args:
        net: the network.
        data: tensors (N, C, H, W), ``(images, labels)``, or a data set as for :func:`atlas.build`.
        target_layers: one layer.
        methods: classes, or ``(class, options)``; or a dict of these by name.
        target: what to explain in every image; None: the class predicted for the whole image.
        images: how many, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of everything random.
        progress: show progress bars.
        transform: as for :func:`atlas.build`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: too few images, an unknown method, or a head that has nothing to explain.
    """

    def __init__(
        self,
        net: PCASVMNet,
        data: Any,
        target_layers: Sequence[nn.Module | str],
        methods: Methods = DEFAULT,
        target: Target | None = None,
        *,
        images: int | None = 200,
        batch_size: int = 16,
        seed: int = 0,
        progress: bool = True,
        transform: Callable[[Any], Tensor] | None = None,
    ) -> None:
        if not isinstance(net, PCASVMNet):
            raise TypeError(f"the network must be a PCASVMNet, got {type(net).__name__}: use PCASVMNet(backbone, head)")
        if not isinstance(target_layers, list | tuple) or len(target_layers) != 1:
            raise ValueError(f"target_layers must be a list of one layer, got {target_layers!r:.80}")
        for name, number in (("images", images), ("batch_size", batch_size)):
            if not (number is None and name == "images") and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        if target is None and net.head.decision_position is None:
            raise ValueError("the head has no SVM, so there is no decision to explain: pass target=PCATarget(0)")
        self.net, self.layer = net, target_layers[0]
        self.methods = named(methods)
        self.target: Any = SVMTarget() if target is None else target
        self.batch_size, self.seed, self.progress = batch_size, seed, progress
        self.data = Images(_data_set(data), transform, thumbnails=False)
        self.rows = np.random.default_rng(seed).permutation(len(self.data))[:images]
        if len(self.rows) < 3:
            raise ValueError(f"{len(self.rows)} images are too few to measure anything: give at least 3, ideally 100")
        self._cams: dict[tuple[str, PCASVMNet], ClosedFormCAM] = {}
        self.worst = {method: Worst() for method in self.methods}
        self._channels_last = True
        self._seen: dict[str, list[bool]] = {method: [] for method in self.methods}

    def batches(self, what: str) -> Iterator[tuple[Tensor, list[Any], list[int]]]:
        """Yield images (N, ...), their labels and rows, at least two at a time, so that each has another one."""
        count = max(2, min(self.batch_size, len(self.rows) // 4))  # so that the progress of few images is seen, too
        bar = tqdm(total=len(self.rows), desc=what, unit="image", disable=not self.progress)
        for rows in np.array_split(self.rows, max(1, len(self.rows) // count)):
            batch = self.data.read(rows.tolist())
            if batch.bad:
                row, why = next(iter(batch.bad.items()))
                raise RuntimeError(f"image {row} ({self.data.id(row)}) cannot be read: {why}")
            yield batch.images.to(device_of(self.net)), batch.labels, batch.rows
            bar.update(len(rows))
        bar.close()

    def targets(self, x: Tensor) -> list[Any]:
        """Return the target of each image; by default the predicted class, by its name."""
        target, classes = self.target, self.net.head.classes_
        if not isinstance(target, SVMTarget | ProbabilityTarget) or target.category is not None or classes is None:
            return [target] * len(x)
        with evaluating(self.net), torch.no_grad():
            output = self.net(x)
        labels = output.labels().tolist()
        if isinstance(target, ProbabilityTarget) or target.versus is None:
            return [replace(target, category=label) for label in labels]
        against = [target.versus] * len(labels)
        if target.versus == "runner-up" and "runner-up" not in classes.tolist():
            margins = output.margins.detach().clone()
            margins[torch.arange(len(labels)), [self.net.head.class_index(label) for label in labels]] = -torch.inf
            against = classes[margins.argmax(1).cpu().numpy()].tolist()
        elif target.versus in labels:
            raise ValueError(f"some images are predicted as {target.versus!r} themselves: name the category as well")
        return [replace(target, category=a, versus=b) for a, b in zip(labels, against, strict=True)]

    def values(self, x: Tensor, targets: Sequence[Any]) -> np.ndarray:
        """Return the value of each image's own target, shape (N,)."""
        parts = []
        with evaluating(self.net), torch.no_grad():
            for start in range(0, len(x), self.batch_size):
                output = self._output(x[start : start + self.batch_size])
                parts += [float(target(row)) for target, row in zip(targets[start:], output, strict=False)]
        return np.array(parts)

    def _output(self, x: Tensor) -> HeadOutput:
        """Return the network's output; its convolutions are faster on a CPU if channels come last in memory."""
        if self._channels_last and x.dim() == 4 and x.device.type == "cpu":
            try:
                return self.net(x.contiguous(memory_format=torch.channels_last))
            except RuntimeError:  # such as a view of activations that then are not contiguous
                self._channels_last = False
        return self.net(x)

    def explained(
        self, method: str, x: Tensor, targets: Sequence[Any], net: PCASVMNet | None = None
    ) -> list[SignedMaps]:
        """Return each image's map of its own target, optionally of another network, such as one with a random head."""
        cam = self.cam(method, net or self.net)
        found: dict[int, SignedMaps] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BlankMapWarning)  # blank maps are counted
            for target in dict.fromkeys(targets):
                places = [n for n, other in enumerate(targets) if other == target]
                maps = cam.explain(x[places], [target])
                found |= {n: maps[place] for place, n in enumerate(places)}
        return [found[n] for n in range(len(x))]

    def seen(self, method: str, maps: Sequence[SignedMaps]) -> np.ndarray:
        """Return which maps of a method are not zero everywhere, shape (N,), and count the others as blank."""
        found = [bool(each.maps.any()) for each in maps]
        self._seen[method] += found
        return np.array(found)

    def result(
        self, check: str, question: str, rows: list[Row], curves: dict[str, Any] | None = None, **settings: Any
    ) -> Result:
        """Return what a check found, with the share of blank maps and the worst images of each method."""
        blank = {method: 1 - sum(found) / len(found) if found else 0.0 for method, found in self._seen.items()}
        common = {"images": len(self.rows), "seed": self.seed, "target": repr(self.target)}
        worst = {method: found for method, found in self.worst.items() if found.rows}
        return Result(
            check, question, rows, blank, common | settings, curves,
            {method: found.rows for method, found in worst.items()},
            {
                method: Pictures(
                    [str(self.data.id(row)) for row in found.rows],
                    torch.stack([self.data.picture(image).clamp(0, 1) for image in found.images]),
                    found.maps(self.target),
                )
                for method, found in worst.items()
            },
        )  # fmt: skip

    def blind(self, x: Tensor) -> Tensor:
        """Return the sums of the activations of the target layer, (N, h, w), which know nothing about the target."""
        cam = self.cam(next(iter(self.methods)), self.net)
        with cam._running(x) as modules:
            return cam._run(x, modules).activations(0).sum(1)

    def randomised(self) -> PCASVMNet | None:
        """Return the same backbone with a head whose components are rotated at random and whose machine is unchanged.

        The machine then looks at other directions than it was fitted on, as if it had learned nothing. None if that
        would change nothing, or there is no linear reduction.
        """
        head = copy.deepcopy(self.net.head)
        stage = head.stages[head.component_position - 1] if head.component_position else None
        if not isinstance(stage, Projection) or isinstance(self.target, QuadraticTarget):
            return None
        count = len(stage.components)
        if count < 2:
            return None
        random = torch.randn(count, count, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        rotation = torch.linalg.qr(random)[0].to(stage.components)
        divisor = stage.divisor.unsqueeze(1)  # of a PCA that whitens: the whitened components are rotated
        stage.components.copy_(rotation @ (stage.components / divisor) * divisor)
        return with_head(self.net, head)

    def cam(self, method: str, net: PCASVMNet | None = None) -> ClosedFormCAM:
        """Return a method's cam for the network, or for another; each is created once."""
        net = net or self.net
        if (method, net) not in self._cams:
            kind, options = self.methods[method]
            self._cams[method, net] = kind(net, [self.layer], **options)
        return self._cams[method, net]


def with_head(net: PCASVMNet, head: Any) -> PCASVMNet:
    """Return a network with the same backbone, whose flags stay as they are, and another head."""
    found = PCASVMNet(net.backbone, head, net.layer, pool=net.pool)
    found.training = net.training
    return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Give torch's generators a seed, and afterwards the user's state back, on every device."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


class Worst:
    """The ten images that a method did worst on, with their maps."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, int, Tensor, SignedMaps]] = []

    def add(self, badness: np.ndarray, rows: Sequence[int], x: Tensor, maps: Sequence[SignedMaps]) -> None:
        """Record images (N, ...), how bad they are (N,; NaN: unknown), and the map of each."""
        found = zip(badness.tolist(), rows, x.cpu(), (each.cpu() for each in maps), strict=True)
        self._kept += [each for each in found if not np.isnan(each[0])]
        self._kept = sorted(self._kept, key=lambda each: -each[0])[:10]

    @property
    def rows(self) -> list[int]:
        """Their numbers in the data set, the worst first."""
        return [row for _, row, _, _ in self._kept]

    @property
    def images(self) -> Tensor:
        """The images, (n, ...)."""
        return torch.stack([image for _, _, image, _ in self._kept])

    def maps(self, target: Any) -> SignedMaps:
        """Return their maps together, under one target, although each explains its own image's class."""
        return SignedMaps.cat([replace(maps, targets=[target]) for _, _, _, maps in self._kept])


def named(methods: Methods) -> dict[str, tuple[type[ClosedFormCAM], dict[str, Any]]]:
    """Return class and options of every method, by name."""
    if not isinstance(methods, Mapping | list | tuple) or not methods:
        raise TypeError(f"methods must be a list of classes, such as [ContributionCAM], or a dict, got {methods!r:.80}")
    pairs: Any = methods.items() if isinstance(methods, Mapping) else ((None, method) for method in methods)
    found: dict[str, tuple[type[ClosedFormCAM], dict[str, Any]]] = {}
    for name, method in pairs:
        kind, options = method if isinstance(method, tuple) else (method, {})
        if not (isinstance(kind, type) and issubclass(kind, ClosedFormCAM)):
            raise TypeError(f"a method must be a class of the package, such as ContributionCAM, got {kind!r:.80}")
        shown = ", ".join(f"{key}={value}" for key, value in options.items() if isinstance(value, str | int | float))
        title = name or (f"{kind.__name__}({shown})" if shown else kind.__name__)
        if title in found:
            raise ValueError(f"two methods are named {title!r}: name them, as in methods={{'one': ..., 'other': ...}}")
        found[title] = kind, dict(options)
    return found


def signed(maps: Sequence[SignedMaps]) -> Tensor:
    """Return maps of one target each as (N, h, w).

    They are the method's own: where the map of the negated target is another one (``SignedMaps.opposite``), what raises
    the target, as the method's paper defines it, and nothing subtracted from it.
    """
    return torch.cat([each.maps[:, 0] for each in maps])


def upsampled(maps: Tensor, size: Sequence[int]) -> np.ndarray:
    """Return maps (N, h, w) at the size of the images."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    whole = F.interpolate(maps.unsqueeze(1).double(), tuple(size), mode=mode, align_corners=False)
    return whole[:, 0].cpu().numpy()


def _data_set(data: Any) -> Any:
    """Return tensors (images), or (images, labels), as a data set; anything else as it is."""
    if isinstance(data, Tensor):
        return TensorDataset(data)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor) and data[0].dim() > 3:
        if len(data[0]) != len(data[1]):
            raise ValueError(f"{len(data[0])} images and {len(data[1])} labels: give one label for every image")
        return list(zip(*data, strict=True))
    return data
