"""From fitted scikit-learn estimators to stages; the supported estimators are in :mod:`.estimators`."""

import importlib
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from sklearn import preprocessing
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, is_classifier, is_regressor
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain


def stages_of(fitted: Any, *, transform: bool = False) -> Iterator[Stage]:
    """Yield the stages of a fitted estimator, pipeline, search or list of these, in order.

    The last one predicts if it can, unless it is asked to ``transform``.

    Raises:
        NoClosedFormError: an estimator is not supported.
        TypeError: something is not a fitted estimator, or the function registered for one returns no stage.
    """
    _register()
    estimators = list(_estimators(fitted))
    for position, estimator in enumerate(estimators):
        if isinstance(estimator, Stage):
            yield estimator
            continue
        if isinstance(estimator, BaseEstimator):
            # A selector of a fitted model need not be fitted itself.
            prefit = isinstance(estimator, SelectFromModel) and estimator.prefit
            check_is_fitted(estimator.estimator if prefit else estimator)
            _refuse_own_methods(estimator)
        last = position == len(estimators) - 1 and not transform
        stage = stage_for(estimator) if last else transformer_for(estimator)
        if not isinstance(stage, Stage):
            kind = type(estimator).__name__
            raise TypeError(f"what is registered for {kind} returns a {type(stage).__name__}, not a Stage")
        stages = Chain([stage]).flat()
        if type(estimator).__module__.startswith(_ACCELERATED):
            _compare(estimator, stages)
        yield from stages


# scikit-learn-intelex: subclasses whose methods compute the same elsewhere.
_ACCELERATED = ("sklearnex.", "daal4py.")


def _compare(estimator: Any, stages: list[Stage]) -> None:
    """Raise an error if an accelerated estimator computes other values than its stages, on a few rows."""
    rng, width = np.random.default_rng(0), estimator.n_features_in_
    points = getattr(estimator, "support_vectors_", getattr(estimator, "mean_", np.zeros(width)))
    rows = np.asarray(points).reshape(-1, width)[:4].mean(0) + rng.normal(size=(9, width))
    y = torch.from_numpy(rows)
    for stage in stages:
        y, _ = stage.evaluate(y)
    voting = getattr(stages[-1], "voting", None)
    if voting is None:
        expected = estimator.transform(rows)
    elif hasattr(estimator, "decision_function"):
        expected, y = estimator.decision_function(rows), voting.scores(y)
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


def _refuse_own_methods(estimator: BaseEstimator, way_out: str = "") -> None:
    """Raise an error for a subclass that computes something else than the supported estimator."""
    own = []
    for kind in type(estimator).__mro__:
        if kind in stage_for.registry or kind.__module__.startswith("sklearn."):
            break
        if kind.__module__.startswith(_ACCELERATED):
            continue
        own += [name for name in ("transform", "decision_function", "predict", "predict_proba") if name in vars(kind)]
    if own and kind is not BaseEstimator:
        name = type(estimator).__name__
        raise NoClosedFormError(
            f"{name} is a {kind.__name__} with a {own[0]} of its own, which would not be explained. "
            f"Add it with stage_for.register({name}){way_out}."
        )


def _estimators(fitted: Any) -> Iterator[Any]:
    """Yield the single estimators of nested pipelines, searches and lists, without those that change nothing."""
    if isinstance(fitted, list | tuple):
        for part in fitted:
            yield from _estimators(part)
    elif any(kind.__module__.partition(".")[0] == "cuml" for kind in type(fitted).__mro__):
        yield from _estimators(_from_gpu(fitted))
    elif fitted is None or (isinstance(fitted, str) and fitted == "passthrough"):
        return
    elif isinstance(fitted, preprocessing.FunctionTransformer) and fitted.func is None:
        return  # it need not be fitted
    elif stage_for.dispatch(type(fitted)) is not stage_for.dispatch(object):
        yield fitted
    elif isinstance(fitted, Pipeline):
        _refuse_own_methods(fitted, ", or pass its fitted steps as a list")
        yield from _estimators([step for _, step in fitted.steps])
    elif isinstance(fitted, BaseSearchCV):
        _refuse_own_methods(fitted, ", or pass its best_estimator_")
        check_is_fitted(fitted)
        if not hasattr(fitted, "best_estimator_"):
            raise ValueError(f"{type(fitted).__name__} has no best estimator: fit it with refit=True")
        yield from _estimators(fitted.best_estimator_)
    elif type(fitted).__name__ == "FrozenEstimator":  # scikit-learn 1.6 and newer
        yield from _estimators(fitted.estimator)
    else:
        yield fitted


