"""Starts: the activations from which contributions start, and which stand in for missing parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import BaselineWarning, Fix
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.starts.boundary_path import PathBoundary
from pytorch_grad_cam_pcasvm.starts.jumps import find_deviations
from pytorch_grad_cam_pcasvm.starts.poles import BESIDE, find_pole, refuse_pole
from pytorch_grad_cam_pcasvm.starts.run import Run, Start, StartPlan
from pytorch_grad_cam_pcasvm.starts.strategies import (
    Given,
    HeadBoundary,
    NearMean,
    Point,
    Strategy,
    TrainingMean,
    Zeros,
)
from pytorch_grad_cam_pcasvm.starts.training_mean import (
    find_channels,
    find_pools,
    find_training_mean,
    fit_mean,
)
from pytorch_grad_cam_pcasvm.targets.questions import Questions

_HEADS = 512  # whose boundaries are kept, of half a megabyte each


@dataclass(eq=False)
class _Searches:
    """What searches for boundaries of one head have found.

    Attributes:
        boundary: that among its features.
        near_mean: those near means of the training set, by layer and kind of mean.
    """

    boundary: Boundary | None = None
    near_mean: dict[Any, PathBoundary] = field(default_factory=dict)


class Baseline:
    """Where the contributions of one method start.

    Args:
        baseline: ``"neutral"``, ``"zero"``, ``"mean"``, activations or an image, as :class:`BaselineCAM` has it.
        mean: the mean of the training set at the target layer, or one for each; None: what the head knows of it.

    Attributes:
        neutral: whether each target starts where it is undecided.

    Raises:
        TypeError: the baseline or the mean is something else.
        ValueError: the baseline is another name; or it, or the mean, has NaN or infinite values.
    """

    def __init__(self, baseline: str | Tensor, mean: Tensor | Sequence[Tensor] | None) -> None:
        self._searches: dict[Any, _Searches] = {}  # by head
        self.baseline, self.means = baseline, mean

    @property
    def baseline(self) -> str | Tensor:
        """The baseline."""
        return self._baseline

    @baseline.setter
    def baseline(self, baseline: str | Tensor) -> None:
        if isinstance(baseline, str) and baseline not in ("neutral", "zero", "mean"):
            raise ValueError(f"baseline must be 'neutral', 'zero', 'mean', activations or an image, got {baseline!r}")
        if not isinstance(baseline, str | Tensor):
            raise TypeError(f"baseline must be 'neutral', 'zero', 'mean' or a tensor, got {type(baseline).__name__}")
        if isinstance(baseline, Tensor) and not bool(baseline.isfinite().all()):
            raise ValueError("the baseline has NaN or infinite values")
        self._baseline = baseline
        self.neutral = isinstance(baseline, str) and baseline == "neutral"

    @property
    def means(self) -> Sequence[Tensor] | None:
        """The means of the training set, one for each target layer, or None."""
        return self._means

    @means.setter
    def means(self, mean: Tensor | Sequence[Tensor] | None) -> None:
        means = [mean] if isinstance(mean, Tensor) else mean
        if not (means is None or (isinstance(means, list | tuple) and all(isinstance(one, Tensor) for one in means))):
            raise TypeError(f"mean must be a tensor from mean_activations, got {type(mean).__name__}")
        if means is not None and not all(bool(one.isfinite().all()) for one in means):
            raise ValueError("the mean has NaN or infinite values")
        self._means = means
        self._searches.clear()

    def plan(self, run: Run, layer: int, questions: Questions, warnings: Any, *, moves: bool) -> StartPlan:
        """Return where K targets start at a target layer.

        Args:
            run: the network's run.
            layer: position of the target layer.
            questions: what K targets ask.
            warnings: those of the method.
            moves: whether maps from the training mean can be moved to each target's own start by the same at all
                positions, where features are means over these.
        """
        run.activations(layer)  # refuses those that no map can be made of
        found = self._choose(run, layer, questions, warnings, moves=moves).find(run, layer, questions)
        groups = [
            (point.target_indices, partial(self._start_at, run, layer, point, questions)) for point in found.points
        ]
        return StartPlan(groups, found.boundary, found.components_apart)

    def _choose(self, run: Run, layer: int, questions: Questions, warnings: Any, *, moves: bool = False) -> Strategy:
        """Return the way in which targets start: it is chosen here alone."""
        if isinstance(self.baseline, Tensor):
            return Given(self.baseline)
        if self.baseline == "zero":
            return Zeros()
        boundary = self.find_boundary(run, layer) if self.neutral else None
        is_unknown = self.neutral and self._is_unknown(run, layer, questions, boundary, warnings)
        if boundary is not None and not is_unknown:
            return HeadBoundary(boundary, self._given_mean(run, layer), moves and run.output.grid is None)
        if not self.neutral:
            return TrainingMean(self._need_mean(run, layer), leaves_jump=True)
        return self._choose_near_mean(run, layer, warnings, is_unknown=is_unknown)

    def _choose_near_mean(self, run: Run, layer: int, warnings: Any, *, is_unknown: bool = False) -> Strategy:
        """Return how targets start near the mean, whose boundary is not among the features, or not known."""
        mean = self._find_mean(run, layer)
        if mean is None:
            if not is_unknown and run.head is not None:
                warnings.note_start_at_zeros(run.layers[layer], _list_layers(run))
            return Zeros()
        if is_unknown or isinstance(run.images, Inputs):  # where a value is 0 depends on the other inputs
            return TrainingMean(mean)
        return NearMean(self._find_boundary_near(run, layer, mean), mean, warnings)

    def _start_at(self, run: Run, layer: int, point: Point, questions: Questions) -> Start:
        start = run.start_at(layer, point.activations) if point.start is None else point.start
        return self._stay_off_poles(run, layer, start, questions.take_targets(point.target_indices))

    def plan_together(self, run: Run, questions: Questions, warnings: Any) -> list[StartPlan]:
        """Return where K targets start at layers of several branches, all at once."""
        layers = range(len(run.layers))
        for layer in layers:
            run.activations(layer)  # refuses those that no map can be made of
        activations = {}
        for layer in layers:
            # Where a value is 0 depends on all inputs: maps start at the mean.
            strategy = self._choose_near_mean(run, layer, warnings) if self.neutral else None
            strategy = strategy or self._choose(run, layer, questions, warnings)
            activations[layer] = strategy.find(run, layer, questions).points[0].activations
        starts = {
            layer: self._stay_off_poles(run, layer, start, questions)
            for layer, start in run.start_together(activations).items()
        }
        return [StartPlan([(range(len(questions)), partial(starts.__getitem__, layer))]) for layer in layers]

    def _stay_off_poles(self, run: Run, layer: int, start: Start, questions: Questions) -> Start:
        """Return a start; refuse one on a pole of the head, or where nothing may be looked at make it NaN.

        A start at zeros, or one that was given, is on a pole if it is nearer to it than rounding.
        """
        head = run.head
        if head is None or is_traced():
            return start
        count, at_boundary = len(head.stages), self.neutral and not isinstance(run.images, Inputs)
        if not questions.depend_on_decision(head, unbounded=at_boundary):
            moved = at_boundary and start.boundary is not None  # to starts that lie on no pole
            count = 0 if moved else (head.component_position or 0) if questions.are_components else count - 1
        if all(stage.linear for stage in head.stages[:count]):
            return start
        features = start.output.head_trace.values[0]
        at_mean = isinstance(self.baseline, str) and self.baseline != "zero"
        eps, beside = torch.finfo(start.activations.dtype).eps, BESIDE if at_mean else 0.0
        features = features if run.output.grid is None else features.mean(0, keepdim=True)
        poles = find_pole(head, features, eps, beside)[:count]
        if not can_sync(poles):
            return replace(start, difference=torch.where(poles.any(), torch.nan, start.difference))
        if bool(poles.any()):
            where = f"{'the training mean' if at_mean else 'the baseline'} of {run.layers[layer]!r}"
            neutral = Fix("start where the target, if it is a class, is undecided, baseline='neutral'", "baseline")
            refuse_pole(head, poles, where, *([] if self.neutral else [neutral]))
        return start

    def find_boundary(self, run: Run, layer: int) -> Boundary | None:
        """Return the boundary of targets among features that are activations, or means of these; None for others."""
        head = run.head
        mean = None if head is None else head.feature_mean
        if head is None or mean is None:
            return None
        if run.output.grid is not None:
            width = find_channels(run, layer)
            if find_pools(run) != {"dense"} or width != slice(0, len(mean)):
                return None
        elif not run.ends_in_mean(layer):
            return None
        searches = self._find_searches(head)
        if searches.boundary is None or not searches.boundary.holds_for(head, mean):
            searches.boundary = Boundary(head, mean)
        return searches.boundary

    def _is_unknown(self, run: Run, layer: int, questions: Questions, boundary: Boundary | None, warnings: Any) -> bool:
        """Return whether nothing tells where a head without a gradient is undecided, and say so."""
        head = run.head
        if questions.are_components:
            return False
        if head is None or head.enumerated is None or (head.classes_ is None and head.voting.about != "one class"):
            return False  # a regressor starts at the mean
        has_boundary = find_deviations(head) is not None and (
            boundary is not None or head.component_position is not None
        )
        if not has_boundary:
            start = "zero activations" if self._find_mean(run, layer) is None else "the training mean"
            warnings.warn_once(
                BaselineWarning,
                f"{head.enumerated.predictor.name} has no gradient, and the head knows no variances of its training "
                f"set at these activations, so where it is undecided cannot be found: maps start at {start}, and add "
                "up to the value minus that there (baseline_values): put a PCA before it",
            )
        return not has_boundary

    def _find_searches(self, head: Any) -> "_Searches":
        """Return what was found for a head: several are explained in turn."""
        for oldest in list(self._searches)[:-_HEADS]:
            self._searches.pop(oldest, None)  # another thread may have been first
        return self._searches.setdefault(head, _Searches())

    def _find_boundary_near(self, run: Run, layer: int, mean: Tensor) -> PathBoundary:
        """Return the boundary near a mean at a layer; starts that it keeps hold for this mean alone."""
        key = run.layers[layer], mean.shape, mean.dtype, mean.device
        near_mean = self._find_searches(run.head).near_mean
        near = near_mean.get(key)
        if near is None or (not is_traced() and can_sync(mean) and not torch.equal(near.mean, mean)):
            near = near_mean[key] = PathBoundary(mean)
        elif not is_traced():
            near.mean = mean  # on a device, what is kept is compared with it
        return near

    def _need_mean(self, run: Run, layer: int) -> Tensor:
        """Return the mean of the training set; refuse if it is not known."""
        mean = self._find_mean(run, layer)
        if mean is None:
            raise ValueError(
                "baseline='mean' needs the training set's mean at the target layer, which the head knows only if "
                "the features are means over the positions of this layer, without a norm in between or a "
                "reshape_transform, and it starts with a StandardScaler or PCA: pass "
                f"mean=mean_activations(net, loader, {_list_layers(run)})"
            )
        return mean

    def _find_mean(self, run: Run, layer: int) -> Tensor | None:
        """Return the mean of the training set, of one row; None if it is not known."""
        given = self._given_mean(run, layer)
        if given is not None:
            return fit_mean(given, run, layer)
        return find_training_mean(run, layer, by_numbers=isinstance(self.baseline, str) and self.baseline == "mean")

    def _given_mean(self, run: Run, layer: int) -> Tensor | None:
        """Return the mean that was given for a target layer."""
        if self.means is not None and len(self.means) != len(run.layers):
            raise ValueError(f"give one mean for each of the {len(run.layers)} target layers, got {len(self.means)}")
        return None if self.means is None else self.means[layer]


def _list_layers(run: Run) -> str:
    """Return the layers whose means are needed, as they are written."""
    return repr(list(run.layers) if len(run.layers) > 1 else run.layers[0])
