"""From fitted estimators, pipelines and searches to stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sklearn import __version__ as running_version
from sklearn import preprocessing
from sklearn.base import (
    BaseEstimator,
    ClusterMixin,
    DensityMixin,
    is_regressor,
)
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from pytorch_grad_cam_pcasvm.head.enumerated import Enumerated
from pytorch_grad_cam_pcasvm.head.registry import has_values, register_all, stage_for, transformer_for, ways_of_booster
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, refuse


def convert_stages(fitted: Any, *, transform: bool = False) -> Iterator[Stage]:
    """Yield the stages of a fitted estimator, pipeline, search or list of these, in order.

    The last one predicts if it can, unless it is asked to ``transform``.

    Raises:
        NoClosedFormError: an estimator is not supported.
        TypeError: something is not a fitted estimator, or the function registered for one returns no stage.
        ValueError: an estimator was fitted by another version of scikit-learn, and lacks what is read here.
    """
    register_all()
    estimators = list(list_estimators(fitted))
    for position, estimator in enumerate(estimators):
        yield from _closed_form(estimator, last=position == len(estimators) - 1 and not transform)


def stages_of_head(fitted: Any) -> Iterator[Stage]:
    """Yield a head's stages, as :func:`convert_stages`; the last may be :class:`.Enumerated`, without a closed form.

    That takes in the steps behind the reduction from the first without a closed form on.

    Raises:
        NoClosedFormError: a step is not supported, and not among the last, of which values are enough.
    """
    register_all()
    estimators, width, reduced = list(list_estimators(fitted)), None, False
    for position, estimator in enumerate(estimators):
        rest = estimators[position:]
        try:
            stages = list(_closed_form(estimator, last=len(rest) == 1))
        except NoClosedFormError as error:
            if not _predicts(rest[-1]) or (len(rest) > 1 and not reduced) or any(map(_reduces, rest[1:-1])):
                raise
            try:
                yield Enumerated.of(rest, width, error.reason, error.ways_out)
            except NoClosedFormError:
                raise
            except Exception as cause:  # it has no values of a form that is known
                raise error from cause
            return
        yield from stages
        reduced = reduced or any(stage.reduces for stage in stages)
        width = next((stage.n_outputs for stage in reversed(stages) if stage.n_outputs is not None), width)


def _closed_form(estimator: Any, *, last: bool) -> Iterator[Stage]:
    """Yield the stages of a single estimator, which predicts if it is the ``last`` and can."""
    if isinstance(estimator, Stage):
        yield estimator
        return
    if isinstance(estimator, BaseEstimator):
        # A selector of a fitted model need not be fitted itself.
        prefit = isinstance(estimator, SelectFromModel) and estimator.prefit
        check_is_fitted(estimator.estimator if prefit else estimator)
        _refuse_own_methods(estimator)
    with _other_versions_named():
        stage = stage_for(estimator) if last else transformer_for(estimator)
    if not isinstance(stage, Stage):
        name = type(estimator).__name__
        raise TypeError(f"what is registered for {name} returns a {type(stage).__name__}, not a Stage")
    stages = Chain([stage]).flat()
    if type(estimator).__module__.startswith(_ACCELERATED):
        _compare_values(estimator, stages)
    yield from stages


def _predicts(estimator: Any) -> bool:
    """Return whether an estimator without a closed form has values that depend on the features."""
    labels = isinstance(estimator, ClusterMixin | DensityMixin) or type(estimator).__name__.startswith("Dummy")
    return has_values(estimator) and not labels and not ways_of_booster(estimator)


def _reduces(estimator: Any) -> bool:
    """Return whether an estimator is a reduction, whose components an earlier reduction would hide."""
    try:
        return any(stage.reduces for stage in _closed_form(estimator, last=False))
    except NoClosedFormError:
        return False


# scikit-learn-intelex: subclasses whose methods compute the same elsewhere.
_ACCELERATED = ("sklearnex.", "daal4py.")
# imbalanced-learn: its methods pass over samplers, and are scikit-learn's otherwise.
_RESAMPLED = "imblearn.pipeline"


def _compare_values(estimator: Any, stages: list[Stage]) -> None:
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


@contextmanager
def _other_versions_named() -> Iterator[None]:
    """Name the versions where a part of scikit-learn was fitted by one that had not all of today's attributes."""
    try:
        yield
    except AttributeError as error:
        part, missing = error.obj, error.name
        if type(part).__module__.partition(".")[0] != "sklearn":
            raise
        # Unpickling takes the version out of the state, and only warns of it.
        version = vars(part).get("_sklearn_version")
        fitted_with = (
            "perhaps with another version, which the InconsistentVersionWarning names when it is unpickled"
            if version is None
            else f"with scikit-learn {version}"
        )
        refuse(
            ValueError,
            f"{type(part).__name__} has no {missing!r}, which it has in scikit-learn {running_version}; it was fitted "
            f"{fitted_with}",
            "fit it again",
            f"install that version, pip install scikit-learn=={version or '...'}",
        )


