"""WarnOnce: reasons why maps are likely to be misread, each reported once."""

from collections.abc import Sequence
from statistics import median_low
from typing import Any

import numpy as np
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.anomalies import compare_residual
from pytorch_grad_cam_pcasvm.head.measures import Measure, as_array
from pytorch_grad_cam_pcasvm.maps.results import check_finite, warn_of_blanks
from pytorch_grad_cam_pcasvm.network.auto_layers import norms_before_attention
from pytorch_grad_cam_pcasvm.network.extraction import find_backbone
from pytorch_grad_cam_pcasvm.network.outputs import OfHead
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.runtime.errors import (
    BaselineWarning,
    BlankMapWarning,
    CancellationWarning,
    CoarseMapWarning,
    OutsideTrainingWarning,
    warn,
)
from pytorch_grad_cam_pcasvm.starts.run import Run
from pytorch_grad_cam_pcasvm.targets import ClosedFormTarget


def measure_images(output: OfHead) -> list[tuple[Measure, np.ndarray]]:
    """Return the measures of a head, each with the distances of N images, (N,)."""
    values: Any = output.head_trace.values
    if values[0] is None or values[0].dim() != 2:
        return []
    measures = output.head.measures
    rows = {place: place.read_rows(values) for place in dict.fromkeys(measure.place for measure in measures)}
    return [(measure, measure.distances(rows[measure.place])) for measure in measures]


def are_unlike_training(output: Any) -> list[bool]:
    """Return for each image whether it is unlike the head's training images, as far as the head can tell.

    Heads of ``fit`` and ``fit_model`` that decide by a PCA's components know how far outside of these training images
    lie that were left out, of dense features on average over positions: at most 1 in 100 new ones like them is farther,
    or of n of them 1 in n + 1. Others have the limits of their scaler or PCA; of dense features False is returned.

    Args:
        output: what a network returned for N images.

    Example:
        >>> are_unlike_training(net(images))
        [False, False]
    """
    measures = measure_images(output) if isinstance(output, OfHead) and output.grid is None else ()
    far = [distances > measure.find_limit(1) for measure, distances in measures]
    outside = measure_outside(output)
    far += [] if outside is None else [outside > 1]
    return np.any(far, 0).tolist() if far else [False] * len(output)


def measure_outside(output: Any) -> np.ndarray | None:
    """Return how far each image lies from what the components express, in parts of a limit, (N,).

    Args:
        output: what a network returned for N images.

    Returns:
        Distances, the roots of :class:`.ResidualTarget`'s values (of dense features of their mean over positions),
        divided by that which at most 1 in 100 new images like those of the training set exceed, or 1 in n + 1 of n;
        None: the head knows no limit.

    Example:
        >>> head = make_pipeline(StandardScaler(), PCA(2), SVC())
        >>> model = fit_model(backbone, loader, head, layer="layer2", pool="mean", progress=False)
        >>> measure_outside(model.net(images)).shape
        (2,)
    """
    if not isinstance(output, OfHead):
        return None
    outside = compare_residual(output.head, output.head_trace, 1 if output.grid is None else output.grid.count)
    return None if outside is None else as_array(outside)


TOLD_ONCE = (BaselineWarning, CancellationWarning, CoarseMapWarning, OutsideTrainingWarning)

_LATEST = 8  # images, of which most have to be far
_CAUSES = (
    "Were they preprocessed as for extract_features (not with values of 0..255), and are layer and pool the same? "
    "Features that were normalised or scaled before fit are not what the network gives: let the head do that, "
    "make_pipeline(Normalizer(), ...)"
)
_COARSE = 4  # positions along a side
_CANCELLED = 10  # times as much on a map as its components contribute


