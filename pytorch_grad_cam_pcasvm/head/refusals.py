"""Refusals: which estimators have no maps, why, and which ones have maps in their place."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

from sklearn import __version__ as running_version
from sklearn import preprocessing
from sklearn.base import (
    BaseEstimator,
    ClusterMixin,
    DensityMixin,
    OneToOneFeatureMixin,
    OutlierMixin,
    is_classifier,
    is_regressor,
)
from torch import nn

from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, refuse

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


def has_values(estimator: Any) -> bool:
    """Return whether an estimator predicts something, in one of scikit-learn's ways."""
    return any(hasattr(estimator, name) for name in ("predict", "predict_proba", "decision_function"))


def may_be_asked(estimator: Any) -> bool:
    """Return whether an estimator without a closed form has values that depend on the features."""
    if _find_precomputed(estimator) is not None:
        return False
    labels = isinstance(estimator, ClusterMixin | DensityMixin) or type(estimator).__name__.startswith("Dummy")
    return has_values(estimator) and not labels and not _ways_of_booster(estimator)


def refuse_unregistered(estimator: Any, registered: Iterable[Any]) -> NoReturn:
    """Refuse an estimator without a row in the table; ``registered`` are the types with one.

    Raises:
        NoClosedFormError: it is an estimator.
        TypeError: it is none.
    """
    name = type(estimator).__name__
    if not isinstance(estimator, BaseEstimator) and (
        isinstance(estimator, type | nn.Module) or not has_values(estimator)
    ):
        raise TypeError(
            "the head must be made of fitted scikit-learn estimators (or a Pipeline, a search, a list of them), "
            f"got {name}: {estimator!r:.80}"
        )
    native = _ways_of_booster(estimator)
    if native:
        raise NoClosedFormError(f"{name} is {_library(estimator)}'s own interface, which knows no classes", *native)
    why = _by_name(_REFUSED, name)
    reason = f"{name} has no closed-form Jacobian{f', since {why}' if why else ' here'}"
    own = [] if why else [f"add yours with stage_for.register({name})"]
    usual = _by_name(_INSTEAD, name) or _usual(estimator, registered)
    raise NoClosedFormError(reason, usual, *own)


def _ways_of_booster(estimator: Any) -> list[str]:
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


def _usual(estimator: Any, registered: Iterable[Any]) -> str:
    """Return an alternative to an estimator of this role, which its mixins tell, or else its methods."""
    # FunctionTransformer is near to many names, and to none in what it does.
    left_out = (object, preprocessing.FunctionTransformer)
    names = [estimator_type.__name__ for estimator_type in registered if estimator_type not in left_out]
    own = type(estimator).__name__
    nearest = get_close_matches(own, names, n=1, cutoff=0.8)
    if nearest:
        return f"fit scikit-learn's {own}" if own == nearest[0] else f"fit {nearest[0]}"
    is_sklearn = isinstance(estimator, BaseEstimator)
    transforms, values = hasattr(estimator, "transform"), has_values(estimator)
    has_classes = hasattr(estimator, "classes_")
    scores = hasattr(estimator, "decision_function") and not has_classes
    if isinstance(estimator, OutlierMixin) or (scores and not (is_sklearn and is_regressor(estimator))):
        return "fit OneClassSVM or EllipticEnvelope, or fit PCA and explain ResidualTarget() or HotellingTarget()"
    if isinstance(estimator, ClusterMixin):
        between = ", or to reduce features PCA" if transforms else ""
        return f"fit GaussianMixture, whose components are clusters{between}"
    if (is_sklearn and is_classifier(estimator)) or (values and (has_classes or hasattr(estimator, "predict_proba"))):
        return "fit SVC"
    if is_sklearn and is_regressor(estimator):
        return "fit SVR"
    if values and not transforms:
        return "fit SVC for classes, or SVR for numbers"
    return f"fit {'StandardScaler' if isinstance(estimator, OneToOneFeatureMixin) else 'PCA'}"


def refuse_own_method(estimator: Any, base: type, method: str, *ways_out: str) -> NoReturn:
    """Refuse a subclass that computes something else than the supported estimator.

    Raises:
        NoClosedFormError: always.
    """
    name = type(estimator).__name__
    raise NoClosedFormError(
        f"{name} is a {base.__name__} with a {method} of its own, which would not be explained",
        f"add it with stage_for.register({name})",
        *ways_out,
    )


def refuse_precomputed(estimator: Any) -> None:
    """Refuse an estimator that takes a table between images, not features.

    Raises:
        NoClosedFormError: a parameter of it is "precomputed".
    """
    table = _find_precomputed(estimator)
    if table is not None:
        raise NoClosedFormError(
            f"{type(estimator).__name__} was fitted with {table}='precomputed', on a table of similarities or "
            "distances between the training images, and takes no features",
            f"fit it on features, with another {table.rpartition('__')[2]}",
        )


def _find_precomputed(estimator: Any) -> str | None:
    """Return the name of a parameter by which an estimator takes a table between images, not features; or None."""
    if not isinstance(estimator, BaseEstimator):
        return None
    parameters = estimator.get_params().items()
    return next((name for name, value in parameters if isinstance(value, str) and value == "precomputed"), None)


def refuse_values(estimator: Any, error: NoClosedFormError, cause: Exception) -> NoReturn:
    """Refuse an estimator without a closed form that could not be asked for its values, either, with the cause.

    Raises:
        NoClosedFormError: always.
    """
    words = " ".join(str(cause).split())
    lacks_label = getattr(estimator, "outlier_label", "") is None
    raise NoClosedFormError(
        f"{error.reason}; and asked for its values, it fails ({type(cause).__name__}: {words:.300})",
        *(["fit it with outlier_label='most_frequent'"] if lacks_label else []),
        *error.ways_out,
    ) from cause


@contextmanager
def other_versions_named() -> Iterator[None]:
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
