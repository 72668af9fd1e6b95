"""Checks of a fit: training features that vary, classes to tell apart, columns in order, no second fit since."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.convert import is_reduction
from pytorch_grad_cam_pcasvm.head.elsewhere import tensor
from pytorch_grad_cam_pcasvm.head.pca_distance import PCADistance
from pytorch_grad_cam_pcasvm.head.refusals import has_values
from pytorch_grad_cam_pcasvm.runtime.errors import ConstantComponentWarning, refuse, warn

# Features come from networks in single precision, whose layers leave some multiples of its rounding.
_ROUNDING = 16 * torch.finfo(torch.float32).eps
_MOST = 1e-3  # of the variance of a scaled feature, that may be rounding
_FEW = 32  # members of an ensemble
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


def refuse_several(fitted: Any) -> None:
    """Raise a ValueError for a list of whole heads, as of cross-validation: a list is of steps in order."""
    steps = fitted if isinstance(fitted, list | tuple) else []
    whole = [part for part in steps if has_values(part) and not hasattr(part, "transform")]
    if len(whole) > 1:
        refuse(
            ValueError,
            f"a list is taken for the steps of one head, in order, but {len(whole)} of its {len(steps)} members "
            f"predict something ({type(whole[0]).__name__} ...), as the heads of several folds do",
            "pass one of them, heads[0]",
            "fit one on all images",
        )


def check_variety(steps: Sequence[Any]) -> dict[int, int]:
    """Refuse steps that were fitted on features which are all alike; warn of components that do not vary.

    Returns:
        By the number of a reduction of which some components do not vary, how many do.

    Raises:
        ValueError: no feature varies.
    """
    varying, warned, before = dict[int, int](), {""}, None
    for place, estimator in enumerate(steps):
        name = type(estimator).__name__
        variances = _variances(estimator)
        constant = constant_components(estimator, before)
        if _is_constant(estimator) or (variances is not None and len(constant) == len(variances)):
            refuse(
                ValueError,
                f"all training features are alike: what {name} was fitted on differs by no more than rounding, so "
                "there is nothing to explain",
                "check that the images differ",
                "that their differences reach the layer of the features",
            )
        if variances is not None and constant:
            varying[place] = len(variances) - len(constant)
        for part, of_part in ((estimator, constant), *_inner(estimator)):
            message = _in_words(part, of_part) if of_part else ""
            if message not in warned:
                warned.add(message)
                warn(message, ConstantComponentWarning)
        before = estimator
    return varying


def constant_components(estimator: Any, before: Any = None) -> list[int]:
    """Return the components of a reduction that vary by rounding alone, behind an estimator; of others none."""
    variances = None if isinstance(estimator, PCADistance) else _variances(estimator)  # whose shrinkage bounds them
    return [] if variances is None else (variances <= _noise(estimator, variances, before)).nonzero()[:, 0].tolist()


def _inner(estimator: Any) -> Iterator[tuple[Any, list[int]]]:
    """Yield the estimators within one, as within an ensemble or a union, and which components of theirs do not vary."""
    parts = [value for name, value in getattr(estimator, "__dict__", {}).items() if name.endswith("_")]
    parts += [getattr(estimator, name, None) for name in ("transformer_list", "steps")]
    before = None
    for part in _estimators_in(parts):
        yield part, constant_components(part, before)
        yield from _inner(part)
        before = part


def holds_reduction(estimator: Any) -> bool:
    """Return whether an estimator has a fitted reduction inside."""
    for part, _ in _inner(estimator):
        with suppress(NotFittedError, TypeError):  # a kernel has parameters, too, and is no estimator
            if is_reduction(part):
                return True
    return False


def _estimators_in(value: Any) -> Iterator[Any]:
    """Yield the fitted estimators in nested lists and tuples; not of a long ensemble, whose members are alike."""
    if isinstance(value, list | tuple):
        for item in value[:_FEW]:
            yield from _estimators_in(item)
    elif hasattr(value, "get_params") and not isinstance(value, type):
        yield value
    elif hasattr(value, "calibrators"):  # of a CalibratedClassifierCV, no estimator itself
        yield value.estimator


def _in_words(estimator: Any, constant: Sequence[int]) -> str:
    """Say which components do not vary, and that so many others are left."""
    name, several = type(estimator).__name__, len(constant) > 1
    variances = _variances(estimator)
    left = 0 if variances is None else len(variances) - len(constant)
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
    """Return the variances of components, up to a common factor, shape (B,); None if they are not known."""
    for name in ("explained_variance_", "eigenvalues_"):
        variances = getattr(estimator, name, None)
        if variances is not None:
            return tensor(variances)
    return None


def _noise(estimator: Any, variances: Tensor, before: Any) -> Tensor | float:
    """Return the variance that rounding leaves where there is none, of each component, behind an estimator."""
    largest, centre = float(variances.max()), getattr(estimator, "mean_", None)
    centre = 0.0 if centre is None else float(tensor(centre).square().sum())
    if not hasattr(estimator, "components_"):  # kernel PCA
        return 16 * torch.finfo(torch.float64).eps * largest
    noise = _ROUNDING**2
    if getattr(estimator, "_fit_svd_solver", "") == "covariance_eigh":  # of sums of squares, less those of the mean
        noise = max(noise, 16 * torch.finfo(torch.as_tensor(estimator.components_).dtype).eps)
    return noise * (largest + centre) + _noise_of_scaled(estimator, before)


def _noise_of_scaled(reduction: Any, before: Any) -> Tensor | float:
    """Return the variance that rounding of unscaled features leaves in components behind a scaler, (B,)."""
    for name in ("mean_", "center_", "data_max_"):
        centre, scale = getattr(before, name, None), getattr(before, "scale_", None)
        if centre is not None and scale is not None and hasattr(before, "inverse_transform"):
            far = tensor(centre) * tensor(scale) if name == "data_max_" else tensor(centre) / tensor(scale)
            # What rounding alone has made of a feature is as large as any other behind a scaler, and no larger.
            rounding = (_ROUNDING * far).square().clamp(max=_MOST)
            components = tensor(reduction.components_)
            return components.square() @ rounding if components.shape[1] == len(rounding) else 0.0
    return 0.0


class Fit:
    """Fitted estimators, and the objects that they held when a head was made from them.

    Fitting again gives an estimator new arrays, so identity tells; numbers are not compared, and parameters are
    no fit.
    """

    def __init__(self, fitted: Any) -> None:
        self._list_fitted = list(_list_fitted(fitted))
        self.told = False

    def __reduce__(self) -> Any:
        """Leave the estimators behind: a copy, or a head in a file, has no others to be compared with."""
        return Fit, ((),)

    def fitted_again(self) -> str | None:
        """Return the class of an estimator that was fitted again, or put in another's place; or None."""
        for owner, name, value in self._list_fitted:
            held = owner[name : name + 1] if isinstance(owner, list) else [vars(owner).get(name)]
            if not held or held[0] is not value:
                part = value if isinstance(owner, list) else owner
                return type(part[-1] if isinstance(part, tuple) else part).__name__  # a step of a pipeline has a name
        return None


