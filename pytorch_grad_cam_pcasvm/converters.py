"""From fitted scikit-learn estimators to stages: one registration per estimator.

``stage_for`` is a :func:`functools.singledispatch`; add an estimator of your own with::

    @stage_for.register(MyScaler)
    def my_scaler(estimator):
        return Scale(tensor(estimator.mean_), tensor(estimator.std_), tensor(0 * estimator.mean_))
"""

from collections.abc import Iterator
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.decomposition import PCA
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC, NuSVC
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pytorch_grad_cam_pcasvm import kernels
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.stages import Projection, Scale, Stage
from pytorch_grad_cam_pcasvm.svm import Binary, KernelSVM, LinearDecision, OneVsOne, OneVsRest


def stages_of(fitted: Any) -> Iterator[Stage]:
    """Yield the stages of a fitted estimator, pipeline, search object or list of these, in order.

    Args:
        fitted: what was fitted on the backbone's features.

    Yields:
        One stage per estimator; ``"passthrough"`` and None steps are skipped.

    Raises:
        NotFittedError: an estimator is not fitted.
        NoClosedFormError: an estimator has no closed-form Jacobian here.
        ValueError: a search was not refitted.
    """
    if isinstance(fitted, list | tuple):
        for part in fitted:
            yield from stages_of(part)
    elif isinstance(fitted, Pipeline):
        yield from stages_of([step for _, step in fitted.steps])
    elif isinstance(fitted, Stage):
        yield fitted
    elif isinstance(fitted, BaseSearchCV):
        check_is_fitted(fitted)
        if not hasattr(fitted, "best_estimator_"):
            raise ValueError(f"{type(fitted).__name__} has no best estimator: fit it with refit=True")
        yield from stages_of(fitted.best_estimator_)
    elif fitted is not None and fitted != "passthrough":
        if isinstance(fitted, BaseEstimator):
            check_is_fitted(fitted)
        yield stage_for(fitted)


@singledispatch
def stage_for(estimator: Any) -> Stage:
    """Return the stage that computes what a fitted estimator computes.

    Args:
        estimator: a fitted scikit-learn estimator.

    Returns:
        The stage, in float64 on the CPU.

    Raises:
        NoClosedFormError: no stage is registered for its type.
        TypeError: it is not an estimator at all.
    """  # noqa: DOC202 - the registered functions return it
    if not isinstance(estimator, BaseEstimator):
        raise TypeError(
            f"the head must be made of fitted scikit-learn estimators (or a Pipeline, a search, a list of them), "
            f"got {type(estimator).__name__}: {estimator!r:.80}"
        )
    known = ", ".join(sorted(t.__name__ for t in stage_for.registry if t is not object))
    raise NoClosedFormError(
        f"{type(estimator).__name__} has no closed-form Jacobian here. Supported: {known}. "
        f"Use one of these, or add yours with stage_for.register({type(estimator).__name__})."
    )


def tensor(array: Any) -> Tensor:
    """Return a float64 copy of a fitted attribute (dense or sparse) on the CPU."""
    if hasattr(array, "toarray"):
        array = array.toarray()
    # Estimators fitted through scikit-learn's array-API dispatch have tensors, perhaps on another device.
    return torch.as_tensor(array).detach().cpu().double().clone()


@stage_for.register(StandardScaler)
def _standard_scaler(estimator: StandardScaler) -> Stage:
    zeros = torch.zeros(estimator.n_features_in_, dtype=torch.float64)
    shift = tensor(estimator.mean_) if estimator.with_mean else zeros
    return Scale(shift, tensor(estimator.scale_) if estimator.with_std else zeros + 1, zeros)


@stage_for.register(MinMaxScaler)
def _min_max_scaler(estimator: MinMaxScaler) -> Stage:
    scale = tensor(estimator.scale_)
    limits = (float(estimator.feature_range[0]), float(estimator.feature_range[1])) if estimator.clip else None
    return Scale(torch.zeros_like(scale), 1 / scale, tensor(estimator.min_), limits)


@stage_for.register(PCA)
def _pca(estimator: PCA) -> Stage:
    components = tensor(estimator.components_)
    divisor = torch.ones(len(components), dtype=torch.float64)
    if estimator.whiten:
        # scikit-learn takes the root, and clips it at eps, in the dtype that PCA was fitted in.
        variance = estimator.explained_variance_
        deviations = torch.as_tensor(variance.sqrt() if isinstance(variance, Tensor) else np.sqrt(variance))
        divisor = tensor(deviations.clamp(min=torch.finfo(deviations.dtype).eps))
    return Projection(components, tensor(estimator.mean_), divisor)


@stage_for.register(SVC)
@stage_for.register(NuSVC)
def _svc(estimator: SVC | NuSVC) -> Stage:
    n_classes = len(estimator.classes_)
    rule = (
        Binary(zero_is_second=True)
        if n_classes == 2
        else OneVsOne(
            n_classes,
            pairwise_scores=estimator.decision_function_shape == "ovo",
            break_ties=estimator.break_ties and estimator.decision_function_shape == "ovr",
        )
    )
    return KernelSVM(
        _kernel(estimator),
        tensor(estimator.support_vectors_),
        tensor(estimator.dual_coef_),
        tensor(estimator.intercept_),
        list(estimator.n_support_),
        rule,
        estimator.classes_,
    )


def _kernel(estimator: SVC | NuSVC) -> kernels.Kernel:
    gamma, coef0 = float(estimator._gamma), float(estimator.coef0)
    match estimator.kernel:
        case "linear":
            return kernels.Linear()
        case "rbf":
            return kernels.RBF(gamma)
        case "poly":
            return kernels.Polynomial(gamma, int(estimator.degree), coef0)
        case "sigmoid":
            return kernels.Sigmoid(gamma, coef0)
        case kernel:
            raise NoClosedFormError(
                f"{type(estimator).__name__} has the kernel {kernel!r}, whose gradient is not known here. "
                "Fit it with kernel='linear', 'rbf', 'poly' or 'sigmoid'."
            )


@stage_for.register(LinearSVC)
def _linear_svc(estimator: LinearSVC) -> Stage:
    weight = tensor(estimator.coef_)
    rule = Binary() if len(estimator.classes_) == 2 else OneVsRest(len(estimator.classes_))
    return LinearDecision(weight, tensor(estimator.intercept_).expand(len(weight)).clone(), rule, estimator.classes_)
