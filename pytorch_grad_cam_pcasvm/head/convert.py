"""Conversion: a fitted estimator, pipeline, search or list is listed as steps, and each step becomes stages."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sklearn import config_context, preprocessing
from sklearn.base import BaseEstimator
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from pytorch_grad_cam_pcasvm.head.elsewhere import ACCELERATED, compare_values, from_gpu, of_sklearn, with_arrays
from pytorch_grad_cam_pcasvm.head.enumerated import Enumerated
from pytorch_grad_cam_pcasvm.head.estimators import NESTED
from pytorch_grad_cam_pcasvm.head.refusals import (
    may_be_asked,
    other_versions_named,
    refuse_own_method,
    refuse_precomputed,
    refuse_values,
)
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain, Projection
from pytorch_grad_cam_pcasvm.head.table import stage_for, transformer_for
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

# imbalanced-learn: its methods pass over samplers, and are scikit-learn's otherwise.
_RESAMPLED = "imblearn.pipeline"


def steps_of(fitted: Any) -> list[Any]:
    """Return the single estimators of nested pipelines, searches and lists, without passthroughs.

    Raises:
        NoClosedFormError: a pipeline or a search has a prediction of its own.
        ValueError: a search has no best estimator.
    """
    return list(_list_steps(fitted))


def _list_steps(fitted: Any) -> Iterator[Any]:
    if isinstance(fitted, list | tuple):
        for part in fitted:
            yield from _list_steps(part)
    elif any(base.__module__.partition(".")[0] == "cuml" for base in type(fitted).__mro__):
        yield from _list_steps(from_gpu(fitted))
    elif fitted is None or (isinstance(fitted, str) and fitted == "passthrough"):
        return
    elif hasattr(fitted, "fit_resample") and not hasattr(fitted, "transform") and not hasattr(fitted, "predict"):
        return  # a sampler, as imbalanced-learn's: it changes the training set, and nothing of what is predicted
    elif isinstance(fitted, preprocessing.FunctionTransformer) and fitted.func is None:
        return  # it need not be fitted
    elif stage_for.dispatch(type(fitted)) is not stage_for.dispatch(object):
        yield fitted
    elif isinstance(fitted, Pipeline):
        _check_methods(fitted, "pass its fitted steps as a list")
        yield from _list_steps([step for _, step in fitted.steps])
    elif isinstance(fitted, BaseSearchCV):
        _check_methods(fitted, "pass its best_estimator_")
        check_is_fitted(fitted)
        if not hasattr(fitted, "best_estimator_"):
            raise ValueError(f"{type(fitted).__name__} has no best estimator: fit it with refit=True")
        yield from _list_steps(fitted.best_estimator_)
    elif type(fitted).__name__ == "FrozenEstimator":  # scikit-learn 1.6 and newer
        yield from _list_steps(fitted.estimator)
    else:
        yield fitted


def stages_of(steps: Sequence[Any], *, transform: bool = False) -> list[Stage]:
    """Return the stages of steps in order; the last one predicts if it can, unless it is asked to ``transform``.

    Raises:
        NoClosedFormError: an estimator is not supported.
        TypeError: something is not a fitted estimator, or the function registered for one returns no stage.
        ValueError: an estimator was fitted by another version of scikit-learn, and lacks what is read here.
    """
    last = None if transform else len(steps) - 1
    return [stage for place, step in enumerate(steps) for stage in _convert_step(step, last=place == last)]


def convert(fitted: Any, *, transform: bool = False) -> list[Stage]:
    """Return the stages of a fitted estimator, pipeline, search or list of these, as :func:`stages_of`."""
    return stages_of(steps_of(fitted), transform=transform)


def stages_of_head(steps: Sequence[Any], varying: Mapping[int, int]) -> list[Stage]:
    """Return a head's stages, as :func:`stages_of`; the last may be :class:`.Enumerated`, without a closed form.

    That takes in the steps behind the reduction from the first without a closed form on.

    Args:
        steps: fitted estimators.
        varying: by the number of a step, how many of its components vary, where some do not.

    Raises:
        NoClosedFormError: a step is not supported, and not among the last, of which values are enough.
    """
    stages = list[Stage]()
    for place, step in enumerate(steps):
        rest = steps[place:]
        try:
            converted = _convert_step(step, last=len(rest) == 1)
        except NoClosedFormError as error:
            behind_reduction = len(rest) == 1 or any(stage.reduces for stage in stages)
            if not may_be_asked(rest[-1]) or not behind_reduction or any(map(is_reduction, rest[1:-1])):
                raise
            return [*stages, _enumerate(rest, stages, error)]
        for stage in converted:
            if place in varying and isinstance(stage, Projection):
                stage.facts = replace(stage.facts, varying=float(varying[place]))
        stages += converted
    return stages


def _enumerate(steps: Sequence[Any], before: Sequence[Stage], error: NoClosedFormError) -> Stage:
    """Return the decision that asks the estimators themselves, behind other stages, with why it must."""
    width = next((stage.n_outputs for stage in reversed(before) if stage.n_outputs is not None), None)
    try:
        return Enumerated.of(steps, width, error.reason, error.ways_out)
    except NoClosedFormError:
        raise
    except Exception as cause:  # it has no values of a form that is known
        refuse_values(steps[-1], error, cause)


def _convert_step(step: Any, *, last: bool) -> list[Stage]:
    """Return the stages of a single estimator, which predicts if it is the ``last`` and can."""
    if isinstance(step, Stage):
        return [step]
    if isinstance(step, BaseEstimator):
        # A selector of a fitted model need not be fitted itself.
        prefit = isinstance(step, SelectFromModel) and step.prefit
        check_is_fitted(step.estimator if prefit else step)
        _check_methods(step)
    refuse_precomputed(step)
    with other_versions_named(), config_context(array_api_dispatch=False):
        arrays = with_arrays(step)
        stage = stage_for(arrays) if last else transformer_for(arrays)
    if not isinstance(stage, Stage):
        name = type(step).__name__
        raise TypeError(f"what is registered for {name} returns a {type(stage).__name__}, not a Stage")
    stages = Chain([stage]).flat()
    if type(step).__module__.startswith(ACCELERATED):
        compare_values(step, stages)
    return stages


def is_reduction(estimator: Any) -> bool:
    """Return whether an estimator is a reduction, whose components an earlier reduction would hide."""
    try:
        return any(stage.reduces for stage in _convert_step(estimator, last=False))
    except NoClosedFormError:
        return False


def _check_methods(estimator: BaseEstimator, *ways_out: str) -> None:
    """Refuse a subclass that computes something else than the supported estimator."""
    own = []
    for base in type(estimator).__mro__:
        if base in stage_for.registry or base.__module__.startswith("sklearn."):
            break
        if base.__module__.startswith((*ACCELERATED, _RESAMPLED)):
            continue
        own += [name for name in ("transform", "decision_function", "predict", "predict_proba") if name in vars(base)]
    # A mixin alone is no estimator.
    if own and base is not BaseEstimator and (base in stage_for.registry or issubclass(base, BaseEstimator)):
        refuse_own_method(estimator, base, own[0], *ways_out)


def register_originals(table: Any) -> None:
    """Register scikit-learn's own classes, too, where scikit-learn-intelex has put others in their places."""
    for estimator_type, function in list(table.registry.items()):
        own = of_sklearn(estimator_type)
        if own not in table.registry:
            table.register(own, function)


for _type, _row in NESTED.items():
    stage_for.register(_type, lambda estimator, row=_row: row(estimator, convert))
for _table in (stage_for, transformer_for):
    register_originals(_table)
