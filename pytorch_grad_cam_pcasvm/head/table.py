"""The table: for each type of estimator, a function that makes a stage of a fitted one. ``estimators`` has its rows."""

from collections.abc import Callable
from functools import singledispatch
from typing import Any

from pytorch_grad_cam_pcasvm.head.refusals import refuse_unregistered
from pytorch_grad_cam_pcasvm.head.stage import Stage

Convert = Callable[..., list[Stage]]  # a fitted estimator, pipeline, search or list of these to its stages
Row = Callable[[Any, Convert], Stage]  # of an estimator that holds others


@singledispatch
def stage_for(estimator: Any) -> Stage:
    """Return the stage that computes a fitted estimator's output, in float64 on the CPU (a ``singledispatch``).

    Raises:
        NoClosedFormError: no stage is registered for the estimator's type.
        TypeError: the argument is not an estimator.

    Example:
        >>> @stage_for.register(MyScaler)
        ... def my_scaler(estimator):
        ...     return Scale(tensor(estimator.mean_), tensor(estimator.std_), tensor(0 * estimator.mean_))
        >>> head = Head.of([MyScaler().fit(features), pipeline[1]])
    """
    refuse_unregistered(estimator, stage_for.registry)


@singledispatch
def transformer_for(estimator: Any) -> Stage:
    """Return the stage of an estimator that others follow; it differs only if one both transforms and classifies."""
    return stage_for(estimator)
