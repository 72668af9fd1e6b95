"""Resampled heads: one pipeline refitted on bootstrap samples of its rows, whose spread says how sure maps are.

Efron, Bootstrap methods: another look at the jackknife, Annals of Statistics 7 (1979).
"""

import copy
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, clone, is_classifier
from sklearn.pipeline import Pipeline, make_pipeline

from pytorch_grad_cam_pcasvm.head.head import Head

LEAST = 8  # photos of a class: of fewer, too many samples are nearly the same
_DRAWS = 1000  # of a sample that lacks a class


def resample_heads(
    head: Any,
    features: Any,
    labels: Any = None,
    n: int = 30,
    groups: Any = None,
    seed: int = 0,
) -> list[Head]:
    """Refit a fitted pipeline on bootstrap samples of its training rows, with the same hyperparameters.

    A sample has as many photos of each class as the training set, drawn with replacement. Rows of one group (an object,
    a patient, a photo and its copies) are drawn together. The result depends on the seed alone.

    Args:
        head: a fitted estimator, pipeline, search or list of these.
        features: the rows that it was fitted on, shape (M, D).
        labels: their labels, shape (M,); None: it was fitted without.
        n: number R of samples.
        groups: the group of each row, shape (M,); None: each row is one of its own.
        seed: random seed.

    Returns:
        R heads, for :func:`.explain_heads`.

    Raises:
        TypeError: it is a :class:`.Head`, which does not hold the estimators.
        ValueError: there are fewer than 8 photos, or groups, of a class, or their numbers differ; or ``n`` is below 2.

    Example:
        >>> rows, of_rows = np.tile(features, (3, 1)), np.tile(labels, 3)  # there are 4 photos of each class
        >>> refits = resample_heads(pipeline, rows, of_rows, n=2)
        >>> [refit.n_features for refit in refits]
        [8, 8]
    """
    if not isinstance(n, int) or n < 2:
        raise ValueError(f"n must be an integer of at least 2, since a spread needs two heads, got {n!r}")
    estimator, rows = _take_estimator(head), np.asarray(features)
    known = None if labels is None else np.asarray(labels)
    units = np.arange(len(rows)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    for name, numbers in (("labels", known), ("groups", units)):
        if numbers is not None and len(numbers) != len(rows):
            raise ValueError(f"there are {len(numbers)} {name} for {len(rows)} rows of features: give one for each")
    classes = known if known is not None and known.ndim == 1 and is_classifier(estimator) else None
    _check_count(units, classes)
    heads = []
    for number in range(n):
        rng = np.random.default_rng([seed, number])
        sample = _draw_sample(units, classes, rng)
        refit = _copy_unfitted(estimator, rng)
        heads.append(Head.of(refit.fit(rows[sample], None if known is None else known[sample])))
    return heads


def _take_estimator(fitted: Any) -> Any:
    """Return the estimator to refit: of a search, also among steps, the best one, of a list a pipeline."""
    if isinstance(fitted, Head):
        raise TypeError("a Head does not hold the estimators that it was made of: pass the fitted pipeline")
    fitted = getattr(fitted, "best_estimator_", fitted)
    if isinstance(fitted, list | tuple):
        fitted = make_pipeline(*fitted)
    if isinstance(fitted, Pipeline):
        fitted = copy.copy(fitted)
        fitted.steps = [(name, getattr(step, "best_estimator_", step)) for name, step in fitted.steps]
    return fitted


def _check_count(units: np.ndarray, classes: np.ndarray | None) -> None:
    """Refuse too few photos, or groups, of a class."""
    labels: list[Any] = [None] if classes is None else np.unique(classes).tolist()
    for label in labels:
        count = len(np.unique(units if classes is None else units[classes == label]))
        if count < LEAST:
            of_class = "" if label is None else f" of the class {label!r}"
            raise ValueError(
                f"there are {count} photos (or groups){of_class}, and resampled heads need {LEAST}, as samples of "
                "fewer are too alike: add photos, or do without"
            )


def _draw_sample(units: np.ndarray, classes: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
    """Return the rows of a bootstrap sample: as many units of each class as there are, with all rows of each."""
    order = np.argsort(units, kind="stable")
    rows_of = np.split(order, np.flatnonzero(np.diff(units[order])) + 1)
    if classes is None:
        return np.concatenate([rows_of[unit] for unit in rng.integers(len(rows_of), size=len(rows_of))])
    labels = [np.unique(classes[rows]) for rows in rows_of]
    if all(len(of_unit) == 1 for of_unit in labels):
        of_unit = np.concatenate(labels)
        drawn = [rng.choice(np.flatnonzero(of_unit == label), (of_unit == label).sum()) for label in np.unique(of_unit)]
        return np.concatenate([rows_of[unit] for unit in np.concatenate(drawn)])
    count = len(np.unique(classes))
    for _ in range(_DRAWS):  # groups of several classes, such as patches of one photo
        sample = np.concatenate([rows_of[unit] for unit in rng.integers(len(rows_of), size=len(rows_of))])
        if len(np.unique(classes[sample])) == count:
            return sample
    raise ValueError(f"of {_DRAWS} samples none has all {count} classes: too few groups have the rarest")


def _copy_unfitted(fitted: Any, rng: np.random.Generator) -> BaseEstimator:
    """Return an unfitted copy: with the number of components that was found, and with seeds where there were none."""
    found = fitted.get_params()
    parts = {"": fitted} | {f"{name}__": part for name, part in found.items() if isinstance(part, BaseEstimator)}
    changes: dict[str, Any] = {
        f"{name}n_components": int(part.n_components_)
        for name, part in parts.items()
        if hasattr(part, "n_components_") and "n_components" in part.get_params(deep=False)
    }
    for name in sorted(found):
        if name.rpartition("__")[2] == "random_state" and found[name] is None:
            changes[name] = int(rng.integers(2**31))
    return clone(fitted).set_params(**changes)