def _refuse_own_methods(estimator: BaseEstimator, *ways_out: str) -> None:
    """Raise an error for a subclass that computes something else than the supported estimator."""
    own = []
    for base in type(estimator).__mro__:
        if base in stage_for.registry or base.__module__.startswith("sklearn."):
            break
        if base.__module__.startswith((*_ACCELERATED, _RESAMPLED)):
            continue
        own += [name for name in ("transform", "decision_function", "predict", "predict_proba") if name in vars(base)]
    if own and base is not BaseEstimator:
        name = type(estimator).__name__
        raise NoClosedFormError(
            f"{name} is a {base.__name__} with a {own[0]} of its own, which would not be explained",
            f"add it with stage_for.register({name})",
            *ways_out,
        )


def list_estimators(fitted: Any) -> Iterator[Any]:
    """Yield the single estimators of nested pipelines, searches and lists, without passthroughs."""
    if isinstance(fitted, list | tuple):
        for part in fitted:
            yield from list_estimators(part)
    elif any(base.__module__.partition(".")[0] == "cuml" for base in type(fitted).__mro__):
        yield from list_estimators(_from_gpu(fitted))
    elif fitted is None or (isinstance(fitted, str) and fitted == "passthrough"):
        return
    elif hasattr(fitted, "fit_resample") and not hasattr(fitted, "transform") and not hasattr(fitted, "predict"):
        return  # a sampler, as imbalanced-learn's: it changes the training set, and nothing of what is predicted
    elif isinstance(fitted, preprocessing.FunctionTransformer) and fitted.func is None:
        return  # it need not be fitted
    elif stage_for.dispatch(type(fitted)) is not stage_for.dispatch(object):
        yield fitted
    elif isinstance(fitted, Pipeline):
        _refuse_own_methods(fitted, "pass its fitted steps as a list")
        yield from list_estimators([step for _, step in fitted.steps])
    elif isinstance(fitted, BaseSearchCV):
        _refuse_own_methods(fitted, "pass its best_estimator_")
        check_is_fitted(fitted)
        if not hasattr(fitted, "best_estimator_"):
            raise ValueError(f"{type(fitted).__name__} has no best estimator: fit it with refit=True")
        yield from list_estimators(fitted.best_estimator_)
    elif type(fitted).__name__ == "FrozenEstimator":  # scikit-learn 1.6 and newer
        yield from list_estimators(fitted.estimator)
    else:
        yield fitted


def _from_gpu(fitted: Any) -> Any:
    """Return the scikit-learn estimator with the fit of cuML's, or of a proxy that cuml.accel puts in its place."""
    if hasattr(type(fitted), "as_sklearn"):
        return fitted.as_sklearn()
    fitted._sync_attrs_to_cpu()
    return fitted._cpu
