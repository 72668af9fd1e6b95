"""The registry: which stage stands for a fitted estimator. Supported estimators are in :mod:`.estimators`."""

import importlib
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from sklearn import preprocessing
from sklearn.base import (
    BaseEstimator,
    ClusterMixin,
    OneToOneFeatureMixin,
    OutlierMixin,
    is_classifier,
    is_regressor,
)
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError

# Parts of the names of estimators that have no maps, and why; the first that fits counts.
_REFUSED = {
    "NeighborsTransformer": "it searches for training images, and decides nothing",
    "LabelBinarizer LabelEncoder": "it takes labels, not features",
    "Vectorizer FeatureHasher": "it takes texts, not features",
    "PatchExtractor": "it takes images, not features",
    "Imputer MissingIndicator": "it is for missing values, and features have none",
    "Tree Forest Boost Isolation Neighbors Binarizer Discretizer": "its output is piecewise constant, its gradient 0",
    "Chain": "each of its members takes the labels of those before it, a step whose gradient is 0",
    "NMF Dirichlet Dictionary SparseCoder": "it is an iteration that stops at a tolerance",
    "TSNE MDS SpectralEmbedding": "it places its training images, and no others",
    "DBSCAN OPTICS Agglomerative Spectral": "it groups its training images, and no others",
    "Isomap LocallyLinear": "it needs the graph of the training set's neighbours",
    "Categorical Ordinal OneHot Target": "it takes categories, not numbers",
    "Covariance LedoitWolf OAS MinCovDet GraphicalLasso": "it estimates a covariance, and decides nothing",
    "Dummy": "it does not look at the features",
}
# Parts of the names of estimators, and what has maps in their place; all others have the usual one of their role.
_INSTEAD = {
    "NeighborsTransformer": "fit KNeighborsClassifier",
    "CategoricalNB": "fit GaussianNB",
    "LabelBinarizer LabelEncoder Vectorizer FeatureHasher PatchExtractor Imputer MissingIndicator": "leave it out",
    "OneHotEncoder OrdinalEncoder TargetEncoder": "leave it out",
    "Covariance LedoitWolf OAS MinCovDet GraphicalLasso": "fit EllipticEnvelope",
    "KernelCenterer": "fit KernelPCA, which centres its kernel itself",
    "PolynomialFeatures PolynomialCountSketch Spline Chi2Sampler": "fit Nystroem",
    "QuantileTransformer": "fit PowerTransformer",
    "TfidfTransformer": "fit Normalizer",
    "BernoulliRBM": "fit PCA",
}


def register_all() -> bool:
    """Register scikit-learn's estimators, which imports much of scikit-learn; return whether they were not yet."""
    if "pytorch_grad_cam_pcasvm.head.estimators" in sys.modules:
        return False
    tables = [(table, dict(table.registry)) for table in (stage_for, transformer_for)]
    importlib.import_module("pytorch_grad_cam_pcasvm.head.estimators")
    for table, own in tables:  # what people have registered before stays theirs
        for estimator_type in own.keys() - {object}:
            table.register(estimator_type, own[estimator_type])
    return True


def has_values(estimator: Any) -> bool:
    """Return whether an estimator predicts something, in one of scikit-learn's ways."""
    return any(hasattr(estimator, name) for name in ("predict", "predict_proba", "decision_function"))


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
    if register_all():
        return stage_for(estimator)
    name = type(estimator).__name__
    if not isinstance(estimator, BaseEstimator) and (
        isinstance(estimator, type | nn.Module) or not has_values(estimator)
    ):
        raise TypeError(
            "the head must be made of fitted scikit-learn estimators (or a Pipeline, a search, a list of them), "
            f"got {name}: {estimator!r:.80}"
        )
    native = ways_of_booster(estimator)
    if native:
        raise NoClosedFormError(f"{name} is {_library(estimator)}'s own interface, which knows no classes", *native)
    why = _by_name(_REFUSED, name)
    reason = f"{name} has no closed-form Jacobian{f', since {why}' if why else ' here'}"
    own = [] if why else [f"add yours with stage_for.register({name})"]
    usual = _by_name(_INSTEAD, name) or (_usual(estimator) if isinstance(estimator, BaseEstimator) else "fit PCA")
    raise NoClosedFormError(reason, usual, *own)


def ways_of_booster(estimator: Any) -> list[str]:
    """Return ways out for a booster of XGBoost's or LightGBM's own interface; none for other estimators.

    XGBoost's takes no rows of numbers; LightGBM's does, but of classes it predicts probabilities, without labels.
    """
    if type(estimator).__name__ != "Booster":
        return []
    if _library(estimator) == "xgboost":
        return [
            "save it and load it as scikit-learn's, booster.save_model('booster.json'), then model = XGBClassifier() "
            "(or XGBRegressor()) and model.load_model('booster.json')"
        ]
    if _library(estimator) == "lightgbm" and _classifies(estimator):
        return [
            "fit LGBMClassifier",
            "wrap it in a class with classes_, decision_function(rows), booster.predict(rows, raw_score=True), and "
            "predict(rows), the labels",
        ]
    return []


def _library(estimator: Any) -> str:
    return type(estimator).__module__.partition(".")[0]


def _classifies(booster: Any) -> bool:
    """Return whether a booster of LightGBM was trained to tell classes."""
    objective = str(booster.dump_model(num_iteration=1).get("objective", ""))
    return objective.startswith(("binary", "multiclass", "cross_entropy", "softmax"))


def _by_name(table: Mapping[str, str], name: str) -> str | None:
    """Return the entry of the first parts of names that an estimator's name has, or None."""
    return next((entry for parts, entry in table.items() if any(part in name for part in parts.split())), None)


def _usual(estimator: BaseEstimator) -> str:
    """Return an alternative to an estimator of this role."""
    # FunctionTransformer is near to many names, and to none in what it does.
    names = [
        estimator_type.__name__
        for estimator_type in stage_for.registry
        if estimator_type not in (object, preprocessing.FunctionTransformer)
    ]
    nearest = get_close_matches(type(estimator).__name__, names, n=1, cutoff=0.8)
    if nearest:
        return f"fit {nearest[0]}"
    if isinstance(estimator, OutlierMixin):
        return "fit OneClassSVM or EllipticEnvelope, or fit PCA and explain ResidualTarget() or HotellingTarget()"
    if isinstance(estimator, ClusterMixin):
        between = ", or to reduce features PCA" if hasattr(estimator, "transform") else ""
        return f"fit GaussianMixture, whose components are clusters{between}"
    if is_classifier(estimator):
        return "fit SVC"
    if is_regressor(estimator):
        return "fit SVR"
    return f"fit {'StandardScaler' if isinstance(estimator, OneToOneFeatureMixin) else 'PCA'}"


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
