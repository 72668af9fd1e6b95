"""How far images are from those that a head was fitted on, by what its stages hold of them."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.head.neighbours import Neighbours
from pytorch_grad_cam_pcasvm.head.quadratic import Quadratic
from pytorch_grad_cam_pcasvm.head.stages import KernelMap, Projection, Scale, Union
from pytorch_grad_cam_pcasvm.network.outputs import OfHead

# In any training set at most 1/25 of the standardised features are farther from 0 than 5 (Chebyshev). For new images,
# docs/reading.md has a table.
_FAR = 5.0
_MOST_FAR = 0.06
_FAR_ALTOGETHER = 4.0  # root mean square, in standard deviations: 1 in the training set
_ENOUGH = 8  # rows, of which a standard deviation is one: Student's t of 7 degrees of freedom is beyond 5 once in 600
_POINTS = 512  # of which as much is seen as of all
_SAME_NORM = 1e-4  # relative difference between norms that are the same: features have single precision
_OTHER_NORM = 1e-2
# Of support vectors, which need not be where most training images are, a factor that these do not differ by.
_OUT_OF_RANGE = 10.0
_NORMS = {"Euclidean length": 2.0, "sum of absolute values": 1.0, "largest absolute value": np.inf}


class Measure(NamedTuple):
    """How far N images are from the training images, (N,), by one measure; what is far; and how to say it.

    A share of many features is known well from one image; a distance, in standard deviations or the like, is not.
    """

    name: str
    distances: np.ndarray
    limit: float
    in_words: str
    is_share: bool = False

    def limit_of(self, count: int) -> float:
        """Return what is far for the middle one of so many images: one of them may be an odd one."""
        return self.limit if self.is_share else self.limit * (1 + 1 / count)


class Step(NamedTuple):
    """A stage, what it gets and gives for N images, and what it gets for features that are all zero."""

    stage: Any
    x: Tensor
    y: Tensor
    zeros: Tensor


def measures(output: OfHead) -> Iterator[Measure]:
    """Yield the distances of images from the training set: by scalers, and by the first other stage that knows any."""
    values: Sequence[Any] = output.head_trace.values
    if values[0] is None or values[0].dim() != 2:
        return
    zeros = torch.zeros_like(values[0][:1])
    for step in _steps(list(output.head.stages), values, zeros):
        measured = list(_measured(step, first=step.x is values[0]))
        # Standard deviations of few rows are off themselves.
        doubt = 1 + _ENOUGH / step.stage.facts.count
        yield from (m if m.is_share else m._replace(limit=doubt * m.limit) for m in measured)
        if measured and not isinstance(step.stage, Scale):
            return


def unlike(output: Any) -> list[bool]:
    """Return of each image whether it is unlike those that the head was fitted on, as far as that can be known.

    Of dense features nothing is said: positions unlike others are what is looked for.
    """
    known = measures(output) if isinstance(output, OfHead) and output.grid is None else ()
    far = [measure.distances > measure.limit_of(1) for measure in known]
    return np.any(far, 0).tolist() if far else [False] * len(output)


def _steps(stages: Sequence[Any], values: Sequence[Any], zeros: Tensor) -> Iterator[Step]:
    """Yield the stages one after another; of several side by side the first, which stands for the others."""
    for stage, (x, y) in zip(stages, pairwise(values), strict=True):
        if x is None or y is None:
            return
        yield Step(stage, x, y, zeros)
        if isinstance(stage, Union):
            inner, way = list(stage.members[0].stages), [x]
            for part in inner:
                way.append(part.evaluate(way[-1])[0])
            yield from _steps(inner, way, zeros)
        zeros = stage.evaluate(zeros)[0]


def _measured(step: Step, *, first: bool) -> Iterator[Measure]:
    stage = step.stage
    if stage.facts.count < _ENOUGH:
        return
    if isinstance(stage, Scale):
        yield from _of_scale(stage, _array(step.y), first=first)
    elif isinstance(stage, Projection):
        yield from _of_projection(stage, *map(_array, step[1:]))
    elif isinstance(stage, Quadratic) and stage.facts.spread:
        nearest = ((_array(step.x)[:, None] - _array(stage.centres)) ** 2).sum(-1).min(1)
        far = np.sqrt(nearest / stage.facts.spread)
        words = f"they lie {_DEVIATIONS} of all features from every class's mean"
        yield Measure("classes", far, _FAR_ALTOGETHER, words)
    elif isinstance(stage, KernelMap | Neighbours):
        yield from _of_points(_array(step.x), _few(stage.points), _array(step.zeros), first=first)
    elif isinstance(stage, KernelSVM):
        yield from _of_machine(stage, _array(step.x), _array(step.zeros), first=first)


_DEVIATIONS = "{:.3g} standard deviations"


def _of_scale(stage: Scale, y: np.ndarray, *, first: bool) -> Iterator[Measure]:
    """Yield how much of what a scaler gives is far from what it gave for the training images."""
    low, high = stage.facts.low, stage.facts.high
    if low is not None and high is not None:
        far = (abs(y - (low + high) / 2) > _FAR / 2 * (high - low)).mean(-1)
        words = "{:.0%} of their features lie more than twice the training images' range outside of it"
        yield Measure("range", far, _MOST_FAR, words, is_share=True)
    elif stage.input_deviations is not None:
        if first:
            far = (abs(y) > _FAR).mean(-1)
            words = f"{{:.0%}} of their features lie more than {_FAR:.0f} standard deviations from the mean"
            yield Measure("features", far, _MOST_FAR, words, is_share=True)
        else:
            far = np.sqrt((y**2).mean(-1))
            yield Measure("scaled", far, _FAR_ALTOGETHER, f"what the head's scaler gives lies {_DEVIATIONS} from 0")


def _of_projection(stage: Projection, x: np.ndarray, y: np.ndarray, zeros: np.ndarray) -> Iterator[Measure]:
    """Yield how far images are from the mean of the training images: within components, outside, and towards zero."""
    mean = _array(stage.mean)
    spread, count = stage.facts.spread, stage.facts.count
    if stage.variances is None:
        if spread:
            yield _altogether(x - mean, spread)
        return
    left = count - len(y[0]) - 2
    if left > 0:
        # Hotelling's T^2 of a new image: its mean, where the variances are those of few images.
        inflation = 1.0 if count == np.inf else math.sqrt((count**2 - 1) / (count * left))
        far = np.sqrt((y**2 / _array(stage.variances)).mean(-1))
        yield Measure(
            "components", far / inflation, _FAR_ALTOGETHER, f"their components lie {_DEVIATIONS} from the mean"
        )
    if not spread:
        return
    yield _altogether(x - mean, spread)
    within, axes = _array(stage.divisor**2 * stage.variances), _array(stage.components)
    outside = max(spread - within.sum(), 0.0)
    if left > 0 and len(axes) < axes.shape[1]:
        # Of what was left over of few images, components have taken their share; what never varied may vary now.
        share = outside * (1 if count == np.inf else ((count - 1) / (count - 1 - len(axes))) ** 2) + 0.01 * spread
        rest = ((x - mean) ** 2).sum(-1) - (((x - mean) @ axes.T) ** 2).sum(-1)
        far = np.sqrt(np.maximum(rest, 0.0) / share)
        yield Measure("outside", far, _FAR_ALTOGETHER, f"they lie {_DEVIATIONS} outside of the head's components")
    direction = zeros[0] - mean
    length = np.linalg.norm(direction)
    if length:
        direction = direction / length
        cosines = (axes @ direction) ** 2
        # No direction beside the components has more variance than the last of them, and few much more than others.
        others = max(min(count - 1, axes.shape[1]) - len(axes), 1)
        variance = (within * cosines).sum() + max(1 - cosines.sum(), 0.0) * min(within.min(), 4 * outside / others)
        yield _towards_zero((x - mean) @ direction, variance, spread)


def _altogether(x: np.ndarray, spread: float) -> Measure:
    far = np.sqrt((x**2).sum(-1) / spread)
    return Measure("altogether", far, _FAR_ALTOGETHER, f"they lie {_DEVIATIONS} of all features from the mean")


def _towards_zero(way: np.ndarray, variance: float, spread: float) -> Measure:
    """Return how far images are from the mean on the line to features that are all zero: normalised ones keep away."""
    # Single precision knows no smaller deviations.
    far = abs(way) / math.sqrt(max(variance, 1e-8 * spread, np.finfo(float).tiny))
    words = f"on the way from the training images' mean to features of zero, they lie {_DEVIATIONS} from it"
    return Measure("towards zero", far, _FAR, words)


def _of_points(x: np.ndarray, points: np.ndarray, zeros: np.ndarray, *, first: bool) -> Iterator[Measure]:
    """Yield how far images are from training images."""
    if first:  # behind a reduction, norms may be the same by construction
        yield from _of_norms(x, points)
    if len(points) < _ENOUGH:
        return
    mean = points.mean(0)
    spread = ((points - mean) ** 2).sum(-1).mean()
    if spread:
        yield _altogether(x - mean, spread)
        direction = zeros[0] - mean
        direction = direction / max(np.linalg.norm(direction), np.finfo(float).tiny)
        yield _towards_zero((x - mean) @ direction, ((points - mean) @ direction).var(), spread)


def _of_machine(stage: KernelSVM, x: np.ndarray, zeros: np.ndarray, *, first: bool) -> Iterator[Measure]:
    """Yield how far images are from the support vectors, which are a part of the training set, and not any part."""
    points = _few(stage.support_vectors)
    if first:  # behind a reduction, norms may be the same by construction
        yield from _of_norms(x, points)
    if not len(points):
        return
    mean = points.mean(0)
    spread = ((points - mean) ** 2).sum(-1).mean()
    # Where a kernel is narrower than the training set, most of that are support vectors.
    width = 1 / stage.kernel.gamma if isinstance(stage.kernel, RBF) else 0.0
    scale = max(width, stage.facts.spread)
    if scale or len(points) >= _ENOUGH:
        far = np.sqrt(((x - mean) ** 2).sum(-1) / max(scale, spread, np.finfo(float).tiny))
        words = "they lie {:.3g} times as far from the support vectors' mean as these do"
        yield Measure("machine", far, _FAR_ALTOGETHER if scale else _OUT_OF_RANGE, words)
    if len(points) >= _ENOUGH:
        sizes, size = (np.sqrt(((rows - zeros) ** 2).sum(-1)) for rows in (points, x))
        smaller = np.divide(sizes.min(), size, out=np.zeros_like(size), where=size > 0)  # dead features are no size
        far = np.maximum(size / max(sizes.max(), np.finfo(float).tiny), smaller)
        words = "their features are {:.3g} times as large, or as small, as those of any support vector"
        yield Measure("range of sizes", far, _OUT_OF_RANGE, words)


def _of_norms(x: np.ndarray, points: np.ndarray) -> Iterator[Measure]:
    """Yield how much the norms of images differ from that of the training images, if these have one and the same."""
    if len(points) < _ENOUGH or points.shape[1] < 4:
        return
    for name, order in _NORMS.items():
        norms = np.linalg.norm(points, order, axis=1)
        if norms.max() and norms.max() - norms.min() <= _SAME_NORM * norms.max():
            far = abs(np.linalg.norm(x, order, axis=1) / norms.mean() - 1)
            words = f"the {name} of training features was {norms.mean():.4g}, and of theirs differs by {{:.0%}}"
            yield Measure(name, far, _OTHER_NORM, words)


def _few(points: Tensor) -> np.ndarray:
    return _array(points[:: max(1, len(points) // _POINTS)])


def _array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array, for which torch need not dispatch anything."""
    return tensor.detach().cpu().numpy()
