"""Whether there is anything to tell apart: training features that vary, and classes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.build import estimators_of
from pytorch_grad_cam_pcasvm.head.registry import tensor
from pytorch_grad_cam_pcasvm.runtime.errors import ConstantComponentWarning, refuse, warn

# Features come from networks in single precision, whose layers leave some multiples of its rounding.
_ROUNDING = 16 * torch.finfo(torch.float32).eps
# Where scikit-learn's estimators keep what they were fitted on.
_ROWS = ("support_vectors_", "_fit_X", "X_fit_", "X_train_", "X_")


def refuse_one_class(classes: Sequence[Any]) -> None:
    """Raise a ValueError if there is only one class."""
    if len(classes) == 1:
        (label,) = np.asarray(classes).tolist()
        refuse(
            ValueError,
            f"the head's classifier was fitted on one class only, {label!r}, and has nothing to decide",
            "fit it on two classes or more",
            "leave it out and explain components, as in make_pipeline(StandardScaler(), PCA(3))",
            "fit a OneClassSVM, whose value tells outliers",
        )


def check_variety(fitted: Any) -> None:
    """Refuse estimators that were fitted on features which are all alike; warn of components that do not vary.

    Raises:
        ValueError: no feature varies.
    """
    for estimator in estimators_of(fitted):
        name = type(estimator).__name__
        variances = _variances(estimator)
        constant = [] if variances is None else (variances <= _noise(estimator, variances)).nonzero()[:, 0].tolist()
        if _is_constant(estimator) or (variances is not None and len(constant) == len(variances)):
            refuse(
                ValueError,
                f"all training features are alike: what {name} was fitted on differs by no more than rounding, so "
                "there is nothing to explain",
                "check that the images differ",
                "that their differences reach the layer of the features",
            )
        if variances is not None and constant:
            warn(_in_words(estimator, constant, len(variances) - len(constant)), ConstantComponentWarning)


def _in_words(estimator: Any, constant: Sequence[int], left: int) -> str:
    """Say which components do not vary, and that so many others are left."""
    name, several = type(estimator).__name__, len(constant) > 1
    numbers = ", ".join(map(str, constant[:-1])) + " and " * several + str(constant[-1])
    whitened = ", which whitening makes as large as the others" if getattr(estimator, "whiten", False) else ""
    return (
        f"component{'s' * several} {numbers} of {name} {'vary' if several else 'varies'} over the training images only "
        f"by rounding{whitened}: {'their maps are' if several else 'its map is'} noise. Fit fewer "
        f"components, {name}({left}), or on more images"
    )


def _is_constant(estimator: Any) -> bool:
    """Return whether an estimator knows that none of the features varied."""
    for spread, centre in (("var_", "mean_"), ("data_range_", "data_max_")):
        if getattr(estimator, spread, None) is not None and hasattr(estimator, centre):
            size = tensor(getattr(estimator, spread))
            size = size.sqrt() if spread == "var_" else size
            return bool(size.max() <= _ROUNDING * tensor(getattr(estimator, centre)).abs().max())
    for name in _ROWS:
        rows = getattr(estimator, name, None)
        if rows is not None:
            rows = tensor(rows)
            # A single support vector, as of a OneClassSVM, says nothing of the others.
            return len(rows) > 1 and bool((rows - rows[0]).abs().max() <= _ROUNDING * rows.abs().max())
    return False


def _variances(estimator: Any) -> Tensor | None:
    """Return the variances of components, shape (B,), or what is proportional to them; None if they are not known."""
    for name in ("explained_variance_", "eigenvalues_"):
        variances = getattr(estimator, name, None)
        if variances is not None:
            return tensor(variances)
    return None


def _noise(estimator: Any, variances: Tensor) -> float:
    """Return the variance that rounding leaves where there is none."""
    largest, centre = float(variances.max()), getattr(estimator, "mean_", None)
    centre = 0.0 if centre is None else float(tensor(centre).square().sum())
    if not hasattr(estimator, "components_"):  # kernel PCA
        return 16 * torch.finfo(torch.float64).eps * largest
    noise = _ROUNDING**2
    if getattr(estimator, "_fit_svd_solver", "") == "covariance_eigh":  # of sums of squares, less those of the mean
        noise = max(noise, 16 * torch.finfo(torch.as_tensor(estimator.components_).dtype).eps)
    return noise * (largest + centre)
