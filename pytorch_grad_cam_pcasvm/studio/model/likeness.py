"""How far photos lie outside of all components of a head, and how far new ones like the training set do."""

import warnings
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import Pipeline

from pytorch_grad_cam_pcasvm.head import Head, measure_residual, tells_anomalies
from pytorch_grad_cam_pcasvm.studio.model.choices import Threshold, choose_threshold, split_folds
from pytorch_grad_cam_pcasvm.studio.model.teaching import Read

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
    folds = partial(_split, labels, own, groups)
    refits = _leave_out(head, fitted, rows, labels, own, folds)
    if refits is None:
        return None
    values = np.zeros(len(rows))
    for without, test in refits:
        values[test] = _measure(without, torch.from_numpy(rows[test])).numpy()
    return _keep(head, values, None if groups is None else own)


def keep_likeness_of_patches(
    head: Head, fitted: Any, rows: np.ndarray, labels: Any, photos: Any, objects: Any, read: Read
) -> Threshold | None:
    """Keep with a head the largest residual, on average over positions, of a photo that is like the training set.

    Args:
        head: of the pipeline, which decides at each position.
        fitted: the pipeline.
        rows: of features of the patches that it was fitted on, (R, D).
        labels: of the rows; None: there are none.
        photos: the number of the photo of each row, (R,).
        objects: the number of the object of each photo, by its number, which are left out together; None: each is its
            own.
        read: yields the features of all positions of the photos.

    Returns:
        What was kept; None as of :func:`keep_likeness`, and of a head that tells anomalies itself.
    """
    own = np.asarray(photos) if objects is None else objects[photos]
    folds = partial(_split, None, own, own)
    refits = None if tells_anomalies(head) else _leave_out(head, fitted, rows, labels, own, folds)
    if refits is None:
        return None
    fold_of = {number: fold for fold, (_, test) in enumerate(refits) for number in own[test].tolist()}
    values: dict[int, float] = {}
    for features, numbers in read():
        for one, photo in zip(features, numbers, strict=True):
            # Of a photo without a row, which all were fitted without, any has the residual of a new one.
            fold = fold_of.get(int(photo if objects is None else objects[photo]), 0)
            values[int(photo)] = float(_measure(refits[fold][0], one.flatten(1).T).mean())
    return _keep(head, np.array([*values.values()]), None if objects is None else objects[[*values]])


def _leave_out(
    head: Head, fitted: Any, rows: np.ndarray, labels: Any, own: np.ndarray, split: Any
) -> list[tuple[Head, np.ndarray]] | None:
    """Return a head's scaler and PCA, fitted anew without a part of the rows at a time, and the numbers of these rows.

    None is returned without a reduction that restores features, or of too few objects.
    """
    if not isinstance(fitted, Pipeline) or not head.component_position or len(np.unique(own)) < _FEWEST:
        return None
    targets = None if labels is None else np.asarray(labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of components that do not vary, which the head itself has told
        parts = (fitted[:steps] for steps in range(1, len(fitted.steps)))
        reduction = next((part for part in parts if _find_residual(part) == head.component_position), None)
        if reduction is None:
            return None
        try:
            return [
                (Head.of(clone(reduction).fit(rows[fit], None if targets is None else targets[fit])), test)
                for fit, test in split()
            ]
        except (TypeError, ValueError):  # fewer rows than components, or a step that cannot be fitted on a part
            return None


def _measure(head: Head, rows: torch.Tensor) -> torch.Tensor:
    """Return the residuals of rows, (R,)."""
    return measure_residual(head, head.values_of(rows.double()))


def _keep(head: Head, values: np.ndarray, groups: Any) -> Threshold | None:
    """Keep the threshold of the residuals of photos that were left out; None: all directions are kept."""
    threshold = choose_threshold(values, _RATE, groups)
    if threshold.score <= 0:
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