class WarnOnce:
    """The warnings that were given for the maps of one method."""

    def __init__(self) -> None:
        self._told: set[type[Warning]] = set()
        self._asked: set[Any] = set()
        self._distances: dict[str, list[float]] = {}  # of the latest images, by measure
        self._start_at_zeros: tuple[str, str] | None = None  # a layer, and those whose means are needed

    def of_results(self, signed: Sequence[Any], *, blind: bool) -> None:
        """Say how maps, one for each branch, may be misread; ``blind``: blank maps have been explained already."""
        for branch, maps in enumerate(signed):
            self.of_layer(" + ".join(maps.layers), maps.maps.shape[2:])
            if branch == 0:
                self.of_start(maps.values, maps.baseline_values)
            if not can_sync(maps.nu):
                continue
            check_finite(maps.nu)
            if branch == 0:  # what the others have is the same
                self.of_maps(maps)
            if not blind and not bool(maps.nu.all()):
                warn_of_blanks(maps.maps, maps.nu, lambda image, k: signed[0].targets[k], maps.output)

    def note_start_at_zeros(self, layer: str, needed: str) -> None:
        """Note that maps of a layer start at zeros, as the means of the layers that are ``needed`` are unknown."""
        self._start_at_zeros = layer, needed

    def of_start(self, values: Tensor, at_start: Tensor | None) -> None:
        """Warn that maps start at zeros, and how far the values there (N, K) are from 0, where they may be looked at.

        Args:
            values: of targets.
            at_start: their values at the start.
        """
        if self._start_at_zeros is None or at_start is None:
            return
        layer, needed = self._start_at_zeros
        self._start_at_zeros, far = None, ""
        if can_sync(at_start):
            far = f", up to {_size(at_start):.3g} from 0, where values reach {_size(values):.3g}"
        self.warn_once(
            BaselineWarning,
            f"the training set's mean at {layer!r} is unknown, so maps start at zero activations, and add up to the "
            f"value minus that at zeros (baseline_values{far}): fit_model keeps these means of every block, or pass "
            f"mean=mean_activations(net, loader, {needed}), or baseline='zero' if that is meant",
        )

    def of_layer(self, layer: str, positions: Sequence[int]) -> None:
        """Warn if the maps of a layer have few positions, (H, W) or (D, H, W); looks at no values."""
        count = 1
        for side in positions:
            count *= side
        if count < _COARSE ** len(positions):
            size = "x".join(map(str, positions))
            self.warn_once(
                CoarseMapWarning,
                f"the maps of {layer!r} have only {size} positions, which look like one soft cloud over an image: "
                "choose an earlier layer, or larger images",
            )

    def of_maps(self, maps: Any) -> None:
        """Warn about the values of a SignedMaps; waits for the device."""
        self.of_images(maps.output)
        if maps.effects is not None:
            self.warn_of_cancelling(maps.targets, as_array(maps.cancellation))
        if maps.baseline_values is None or BaselineWarning in self._told:
            return
        values, at_baseline = as_array(maps.values), as_array(maps.baseline_values)
        for k in np.flatnonzero(2 * _is_ruled(values, at_baseline).sum(0) > len(values)):
            if _is_decision(maps.targets[k], maps.output):
                self._warn_about_baseline(maps.targets[k], values[:, k], at_baseline[:, k], maps.effects is None)

    def of_rows(self, output: Any, targets: Sequence[Any], values: Tensor, at_baseline: Tensor | None) -> None:
        """Warn about the values of maps with one target per image, values (N, 1); waits for the device."""
        self.of_images(output)
        rows = [n for n, target in enumerate(targets) if _is_decision(target, output)]
        if rows and at_baseline is not None and BaselineWarning not in self._told:
            kinds = {targets[n] for n in rows}
            decision = kinds.pop() if len(kinds) == 1 else "the decisions"
            columns = as_array(values)[rows, 0], as_array(at_baseline)[rows, 0]
            if 2 * _is_ruled(*columns).sum() > len(rows):
                self._warn_about_baseline(decision, *columns)

    def warn_of_cancelling(self, targets: Sequence[Any], cancellation: np.ndarray) -> None:
        """Warn if on some maps (N, K) evidence cancels that is much larger than the value that it explains."""
        most = cancellation.max(0)
        worst = int(most.argmax())
        if most[worst] > _CANCELLED:
            count = int((cancellation[:, worst] > _CANCELLED).sum())
            self.warn_once(
                CancellationWarning,
                f"on {count} of {len(cancellation)} maps of {targets[worst]}, colours of both signs cancel that are up "
                f"to {most[worst]:.3g} times as large as what the components contribute: look at these one by one, "
                "PCATarget(0) and so on, or fit fewer of them",
            )

    def of_images(self, output: Any) -> None:
        """Warn if most of the latest images are unlike the head's training images; waits for the device."""
        if OutsideTrainingWarning in self._told or not isinstance(output, OfHead):
            return
        for measure, measured in measure_images(output):
            # Use the median of the latest images, so that a single odd one gives no warning.
            distances = [*self._distances.get(measure.name, ()), *measured.tolist()]
            self._distances[measure.name] = distances = distances[-max(_LATEST, len(measured)) :]
            middle = median_low(distances)
            if middle > measure.find_limit(len(distances)):
                self.warn_once(
                    OutsideTrainingWarning,
                    f"the images are unlike the training images: {measure.in_words.format(middle)}. {_CAUSES}",
                )

    def _warn_about_baseline(
        self, decision: Any, values: np.ndarray, at_baseline: np.ndarray, has_gradient: bool = True
    ) -> None:
        """Warn that most values (N,) of a decision are due to the baseline, which a neutral one need not change."""
        (ruled,) = np.nonzero(_is_ruled(values, at_baseline))
        neutral = "; with baseline='neutral', it adds up to the value, if there is such a start"
        value, start = values[ruled[0]], at_baseline[ruled[0]]
        self.warn_once(
            BaselineWarning,
            f"for {len(ruled)} of {len(values)} images, the baseline contributes more to {decision} than the "
            f"image: a value of {value:.3g} is {start:.3g} at the baseline, so the map adds up to "
            f"{value - start:.3g}" + neutral * has_gradient,
        )

    def once(self, key: Any) -> bool:
        """Return whether something is asked for the first time."""
        first = key not in self._asked
        self._asked.add(key)
        return first

    def warn_once(self, category: type[Warning], message: str) -> None:
        """Give a warning, unless one of its kind was given."""
        if category not in self._told:
            self._told.add(category)
            warn(message, category)


def _size(values: Tensor) -> float:
    """Return the largest absolute value; waits for the device."""
    return float(abs(as_array(values)).max())


def _is_decision(target: Any, output: Any) -> bool:
    """Return whether a target is a decision, which has a boundary: the value of a regressor has none."""
    is_closed_form = isinstance(target, ClosedFormTarget) and isinstance(output, OfHead)
    return is_closed_form and target.boundary(output.head) is not None


def _is_ruled(values: np.ndarray, at_baseline: np.ndarray) -> np.ndarray:
    """Return where the baseline contributes more to a value than the image."""
    return abs(at_baseline) > abs(values - at_baseline)


def warn_of_blind_tokens(run: Run, layer: int, nu: Tensor) -> bool:
    """Say which layer to take where the features look at no token of a patch: not at the output of a last block."""
    if not run.layouts[layer].extra_tokens or not can_sync(nu) or bool(nu.any()):
        return False
    norm = next(reversed(norms_before_attention(find_backbone(run.model))), None)
    fix = f"choose {norm!r}, " if norm not in (None, run.layers[layer]) else "choose "
    warn(
        f"no map of {run.layers[layer]!r} has a gradient: after it the features look at other tokens only, such as "
        f"the class token; {fix}the last layer before an attention",
        BlankMapWarning,
    )
    return True
