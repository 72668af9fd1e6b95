"""Starts: the activations from which contributions start, and which stand in for missing parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.methods.boundary_path import Found, PathBoundary, leave_jump
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.methods.run import Run, Start, StartPlan
from pytorch_grad_cam_pcasvm.methods.training_mean import (
    as_activations,
    find_channels,
    find_pools,
    find_training_mean,
    fit_mean,
    spread_everywhere,
)
from pytorch_grad_cam_pcasvm.methods.warn_once import WarnOnce
from pytorch_grad_cam_pcasvm.network.extraction import find_backbone
from pytorch_grad_cam_pcasvm.network.features import output_of
from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import BaselineWarning, Fix, NoBoundaryError
from pytorch_grad_cam_pcasvm.targets import SVMTarget
from pytorch_grad_cam_pcasvm.targets.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.targets.jumps import find_deviations
from pytorch_grad_cam_pcasvm.targets.poles import BESIDE, find_pole, refuse_pole
from pytorch_grad_cam_pcasvm.targets.questions import BESIDE_MEAN, Questions


@dataclass(frozen=True, eq=False)
class Point:
    """Where some targets start.

    Attributes:
        target_indices: of the targets.
        activations: of the target layer, of one row or N.
        start: the path run from there, where the search has done so.
    """

    target_indices: Sequence[int]
    activations: Tensor
    start: Start | None = None


class Starts:
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
        self._boundary: Boundary | None = None
        self._near_mean: dict[Any, PathBoundary] = {}
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
        self._near_mean.clear()

    def plan(self, run: Run, layer: int, questions: Questions, warnings: WarnOnce, *, moves: bool) -> StartPlan:
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
        everyone = list(range(len(questions)))
        boundary = self._boundary_of(run, layer) if self.neutral else None
        if self.neutral and self._is_unknown(run, layer, questions, boundary, warnings):
            mean = self._find_mean(run, layer)
            zeros = torch.zeros_like(run.recorded.activations[layer][:1])
            return StartPlan([(everyone, partial(run.start_at, layer, zeros if mean is None else mean))])
        if boundary is not None and moves and run.output.grid is None:
            mean = spread_everywhere(boundary.start.features[0], run, layer, self._given_mean(run, layer))
            difference = run.recorded.activations[layer] - mean
            at_mean = Start(None, boundary.start, mean, difference, boundary)  # maps are moved to their own starts
            at_mean = self._stay_off_poles(run, layer, at_mean, questions)
            return StartPlan([(everyone, lambda: at_mean)], boundary, boundary.components_apart)
        points, apart = [Point(everyone, self.activations(run, layer))] if not self.neutral else [], False
        if self.neutral:
            points, apart = self.find_undecided(run, layer, questions, boundary, warnings)
        groups = [(point.target_indices, partial(self._start_at, run, layer, point, questions)) for point in points]
        return StartPlan(groups, components_apart=apart)

    def _start_at(self, run: Run, layer: int, point: Point, questions: Questions) -> Start:
        start = run.start_at(layer, point.activations) if point.start is None else point.start
        return self._stay_off_poles(run, layer, start, questions.take_targets(point.target_indices))

    def plan_together(self, run: Run, questions: Questions, warnings: WarnOnce) -> list[StartPlan]:
        """Return where K targets start at layers of several branches, all at once."""
        layers = range(len(run.layers))
        for layer in layers:
            run.activations(layer)  # refuses those that no map can be made of
        if self.neutral:  # where a value is 0 depends on all inputs: maps start at the mean
            points = [self.find_undecided(run, layer, questions, None, warnings)[0][0] for layer in layers]
            activations = {layer: point.activations for layer, point in enumerate(points)}
        else:
            activations = {layer: self.activations(run, layer) for layer in layers}
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

    def _boundary_of(self, run: Run, layer: int) -> Boundary | None:
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
        if self._boundary is None or not self._boundary.holds_for(head, mean):
            self._boundary = Boundary(head, mean)
        return self._boundary

    def _is_unknown(
        self, run: Run, layer: int, questions: Questions, boundary: Boundary | None, warnings: WarnOnce
    ) -> bool:
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

    def find_undecided(
        self, run: Run, layer: int, questions: Questions, boundary: Boundary | None, warnings: WarnOnce
    ) -> tuple[list[Point], bool]:
        """Return where K targets are undecided, and whether components are 0 at different activations."""
        like, head, everyone = run.recorded.activations[layer], run.head, list(range(len(questions)))
        mean = self._find_mean(run, layer) if boundary is None else None
        if boundary is None and mean is None:
            if head is not None:
                warnings.note_start_at_zeros(run.layers[layer], _list_layers(run))
            return [Point(everyone, torch.zeros_like(like[:1]))], False
        if mean is not None and isinstance(run.images, Inputs):  # where a value is 0 depends on the other inputs
            return [Point(everyone, mean)], False
        if mean is not None:
            return self._find_near(run, layer, questions, mean, warnings)
        assert boundary is not None
        mean, starts = self._given_mean(run, layer), []
        for target_indices, names, boundary_index in questions.group_boundaries(
            head, like.device, apart=boundary.components_apart
        ):
            points = [spread_everywhere(boundary.point(name), run, layer, mean) for name in names]
            starts.append(Point(target_indices, _spread_points(points, boundary_index, run, layer)))
        return starts, boundary.components_apart

    def _find_near(
        self, run: Run, layer: int, questions: Questions, mean: Tensor, warnings: WarnOnce
    ) -> tuple[list[Point], bool]:
        """Return the starts of K targets among the activations near their mean, as :meth:`find_undecided` does."""
        head = run.head
        single = run if is_traced() else run.isolate()
        near = self._find_boundary_near(run.layers[layer], mean)
        groups, together, apart = questions.group_boundaries(head, mean.device), None, False
        without = (None, BESIDE_MEAN)  # a boundary
        if run.output.grid is None or any(
            name in without for _, names, _ in groups for name in names
        ):  # of dense features, it takes long
            together = near.of_components(single, layer)
            apart = together is None
            groups = groups if not apart else questions.group_boundaries(head, mean.device, apart=True)
        starts = []
        for target_indices, names, boundary_index in groups:
            points = []
            for name in names:
                if name in without and together is None:
                    listing = ", ".join(dict.fromkeys(repr(questions[k]) for k in target_indices))
                    warnings.warn_once(
                        BaselineWarning,
                        f"no activations of {run.layers[layer]!r} near the training set's mean make all components 0, "
                        f"so maps of {listing} start at this mean",
                    )
                centre = Found(mean) if together is None else together
                if name == BESIDE_MEAN:
                    centre = Found(leave_jump(run, layer, centre.activations))
                points.append(centre if name in without else self._find_point(near, single, layer, name, warnings))
            activations = _spread_points([point.activations for point in points], boundary_index, run, layer)
            ready = points[0].start if len(points) == 1 and single is run else None
            starts.append(Point(target_indices, activations, ready))
        return starts, apart

    def _find_point(self, near: PathBoundary, run: Run, layer: int, target: Any, warnings: WarnOnce) -> Found:
        """Return activations at which a target is 0, near the mean; of dense features, this mean if there are none.

        Raises:
            NoBoundaryError: there are none for the decision about a whole image.
        """
        try:
            return near.find_point(run, layer, target)
        except NoBoundaryError:
            if run.output.grid is None:
                raise
        # A class that few patches have may be out of reach everywhere at once.
        warnings.warn_once(
            BaselineWarning,
            f"no activations of {run.layers[layer]!r} near the training mean make the mean of {target!r} over "
            "positions 0: its maps start at this mean, and add up to the value minus that there (baseline_values)",
        )
        return Found(near.mean)

    def _find_boundary_near(self, layer: str, mean: Tensor) -> PathBoundary:
        """Return the boundary near a mean at a layer; starts that it keeps hold for this mean alone."""
        key = layer, mean.shape, mean.dtype, mean.device
        near = self._near_mean.get(key)
        if near is None or (not is_traced() and can_sync(mean) and not torch.equal(near.mean, mean)):
            near = self._near_mean[key] = PathBoundary(mean)
        elif not is_traced():
            near.mean = mean  # on a device, what is kept is compared with it
        return near

    def activations(self, run: Run, layer: int) -> Tensor:
        """Return the baseline in the layout of the network, of one row or N."""
        activations, baseline = run.recorded.activations[layer], self.baseline
        if isinstance(baseline, str):
            start = torch.zeros_like(activations[:1]) if baseline == "zero" else self._find_mean(run, layer)
            if start is None:
                raise ValueError(
                    "baseline='mean' needs the training set's mean at the target layer, which the head knows only if "
                    "the features are means over the positions of this layer, without a norm in between or a "
                    "reshape_transform, and it starts with a StandardScaler or PCA: pass "
                    f"mean=mean_activations(net, loader, {_list_layers(run)})"
                )
            return start if baseline == "zero" else leave_jump(run, layer, start)
        shape, image = activations.shape, run.images.shape
        if baseline.shape not in (image, image[1:], (1, *image[1:])):
            return as_activations(baseline, run, layer)
        images = baseline.to(activations.device).reshape(-1, *image[1:]).to(run.images.dtype)
        start = output_of(find_backbone(run.model), run.layers[layer], images)
        if len(start) == run.layouts[layer].tile_count:  # of one image
            start = start.repeat(run.count, *[1] * (start.dim() - 1)) if len(start) > 1 else start
        if baseline.shape in (shape, shape[1:], (1, *shape[1:])) and not torch.equal(
            start.flatten(), baseline.to(start).flatten()
        ):
            raise ValueError(
                f"a baseline of shape {tuple(baseline.shape)} could be an image or activations, which have the same "
                "shape here; give activations with one number per channel, (T,), or choose another layer"
            )
        return start

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


def _spread_points(points: Sequence[Tensor], boundary_index: Tensor | None, run: Run, layer: int) -> Tensor:
    """Return the start of each image, the same in all of its tiles; one row if all images share it.

    Args:
        points: activations of one row.
        boundary_index: which of them each image starts at; None: there is one.
        run: the network's run.
        layer: position of the target layer.
    """
    if boundary_index is None or len(points) == 1:
        return points[0]
    rows, crops = torch.cat(list(points))[boundary_index], run.layouts[layer].crops
    return rows if crops is None else crops.repeat(rows)


def _list_layers(run: Run) -> str:
    """Return the layers whose means are needed, as they are written."""
    return repr(list(run.layers) if len(run.layers) > 1 else run.layers[0])


class BaselineCAM(ClosedFormCAM):
    """A method with a baseline.

    Args:
        baseline: F0, where contributions start, or what replaces a channel or position that is left out. ``"neutral"``:
            where the target is undecided, so that a map adds up to the value itself: for a component, the mean of the
            training set; for a margin or a decision between classes, a point on the decision boundary near that mean,
            the same for all images. A regressor starts at the mean. ``"zero"``: no activation at all; ``"mean"``: the
            mean of the training set, whatever the target's value there. Or activations as the layer returns them, shape
            (T,), (T, H, W) or (N, T, H, W), for tokens (L, D) or (N, L, D); or an image of the same shape as the
            explained ones, which is run through the network. With ``attention="frozen"``, the baseline, and therefore
            ``baseline_values``, is evaluated with the image's own attention weights.
        mean: the mean of the training set at the target layer, from :func:`.mean_activations`, for ``"neutral"`` and
            ``"mean"``; for several target layers, a list of these. None: derived from the head, if the features are
            means over positions of the target layer (``"neutral"`` then always has the head's means over positions,
            and takes from this mean how they vary), or if :func:`.fit_model` has stored the layer's means with it;
            otherwise ``"neutral"`` starts at zeros, with a warning. For images of another size, its mean over positions
            is used if the features are pooled; others are refused.

    Raises:
        TypeError: the baseline is neither one of these names nor a tensor, or the mean is not a tensor.
        ValueError: the baseline is another name, or the baseline or the mean has NaN or infinite values. When a map is
            computed: the baseline has the wrong shape, the mean is unknown, or that of images of another size, or there
            is no decision boundary within reach of it.

    Example:
        >>> isinstance(ContributionCAM(net, ["layer2"]), BaselineCAM)
        True
    """

    needs = "difference"
    # Whether maps from the training mean can be moved to another start by the same at all positions.
    moves_starts = False
    _predicted = SVMTarget()

    def __init__(
        self,
        model: nn.Module,
        target_layers: Sequence[nn.Module | str] | str,
        reshape_transform: Callable[[Tensor], Tensor] | str | None = None,
        *,
        baseline: str | Tensor = "zero",
        mean: Tensor | Sequence[Tensor] | None = None,
        jacobian: str = "closed_form",
        attention: str = "exact",
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(
            model, target_layers, reshape_transform, jacobian=jacobian, attention=attention, max_bytes=max_bytes
        )
        self._starts = Starts(baseline, mean)

    @property
    def baseline(self) -> str | Tensor:
        """The baseline; may be reassigned."""
        return self._starts.baseline

    @baseline.setter
    def baseline(self, baseline: str | Tensor) -> None:
        self._starts.baseline = baseline

    @property
    def mean(self) -> Sequence[Tensor] | None:
        """The means of the training set, one for each target layer, or None; may be reassigned."""
        return self._starts.means

    @mean.setter
    def mean(self, mean: Tensor | Sequence[Tensor] | None) -> None:
        self._starts.means = mean

    def _plan_starts(self, run: Run, questions: Questions) -> list[StartPlan | None]:
        if run.has_branches and self.adds_up:
            return [*self._starts.plan_together(run, questions, self._warnings)]
        plan = partial(self._starts.plan, run, questions=questions, warnings=self._warnings, moves=self.moves_starts)
        return [plan(layer) for layer in range(len(run.layers))]
