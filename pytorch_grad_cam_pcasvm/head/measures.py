"""Measures of how far images are from a head's training images, by the facts that its stages hold."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM
from pytorch_grad_cam_pcasvm.head.distances import Neighbours, Quadratic
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.head.stages import KernelMap, Projection, Scale, Union
from pytorch_grad_cam_pcasvm.runtime.device import precision

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
_DEVIATIONS = "{:.3g} standard deviations"
_NORMS = {"Euclidean length": 2.0, "sum of absolute values": 1.0, "largest absolute value": np.inf}


class Place(NamedTuple):
    """Rows inside a head: one of its values, or the output of a branch of a union."""

    position: int = 0
    inside: tuple[Any, ...] = ()

    def move_behind(self, stage: Any, *, inner: bool) -> "Place":
        """Return the place behind a stage; ``inner``: of one that is side by side with others."""
        return Place(self.position, (*self.inside, stage)) if inner else Place(self.position + 1)

    def read_rows(self, values: Sequence[Tensor]) -> np.ndarray:
        """Return the rows, by the values of a trace."""
        x = values[self.position]
        for stage in self.inside:
            x = stage.evaluate(x)[0]
        return as_array(x)


class Measure(NamedTuple):
    """The distances of N images from the training images by one measure, with its limit and its words.

    A share of many features is known well from one image; a distance, in standard deviations or the like, is not.

    Attributes:
        name: what is measured.
        place: the rows that are measured.
        distances: their distances, (N,).
        limit: what is far.
        in_words: how to say it, with a place for the distance.
        is_share: whether it is a share of many features.
    """

    name: str
    place: Place
    distances: Callable[[np.ndarray], np.ndarray]
    limit: float
    in_words: str
    is_share: bool = False

    def find_limit(self, count: int) -> float:
        """Return the limit for the median of so many images, as a single one may be unusual."""
        return self.limit if self.is_share else self.limit * (1 + 1 / count)


class MeasuredStep(NamedTuple):
    """A stage, the places of its input and output, and its input for features that are all zero."""

    stage: Any
    before: Place
    after: Place
    zeros: Tensor

    @property
    def is_first(self) -> bool:
        """Whether the stage gets the features; behind a reduction, norms may be the same by construction."""
        return self.before == Place()


def list_measures(stages: Sequence[Any], width: int | None) -> list[Measure]:
    """Return the measures that stages know, for features of a width: by scalers, and by the first other one."""
    if width is None:
        return []
    device = next((buffer.device for stage in stages for buffer in stage.buffers()), torch.device("cpu"))
    measures = []
    for step in _steps(stages, Place(), torch.zeros(1, width, dtype=precision(device), device=device)):
        measured = list(_measure_step(step))
        # Standard deviations of few rows are off themselves.
        doubt = 1 + _ENOUGH / step.stage.facts.count
        measures += [m if m.is_share else m._replace(limit=doubt * m.limit) for m in measured]
        if measured and not isinstance(step.stage, Scale):
            break
    return measures


def _steps(stages: Sequence[Any], before: Place, zeros: Tensor, *, inner: bool = False) -> Iterator[MeasuredStep]:
    """Yield the stages one after another; of several side by side the first, which stands for the others."""
    for previous, stage in zip([None, *stages], stages, strict=False):
        if previous is not None:
            before, zeros = before.move_behind(previous, inner=inner), previous.evaluate(zeros)[0]
        yield MeasuredStep(stage, before, before.move_behind(stage, inner=inner), zeros)
        if isinstance(stage, Union):
            yield from _steps(list(stage.members[0].stages), before, zeros, inner=True)


def _measure_step(step: MeasuredStep) -> Iterator[Measure]:
    stage = step.stage
    if stage.facts.count < _ENOUGH:
        return
    if isinstance(stage, Scale):
        yield from _measure_scaler(step)
    elif isinstance(stage, Projection):
        yield from _measure_projection(step)
    elif isinstance(stage, Quadratic) and stage.facts.spread:
        words = f"they lie {_DEVIATIONS} of all features from every class's mean"
        distances = partial(_to_nearest, as_array(stage.centres), stage.facts.spread)
        yield Measure("classes", step.before, distances, _FAR_ALTOGETHER, words)
    elif isinstance(stage, KernelMap | Neighbours):
        yield from _measure_points(step, _sample_points(stage.points))
    elif isinstance(stage, KernelSVM):
        yield from _measure_machine(step, _sample_points(stage.support_vectors))


def _measure_scaler(step: MeasuredStep) -> Iterator[Measure]:
    """Yield the share of a scaler's output that is far from its output for the training images."""
    low, high = step.stage.facts.low, step.stage.facts.high
    if low is not None and high is not None:
        distances = partial(_share_beyond, (low + high) / 2, _FAR / 2 * (high - low))
        words = "{:.0%} of their features lie more than twice the training images' range outside of it"
        yield Measure("range", step.after, distances, _MOST_FAR, words, is_share=True)
    elif step.stage.input_deviations is not None:
        if step.is_first:
            words = f"{{:.0%}} of their features lie more than {_FAR:.0f} standard deviations from the mean"
            yield Measure("features", step.after, partial(_share_beyond, 0.0, _FAR), _MOST_FAR, words, is_share=True)
        else:
            words = f"what the head's scaler gives lies {_DEVIATIONS} from 0"
            yield Measure("scaled", step.after, _root_mean_square, _FAR_ALTOGETHER, words)


