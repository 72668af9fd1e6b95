"""Faithfulness: does the decision fall where the map says it should?"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pytorch_grad_cam.metrics.road import NoisyLinearImputer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode
from pytorch_grad_cam_pcasvm.studio.evaluation.result import ANYTHING, SAME, Estimate, Result, Row
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import RANDOM, RIVALS, SHARED, Rivals
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject, heat, seeded
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import Steps, measured_whole

_QUESTION = (
    "does the value fall more than with a control when the map's most relevant pixels are removed, and less when only "
    "they are kept? (in standard deviations of the value)"
)
KINDS = ("deletion", "insertion")


@measured_whole
def faithfulness(  # noqa: D417 - of the study its class tells
    study: Subject,
    *,
    fractions: Sequence[float] = (0.25, 0.5, 0.75),
    fill: str = "blur",
    patches: int | None = None,
    arcc: bool = False,
    rivals: Sequence[str] = RIVALS,
) -> Steps:
    """Measure deletion and insertion against controls.

    Deletion removes the most relevant part of an image, insertion keeps only that part; pixels are ranked by the signed
    map, and fractions are exact to the pixel. The number for each image is the mean over the fractions, in standard
    deviations of the target's value over the images: how much further the value falls than with the control (deletion),
    or how much more of it remains (insertion). Above 0, the map is better.

    Args:
        fractions: fractions of the pixels, between 0 and 1.
        fill: the replacement for removed pixels: ``"blur"``, the image blurred over a tenth of its side; ``"mean"``,
            the mean of the image; ``"road"``, ROAD's noisy linear imputation (from pytorch-grad-cam).
        patches: rank square patches, this many along the longer side, by the mean of the map, instead of pixels, so
            that maps of different resolutions remove pieces of one size. None: rank pixels.
        arcc: also compute ARCC, pytorch-grad-cam's mean of coherency, simplicity and ROAD, from 0 to 1 (grad-cam 1.5.7
            or newer; slow). It is meant for probabilities: explain a ``ProbabilityTarget``, otherwise ROAD's part is 0
            or 1.
        rivals: the controls to compare with: some of ``"random maps"``, ``"another image's map"``, ``"the blind map"``,
            ``"a randomised head's map"``, or the name of one of the methods.

    Returns:
        A row for each method, measure and control: random maps of the same resolution, the map of another image for the
        same target, the blind map (the sum of the activations), and the map of a head whose components are rotated at
        random. Every image has its own random map and rotation. Where a map is flat, the random map ranks its pixels.
        Blank maps are counted, but left out of the means.

    Raises:
        ImportError: ``arcc`` with a version of grad-cam that does not have it.
        ValueError: a control or the fill is unknown, fractions are not between 0 and 1, or all images have the same
            value, as they are or once parts of them are removed.

    Example:
        >>> result = evaluation.faithfulness(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result["ContributionCAM", "deletion", "random maps"].n
        6
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    _check(fill, patches, fractions)
    subject = study.fresh()
    against = Rivals(subject, rivals)
    change, of_host = (defaultdict[Any, list[np.ndarray]](list) for _ in range(2))
    values: list[np.ndarray] = []
    ranges: list[np.ndarray] = []  # of the values of each image, over all that was removed

    def collect_result() -> Result:
        # Of a few images, parts of which change nothing, more may say more.
        _refuse_constant(np.concatenate(ranges), np.concatenate(values))
        spread = float(np.concatenate(values).std())
        if not spread > SAME * np.abs(np.concatenate(values)).max():
            raise ValueError("the target has the same value for all images: there is nothing that could fall")
        mean = {key: np.concatenate(parts) / spread for key, parts in change.items()}
        rows = [row for method in subject.named for row in _compare_rivals(method, mean, against)]
        for method, scores in of_host.items():
            blank = np.isnan(mean[(method, ""), "deletion"]).any(1)
            rows.append(Row(method, "ARCC", "", Estimate.of(np.where(blank, np.nan, np.concatenate(scores)))))
        sources: dict[str, Any] = {method: (method, "") for method in subject.named}
        sources |= {rival: rival for rival in SHARED if rival in against.names}
        return subject.result(
            "faithfulness",
            _QUESTION + subject.without_normal,
            rows,
            {"fractions": list(fractions), **_curves(mean, sources)},
            fill=fill,
            fractions=list(fractions),
            patches=patches,
        )

    yield None
    for x, _, rows_of in subject.batches("faithfulness", looks=True):
        targets = subject.targets(x)
        value = subject.values(x, targets)
        values.append(value)
        size = x.shape[2:]
        shared = {name: heat(maps, size) for name, maps in against.next(x, targets, rows_of).items()}
        maps_of = {method: against.of(method) for method in subject.named}
        ranked = _heat_sources(maps_of, {name: shared[name] for name in shared if name in against.names}, size, patches)
        fill_pixels, left_out = FILLS[fill](x), subject.for_normal(x)[:, None]
        of_parts: list[np.ndarray] = []
        for source, heatmaps in ranked.items():
            order = ranks(heatmaps, shared[RANDOM])
            nonzero = heatmaps.reshape(len(heatmaps), -1).any(1, keepdims=True)
            for measure in KINDS:
                after = [subject.values(without(fill_pixels, order, measure, f), targets) for f in fractions]
                of_parts += after
                changed = np.stack(after, 1) - value[:, None]
                change[source, measure].append(np.where(nonzero & ~left_out, changed, np.nan))
            yield None  # which takes as long as other checks take for a batch
        ranges.append(np.ptp(of_parts, axis=0)[~left_out[:, 0]])
        for method, maps in maps_of.items():
            stays, falls = (change[(method, ""), measure][-1].mean(1) for measure in KINDS)
            subject.add(method, stays - falls, rows_of, x, maps[""])
            if arcc:
                of_host[method].append(_arcc(subject, method, x, targets))
        yield subject.step(collect_result, lambda row: row.against == RANDOM)


def _heat_sources(
    maps_of: Mapping[str, Mapping[str, Any]], shared: Mapping[str, np.ndarray], size: Sequence[int], patches: int | None
) -> dict[Any, np.ndarray]:
    """Return the heatmaps of all sources, in patches if these are removed: shared ones, and those of each method."""
    heatmaps: dict[Any, np.ndarray] = dict(shared)
    for method, maps in maps_of.items():
        heatmaps |= {(method, name): heat(source_maps, size) for name, source_maps in maps.items()}
    if patches is None:
        return heatmaps
    return {source: in_patches(values, patches) for source, values in heatmaps.items()}


def _check(fill: str, patches: int | None, fractions: Sequence[float]) -> None:
    if fill not in FILLS:
        raise ValueError(f"fill must be one of {sorted(FILLS)}, got {fill!r}")
    if patches is not None and (not isinstance(patches, int) or patches < 2):
        raise ValueError(f"patches must be an integer from 2, or None, got {patches!r}")
    if np.ndim(fractions) != 1 or not len(fractions) or not all(0 < fraction < 1 for fraction in fractions):
        raise ValueError(f"fractions must be numbers between 0 and 1, such as (0.1, 0.3, 0.5), got {fractions}")


def _refuse_constant(ranges: np.ndarray, values: np.ndarray) -> None:
    """Refuse values (N,) that keep to one for each image, by ranges (N',) over all that is removed from an image."""
    if not ranges.max(initial=0.0) > SAME * np.abs(values).max():
        raise ValueError(
            "once parts of an image are removed, the target has the same value whichever they are, as such images are "
            "far from all training images. This says nothing about the maps. A smaller gamma or a linear kernel "
            "reaches farther"
        )


def _curves(mean: Mapping[Any, np.ndarray], sources: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Return the mean change at each fraction, for each name, by measure."""
    return {
        measure: {
            name: [Estimate.of(column).mean for column in mean[source, measure].T] for name, source in sources.items()
        }
        for measure in KINDS
    }


def _compare_rivals(method: str, mean: Mapping[Any, np.ndarray], against: Rivals) -> list[Row]:
    """Return how much more a method's maps change the value than controls and other methods do."""
    sources: dict[str, Any] = {rival: rival if rival in SHARED else (method, rival) for rival in against.names}
    sources |= {rival: (rival, "") for rival in against.methods if rival != method}
    rows = []
    for measure in KINDS:
        sign = -1 if measure == "deletion" else 1
        own = mean[(method, ""), measure].mean(1)
        for rival, source in sources.items():
            ahead = Estimate.of(sign * (own - mean[source, measure].mean(1)), bounds=ANYTHING)
            rows.append(Row(method, measure, rival, ahead, 0.0))
    return rows


def _arcc(subject: Subject, method: str, x: Tensor, targets: Sequence[Any]) -> np.ndarray:
    """Return pytorch-grad-cam's ARCC of the map of each image, (N,)."""
    try:
        from pytorch_grad_cam.metrics.arcc import ARCC
    except ImportError as error:
        raise ImportError("this grad-cam has no ARCC: pip install --upgrade grad-cam, or use arcc=False") from error
    cam, scores = subject.cam(method), []
    for image, target in zip(x.split(1), targets, strict=True):
        with seeded(subject.seed), evaluation_mode(subject.net):  # ROAD's noise comes from torch's own generator
            scores.append(ARCC(cam)(image, cam(image, targets=[target]), [target], subject.net)[0])
    return np.asarray(scores, np.float64)


def ranks(maps: np.ndarray, ties: np.ndarray) -> np.ndarray:
    """Return the ranks of the pixels of each map, from 0, the least relevant; equal ones as other maps rank them."""
    flat = maps.reshape(len(maps), -1)
    order = np.lexsort((ties.reshape(flat.shape), flat), axis=1)
    ranked = np.empty_like(order)
    np.put_along_axis(ranked, order, np.arange(flat.shape[1])[None], 1)
    return ranked.reshape(maps.shape)


def in_patches(maps: np.ndarray, count: int) -> np.ndarray:
    """Return maps (N, ...) with their means over patches, of which ``count`` lie along the longer side."""
    side = max(maps.shape[1:]) / count
    grid = [max(1, round(size / side)) for size in maps.shape[1:]]
    whole = torch.from_numpy(maps).unsqueeze(1)
    pool: Any = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[len(grid)]
    return F.interpolate(pool(whole, grid), maps.shape[1:], mode="nearest-exact")[:, 0].numpy()


Filled = Callable[[Tensor], Tensor]  # from what is kept, boolean (N, ...), to images


def without(fill: Filled, order: np.ndarray, measure: str, fraction: float) -> Tensor:
    """Return images without their most relevant pixels (``deletion``), or with only these (``insertion``).

    Args:
        fill: one of ``FILLS`` applied to images: returns them with only some pixels kept.
        order: ranks of the pixels, shape (N, ...).
        measure: ``deletion`` or ``insertion``.
        fraction: fraction of the pixels that count as the most relevant.

    Returns:
        Images, shape (N, C, ...).
    """
    pixels = order[0].size
    top = torch.from_numpy(order >= pixels - round(fraction * pixels))
    return fill(~top if measure == "deletion" else top)


def _blurred(x: Tensor) -> Filled:
    """Put the image, blurred over a tenth of its side, where nothing is kept."""
    blurred = x
    for axis in range(2, x.dim()):
        sigma = max(x.shape[axis] / 10, 0.5)
        reach = min(math.ceil(3 * sigma), x.shape[axis] - 1)
        weights = torch.exp(-(torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype) ** 2) / (2 * sigma**2))
        lines = blurred.movedim(axis, -1)
        padded = F.pad(lines.reshape(-1, 1, lines.shape[-1]), (reach, reach), mode="reflect")
        blurred = F.conv1d(padded, (weights / weights.sum())[None, None]).reshape(lines.shape).movedim(-1, axis)
    return lambda keep: torch.where(keep.unsqueeze(1).to(x.device), x, blurred)


def _fill_with_mean(x: Tensor) -> Filled:
    """Put the mean of each channel where nothing is kept."""
    mean = x.mean(tuple(range(2, x.dim())), keepdim=True)
    return lambda keep: torch.where(keep.unsqueeze(1).to(x.device), x, mean)


def _road(x: Tensor) -> Filled:
    """Fill removed pixels by pytorch-grad-cam's noisy linear imputation (ROAD, arXiv 2202.00449)."""
    if x.dim() != 4:
        raise ValueError("ROAD imputes pixels of images, but these are volumes: use fill='blur' or 'mean'")
    imputer, images = NoisyLinearImputer(), x.cpu()

    def fill_pixels(keep: Tensor) -> Tensor:
        done = []
        for image, mask in zip(images, keep, strict=True):
            with seeded(0):  # its noise comes from torch's own generator, and is the same in batches of any size
                done.append(imputer(image, mask.float()))
        return torch.stack(done).to(x)

    return fill_pixels


FILLS: dict[str, Callable[[Tensor], Filled]] = {"blur": _blurred, "mean": _fill_with_mean, "road": _road}
