"""The registry: from fitted estimators, pipelines and searches to stages. Supported ones are in :mod:`.estimators`."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import singledispatch
from typing import Any, NoReturn

from sklearn import __version__ as running_version
from sklearn import config_context, preprocessing
from sklearn.base import (
    BaseEstimator,
    ClusterMixin,
    DensityMixin,
    OneToOneFeatureMixin,
    OutlierMixin,
    is_classifier,
    is_regressor,
)
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted
from torch import nn

from pytorch_grad_cam_pcasvm.head.elsewhere import ACCELERATED, compare_values, from_gpu, of_sklearn, with_arrays
from pytorch_grad_cam_pcasvm.head.enumerated import Enumerated
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain
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
# imbalanced-learn: its methods pass over samplers, and are scikit-learn's otherwise.
_RESAMPLED = "imblearn.pipeline"


def register_all() -> bool:
    """Register scikit-learn's estimators, which imports much of scikit-learn; return whether they were not yet."""
    if "pytorch_grad_cam_pcasvm.head.estimators" in sys.modules:
        return False
    tables = [(table, dict(table.registry)) for table in (stage_for, transformer_for)]
    importlib.import_module("pytorch_grad_cam_pcasvm.head.estimators")
    for table, own in tables:  # registrations made before this import take precedence
        for estimator_type in own.keys() - {object}:
            table.register(estimator_type, own[estimator_type])
        register_originals(table)
    return True


def register_originals(table: Any) -> None:
    """Register scikit-learn's own classes where those of scikit-learn-intelex stand in their places."""
    for estimator_type, function in list(table.registry.items()):
        own = of_sklearn(estimator_type)
        if own not in table.registry:
            table.register(own, function)


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
    usual = _by_name(_INSTEAD, name) or _usual(estimator)
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


def _usual(estimator: Any) -> str:
    """Return an alternative to an estimator of this role, which its mixins tell, or else its methods."""
    # FunctionTransformer is near to many names, and to none in what it does.
    names = [
        estimator_type.__name__
        for estimator_type in stage_for.registry
        if estimator_type not in (object, preprocessing.FunctionTransformer)
    ]
    own = type(estimator).__name__
    nearest = get_close_matches(own, names, n=1, cutoff=0.8)
    if nearest:
        return f"fit scikit-learn's {own}" if own == nearest[0] else f"fit {nearest[0]}"
    known = isinstance(estimator, BaseEstimator)
    transforms, values = hasattr(estimator, "transform"), has_values(estimator)
    scores = hasattr(estimator, "decision_function") and not hasattr(estimator, "classes_")
    if isinstance(estimator, OutlierMixin) or (scores and not (known and is_regressor(estimator))):
        return "fit OneClassSVM or EllipticEnvelope, or fit PCA and explain ResidualTarget() or HotellingTarget()"
    if isinstance(estimator, ClusterMixin):
        between = ", or to reduce features PCA" if transforms else ""
        return f"fit GaussianMixture, whose components are clusters{between}"
    if (known and is_classifier(estimator)) or (values and _tells_classes(estimator)):
        return "fit SVC"
    if known and is_regressor(estimator):
        return "fit SVR"
    if values and not transforms:
        return "fit SVC for classes, or SVR for numbers"
    return f"fit {'StandardScaler' if isinstance(estimator, OneToOneFeatureMixin) else 'PCA'}"


def _tells_classes(estimator: Any) -> bool:
    return hasattr(estimator, "classes_") or hasattr(estimator, "predict_proba")


@singledispatch
def transformer_for(estimator: Any) -> Stage:
    """Return the stage of an estimator that others follow; it differs only if one both transforms and classifies."""
    return stage_for(estimator)


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
            if not _predicts(rest[-1]) or (len(rest) > 1 and not reduced) or any(map(is_reduction, rest[1:-1])):
                raise
            try:
                yield Enumerated.of(rest, width, error.reason, error.ways_out)
            except NoClosedFormError:
                raise
            except Exception as cause:  # it has no values of a form that is known
                _refuse_values(rest[-1], error, cause)
            return
        yield from stages
        reduced = reduced or any(stage.reduces for stage in stages)
        width = next((stage.n_outputs for stage in reversed(stages) if stage.n_outputs is not None), width)


def _refuse_values(estimator: Any, error: NoClosedFormError, cause: Exception) -> NoReturn:
    """Refuse an estimator without a closed form that could not be asked for its values, either, with the cause."""
    told = " ".join(str(cause).split())
    lacks_label = getattr(estimator, "outlier_label", "") is None
    raise NoClosedFormError(
        f"{error.reason}; and asked for its values, it fails ({type(cause).__name__}: {told:.300})",
        *(["fit it with outlier_label='most_frequent'"] if lacks_label else []),
        *error.ways_out,
    ) from cause


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
    table = _find_precomputed(estimator)
    if table is not None:
        raise NoClosedFormError(
            f"{type(estimator).__name__} was fitted with {table}='precomputed', on a table of similarities or "
            "distances between the training images, and takes no features",
            f"fit it on features, with another {table.rpartition('__')[2]}",
        )
    with _other_versions_named(), config_context(array_api_dispatch=False):
        arrays = with_arrays(estimator)
        stage = stage_for(arrays) if last else transformer_for(arrays)
    if not isinstance(stage, Stage):
        name = type(estimator).__name__
        raise TypeError(f"what is registered for {name} returns a {type(stage).__name__}, not a Stage")
    stages = Chain([stage]).flat()
    if type(estimator).__module__.startswith(ACCELERATED):
        compare_values(estimator, stages)
    yield from stages


def _find_precomputed(estimator: Any) -> str | None:
    """Return the name of a parameter by which an estimator takes a table between images, not features; or None."""
    if not isinstance(estimator, BaseEstimator):
        return None
    parameters = estimator.get_params().items()
    return next((name for name, value in parameters if isinstance(value, str) and value == "precomputed"), None)


def _predicts(estimator: Any) -> bool:
    """Return whether an estimator without a closed form has values that depend on the features."""
    if _find_precomputed(estimator) is not None:
        return False
    labels = isinstance(estimator, ClusterMixin | DensityMixin) or type(estimator).__name__.startswith("Dummy")
    return has_values(estimator) and not labels and not ways_of_booster(estimator)


def is_reduction(estimator: Any) -> bool:
    """Return whether an estimator is a reduction, whose components an earlier reduction would hide."""
    try:
        return any(stage.reduces for stage in _closed_form(estimator, last=False))
    except NoClosedFormError:
        return False


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
        if base.__module__.startswith((*ACCELERATED, _RESAMPLED)):
            continue
        own += [name for name in ("transform", "decision_function", "predict", "predict_proba") if name in vars(base)]
    # A mixin alone is no estimator.
    if own and base is not BaseEstimator and (base in stage_for.registry or issubclass(base, BaseEstimator)):
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
        yield from list_estimators(from_gpu(fitted))
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
