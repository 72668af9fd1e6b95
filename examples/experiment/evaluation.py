"""Can the maps be believed? Numbers over the test set, not one picture."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from pytorch_grad_cam.metrics.perturbation_confidence import (
    PerturbationConfidenceMetric,
    RemoveLeastRelevantFirst,
    RemoveMostRelevantFirst,
)
from torch import Tensor
from tqdm.auto import tqdm

from experiment.frozen import FrozenFeatures
from pytorch_grad_cam_pcasvm import BlankMapWarning, ClosedFormGradCAM, PCASVMNet, SVMTarget

FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.9)


def explained(
    net: PCASVMNet, features: FrozenFeatures, targets: Sequence[Any], device: str, batch: int = 256
) -> tuple[Tensor, Tensor]:
    """Return the signed maps, (R, K, M, N), and the values, (R, K), of a network of dense layers on frozen features."""
    parts = []
    with ClosedFormGradCAM(net, [net.backbone.features]) as cam, warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)
        for start in range(0, len(features.rows), batch):
            index = np.arange(start, min(start + batch, len(features.rows)))
            maps = cam.explain(features.batch(index, device), targets)
            parts.append((maps.maps.cpu(), maps.values.cpu()))
    maps_of_all, values = zip(*parts, strict=True)
    return torch.cat(maps_of_all), torch.cat(values)


def correlations(first: Tensor, second: Tensor) -> np.ndarray:
    """Return the absolute correlation of two maps of each image, (R, M, N) and (R, M, N); NaN where one is constant."""
    a, b = (maps.flatten(1).double() for maps in (first, second))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).abs().numpy()


def closeness(first: Tensor, second: Tensor) -> dict[str, Any]:
    """Return how close maps are to others of the same image, and to those of the next image, which is no relation."""
    return {
        "same image": summary(correlations(first, second)),
        "another image": summary(correlations(first, second.roll(1, 0))),
    }


def summary(values: np.ndarray) -> dict[str, float | int | None]:
    """Return mean, standard error (None where there are too few) and number of what is not NaN."""
    values = values[np.isfinite(values)]
    return {
        "mean": float(values.mean()) if len(values) else None,
        "standard error": float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None,
        "n": len(values),
    }


class Blur:
    """What the host's perturbations put in place of removed pixels: the image, blurred over a tenth of its side."""

    def __call__(self, image: Tensor, keep: Tensor) -> Tensor:
        """Return the image (C, H, W) where ``keep`` (H, W) is 1, and its blurred copy elsewhere."""
        pixels = image.permute(1, 2, 0).numpy()
        blurred = torch.from_numpy(cv2.GaussianBlur(pixels, (0, 0), pixels.shape[0] / 10)).reshape(pixels.shape)
        return torch.where(keep.bool(), image, blurred.permute(2, 0, 1))


# Removed is what lies above a percentile of the map: most relevant first, or of its negative, least relevant first.
REMOVALS: dict[str, Callable[[float], Any]] = {
    "deletion": lambda fraction: RemoveMostRelevantFirst(100 * (1 - fraction), Blur()),
    "insertion": lambda fraction: RemoveLeastRelevantFirst(100 * fraction, Blur()),
}


def ranks(maps: np.ndarray) -> np.ndarray:
    """Return the ranks of the pixels of each map (N, H, W), from 0 to 1: without ties a percentile is exact."""
    order = maps.reshape(len(maps), -1).argsort(1, kind="stable").argsort(1, kind="stable")
    return (order / (order.shape[1] - 1)).reshape(maps.shape).astype(np.float32)


