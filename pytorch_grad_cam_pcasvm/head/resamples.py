"""Refits of a head on other samples of its photos, matched to it component by component."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import normalize

from pytorch_grad_cam_pcasvm.head.stack import HeadTrace, Stack

STABLE = 0.9  # mean squared cosine: two equal directions give 0.82, a dominant one 0.99


@dataclass(frozen=True, eq=False)
class Resamples:
    """Refits of a head on bootstrap samples.

    Attributes:
        heads: the R refits.
        matches: for each of them, and each component of the head, the number of the component of the most similar
            direction, and 1.0 or -1.0 by which side it points to.
        stability: of each component of the head the mean squared cosine of its direction with those matched, B numbers.
    """

    heads: Sequence[Any]
    matches: Sequence[Sequence[tuple[int, float]]]
    stability: Sequence[float]

    @property
    def unstable(self) -> list[int]:
        """The components of the head that are not stable."""
        return [b for b, cosine in enumerate(self.stability) if cosine < STABLE]

    @staticmethod
    def of(head: Stack, heads: Sequence[Any]) -> "Resamples":
        """Return refits of a head, matched to it.

        Raises:
            ValueError: there is only one; or one has other classes, takes other features, or has fewer components.
        """
        if len(heads) < 2:
            raise ValueError(f"errors are a spread, which needs two resampled heads at least, got {len(heads)}")
        for refit in heads:
            if refit.n_features != head.n_features or _list_classes(refit) != _list_classes(head):
                raise ValueError("resampled heads must take the same features as the head, and know the same classes")
        own, matches, cosines = _find_directions(head), [], []
        for number, refit in enumerate(heads if own is not None else ()):
            directions = _find_directions(refit)
            count = 0 if directions is None else len(directions)
            if count < len(own):
                raise ValueError(
                    f"resampled head {number} has {count} components, the head has {len(own)}: fit them with the same "
                    "steps and n_components"
                )
            similarity = (own @ directions.mT).numpy()
            _, of_refit = linear_sum_assignment(-np.square(similarity))
            matched = similarity[np.arange(len(of_refit)), of_refit]
            matches.append([
                (int(b), 1.0 if cosine >= 0 else -1.0) for b, cosine in zip(of_refit, matched, strict=True)
            ])
            cosines.append(np.square(matched))
        stability = np.mean(cosines, 0).tolist() if cosines else []
        return Resamples(heads, matches or [[] for _ in heads], stability)


def _list_classes(head: Stack) -> list[Any] | None:
    return None if head.classes_ is None else head.classes_.tolist()


def _find_directions(head: Stack) -> Any:
    """Return the directions of components in the space of the reduction's input, of length 1, (B, D); or None.

    They are on the CPU, as a head may be on a GPU, and its refits not yet.
    """
    position = head.component_position
    if position is None:
        return None
    with torch.no_grad():
        mean = head.feature_mean
        like = next(head.buffers(), torch.zeros(0, dtype=torch.float64))
        features = like.new_zeros(1, head.n_features or 0) if mean is None else mean.unsqueeze(0)
        trace: HeadTrace = head(features)
        jacobian, _ = head.pullback(trace, {position: None}, until=position - 1)
    return normalize(jacobian[0].cpu().double(), dim=1)
