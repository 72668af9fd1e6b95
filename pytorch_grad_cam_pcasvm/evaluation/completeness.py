"""Completeness: do maps add up to the explained value?"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.evaluation.intervals import ANYTHING, SAME
from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.rivals import ANOTHER, HEAD, Rivals
from pytorch_grad_cam_pcasvm.evaluation.statistics import Estimate
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject
from pytorch_grad_cam_pcasvm.evaluation.turns import Steps, measured_whole
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.targets import ClosedFormTarget

ERROR = "distance of the sum from the value"
CONTRADICTING = "maps that contradict the decision"
MOST_CONTRADICTING = 0.1  # of the maps
EXACT = 1e-3  # of the spread of the values; float32 keeps more


@measured_whole
def completeness(study: Subject) -> Steps:
    """Measure how far the sums of maps are from the values that they explain.

    The measure is ``|sum of the map + remainder + value at the baseline - value|``, in standard deviations of the
    values over the images; for a method without a baseline, the sum of the map is compared with the value itself.

    Returns:
        A row for each method, which passes below a thousandth, and how much farther from the value the sums of another
        image's map and of a randomised head's map are. (Random maps and the blind map are not in units of the value.)
        Methods that do not claim to add up have nothing to pass. For decisions, also the share of maps that contradict
        them because their sum has the opposite sign: it passes below a tenth, whatever the method claims.

    Raises:
        ValueError: the target has the same value for all images.

    Example:
        >>> result = evaluation.completeness(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result.blank
        {'ClosedFormGradCAM': 0.0, 'ContributionCAM': 0.0}
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    subject = study.fresh()
    against = Rivals(subject, (ANOTHER, HEAD))
    values: list[np.ndarray] = []
    promised: set[str] = set()  # methods whose maps have a value at a baseline to add to
    differences = defaultdict[Any, list[np.ndarray]](list)  # by method and rival
    contradicting = defaultdict[str, list[bool]](list)
    decides = isinstance(subject.target, ClosedFormTarget) and subject.target.boundary(subject.net.head) is not None

    def measured() -> list[Row]:
        spread = float(np.concatenate(values).std())
        if not spread > SAME * np.abs(np.concatenate(values)).max():
            raise ValueError("the target has the same value for all images: there is no scale to measure distances on")
        distances = {key: np.concatenate(parts) / spread for key, parts in differences.items()}
        rows = []
        for method in subject.named:
            own, passes = distances[method, ""], method in promised
            error = Estimate.of(own, bounds=ANYTHING)
            rows.append(Row(method, ERROR, "", error, EXACT if passes else None, below=True))
            for rival in against.names:
                farther = Estimate.of(distances[method, rival] - own, bounds=ANYTHING)
                rows.append(Row(method, ERROR, rival, farther, 0.0 if passes else None))
            if decides:
                share = Estimate.of(contradicting[method], bounds=(0, 1))
                rows.append(Row(method, CONTRADICTING, "", share, MOST_CONTRADICTING, below=True))
        return rows

    def found() -> Result:
        return subject.result(
            "completeness",
            "how far are the sums of maps from the values that they explain? (in standard deviations of the values)",
            measured(),
        )

    yield None
    for x, _, rows_of in subject.batches("completeness", looks=True):
        targets = subject.targets(x)
        values.append(subject.values(x, targets))
        against.next(x, targets, rows_of)
        for method in subject.named:
            theirs = against.of(method)
            maps = theirs[""]
            if maps[0].baseline_values is not None:
                promised.add(method)
            own = np.array([float(image_map.values) for image_map in maps])
            for source, source_maps in theirs.items():
                differences[method, source].append(np.abs(_sums(source_maps) - own))
            signs = [float(image_map.maps.double().sum()) * float(image_map.values) for image_map in maps]
            contradicting[method] += [sign < 0 for sign in signs]
            subject.add(method, differences[method, ""][-1], rows_of, x, maps)
        yield subject.step(found, lambda row: bool(row.verdict))


def _sums(maps: Sequence[SignedMaps]) -> np.ndarray:
    """Return the sum of each map, its remainder and the value at its baseline, shape (N,)."""
    sums = []
    for image_map in maps:
        remainder = 0.0 if image_map.remainder is None else float(image_map.remainder)
        total = float(image_map.maps.double().sum()) + remainder
        start = 0.0 if image_map.baseline_values is None else float(image_map.baseline_values)
        sums.append(total * float(image_map.log_scale.exp()) + start)
    return np.array(sums)
