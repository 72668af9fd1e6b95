"""Pixels: how well numbers at pixels tell the inside of true masks from the outside, and which faults they find."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import ndimage

from pytorch_grad_cam_pcasvm.runtime.pictures import as_array
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Estimate
from pytorch_grad_cam_pcasvm.studio.model.choices import choose_threshold

RATE = 0.01  # of good photos
SIZES = 0.001, 0.01  # of a photo's area: up to which a fault is tiny, and small
_CLAUSES = {
    "rate": "where at most 1 in {number:.3g} good photos raises a false alarm",
    "wanted": " (1 in {number:.3g} was asked for, for which {good} good photos are too few)",
    "faults": "{faults} of the faults are found ({sizes}), and {photos} of the photos with faults",
    "photos": "{photos} of the photos with faults are found",
    "size": "of those {size}: {share}",
    "share": "{share:.0%} ({count} of {number})",
}


@dataclass(frozen=True)
class FoundFaults:
    """Which faults have a number above the alarm threshold, which few good photos have anywhere.

    A fault is a connected region of a mask, also by corners.

    Attributes:
        alarm: the threshold, by the largest numbers of good photos; see :func:`.choose_threshold`.
        rate: of new good photos, at most this share has a larger one, on average; 1 / (n + 1), if n good photos are too
            few for the rate that was asked for.
        wanted: the rate that was asked for.
        good: how many good photos there are.
        faults: the share of the faults that are found.
        photos: the share of the photos with faults that have a number above the threshold.
        by_size: the share of the faults that are found, of those of a size.

    Example:
        >>> scores, masks = np.zeros((3, 8, 8)), np.zeros((3, 8, 8), bool)
        >>> masks[0, 2:4, 2:5], scores[0, 2, 2] = True, 1.0
        >>> found = evaluation.pixel_scores(scores, masks).found
        >>> found.faults.mean, found.good
        (1.0, 2)
    """

    alarm: float
    rate: float
    wanted: float
    good: int
    faults: Estimate
    photos: Estimate
    by_size: dict[str, Estimate] = field(default_factory=dict)

    def describe(self) -> str:
        """Return it in a sentence, without a full stop."""
        return self._write("faults")

    def describe_photos(self) -> str:
        """Return which photos are found, in a sentence without a full stop."""
        return self._write("photos")

    def _write(self, clause: str) -> str:
        """Return the rate of false alarms, and one of the clauses about the faults found at it."""
        rate = _CLAUSES["rate"].format(number=1 / self.rate)
        if self.rate > self.wanted:
            rate += _CLAUSES["wanted"].format(number=1 / self.wanted, good=self.good)
        sizes = [_CLAUSES["size"].format(size=name, share=_write_share(share)) for name, share in self.by_size.items()]
        faults, photos = _write_share(self.faults), _write_share(self.photos)
        return f"{rate}, {_CLAUSES[clause].format(faults=faults, photos=photos, sizes='; '.join(sizes))}"


def find_faults(scores: np.ndarray, masks: np.ndarray, rate: float = RATE) -> FoundFaults | None:
    """Return which faults are found, or None: there is no good photo, by which alarms are measured.

    Args:
        scores: shape (N, H, W), larger inside.
        masks: true masks, boolean, of the same shape; all False for good photos.
        rate: the share of good photos that may raise a false alarm.
    """
    axes = tuple(range(1, masks.ndim))
    peaks, masked = scores.max(axes), masks.any(axes)
    if masked.all():
        return None
    threshold = choose_threshold(peaks[~masked], rate)
    hits, sizes = [], []
    for image, mask in zip(scores[masked], masks[masked], strict=True):
        regions, count = ndimage.label(mask, np.ones((3,) * mask.ndim))
        numbers = np.arange(1, count + 1)
        hits.append(np.asarray(ndimage.maximum(image, regions, numbers)) > threshold.score)
        sizes.append(np.bincount(regions.ravel(), minlength=count + 1)[1:] / mask.size)
    of_faults, size = np.concatenate(hits), np.concatenate(sizes)
    parts = {name: of_faults[(low < size) & (size <= high)] for name, (low, high) in _bounds().items()}
    return FoundFaults(
        threshold.score,
        threshold.rate,
        threshold.wanted,
        threshold.count,
        Estimate.of(of_faults, bounds=(0, 1)),
        Estimate.of(peaks[masked] > threshold.score, bounds=(0, 1)),
        {name: Estimate.of(part, bounds=(0, 1)) for name, part in parts.items() if len(part)},
    )


def _bounds() -> dict[str, tuple[float, float]]:
    """Return the sizes that are told apart, as shares of a photo's area, by name."""
    low, high = SIZES
    return {
        f"up to {low:.1%} of the photo": (0.0, low),
        f"{low:.1%} to {high:.0%}": (low, high),
        f"above {high:.0%}": (high, 1.0),
    }


def _write_share(share: Estimate) -> str:
    return _CLAUSES["share"].format(share=share.mean, count=round(share.mean * share.n), number=share.n)


