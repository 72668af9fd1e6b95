"""Consistency: do maps add up to the explained value, move with the image, and stay the same under noise?"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.rivals import ANOTHER, HEAD, RANDOM, Rivals
from pytorch_grad_cam_pcasvm.evaluation.statistics import ALIKE, ANYTHING, SAME, Estimate, rank_correlations
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject, generator, heat
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

    def collect_result() -> Result:
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
                differences[method, source].append(np.abs(_add_up(source_maps) - own))
            signs = [float(image_map.maps.double().sum()) * float(image_map.values) for image_map in maps]
            contradicting[method] += [sign < 0 for sign in signs]
            subject.add(method, differences[method, ""][-1], rows_of, x, maps)
        yield subject.step(collect_result, lambda row: bool(row.verdict))


def _add_up(maps: Sequence[SignedMaps]) -> np.ndarray:
    """Return the sum of each map, its remainder and the value at its baseline, shape (N,)."""
    sums = []
    for image_map in maps:
        remainder = 0.0 if image_map.remainder is None else float(image_map.remainder)
        total = float(image_map.maps.double().sum()) + remainder
        start = 0.0 if image_map.baseline_values is None else float(image_map.baseline_values)
        sums.append(total * float(image_map.log_scale.exp()) + start)
    return np.array(sums)


NOISE, SHIFT = "the image with noise", "the image shifted"


@measured_whole
def stability(  # noqa: D417 - of the study its class tells
    study: Subject,
    *,
    noise: float = 0.1,
    shift: float = 0.05,
) -> Steps:
    """Measure the rank correlation of each map with the map of the same image, with noise or shifted.

    The edge of a shifted image is repeated to fill the gap, and only the parts present in both maps are compared. The
    target stays the same.

    Args:
        noise: standard deviation of the noise, as a fraction of that of the image.
        shift: shift along the last axis, as a fraction of the width.

    Returns:
        The correlation for each method and change, which passes above 0.5, and how far it exceeds the correlation of
        each control with the changed image's map: random maps, another image's map, the blind map and a randomised
        head's map.

    Raises:
        ValueError: the noise is negative, or the shift is not between 0 and 1.

    Example:
        >>> result = evaluation.stability(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result.settings["images"]
        6
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    if noise < 0 or not 0 <= shift < 1:
        raise ValueError(f"noise must be 0 or more, and shift between 0 and 1, got {noise} and {shift}")
    subject = study.fresh()
    against = Rivals(subject)
    correlations = defaultdict[Any, list[np.ndarray]](list)  # by method, change and rival

    def measured() -> list[Row]:
        numbers = {key: np.concatenate(parts) for key, parts in correlations.items()}
        rows = []
        for method in subject.named:
            for change in (NOISE, SHIFT):
                own = numbers[method, change, ""]
                rows.append(Row(method, change, "", Estimate.of(own, bounds=(-1, 1)), ALIKE))
                for rival in against.names:
                    ahead = Estimate.of(own - numbers[method, change, rival], bounds=(-2, 2))
                    rows.append(Row(method, change, rival, ahead, 0.0))
        return rows

    def collect_result() -> Result:
        return subject.result(
            "stability",
            "does the map stay the same under noise, and move with the image? (rank correlation)",
            measured(),
            noise=noise,
            shift=shift,
        )

    yield None
    for x, _, rows_of in subject.batches("stability", looks=True):
        targets, size = subject.targets(x), x.shape[2:]
        shared = {name: heat(maps, size) for name, maps in against.next(x, targets, rows_of).items()}
        pixels = max(1, round(shift * size[-1])) if shift else 0
        if pixels >= size[-1]:
            raise ValueError(f"a shift of {shift} leaves nothing of images {size[-1]} pixels wide")
        spread = x.flatten(1).std(1).reshape(-1, *[1] * (x.dim() - 1))
        random = np.stack([generator(subject.seed, 3, row).normal(size=x.shape[1:]) for row in rows_of])
        changed = {
            NOISE: x + noise * spread * torch.from_numpy(random).to(x),
            SHIFT: torch.cat([x[..., :1].expand(*x.shape[:-1], pixels), x[..., : size[-1] - pixels]], -1),
        }
        for method in subject.named:
            maps = against.of(method)
            before = {name: heat(source_maps, size) for name, source_maps in maps.items()} | shared
            for change, changed_images in changed.items():
                after = heat(subject.explained(method, changed_images, targets), size)
                for source, first in before.items():
                    second = after
                    if change == SHIFT:  # what both of them have
                        first, second = first[..., : size[-1] - pixels], after[..., pixels:]
                    correlations[method, change, source].append(rank_correlations(first, second))
            similarity = correlations[method, NOISE, ""][-1] + correlations[method, SHIFT, ""][-1]
            subject.add(method, -similarity, rows_of, x, maps[""])
        yield subject.step(collect_result, lambda row: row.against in ("", RANDOM))
