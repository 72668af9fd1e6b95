"""Estimators that were fitted elsewhere: by scikit-learn-intelex, on a GPU, or on tensors."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import is_regressor
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

# scikit-learn-intelex: subclasses whose methods compute the same elsewhere.
ACCELERATED = ("sklearnex.", "daal4py.")


def of_sklearn(estimator_type: Any) -> Any:
    """Return the class of scikit-learn that one of scikit-learn-intelex derives from; of others the class itself."""
    if not estimator_type.__module__.startswith(ACCELERATED):
        return estimator_type
    return next((base for base in estimator_type.__mro__ if base.__module__.startswith("sklearn.")), estimator_type)


def tensor(array: Any) -> Tensor:
    """Return a float64 copy of a fitted attribute (dense or sparse) on the CPU.

    Example:
        >>> mean = tensor(pipeline[0].mean_)
    """
    if hasattr(array, "toarray"):
        array = array.toarray()
    if isinstance(array, np.ndarray):
        array = np.array(array, order="C")  # torch takes no negative strides
    # Estimators fitted through scikit-learn's array-API dispatch have tensors, perhaps on another device.
    return torch.as_tensor(array).detach().cpu().double().clone()


def with_arrays(estimator: Any) -> Any:
    """Return a copy of an estimator of scikit-learn with NumPy's arrays for the tensors that it was fitted on, if any.

    With array-API dispatch an estimator has its numbers in the namespace of its training set, whose functions have
    other arguments.
    """
    if not type(estimator).__module__.startswith(("sklearn.", *ACCELERATED)):
        return estimator
    foreign = {
        name: value
        for name, value in vars(estimator).items()
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray)
    }
    if not foreign:
        return estimator
    arrays = copy.copy(estimator)
    for name, value in foreign.items():
        of_torch = value if isinstance(value, Tensor) else torch.utils.dlpack.from_dlpack(value)
        setattr(arrays, name, of_torch.detach().cpu().numpy())
    return arrays


def compare_values(estimator: Any, stages: Sequence[Stage]) -> None:
    """Raise an error if an accelerated estimator computes other values than its stages, on a few rows."""
    rng, width = np.random.default_rng(0), estimator.n_features_in_
    fitted = (getattr(estimator, name, None) for name in ("support_vectors_", "mean_", "_fit_X", "cluster_centers_"))
    points = next((points for points in fitted if points is not None), np.zeros(width))
    rows = tensor(points).numpy().reshape(-1, width)[:4].mean(0) + rng.normal(size=(9, width))
    y = torch.from_numpy(rows)
    for stage in stages:
        y, _ = stage.evaluate(y)
    voting = getattr(stages[-1], "voting", None)
    if voting is None:
        expected = estimator.transform(rows)
    elif hasattr(estimator, "decision_function"):
        expected, y = estimator.decision_function(rows), voting.scores(y)
    elif voting.about == "likeness":  # minus a distance, to neighbours or to the nearest centre
        near = hasattr(estimator, "kneighbors")
        expected = -(estimator.kneighbors(rows)[0].mean(1) if near else estimator.transform(rows).min(1))
    elif is_regressor(estimator):
        expected = estimator.predict(rows)
    else:
        expected, y = np.searchsorted(estimator.classes_, estimator.predict(rows)), voting.predicted(y)
    expected = np.asarray(expected, dtype=float)
    actual = y.numpy()[:, -1] if expected.ndim < y.dim() else y.numpy()
    if not np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max():
        name = type(estimator).__name__
        raise NoClosedFormError(
            f"{name} of {type(estimator).__module__.partition('.')[0]} computes other values than scikit-learn's",
            "fit scikit-learn's own, without its patch",
        )


def from_gpu(fitted: Any) -> Any:
    """Return the scikit-learn estimator with the fit of cuML's, or of a proxy that cuml.accel puts in its place."""
    if hasattr(type(fitted), "as_sklearn"):
        return fitted.as_sklearn()
    fitted._sync_attrs_to_cpu()
    return fitted._cpu
