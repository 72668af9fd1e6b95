"""Closeness: how alike are the maps of a decision and of a component?"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiment.frozen import FrozenFeatures
from pytorch_grad_cam_pcasvm import BlankMapWarning, ClosedFormGradCAM, PCASVMNet


def explained(
    net: PCASVMNet, features: FrozenFeatures, targets: Sequence[Any], device: str, batch: int = 256
) -> Tensor:
    """Return the signed maps, (R, K, M, N), of a network of dense layers on frozen features."""
    parts = []
    with ClosedFormGradCAM(net, [net.backbone.features]) as cam, warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)
        for start in range(0, len(features.rows), batch):
            index = np.arange(start, min(start + batch, len(features.rows)))
            parts.append(cam.explain(features.batch(index, device), targets).maps.cpu())
    return torch.cat(parts)


def closeness(first: Tensor, second: Tensor) -> dict[str, float | None]:
    """Return how close maps (R, M, N) are to others of the same image, and to those of the next, which is no relation.

    The mean of the absolute correlation; maps that are constant are left out, and None stands for none.
    """

    def mean(other: Tensor) -> float | None:
        a, b = (maps.flatten(1).double() for maps in (first, other))
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
        size = a.norm(dim=1) * b.norm(dim=1)
        found = ((a * b).sum(1) / size).abs()[size > 0]
        return float(found.mean()) if len(found) else None

    return {"same image": mean(second), "another image": mean(second.roll(1, 0))}