# Parts of the names of estimators that have no maps, and why.
_REFUSED = {
    "Tree Forest Boost Isolation Neighbors Binarizer Discretizer": "its output is piecewise constant, its gradient 0",
    "Chain": "each of its members takes the labels of those before it, a step whose gradient is 0",
    "NMF Dirichlet Dictionary SparseCoder": "it is an iteration that stops at a tolerance",
    "Isomap LocallyLinear Spectral LocalOutlier TSNE MDS": "it needs the graph of the training set's neighbours",
    "Categorical Ordinal OneHot Target": "it takes categories, not numbers",
    "Dummy": "it does not look at the features",
}


def _register() -> bool:
    """Import what registers scikit-learn's estimators, and much of scikit-learn; return whether that was new."""
    if "pytorch_grad_cam_pcasvm.head.estimators" in sys.modules:
        return False
    tables = [(table, dict(table.registry)) for table in (stage_for, transformer_for)]
    importlib.import_module("pytorch_grad_cam_pcasvm.head.estimators")
    for table, own in tables:  # what people have registered before stays theirs
        for kind in own.keys() - {object}:
            table.register(kind, own[kind])
    return True


def _from_gpu(fitted: Any) -> Any:
    """Return the scikit-learn estimator with the fit of cuML's, or of a proxy that cuml.accel puts in its place."""
    if hasattr(type(fitted), "as_sklearn"):
        return fitted.as_sklearn()
    fitted._sync_attrs_to_cpu()
    return fitted._cpu


@singledispatch
def stage_for(estimator: Any) -> Stage:
    """Return the stage that computes what a fitted estimator does, in float64 on the CPU (a ``singledispatch``).

    Raises:
        NoClosedFormError: no stage is registered for the estimator's type.
        TypeError: the argument is not an estimator.

    Example:
        >>> @stage_for.register(MyScaler)
        ... def my_scaler(estimator):
        ...     return Scale(tensor(estimator.mean_), tensor(estimator.std_), tensor(0 * estimator.mean_))
        >>> head = Head.of([MyScaler().fit(features), pipeline[1]])
    """
    if _register():
        return stage_for(estimator)
    name = type(estimator).__name__
    if not isinstance(estimator, BaseEstimator):
        raise TypeError(
            "the head must be made of fitted scikit-learn estimators (or a Pipeline, a search, a list of them), "
            f"got {name}: {estimator!r:.80}"
        )
    # FunctionTransformer is near to many names, and to none in what it does.
    known = [kind.__name__ for kind in stage_for.registry if kind not in (object, preprocessing.FunctionTransformer)]
    one_to_one = "StandardScaler" if isinstance(estimator, OneToOneFeatureMixin) else "PCA"
    usual = "SVC" if is_classifier(estimator) else "SVR" if is_regressor(estimator) else one_to_one
    nearest = [*get_close_matches(name, known, n=1, cutoff=0.8), usual][0]
    why = next((why for parts, why in _REFUSED.items() if any(part in name for part in parts.split())), None)
    why, own = (f": {why}", "") if why else (" here", f"; or add yours with stage_for.register({name})")
    raise NoClosedFormError(f"{name} has no closed-form Jacobian{why}. The nearest that has one is {nearest}{own}.")


@singledispatch
def transformer_for(estimator: Any) -> Stage:
    """Return the stage of an estimator that others follow; it differs only if one both transforms and classifies."""
    return stage_for(estimator)


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
