"""The scale of anomalies: how anomalous the training set's own rows are where they are left out of it.

A row of the training set is at no distance from itself, so that its own value says nothing of what a photo like the
training set has. The command line's ``fit`` asks estimators that were fitted on the other photos, and stores the
answer. Of other heads, a bank of training rows answers for itself: by the distances to the nearest different rows.
"""

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.distances import CosineDistance, LogDensity, NearestDistance, OfPoints
from pytorch_grad_cam_pcasvm.head.head import Head

_TIMES = 3.0  # a scale ends at so many times what training photos reach, which is dark
_SHARE = 0.999  # of the training rows that are below what they reach: a few may be defects
_ROWS, _BLOCK = 1000, 100  # of a bank that are asked, and at once
_SAME = 1e-6  # of the length of the longest row: by so much a row differs from itself in single precision


def anomaly_range(head: Head) -> tuple[float, float] | None:
    """Return where the scale of a head's anomalies starts and ends; None: nothing is known of its training set.

    Example:
        >>> head = Head.of(NearestNeighbors(n_neighbors=1).fit(features))
        >>> low, high = anomaly_range(head)
        >>> low, high > 0
        (0.0, True)
    """
    for stage in head.stages:
        least, reach = stage.facts.least, stage.facts.reach
        if least is not None and reach is not None:
            return _range(least, reach)
    points = next((stage for stage in head.stages if isinstance(stage, OfPoints)), None)
    values = None if points is None else _left_out(points)
    if points is None or values is None:
        return None
    return _range(*measure_reach(values.cpu().numpy(), is_distance=points.is_distance))


def usual_reach(head: Head) -> float | None:
    """Return the anomaly that nearly all good rows stay below; None: nothing is known of the training set.

    Example:
        >>> head = Head.of(NearestNeighbors(n_neighbors=1).fit(features))
        >>> 0 < usual_reach(head) < anomaly_range(head)[1]
        True
    """
    known = anomaly_range(head)
    return None if known is None else known[0] + (known[1] - known[0]) / _TIMES


def measure_reach(values: np.ndarray, *, is_distance: bool) -> tuple[float, float]:
    """Return between which numbers anomalies of training rows are; distances start at 0.

    Args:
        values: anomalies of rows, each measured by a head that was fitted without it, shape (R,).
        is_distance: whether they are distances.

    Example:
        >>> measure_reach(np.array([1.0, 2.0, 2.0]), is_distance=True)
        (0.0, 2.0)
    """
    return 0.0 if is_distance else float(values.min()), float(np.quantile(values, _SHARE))


def _range(least: float, reach: float) -> tuple[float, float] | None:
    return (least, least + _TIMES * (reach - least)) if reach > least else None


def _left_out(stage: OfPoints) -> Tensor | None:
    """Return the anomalies of rows of a bank, without themselves and their like; None: there are too few others."""
    bank, points = stage.at_centre, stage.points
    chosen = points[torch.linspace(0, len(points) - 1, min(len(points), _ROWS), device=points.device).round().long()]
    same, values = (_SAME * points.norm(dim=-1).max()) ** 2, []
    for rows in chosen.split(_BLOCK):
        squares = bank.squared_distances(rows) + (rows - bank.centre).square().sum(-1, keepdim=True)
        squares = torch.where(squares <= same, torch.inf, squares)
        if isinstance(stage, NearestDistance):
            nearest = squares.topk(min(stage.k, len(points)), largest=False).values
            cosine = isinstance(stage, CosineDistance)  # for which these are lengths of differences of units
            values.append((nearest / 2 if cosine else nearest.sqrt()).mean(-1))
        elif isinstance(stage, LogDensity):
            exponents = stage.logarithms - squares / (2 * stage.bandwidth**2)
            values.append(-exponents.logsumexp(-1) - stage.constant)
    left_out = torch.cat(values) if values else points.new_empty(0)
    left_out = left_out[left_out.isfinite()]
    return left_out if len(left_out) else None