def _measure_projection(step: MeasuredStep) -> Iterator[Measure]:
    """Yield how far images are from the mean of the training images: within components, outside, and towards zero."""
    stage = step.stage
    mean = as_array(stage.mean)
    spread, count = stage.facts.spread, stage.facts.count
    if stage.variances is None:
        if spread:
            yield _altogether(step.before, mean, spread)
        return
    left = count - stage.n_outputs - 2
    if left > 0:
        # Hotelling's T^2 of a new image: its mean, where the variances are those of few images.
        inflation = 1.0 if count == np.inf else math.sqrt((count**2 - 1) / (count * left))
        distances = partial(_root_mean_square, variances=as_array(stage.variances), inflation=inflation)
        words = f"their components lie {_DEVIATIONS} from the mean"
        yield Measure("components", step.after, distances, _FAR_ALTOGETHER, words)
    if not spread:
        return
    yield _altogether(step.before, mean, spread)
    within, axes = as_array(stage.divisor**2 * stage.variances), as_array(stage.components)
    outside = max(spread - within.sum(), 0.0)
    if left > 0 and len(axes) < axes.shape[1]:
        # Of what was left over of few images, components have taken their share; what never varied may vary now.
        share = outside * (1 if count == np.inf else ((count - 1) / (count - 1 - len(axes))) ** 2) + 0.01 * spread
        words = f"they lie {_DEVIATIONS} outside of the head's components"
        yield Measure("outside", step.before, partial(_beside, mean, axes, share), _FAR_ALTOGETHER, words)
    direction = as_array(step.zeros)[0] - mean
    length = np.linalg.norm(direction)
    if length:
        direction = direction / length
        cosines = (axes @ direction) ** 2
        # No direction beside the components has more variance than the last of them, and few much more than others.
        left_out = max(min(count - 1, axes.shape[1]) - len(axes), 1)
        variance = (within * cosines).sum() + max(1 - cosines.sum(), 0.0) * min(within.min(), 4 * outside / left_out)
        yield _towards_zero(step.before, mean, direction, variance, spread)


def _altogether(place: Place, mean: np.ndarray, spread: float) -> Measure:
    words = f"they lie {_DEVIATIONS} of all features from the mean"
    return Measure("altogether", place, partial(_from_mean, mean, spread), _FAR_ALTOGETHER, words)


def _towards_zero(place: Place, mean: np.ndarray, direction: np.ndarray, variance: float, spread: float) -> Measure:
    """Return how far images are from the mean on the line to features that are all zero: normalised ones keep away."""
    # Single precision knows no smaller deviations.
    deviation = math.sqrt(max(variance, 1e-8 * spread, np.finfo(float).tiny))
    words = f"on the way from the training images' mean to features of zero, they lie {_DEVIATIONS} from it"
    return Measure("towards zero", place, partial(_measure_along, mean, direction, deviation), _FAR, words)