def upsampled(maps: Tensor, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return maps (N, M, N) in the size of the images; where a map has ties, positions are ordered at random."""
    jitter = torch.from_numpy(rng.random(maps.shape))
    maps = maps.double().cpu()
    span = maps.flatten(1).amax(1) - maps.flatten(1).amin(1)
    maps = maps + 1e-6 * torch.where(span > 0, span, 1.0)[:, None, None] * jitter
    return np.stack([cv2.resize(each, size[::-1]) for each in maps.numpy()])


def blurred(x: Tensor) -> Tensor:
    """Return images (N, 3, H, W) blurred over a tenth of their side: what takes the place of removed pixels."""
    nothing = torch.zeros(x.shape[2:])
    return torch.stack([Blur()(image, nothing) for image in x])


def without(x: Tensor, blur: Tensor, order: np.ndarray, kind: str, fraction: float) -> Tensor:
    """Return images without their most relevant part (``deletion``), or with that part alone (``insertion``).

    Args:
        x: images, shape (N, 3, H, W).
        blur: the same, blurred.
        order: ranks of their pixels, from 0 to 1, shape (N, H, W) (see :func:`ranks`).
        kind: ``deletion`` or ``insertion``.
        fraction: how much of the image that part is, to the pixel.

    Returns:
        Images, shape (N, 3, H, W).
    """
    pixels = order[0].size
    part = torch.from_numpy(order * (pixels - 1) > pixels - 1 - round(fraction * pixels) + 0.5).unsqueeze(1)
    return torch.where(part, blur, x) if kind == "deletion" else torch.where(part, x, blur)


def curves(net: PCASVMNet, x: Tensor, targets: dict[str, Any], spread: dict[str, float], seed: int) -> dict[str, Any]:
    """Return deletion and insertion curves of targets, for their maps and for maps that know nothing of them.

    Deletion takes away the most relevant part of an image and insertion leaves only that, by the host's metrics. A
    faithful map lets the target fall early in deletion, and keeps it in insertion. Pixels are ranked by the signed map.

    Args:
        net: the network.
        x: images, shape (N, 3, H, W).
        targets: by name.
        spread: standard deviation of every target over the test set: values are measured in it.
        seed: of the random maps.

    Returns:
        By target: how many images have no map at all, and else, of the others, the mean change of the value at
        ``FRACTIONS`` of the image, by kind (``deletion``, ``insertion``) and source (``map``; ``random``, maps of the
        same resolution; ``another image``, its map of the same target); and by kind and source how much better the map
        is than the source (mean difference of the curves), with the share of images where it is better.
    """
    rng = np.random.default_rng(seed)
    size = tuple(x.shape[2:])
    with ClosedFormGradCAM(net, [net.backbone.features]) as cam, warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)
        maps = cam.explain(x, list(targets.values()))
        signed = (maps.positive(size) - maps.negative(size)).cpu().numpy()
    results: dict[str, Any] = {}
    for k, (name, target) in enumerate(tqdm(targets.items(), desc="curves", unit="target")):
        seen = signed[:, k].any((1, 2))
        results[name] = {"without a gradient": int((~seen).sum())}
        if not seen.any() or not spread[name]:
            continue
        values = maps.values[:, k].cpu().numpy()[seen]
        if isinstance(target, SVMTarget):
            # The class that is predicted for the whole image, also where much of it is taken away.
            of_image = [SVMTarget(label) for label in maps.output.labels()[seen].tolist()]
        else:
            of_image = [target] * len(values)
        coarse = rng.random((len(values), *maps.maps.shape[2:]), dtype=np.float32)
        sources = {
            "map": ranks(signed[seen, k]),
            "random": ranks(np.stack([cv2.resize(m, size[::-1]) for m in coarse])),
            "another image": np.roll(ranks(signed[seen, k]), 1, 0),
        }
        for kind, remove in REMOVALS.items():
            changes = {}
            for source, heat in sources.items():
                after = [
                    PerturbationConfidenceMetric(remove(f))(x[seen], heat, of_image, net, return_diff=False)
                    for f in FRACTIONS
                ]
                changes[source] = (np.stack(after) - values) / spread[name]
            gains = {
                source: (changes[source] - changes["map"]).mean(0) * (1 if kind == "deletion" else -1)
                for source in sources
                if source != "map"
            }
            results[name][kind] = {
                "curves": {source: change.mean(1).tolist() for source, change in changes.items()},
                "better than": {
                    source: {**summary(gain), "share of images": float((gain > 0).mean())}
                    for source, gain in gains.items()
                },
            }
    return results