TOLERANCE = 15  # pixels, as in Zhang et al., IJCV 2018
LIMIT = 0.3  # of false positives, as in Bergmann et al., CVPR 2019
_BINS, _SAMPLES = 1024, 200  # of the bootstrap


@dataclass(frozen=True)
class PixelScores:
    """How well numbers at pixels tell the inside of masks from the outside.

    The standard errors are those of a bootstrap over images.

    Attributes:
        auroc: area under the ROC curve of all pixels, in [0, 1]; chance is 0.5.
        aupro: area under the curve of the mean overlap with each region (connected, also by corners), up to 30 % of
            false positives, as a part of that; in [0, 1]. Chance is 0.15.
        f1: the best F1 score of all thresholds, in [0, 1].
        threshold: the number from which on pixels are inside, for that.
        pointing: the share of images with a mask whose largest number lies in it.
        near: the share of those in which it lies at most so many pixels away.
        image_auroc: area under the ROC curve of images by their largest number: is there anything? NaN where all images
            have a mask, or none.
        images: how many images there are.
        masked: how many of them have a mask that is not empty.
        regions: number of connected regions.
        found: which of these are found, at a rate of false alarms; None: all images have a mask.

    Example:
        >>> truth = np.zeros((2, 8, 8), bool)
        >>> truth[0, 2:4, 2:5] = True
        >>> scores = evaluation.pixel_scores(truth + 0.1 * np.arange(8), truth)
        >>> scores.regions, scores.masked
        (1, 1)
    """

    auroc: Estimate
    aupro: Estimate
    f1: Estimate
    threshold: float
    pointing: Estimate
    near: Estimate
    image_auroc: Estimate
    images: int
    masked: int
    regions: int
    found: FoundFaults | None


def pixel_scores(
    scores: Any, masks: Any, *, tolerance: float = TOLERANCE, rate: float = RATE, seed: int = 0
) -> PixelScores:
    """Measure how well numbers at pixels, such as anomaly maps, tell the inside of masks from the outside.

    Args:
        scores: shape (N, H, W), larger inside.
        masks: true masks, shape (N, H, W), nonzero inside; all zeros for images on which there is nothing.
        tolerance: how many pixels away from a mask the largest number may be.
        rate: the share of images without a mask that may raise a false alarm, in (0, 1).
        seed: random seed of the bootstrap.

    Returns:
        The scores.

    Raises:
        ValueError: the shapes differ, numbers are not finite, there is nothing inside or outside of masks, or the rate
            is no share.

    Example:
        >>> truth = np.zeros((2, 8, 8), bool)
        >>> truth[0, 2:4, 2:5] = True
        >>> evaluation.pixel_scores(truth + 0.1 * np.arange(8), truth).auroc.mean
        1.0
    """
    numbers, inside = as_array(scores), np.nan_to_num(as_array(masks)) != 0
    if numbers.ndim < 2 or numbers.shape != inside.shape:
        raise ValueError(
            f"scores have shape {numbers.shape} and masks {inside.shape}: both must be (N, H, W); "
            "maps.positive(size=(H, W), scale='none') is of their size"
        )
    numbers = numbers.astype(np.float64, copy=False)
    if not np.isfinite(numbers).all():
        raise ValueError("the scores are not finite")
    if not inside.any() or inside.all():
        raise ValueError(f"{'nothing' if not inside.any() else 'everything'} lies inside of the masks")
    if not 0 < rate < 1:
        raise ValueError(f"rate must be a share above 0 and below 1, such as 0.01, got {rate!r}")
    weights, regions = _region_weights(inside)
    masked = np.asarray(inside.reshape(len(inside), -1).any(1))
    # Of equal numbers, all are above a threshold, or none.
    values, level = np.unique(-numbers, return_inverse=True)
    level = level.reshape(numbers.shape)
    counts = [np.bincount(level[part], of_part, len(values)) for part, of_part in (
        (~inside, None), (inside, None), (inside, weights[inside]),
    )]  # fmt: skip
    f1 = _f1(*counts[:2])
    near = [pointing(image, mask, tolerance) for image, mask in zip(numbers[masked], inside[masked], strict=True)]
    peaks = numbers.reshape(len(numbers), -1).max(1)
    errors = _standard_errors(numbers, inside, weights, seed)
    count = len(numbers)
    return PixelScores(
        auroc=Estimate(float(_auroc(*counts[:2])), errors[0], count),
        aupro=Estimate(float(_aupro(counts[0], counts[2])), errors[1], count),
        f1=Estimate(float(f1.max()), errors[2], count),
        threshold=float(-values[f1.argmax()]),
        pointing=Estimate.of([exact for exact, _ in near], bounds=(0, 1)),
        near=Estimate.of([close for _, close in near], bounds=(0, 1)),
        image_auroc=measure_image_auroc(peaks, masked),
        images=count,
        masked=int(masked.sum()),
        regions=regions,
        found=find_faults(numbers, inside, rate),
    )


