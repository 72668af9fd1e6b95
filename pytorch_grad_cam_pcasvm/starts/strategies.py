"""Five strategies by which contributions start: zeros, given activations, the training mean, and two boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.extraction import find_backbone
from pytorch_grad_cam_pcasvm.network.features import output_of
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import BaselineWarning, NoBoundaryError
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary
from pytorch_grad_cam_pcasvm.starts.boundary_path import Found, PathBoundary, leave_jump
from pytorch_grad_cam_pcasvm.starts.run import Run, Start
from pytorch_grad_cam_pcasvm.starts.training_mean import as_activations, spread_everywhere
from pytorch_grad_cam_pcasvm.targets.questions import BESIDE_MEAN, Questions


class Warner(Protocol):
    """What tells a warning once."""

    def warn_once(self, kind: type[Warning], message: str) -> None:
        """Tell a warning, unless it was told before."""


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


class Points(NamedTuple):
    """Where K targets start.

    Attributes:
        points: those of groups of targets.
        boundary: where each target starts, if all are computed from the training mean and moved to their own starts.
        components_apart: whether components are 0 at different activations.
    """

    points: Sequence[Point]
    boundary: Boundary | None = None
    components_apart: bool = False


class Strategy(Protocol):
    """A way to find where targets start."""

    def find(self, run: Run, layer: int, questions: Questions) -> Points:
        """Return where K targets start at a target layer."""


def _start_together(activations: Tensor, questions: Questions) -> Points:
    return Points([Point(range(len(questions)), activations)])


class Zeros:
    """No activation at all."""

    def find(self, run: Run, layer: int, questions: Questions) -> Points:
        """Return zeros."""
        return _start_together(torch.zeros_like(run.recorded.activations[layer][:1]), questions)


@dataclass(frozen=True, eq=False)
class Given:
    """Activations of the user's, or those of an image.

    Attributes:
        baseline: the activations, or the image.
    """

    baseline: Tensor

    def find(self, run: Run, layer: int, questions: Questions) -> Points:
        """Return the activations in the layout of the network."""
        return _start_together(self._activations(run, layer), questions)

    def _activations(self, run: Run, layer: int) -> Tensor:
        activations, baseline = run.recorded.activations[layer], self.baseline
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


@dataclass(frozen=True, eq=False)
class TrainingMean:
    """The mean of the training set.

    Attributes:
        mean: activations of one row.
        leaves_jump: whether it is left for the inside of a cell where a decision without a gradient jumps.
    """

    mean: Tensor
    leaves_jump: bool = False

    def find(self, run: Run, layer: int, questions: Questions) -> Points:
        """Return the mean."""
        return _start_together(leave_jump(run, layer, self.mean) if self.leaves_jump else self.mean, questions)


@dataclass(frozen=True, eq=False)
class HeadBoundary:
    """Where each target is undecided among features that are activations, or means of these.

    Attributes:
        boundary: the points among the features.
        mean: the mean of the layer that was given, which tells how positions vary; None: they are all alike.
        moves: whether maps from the training mean are moved to each target's own start, which differ by a constant.
    """

    boundary: Boundary
    mean: Tensor | None
    moves: bool

    def find(self, run: Run, layer: int, questions: Questions) -> Points:
        """Return the points at all positions; if maps are moved, the training mean."""
        boundary, like = self.boundary, run.recorded.activations[layer]
        if self.moves:
            mean = spread_everywhere(boundary.start.features[0], run, layer, self.mean)
            at_mean = Start(None, boundary.start, mean, like - mean, boundary)
            return Points([Point(range(len(questions)), mean, at_mean)], boundary, boundary.components_apart)
        points = []
        for target_indices, names, boundary_index in questions.group_boundaries(
            run.head, like.device, apart=boundary.components_apart
        ):
            spread = [spread_everywhere(boundary.point(name), run, layer, self.mean) for name in names]
            points.append(Point(target_indices, _spread_points(spread, boundary_index, run, layer)))
        return Points(points, None, boundary.components_apart)


@dataclass(frozen=True, eq=False)
class NearMean:
    """Where each target is undecided among the activations near the mean of the training set.

    Attributes:
        near: the search, and what it has found before.
        mean: activations of one row.
        warnings: those of the method.
    """

    near: PathBoundary
    mean: Tensor
    warnings: Warner

    def find(self, run: Run, layer: int, questions: Questions) -> Points:
        """Return the activations, the same for all images that ask the same."""
        head = run.head
        single = run if is_traced() else run.isolate()
        near, mean = self.near, self.mean
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
                    self.warnings.warn_once(
                        BaselineWarning,
                        f"no activations of {run.layers[layer]!r} near the training set's mean make all components 0, "
                        f"so maps of {listing} start at this mean",
                    )
                centre = Found(mean) if together is None else together
                if name == BESIDE_MEAN:
                    centre = Found(leave_jump(run, layer, centre.activations))
                points.append(centre if name in without else self._find_point(single, layer, name))
            activations = _spread_points([point.activations for point in points], boundary_index, run, layer)
            ready = points[0].start if len(points) == 1 and single is run else None
            starts.append(Point(target_indices, activations, ready))
        return Points(starts, None, apart)

    def _find_point(self, run: Run, layer: int, target: Any) -> Found:
        """Return activations at which a target is 0, near the mean; of dense features, this mean if there are none.

        Raises:
            NoBoundaryError: there are none for the decision about a whole image.
        """
        try:
            return self.near.find_point(run, layer, target)
        except NoBoundaryError:
            if run.output.grid is None:
                raise
        # A class that few patches have may be out of reach everywhere at once.
        self.warnings.warn_once(
            BaselineWarning,
            f"no activations of {run.layers[layer]!r} near the training mean make the mean of {target!r} over "
            "positions 0: its maps start at this mean, and add up to the value minus that there (baseline_values)",
        )
        return Found(self.near.mean)


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
