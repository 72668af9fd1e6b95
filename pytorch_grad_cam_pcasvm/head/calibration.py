"""Calibration curves: from a classifier's scores to probabilities, as in scikit-learn's calibrators."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference

# A curve on scores of one class (...), or a calibration of all classes, (..., C) or (..., 1) to (..., C).
Calibration = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Platt:
    """One class: ``1 / (1 + exp(a s + b))``."""

    a: float
    b: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, of the shape of the scores."""
        return torch.sigmoid(-(self.a * scores + self.b))


@dataclass(frozen=True)
class Isotonic:
    """One class: linear between the points (x, y), constant outside them."""

    x: list[float]
    y: list[float]

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, of the shape of the scores."""
        at, height = (_curve(tuple(values), scores.dtype, scores.device) for values in (self.x, self.y))
        if len(at) == 1:
            return height.expand_as(scores)
        inside = scores.clamp(at[0], at[-1]).contiguous()
        right = torch.searchsorted(at, inside.detach()).clamp(1, len(at) - 1)
        left = right - 1
        slope = (height[right] - height[left]) / (at[right] - at[left])
        return height[left] + (inside - at[left]) * slope


@lru_cache(maxsize=256)
def _curve(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, which is sent to its device once: to send it again is to wait for the device."""
    with without_inference():
        return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class PerClass:
    """All classes: one curve for each, then divided by their sum; two classes have one curve."""

    curves: list[Platt | Isotonic]

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, shape (..., C)."""
        # Of the pairwise scores of a one-vs-one classifier scikit-learn takes the first C.
        columns = scores.unbind(-1)[: len(self.curves)]
        raw = torch.stack([curve(score) for curve, score in zip(self.curves, columns, strict=True)], -1)
        if len(self.curves) == 1:
            return torch.cat([1 - raw, raw], -1)
        total = raw.sum(-1, keepdim=True)
        # Where every curve gives 0, scikit-learn takes the uniform distribution.
        return torch.where(total > 0, raw / torch.where(total > 0, total, 1.0), 1 / len(self.curves))


@dataclass(frozen=True)
class Temperature:
    """All classes: ``softmax(beta s)``; two classes have the scores -s and s."""

    beta: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Return probabilities, shape (..., C)."""
        scores = torch.cat([-scores, scores], -1) if scores.shape[-1] == 1 else scores
        return torch.softmax(self.beta * scores, -1)