def by_class(scores: np.ndarray, masks: np.ndarray, labels: Sequence[Any], **options: Any) -> dict[str, PixelScores]:
    """Return the scores of each class that has masks: on its images and on images without any mask."""
    masked = np.asarray(masks.reshape(len(masks), -1).any(1))
    classes = dict.fromkeys(label for label, has_mask in zip(labels, masked, strict=True) if has_mask)
    if len(classes) < 2:
        return {}
    result = {}
    for name in sorted(classes, key=str):
        rows = ~masked | (np.array([label == name for label in labels]) & masked)
        if not masks[rows].all():
            result[str(name)] = pixel_scores(scores[rows], masks[rows], **options)
    return result


def _region_weights(inside: np.ndarray) -> tuple[np.ndarray, int]:
    """Return 1 / (the number of pixels of its region) of each pixel inside, and the number of regions."""
    weights, count = np.zeros(inside.shape), 0
    structure = np.ones((3,) * (inside.ndim - 1))
    for image, mask in enumerate(inside):
        regions, region_count = ndimage.label(mask, structure)
        sizes = np.bincount(regions.ravel())
        weights[image] = np.where(mask, 1 / sizes[regions], 0)
        count += region_count
    return weights, count


def _auroc(outside: np.ndarray, inside: np.ndarray) -> Any:
    """Return the area under the ROC curve, of counts at each level from the highest, (..., levels)."""
    above = inside.cumsum(-1) - 0.5 * inside  # equal numbers count half
    return (above * outside).sum(-1) / (inside.sum(-1) * outside.sum(-1))


def _aupro(outside: np.ndarray, overlap: np.ndarray) -> Any:
    """Return the area under the curve of overlap up to the limit, of counts at each level from the highest."""
    false = outside.cumsum(-1) / outside.sum(-1, keepdims=True)
    hit = overlap.cumsum(-1) / overlap.sum(-1, keepdims=True)
    zero = np.zeros((*false.shape[:-1], 1))
    x, y = np.concatenate([zero, false], -1), np.concatenate([zero, hit], -1)
    # Beyond the limit, a step counts only as far as that.
    width = np.diff(x, axis=-1)
    part = np.divide((LIMIT - x[..., :-1]).clip(0, width), width, out=np.zeros_like(width), where=width > 0)
    mean = y[..., :-1] + 0.5 * part * np.diff(y, axis=-1)
    return (part * width * mean).sum(-1) / LIMIT


def _f1(outside: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Return the F1 score of each threshold, of counts at each level from the highest."""
    hits, false = inside.cumsum(-1), outside.cumsum(-1)
    result: np.ndarray = 2 * hits / (hits + false + inside.sum(-1, keepdims=True))
    return result


def pointing(numbers: np.ndarray, mask: np.ndarray, tolerance: float) -> tuple[float, float]:
    """Return whether the largest number lies in a mask, and whether at most so far away; equal ones share."""
    largest = numbers == numbers.max()
    away = ndimage.distance_transform_edt(~mask)[largest]
    return float((away == 0).mean()), float((away <= tolerance).mean())


def measure_image_auroc(peaks: np.ndarray, masked: np.ndarray) -> Estimate:
    """Return the area under the ROC curve of images, with its standard error (DeLong et al., Biometrics 1988)."""
    positive, negative = peaks[masked], peaks[~masked]
    if not len(positive) or not len(negative):
        return Estimate(float("nan"), float("nan"), 0)
    higher = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
    variances = [part.var(ddof=1) / len(part) for part in (higher.mean(1), higher.mean(0)) if len(part) > 1]
    return Estimate(float(higher.mean()), float(np.sqrt(sum(variances))) if variances else float("nan"), len(peaks))


def _standard_errors(numbers: np.ndarray, inside: np.ndarray, weights: np.ndarray, seed: int) -> list[float]:
    """Return the standard errors of AUROC, AUPRO and F1, of images drawn again, with numbers in bins."""
    count = len(numbers)
    if count < 2:
        return [float("nan")] * 3
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, _BINS + 1)[1:-1]))
    bins = len(edges) - np.searchsorted(edges, numbers, side="right")  # 0 has the largest
    bin_count = len(edges) + 1
    histograms = np.stack([
        np.stack([
            np.bincount(bins[image][part[image]], None if of is None else of[image][part[image]], bin_count)
            for image in range(count)
        ])
        for part, of in ((~inside, None), (inside, None), (inside, weights))
    ])  # fmt: skip
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), _SAMPLES)
    outside, within, overlap = draws @ histograms
    valid = (outside.sum(-1) > 0) & (within.sum(-1) > 0)
    outside, within, overlap = outside[valid], within[valid], overlap[valid]
    measured = _auroc(outside, within), _aupro(outside, overlap), _f1(outside, within).max(-1)
    return [float(np.std(values, ddof=1)) if len(values) > 1 else float("nan") for values in measured]
