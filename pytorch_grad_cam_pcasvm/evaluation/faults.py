"""Faults: the share of masked faults that are found at a rate of false alarms among good photos."""

from dataclasses import dataclass, field

import numpy as np
from scipy import ndimage

from pytorch_grad_cam_pcasvm.evaluation.statistics import Estimate
from pytorch_grad_cam_pcasvm.model.thresholds import choose_threshold

RATE = 0.01  # of good photos
SIZES = 0.001, 0.01  # of a photo's area: up to which a fault is tiny, and small


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
        sizes = "; ".join(f"of those {name}: {_describe_share(share)}" for name, share in self.by_size.items())
        return (
            f"{self._describe_rate()}, {_describe_share(self.faults)} of the faults are found ({sizes}), and "
            f"{_describe_share(self.photos)} of the photos with faults"
        )

    def describe_photos(self) -> str:
        """Return which photos are found, in a sentence without a full stop."""
        return f"{self._describe_rate()}, {_describe_share(self.photos)} of the photos with faults are found"

    def _describe_rate(self) -> str:
        few = f", for which {self.good} good photos are too few" if self.rate > self.wanted else ""
        wanted = f" (1 in {1 / self.wanted:.3g} was asked for{few})" if few else ""
        return f"where at most 1 in {1 / self.rate:.3g} good photos raises a false alarm{wanted}"


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
    found, sizes = [], []
    for image, mask in zip(scores[masked], masks[masked], strict=True):
        regions, count = ndimage.label(mask, np.ones((3,) * mask.ndim))
        numbers = np.arange(1, count + 1)
        found.append(np.asarray(ndimage.maximum(image, regions, numbers)) > threshold.score)
        sizes.append(np.bincount(regions.ravel(), minlength=count + 1)[1:] / mask.size)
    of_faults, size = np.concatenate(found), np.concatenate(sizes)
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


def _describe_share(share: Estimate) -> str:
    return f"{share.mean:.0%} ({round(share.mean * share.n)} of {share.n})"
