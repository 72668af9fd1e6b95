"""The subject of a measurement: a network, images, one target for each, and the methods that explain it."""

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from hashlib import blake2b
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pytorch_grad_cam_pcasvm.maps.results import check_finite
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods import ClosedFormGradCAM, ContributionCAM
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.errors import (
    BaselineWarning,
    BlankMapWarning,
    NoBoundaryError,
    OutsideTrainingWarning,
)
from pytorch_grad_cam_pcasvm.runtime.log import progress_bar
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_leaves
from pytorch_grad_cam_pcasvm.studio.data.images import Images
from pytorch_grad_cam_pcasvm.studio.evaluation.result import LEVEL, Pictures, Result, Row
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import CheckStep, list_looks
from pytorch_grad_cam_pcasvm.studio.model.model import refuse_dense
from pytorch_grad_cam_pcasvm.targets import LogRatioTarget, SVMTarget, Target, default_decision, fix_target

Method = type[ClosedFormCAM] | tuple[type[ClosedFormCAM], Mapping[str, Any]]
Methods = Sequence[Method] | Mapping[str, Method]


@dataclass(eq=False, repr=False)
class Subject:
    """What is measured: checked, and read a batch at a time. Its fields are the arguments of a :class:`Study`."""

    net: PCASVMNet
    data: Any
    target_layers: Sequence[nn.Module | str]
    methods: Methods = (ClosedFormGradCAM, ContributionCAM)
    target: Target | None = None
    _: KW_ONLY
    images: int | None = 200
    batch_size: int = 16
    seed: int = 0
    progress: bool = True
    transform: Callable[[Any], Tensor] | None = None
    normal: Any = None
    stop_early: bool = False
    minutes: float | None = None

    def __post_init__(self) -> None:
        self.layer = find_target_layer(self.net, self.target_layers)
        numbers = (("images", self.images, 1), ("batch_size", self.batch_size, 1), ("seed", self.seed, 0))
        for name, number, least in numbers:
            if not (number is None and name == "images") and (not isinstance(number, Integral) or number < least):
                raise ValueError(f"{name} must be an integer from {least}, got {number!r}")
        if self.minutes is not None and not (isinstance(self.minutes, Real) and 0 <= self.minutes < float("inf")):
            raise ValueError(f"minutes must be a number from 0, or None for as many as it takes, got {self.minutes!r}")
        if not (self.target is None or callable(self.target)):
            raise TypeError(f"target must be one target, such as PCATarget(0), got {self.target!r:.80}")
        self.normal = self.net.head.normal if self.normal is None else self.normal
        self.target = default_decision(self.net.head, self.normal) if self.target is None else self.target
        self.named = name_methods(self.methods)
        self.source = Images(_data_set(self.data), self.transform, thumbnails=0, exif=self.net.head.exif)
        self.rows = np.random.default_rng(self.seed).permutation(len(self.source))[: self.images]
        if len(self.rows) < 3:
            raise ValueError(f"{len(self.rows)} images are too few to measure anything: give at least 3, ideally 100")
        self.made, self.known, self.title = Made(), Known(), ""  # in front of what progress bars say
        self.note = ""  # of the images, for a report
        self._warnings = WarnOnce()
        self._channels_last = True
        self._forget()

    def _forget(self) -> None:
        self.missing: dict[str, str] = {}  # what cannot be measured, and why
        self.level = LEVEL
        self.nothing = 0  # images without a mask that were measured
        self.looks, self.done, self.total, self.unit = list[int](), 0, 0, "image"  # of the check that goes on
        self._cams: dict[tuple[str, PCASVMNet], ClosedFormCAM] = {}
        self._seen: dict[str, list[bool]] = {method: [] for method in self.named}
        self._worst: dict[str, list[tuple[float, int, Tensor, SignedMaps]]] = {method: [] for method in self.named}

    def fresh(self, target: Target | None = None) -> "Subject":
        """Return a copy without results, optionally for another target; it shares the maps that are made.

        Raises:
            ValueError: the head has nothing to explain.
        """
        refuse_dense(self.net, "this measure")
        copied = copy.copy(self)
        copied.target = self.target if target is None else target
        if isinstance(copied.target, SVMTarget | LogRatioTarget) and self.net.head.decision_position is None:
            raise ValueError("the head has no SVM, so there is no decision to explain: pass target=PCATarget(0)")
        copied._forget()
        return copied

    def batches(self, description: str, looks: bool | None = None) -> Iterator[tuple[Tensor, list[Any], list[int]]]:
        """Yield images (N, ...), their labels and rows, at least two at a time."""
        for rows in self.parts(self.rows.tolist(), description, "image", looks):
            yield *self.read(rows), rows

    def parts(self, items: list[Any], description: str, unit: str, looks: bool | None = None) -> Iterator[list[Any]]:
        """Yield items, such as rows, a batch at a time, with a progress bar; at least two at a time if possible.

        Args:
            items: what is measured.
            description: in front of the bar.
            unit: of the items.
            looks: whether a study that may end early looks at what was found so far, where a batch then ends; None:
                these are not the items of a check, of which ``done`` says how many there were, this batch included.
        """
        stops = list_looks(len(items)) if looks and (self.stop_early or self.minutes is not None) else []
        if looks is not None:
            self.looks, self.done, self.total, self.unit = stops, 0, len(items), unit
        for first, last in itertools.pairwise([0, *stops, len(items)]):
            number = last - first
            count = max(2, min(self.batch_size, len(items) // 4))  # so that the progress of few is seen, too
            bar = {"total": len(items), "initial": first, "desc": self.title + description, "unit": unit}
            bar |= {"position": 0, "leave": False}  # those of checks that take turns are one line
            with progress_bar(self.progress, **bar) as shown:  # a bar for each turn of a check
                for start, end in itertools.pairwise(np.linspace(first, last, -(-number // count) + 1).round()):
                    if looks is not None:
                        self.done = int(end)
                    yield items[int(start) : int(end)]
                    shown.update(int(end - start))

    def step(self, result: Callable[[], Result], decides: Callable[[Row], bool]) -> CheckStep:
        """Return where a check stands after a batch of its items.

        Args:
            result: returns what was found so far.
            decides: whether a row decides that the check may stop early.
        """
        return CheckStep(self, result, decides)

    def read(self, rows: list[int]) -> tuple[Tensor, list[Any]]:
        """Return images (N, ...) on the network's device, and their labels."""
        batch = self.source.read(rows)
        if batch.bad:
            row, why = next(iter(batch.bad.items()))
            raise RuntimeError(
                f"image {row} ({self.source.id(row)}) cannot be read: {why}. Fix it, or leave it out of the data set"
            )
        return batch.images.to(find_device(self.net)), batch.labels

    def targets(self, x: Tensor) -> list[Any]:
        """Return the target of each image; by default the predicted class, by its name."""

        def fixed() -> list[Any]:
            with evaluation_mode(self.net), torch.no_grad():
                output = self.net(x)
            self._warnings.of_images(output)
            try:
                return [fix_target(self.target, output.rows([n])) for n in range(len(x))]
            except ValueError as error:  # the class to compare with is the predicted one of some image
                raise ValueError(f"{error}: name the category as well") from error

        return self.known.get([("target", self.target, digest) for digest in digest_images(x)], fixed)

    def predicted(self, x: Tensor) -> list[Any]:
        """Return the predicted class of each image."""
        return self.known.get([("class", digest) for digest in digest_images(x)], lambda: self.net.predict(x).tolist())

    @property
    def without_normal(self) -> str:
        """What is left out where a class is an absence, to be said behind a question."""
        return "" if self.normal is None else f"; decisions for {self.normal!r} are left out"

    def for_normal(self, x: Tensor) -> np.ndarray:
        """Return which images are taken for the normal class, (N,): no map shows an absence."""
        if self.normal is None:
            return np.zeros(len(x), bool)
        return np.asarray([label == self.normal for label in self.predicted(x)])

    def values(self, x: Tensor, targets: Sequence[Any]) -> np.ndarray:
        """Return the value of each image's own target, shape (N,)."""
        parts = []
        with evaluation_mode(self.net), torch.no_grad():
            for start in range(0, len(x), self.batch_size):
                output = self._compute_output(x[start : start + self.batch_size])
                parts += [float(target(row)) for target, row in zip(targets[start:], output, strict=False)]
        return np.array(parts)

    def _compute_output(self, x: Tensor) -> HeadOutput:
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
        """Return each image's map of its own target, optionally of another network, such as one with a random head.

        If a randomised network has no boundary within reach, its maps start at the mean.

        Raises:
            NoBoundaryError: the network itself has no boundary within reach.
        """
        cam = self.cam(method, net or self.net)
        try:
            maps = explained(cam, x, targets)
        except NoBoundaryError:
            if net in (None, self.net):
                raise
            cam.baseline = "mean"
            try:
                maps = explained(cam, x, targets)
            finally:
                cam.baseline = "neutral"
        check_finite(signed(maps))  # explain does not wait for a device to see it
        return maps

    def add(self, method: str, badness: np.ndarray, rows: Sequence[int], x: Tensor, maps: Sequence[SignedMaps]) -> None:
        """Count blank maps, and keep the ten worst images of a method; badness (N,) is NaN where it is not known."""
        self._seen[method] += [bool(image_map.maps.any()) for image_map in maps]
        candidates = zip(badness.tolist(), rows, x.cpu(), maps, strict=True)
        ranked = [*self._worst[method], *(candidate for candidate in candidates if not np.isnan(candidate[0]))]
        self._worst[method] = sorted(ranked, key=lambda candidate: -candidate[0])[:10]

    def result(
        self, check: str, question: str, rows: list[Row], curves: dict[str, Any] | None = None, **settings: Any
    ) -> Result:
        """Return the result of a check, with the share of blank maps and the worst images of each method."""
        blank = {
            method: 1 - sum(nonblank) / len(nonblank) if nonblank else 0.0 for method, nonblank in self._seen.items()
        }
        common: dict[str, Any] = {"images": len(self.rows), "seed": self.seed, "target": repr(self.target)}
        if self.missing:
            common["not measured"] = "; ".join(f"{part}: {why}" for part, why in self.missing.items())
        common["measured"] = f"{self.done} of {self.total} {self.unit}s"
        at_level = [replace(row, level=self.level) for row in rows]
        result = Result(check, question, at_level, blank, common | settings, curves)
        for method, worst in self._worst.items():
            if worst:
                _, result.worst[method], images, maps = map(list, zip(*worst, strict=True))
                result.names[method] = [str(self.source.id(row)) for row in result.worst[method]]
                result.pictures[method] = Pictures(
                    torch.stack([self.source.picture(image).clamp(0, 1) for image in images]),
                    SignedMaps.cat([replace(image_map.cpu(), targets=[self.target]) for image_map in maps]),
                )
        return result

    def blind(self, x: Tensor, net: PCASVMNet | None = None) -> Tensor:
        """Return the sums of the activations of the target layer, (N, h, w), which ignore the target."""
        cam = self.cam(next(iter(self.named)), net)
        with cam._running(x) as modules:
            activations = cam._run_network(x, modules).activations(0)
        return activations.sum(1, dtype=torch.float64 if activations.dtype == torch.float64 else torch.float32)

    def cam(self, method: str, net: PCASVMNet | None = None) -> ClosedFormCAM:
        """Return a method's cam for the network, or for another; each is created once."""
        net = net or self.net
        if (method, net) not in self._cams:
            cam_class, options = self.named[method]
            layers = options.get("target_layers", [self.layer])
            method_options = {name: option for name, option in options.items() if name != "target_layers"}
            self._cams[method, net] = cam_class(net, layers, **method_options)
            self._cams[method, net].has_errors = False  # which nothing here measures
        return self._cams[method, net]


def with_head(net: PCASVMNet, head: Any) -> PCASVMNet:
    """Return a network with the same backbone, whose flags stay as they are, and another head."""
    other = PCASVMNet(net.backbone, head, net.layer, pool=net.pool)
    other.training = net.training
    return other


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators on every device, and restore the user's state afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def generator(seed: int, purpose: int, row: int) -> np.random.Generator:
    """Return the generator of one image, so that its numbers depend on no other image, batch or method."""
    return np.random.default_rng([seed, purpose, row])


class Made:
    """Maps that are made, as many as fit into ``room`` bytes; the first stay, as each measure starts with them."""

    def __init__(self, room: int = 2**28) -> None:
        self._room, self._maps = room, dict[Any, list[SignedMaps]]()

    def get(self, key: Any, make: Callable[[], list[SignedMaps]]) -> list[SignedMaps]:
        """Return the maps of a key, which are made if there are none."""
        if key in self._maps:
            return self._maps[key]
        maps = make()
        outputs = [image_map.output.head_trace.values for image_map in maps if image_map.output is not None]
        self._room -= sum(leaf.nbytes for leaf in tree_leaves([outputs, [image_map.columns for image_map in maps]]))
        if self._room >= 0:
            self._maps[key] = maps
        return maps


class Known:
    """What checks have asked about single images, by keys that begin with a question and end with an image's digest."""

    def __init__(self) -> None:
        self._answers: dict[Any, Any] = {}

    def get(self, keys: Sequence[Any], ask: Callable[[], Sequence[Any]]) -> list[Any]:
        """Return the answer of each key; all of them are asked if one is not known."""
        if not all(key in self._answers for key in keys):
            self._answers |= dict(zip(keys, ask(), strict=True))
        return [self._answers[key] for key in keys]


def digest_images(x: Tensor) -> list[bytes]:
    """Return a digest of each image."""
    return [blake2b(image).digest() for image in x.cpu().flatten(1).contiguous().view(torch.uint8).numpy()]


def find_target_layer(net: PCASVMNet, target_layers: Sequence[nn.Module | str]) -> nn.Module | str:
    """Return the one target layer, by its name if it has one."""
    if not isinstance(net, PCASVMNet):
        raise TypeError(f"the network must be a PCASVMNet, got {type(net).__name__}: use PCASVMNet(backbone, head)")
    if not isinstance(target_layers, list | tuple) or len(target_layers) != 1:
        raise ValueError(f"target_layers must be a list of one layer, got {target_layers!r:.80}")
    return find_layer_name(net.feature_source()[0], target_layers[0]) or target_layers[0]


def name_methods(methods: Methods) -> dict[str, tuple[type[ClosedFormCAM], dict[str, Any]]]:
    """Return class and options of every method, by name."""
    if not isinstance(methods, Mapping | list | tuple) or not methods:
        raise TypeError(f"methods must be a list of classes, such as [ContributionCAM], or a dict, got {methods!r:.80}")
    pairs: Any = methods.items() if isinstance(methods, Mapping) else ((None, method) for method in methods)
    titled: dict[str, tuple[type[ClosedFormCAM], dict[str, Any]]] = {}
    for name, method in pairs:
        cam_class, options = method if isinstance(method, tuple) else (method, {})
        if not (isinstance(cam_class, type) and issubclass(cam_class, ClosedFormCAM)):
            raise TypeError(f"a method must be a class of the package, such as ContributionCAM, got {cam_class!r:.80}")
        shown = ", ".join(f"{key}={value}" for key, value in options.items() if isinstance(value, str | int | float))
        title = name or (f"{cam_class.__name__}({shown})" if shown else cam_class.__name__)
        if title in titled:
            raise ValueError(f"two methods are named {title!r}: name them, as in methods={{'one': ..., 'other': ...}}")
        titled[title] = cam_class, dict(options)
    return titled


def explained(cam: ClosedFormCAM, x: Tensor, targets: Sequence[Any]) -> list[SignedMaps]:
    """Return each image's map of its own target, without warnings: blank maps are counted, and controls are odd."""
    by_image: dict[int, SignedMaps] = {}
    with warnings.catch_warnings():
        for category in (BlankMapWarning, BaselineWarning, OutsideTrainingWarning):
            warnings.simplefilter("ignore", category)
        for target in dict.fromkeys(targets):
            places = [n for n, other in enumerate(targets) if other == target]
            maps = cam.explain(x[places], [target])
            by_image |= {n: maps[place] for place, n in enumerate(places)}
    return [by_image[n] for n in range(len(x))]


def signed(maps: Sequence[SignedMaps]) -> Tensor:
    """Return maps of one target each as (N, h, w).

    They are the method's own: where the map of the negated target is another one (``SignedMaps.opposite``), what raises
    the target, as the method's paper defines it, and nothing subtracted from it.
    """
    return torch.cat([image_map.maps[:, 0] for image_map in maps])


def heat(maps: Tensor | Sequence[SignedMaps], size: Sequence[int]) -> np.ndarray:
    """Return maps of one target each, or (N, h, w), at the size of the images, as float64."""
    small = (maps if isinstance(maps, Tensor) else signed(maps)).unsqueeze(1).double()
    # Rounding may leave these bounds, and would rank the pixels of a flat map.
    axes = tuple(range(1, small.dim()))
    bounds = small.amin(axes, keepdim=True), small.amax(axes, keepdim=True)
    return upsample_maps(small, size).clamp(*bounds)[:, 0].cpu().numpy()


def _data_set(data: Any) -> Any:
    """Return tensors or arrays (images), or (images, labels), as a data set; anything else as it is."""
    labels = None
    if isinstance(data, tuple | list) and len(data) == 2:  # two images would be too few
        data, labels = data
        if not isinstance(data, Tensor | np.ndarray):
            raise TypeError(
                f"(images, labels) must have a tensor of images, got {type(data).__name__}: torch.stack them, or give "
                "a data set of pairs"
            )
    if not isinstance(data, Tensor | np.ndarray):
        return data
    if data.ndim < 3:
        raise ValueError(f"images must have shape (N, C, H, W), got {tuple(data.shape)}")
    if labels is None:
        return TensorDataset(torch.as_tensor(data))
    if len(data) != len(labels):
        raise ValueError(f"{len(data)} images and {len(labels)} labels: give one label for every image")
    return list(zip(torch.as_tensor(data), labels, strict=True))
