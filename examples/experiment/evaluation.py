"""Can the maps be believed? Numbers over the test set, not one picture."""

import warnings
from collections.abc import Sequence
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
from pytorch_grad_cam_pcasvm import BlankMapWarning, ClosedFormGradCAM, PCASVMNet, PCATarget, SVMTarget

FRACTIONS = (0.1, 0.25, 0.5, 0.75, 0.9)


def maps_of(net: PCASVMNet, features: FrozenFeatures, index: np.ndarray, targets: Sequence[Any], device: str) -> Tensor:
    """Return the signed maps of a network of dense layers on frozen features, shape (len(index), K, M, N)."""
    with ClosedFormGradCAM(net, [net.backbone.features]) as cam, warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)  # counted below
        parts = np.array_split(index, len(index) // 256 + 1)
        return torch.cat([cam.explain(features.batch(rows, device), targets).maps for rows in parts]).cpu()


def correlations(first: Tensor, second: Tensor) -> np.ndarray:
    """Return Pearson's correlation of two maps of each image, (N, M, N) and (N, M, N); NaN where one is constant."""
    a, b = (maps.flatten(1).double() for maps in (first, second))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).numpy()


def summary(values: np.ndarray) -> dict[str, float | int]:
    """Return mean, standard error and number of what is not NaN."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return {"mean": float("nan"), "standard error": float("nan"), "n": len(values)}
    return {
        "mean": float(values.mean()),
        "standard error": float(values.std(ddof=1) / np.sqrt(len(values))),
        "n": len(values),
    }


class Blur:
    """What the host's perturbations put in place of removed pixels: the image, blurred over a tenth of its side."""

    def __call__(self, image: Tensor, keep: Tensor) -> Tensor:
        """Return the image (C, H, W) where ``keep`` (H, W) is 1, and its blurred copy elsewhere."""
        pixels = image.permute(1, 2, 0).numpy()
        blurred = torch.from_numpy(cv2.GaussianBlur(pixels, (0, 0), pixels.shape[0] / 10)).reshape(pixels.shape)
        return torch.where(keep.bool(), image, blurred.permute(2, 0, 1))


def curves(
    net: PCASVMNet, x: Tensor, targets: dict[str, Any], spread: dict[str, float], seed: int
) -> dict[str, dict[str, Any]]:
    """Return deletion and insertion curves of targets, for their maps and for random maps of the same resolution.

    Deletion takes away the most relevant part of an image and insertion leaves only that, by the host's metrics. A
    faithful map lets the target fall early in deletion, and rise early in insertion.

    Args:
        net: the network.
        x: images, shape (N, 3, H, W).
        targets: by name.
        spread: standard deviation of every target over the test set: values are measured in it.
        seed: of the random maps.

    Returns:
        By target: mean curves ``deletion`` and ``insertion`` at ``FRACTIONS`` of the image, those of random maps, how
        much better than random the map is per image (mean difference of the curves, in the sense of its kind), with
        the share of images where it is better, and how many images were left out for a blank map.
    """
    rng = np.random.default_rng(seed)
    size = tuple(x.shape[2:])
    results = {}
    with ClosedFormGradCAM(net, [net.backbone.features]) as cam, warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)
        explained = cam.explain(x, list(targets.values()))
        positive = explained.positive(size).cpu().numpy().astype(np.float32)
    for k, (name, target) in enumerate(tqdm(targets.items(), desc="curves", unit="target")):
        seen = positive[:, k].any((1, 2))
        if not seen.any():
            results[name] = {"blank": int((~seen).sum())}
            continue
        if isinstance(target, SVMTarget):
            # The class that is predicted for the whole image, also where much of it is taken away.
            labels = net.head.classes_[net.head.rule.predicted(explained.output.decision).cpu().numpy()][seen]
            per_image = [SVMTarget(label) for label in labels.tolist()]
        else:
            per_image = [target] * int(seen.sum())
        coarse = rng.random((int(seen.sum()), *explained.maps.shape[2:]), dtype=np.float32)
        maps = {
            "map": positive[seen, k],
            "random": np.stack([np.clip(cv2.resize(m, size[::-1]), 0, 1) for m in coarse]),
        }
        values = {
            (kind, source): _curve(net, x[seen], heat, per_image, kind) / spread[name]
            for source, heat in maps.items()
            for kind in ("deletion", "insertion")
        }
        better = {
            "deletion": (values["deletion", "random"] - values["deletion", "map"]).mean(0),
            "insertion": (values["insertion", "map"] - values["insertion", "random"]).mean(0),
        }
        results[name] = {
            "fractions": FRACTIONS,
            "blank": int((~seen).sum()),
            **{f"{kind} of {source}": value.mean(1).tolist() for (kind, source), value in values.items()},
            **{
                f"{kind}, better than random": {**summary(gain), "share of images": float((gain > 0).mean())}
                for kind, gain in better.items()
            },
        }
    return results


def _curve(net: PCASVMNet, x: Tensor, heat: np.ndarray, targets: Sequence[Any], kind: str) -> np.ndarray:
    """Return the targets' values, less those of the whole images, at every fraction: shape (F, N)."""
    remove = {
        "deletion": lambda fraction: RemoveMostRelevantFirst(100 * (1 - fraction), Blur()),
        "insertion": lambda fraction: RemoveLeastRelevantFirst(100 * fraction, Blur()),
    }[kind]
    return np.stack([PerturbationConfidenceMetric(remove(f))(x, heat, targets, net) for f in FRACTIONS])


def closeness(
    nets: dict[str, PCASVMNet], features: FrozenFeatures, index: np.ndarray, components: int, device: str
) -> dict[str, list[dict[str, float | int]]]:
    """Return how close the map of each SVM's predicted class is to that of each component, over images.

    Args:
        nets: by name, on frozen features.
        features: of the images.
        index: which of them.
        components: number of components B.
        device: where to compute.

    Returns:
        By name, for every component: the absolute correlation of the signed maps.
    """
    targets = [*(PCATarget(b) for b in range(components)), SVMTarget()]
    result = {}
    for name, net in nets.items():
        maps = maps_of(net, features, index, targets, device)
        result[name] = [summary(np.abs(correlations(maps[:, b], maps[:, -1]))) for b in range(components)]
    return result