def _list_fitted(fitted: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the owner, the name and the value of every fitted attribute, and of every estimator inside."""
    if isinstance(fitted, list | tuple):
        for place, item in enumerate(fitted):
            if isinstance(item, list | tuple | BaseEstimator):
                if isinstance(fitted, list):
                    yield fitted, place, item
                yield from _list_fitted(item)
    elif isinstance(fitted, BaseEstimator):
        for name, value in vars(fitted).items():
            # What is private may be made anew by each prediction, as a stack's _n_feature_outs is.
            inside = isinstance(value, list | BaseEstimator) and not name.startswith("_")
            if name.endswith("_") or inside:
                yield fitted, name, value
            if inside:
                yield from _list_fitted(value)


_MOST_NUMBERS = 3  # in a name, of which any may come first in the order
_SHOWN = 5  # names


def warn_of_order(steps: Sequence[Any]) -> None:
    """Warn if the first step was fitted on numbered columns in another order, such as the alphabetical one.

    A network gives features by place alone: f0, f1, f2 and so on. A table that was sorted by f0, f1, f10, f11, f2 has
    others there.
    """
    names = getattr(steps[0], "feature_names_in_", None)
    for group in _alike([] if names is None else [str(name) for name in names]):
        if not _rises([numbers for _, numbers in group]):
            shown = [name for name, _ in group]
            first = next((i for i in range(1, len(group)) if group[i][1] < group[i - 1][1]), 1)
            start = max(0, first - _SHOWN + 1)
            listed = ("... " if start else "") + ", ".join(shown[start : start + _SHOWN])
            warn(
                f"{type(steps[0]).__name__} was fitted on columns whose numbers are not in the order of their places "
                f"({listed} ...), as where names are sorted as text; but a network's features are taken by place, "
                "whatever the names: fit it again on columns in the order of the network's features, such as "
                "table[sorted(table.columns, key=lambda name: [*map(int, re.findall('[0-9]+', name))])], or on an "
                "array, table.to_numpy(), if their places are right",
                UserWarning,
            )
            return


def _alike(names: Sequence[str]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return groups of names that differ in their numbers alone, in order, each name with its numbers."""
    groups: dict[tuple[str, ...], list[tuple[str, tuple[int, ...]]]] = {}
    for name in names:
        parts = re.split(r"([0-9]+)", name)
        groups.setdefault(tuple(parts[::2]), []).append((name, tuple(map(int, parts[1::2]))))
    return [group for group in groups.values() if group[0][1]]


def _rises(rows: Sequence[tuple[int, ...]]) -> bool:
    """Return whether rows of numbers are in order, whichever of their numbers comes first."""
    width = len(rows[0])
    orders = permutations(range(width)) if width <= _MOST_NUMBERS else [range(width)]
    ordered = ([tuple(row[place] for place in order) for row in rows] for order in orders)
    return any(keys == sorted(keys) for keys in ordered)
