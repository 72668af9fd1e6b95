"""How far photos lie outside of all components of a head, and how far new ones like the training set do."""

import warnings
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import Pipeline

from pytorch_grad_cam_pcasvm.head import Head, measure_anomaly, tells_anomalies
from pytorch_grad_cam_pcasvm.studio.model.choices import Threshold, choose_threshold, split_folds

_FEWEST = 8  # photos, by which something is said
_FOLDS = 5
_RATE = 0.01  # of photos like the training set that are taken for others


def keep_likeness(head: Head, fitted: Any, rows: np.ndarray, labels: Any, groups: Any) -> Threshold | None:
    """Keep with a head the largest residual of a photo that is like the training set.

    Scaler and PCA are fitted anew without a fifth of the photos at a time, whose residuals Q (see
    :class:`.ResidualTarget`) are then those of new photos. At most 1 in 100 new ones, or of n photos 1 in n + 1, has a
    larger one than the threshold (:func:`.choose_threshold`).

    Args:
        head: of the pipeline, which decides once for each photo.
        fitted: the pipeline.
        rows: of features, a row a photo, (N, D).
        labels: of the rows; None: there are none.
        groups: the number of the object of each row, whose rows are left out together; None: each is its own.

    Returns:
        What was kept; None without a reduction that restores features, or of too few photos.
    """
    own = np.arange(len(rows)) if groups is None else np.asarray(groups)
    if not isinstance(fitted, Pipeline) or not head.component_position or len(np.unique(own)) < _FEWEST:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of components that do not vary, which the head itself has told
        parts = (fitted[:steps] for steps in range(1, len(fitted.steps)))
        reduction = next((part for part in parts if _find_residual(part) == head.component_position), None)
        if reduction is None:
            return None
        values, targets = np.zeros(len(rows)), None if labels is None else np.asarray(labels)
        for fit, test in _split(labels, own, groups):
            try:
                own_targets = None if targets is None else targets[fit]
                without = Head.of(clone(reduction).fit(rows[fit], own_targets))
            except (TypeError, ValueError):  # fewer rows than components, or a step that cannot be fitted on a part
                return None
            values[test] = measure_anomaly(without, without.values_of(torch.from_numpy(rows[test]).double())).numpy()
    threshold = choose_threshold(values, _RATE, None if groups is None else own)
    if threshold.score <= 0:  # all directions are kept
        return None
    head.training_set.preparation = (head.training_set.preparation or {}) | {"likeness": asdict(threshold)}
    return threshold


def _find_residual(fitted: Any) -> int | None:
    """Return the position of the components of a part of a pipeline that restores features; None: it does not."""
    try:
        part = Head.of(fitted)
    except (TypeError, ValueError):  # a scaler alone
        return None
    return part.component_position if tells_anomalies(part) else None


def _split(labels: Any, own: np.ndarray, groups: Any) -> Any:
    """Return folds with a share of each class; of a class that has one object only, folds of objects."""
    try:
        if np.ndim(labels) == 1:
            return split_folds(np.asarray(labels), None if groups is None else own)
    except ValueError:
        pass
    return GroupKFold(min(_FOLDS, len(np.unique(own)))).split(own, groups=own)