def _measure_points(step: MeasuredStep, points: np.ndarray) -> Iterator[Measure]:
    """Yield how far images are from training images."""
    if step.is_first:
        yield from _measure_norms(step, points)
    if len(points) < _ENOUGH:
        return
    mean = points.mean(0)
    spread = ((points - mean) ** 2).sum(-1).mean()
    if spread:
        yield _altogether(step.before, mean, spread)
        direction = as_array(step.zeros)[0] - mean
        direction = direction / max(np.linalg.norm(direction), np.finfo(float).tiny)
        yield _towards_zero(step.before, mean, direction, ((points - mean) @ direction).var(), spread)


def _measure_machine(step: MeasuredStep, points: np.ndarray) -> Iterator[Measure]:
    """Yield how far images are from the support vectors, which are a part of the training set, and not any part."""
    stage, zeros = step.stage, as_array(step.zeros)
    if step.is_first:
        yield from _measure_norms(step, points)
    if not len(points):
        return
    mean = points.mean(0)
    spread = ((points - mean) ** 2).sum(-1).mean()
    # Where a kernel is narrower than the training set, most of that are support vectors.
    width = 1 / stage.kernel.gamma if isinstance(stage.kernel, RBF) else 0.0
    scale = max(width, stage.facts.spread)
    if scale or len(points) >= _ENOUGH:
        words = "they lie {:.3g} times as far from the support vectors' mean as these do"
        distances = partial(_from_mean, mean, max(scale, spread, np.finfo(float).tiny))
        yield Measure("machine", step.before, distances, _FAR_ALTOGETHER if scale else _OUT_OF_RANGE, words)
    if len(points) >= _ENOUGH:
        words = "their features are {:.3g} times as large, or as small, as those of any support vector"
        distances = partial(_out_of_sizes, zeros, np.sqrt(((points - zeros) ** 2).sum(-1)))
        yield Measure("range of sizes", step.before, distances, _OUT_OF_RANGE, words)


def _measure_norms(step: MeasuredStep, points: np.ndarray) -> Iterator[Measure]:
    """Yield how much the norms of images differ from the training images' norm, if all of these have the same."""
    if len(points) < _ENOUGH or points.shape[1] < 4:
        return
    for name, order in _NORMS.items():
        norms = np.linalg.norm(points, order, axis=1)
        if norms.max() and norms.max() - norms.min() <= _SAME_NORM * norms.max():
            words = f"the {name} of training features was {norms.mean():.4g}, and of theirs differs by {{:.0%}}"
            yield Measure(name, step.before, partial(_off_norm, order, norms.mean()), _OTHER_NORM, words)


def _share_beyond(middle: float, half: float, x: np.ndarray) -> np.ndarray:
    return (abs(x - middle) > half).mean(-1)


def _root_mean_square(x: np.ndarray, variances: Any = 1.0, inflation: float = 1.0) -> np.ndarray:
    return np.sqrt((x**2 / variances).mean(-1)) / inflation


def _to_nearest(centres: np.ndarray, spread: float, x: np.ndarray) -> np.ndarray:
    return np.sqrt(((x[:, None] - centres) ** 2).sum(-1).min(1) / spread)


def _from_mean(mean: np.ndarray, spread: float, x: np.ndarray) -> np.ndarray:
    return np.sqrt(((x - mean) ** 2).sum(-1) / spread)


def _beside(mean: np.ndarray, axes: np.ndarray, share: float, x: np.ndarray) -> np.ndarray:
    rest = ((x - mean) ** 2).sum(-1) - (((x - mean) @ axes.T) ** 2).sum(-1)
    return np.sqrt(np.maximum(rest, 0.0) / share)


def _measure_along(mean: np.ndarray, direction: np.ndarray, deviation: float, x: np.ndarray) -> np.ndarray:
    return abs((x - mean) @ direction) / deviation


def _out_of_sizes(zeros: np.ndarray, sizes: np.ndarray, x: np.ndarray) -> np.ndarray:
    size = np.sqrt(((x - zeros) ** 2).sum(-1))
    smaller = np.divide(sizes.min(), size, out=np.zeros_like(size), where=size > 0)  # dead features are no size
    return np.maximum(size / max(sizes.max(), np.finfo(float).tiny), smaller)


def _off_norm(order: float, norm: float, x: np.ndarray) -> np.ndarray:
    return abs(np.linalg.norm(x, order, axis=1) / norm - 1)


def _sample_points(points: Tensor) -> np.ndarray:
    return as_array(points[:: max(1, len(points) // _POINTS)])


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array, for which torch need not dispatch anything."""
    return tensor.detach().cpu().numpy()
