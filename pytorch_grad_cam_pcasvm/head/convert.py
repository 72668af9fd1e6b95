"""From fitted scikit-learn estimators to stages: one registration per estimator."""

import math
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from sklearn import decomposition, preprocessing, random_projection, svm
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cross_decomposition import PLSRegression
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_selection import RFE, SelectFromModel, SelectorMixin
from sklearn.isotonic import IsotonicRegression
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import LogisticRegression, SGDClassifier, SGDRegressor
from sklearn.linear_model._base import LinearClassifierMixin, LinearModel
from sklearn.model_selection._search import BaseSearchCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.head import kernels, multiclass
from pytorch_grad_cam_pcasvm.head.calibration import Calibration, Isotonic, PerClass, Platt, Temperature
from pytorch_grad_cam_pcasvm.head.decisions import Decision, Ensemble, KernelSVM, LinearDecision
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import (
    Chain,
    FourierFeatures,
    KernelMap,
    Normalise,
    Projection,
    Scale,
    Select,
)


def stages_of(fitted: Any) -> Iterator[Stage]:
    """Yield the stages of a fitted estimator, pipeline, search or list of these, one per estimator, in order."""
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
        stage = stage_for(estimator) if position == len(estimators) - 1 else transformer_for(estimator)
        if not isinstance(stage, Stage):
            kind = type(estimator).__name__
            raise TypeError(f"what is registered for {kind} returns a {type(stage).__name__}, not a Stage")
        yield stage


def _refuse_own_methods(estimator: BaseEstimator, way_out: str = "") -> None:
    """Refuse a subclass that computes something else than the estimator that is known."""
    own = []
    for kind in type(estimator).__mro__:
        if kind in stage_for.registry or kind.__module__.startswith("sklearn."):
            break
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


@singledispatch
def stage_for(estimator: Any) -> Stage:
    """Return the stage that computes the same as a fitted estimator, in float64 on the CPU (a ``singledispatch``).

    Raises:
        NoClosedFormError: no stage is registered for its type.
        TypeError: it is not an estimator.

    Example:
        >>> @stage_for.register(MyScaler)
        ... def my_scaler(estimator):
        ...     return Scale(tensor(estimator.mean_), tensor(estimator.std_), tensor(0 * estimator.mean_))
        >>> head = Head.of([MyScaler().fit(features), pipeline[1]])
    """
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
    why, own = " here", f"; or add yours with stage_for.register({name})"
    if any(part in name for part in ("Tree", "Forest", "Boosting", "Neighbors")):
        why, own = ": its output is piecewise constant, its gradient 0", ""
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


# --- scalers and selectors ------------------------------------------------------------------------------------------


def _scale(
    estimator: Any, centre: Any, scale: Any, offset: Any = None, limits: Any = (-1, 1), *, centre_is_mean: bool = False
) -> Stage:
    """Return ``(x - centre) / scale + offset``, without the parts that are None, clipped if the estimator clips."""
    zeros = torch.zeros(estimator.n_features_in_, dtype=torch.float64)
    shift, divisor, offset = (
        zeros + default if array is None else tensor(array) for array, default in ((centre, 0), (scale, 1), (offset, 0))
    )
    clips = getattr(estimator, "clip", False)
    limits = (float(limits[0]), float(limits[1])) if clips else None
    return Scale(shift, divisor, offset, limits, centre_is_mean and centre is not None)


@stage_for.register(SelectorMixin)
@transformer_for.register(RFE)
def _selector(estimator: Any) -> Stage:
    support = np.asarray(estimator.get_support())
    return Select(torch.as_tensor(np.flatnonzero(support)), len(support))


@stage_for.register(RFE)
def _recursive_elimination(estimator: RFE) -> Stage:
    raise NoClosedFormError(
        f"{type(estimator).__name__} at the end predicts with an estimator of its own: "
        "put that after it, [..., rfe, rfe.estimator_]."
    )


@stage_for.register(preprocessing.FunctionTransformer)
def _function_transformer(estimator: Any) -> Stage:
    raise NoClosedFormError(
        f"FunctionTransformer({estimator.func!r}) has no closed-form Jacobian: only the identity (func=None) has. "
        "Move the function into the backbone, or register a transformer of your own with stage_for.register(...)."
    )


# --- reductions: most are V^T (x - u) with a matrix of their own ----------------------------------------------------


def _projection(components: Any, mean: Any = None, divisor: Tensor | None = None, **known: Any) -> Stage:
    components = tensor(components)
    mean = torch.zeros(components.shape[1], dtype=torch.float64) if mean is None else tensor(mean)
    divisor = torch.ones(len(components), dtype=torch.float64) if divisor is None else divisor
    return Projection(components, mean, divisor, **known)


@stage_for.register(decomposition.PCA)
@stage_for.register(decomposition.IncrementalPCA)
def _pca(estimator: Any) -> Stage:
    # scikit-learn takes the root, clips it at eps where it divides, and multiplies in the dtype that PCA was fitted in.
    variance = estimator.explained_variance_
    deviations = variance.sqrt() if isinstance(variance, Tensor) else np.sqrt(variance)
    eps = torch.finfo(torch.as_tensor(deviations).dtype).eps
    ones = torch.ones(len(variance), dtype=torch.float64)
    if estimator.whiten:
        divisor, variances = tensor(deviations).clamp(min=eps), ones
        inverse = tensor(deviations[:, None] * estimator.components_)
    else:
        divisor, inverse, variances = ones, ones, tensor(variance).clamp(min=eps**2)
    return _projection(estimator.components_, estimator.mean_, divisor, inverse=inverse, variances=variances)


@stage_for.register(decomposition.FactorAnalysis)
def _factor_analysis(estimator: Any) -> Stage:
    # E[z | x] = (1 + L Psi^-1 L^T)^-1 L Psi^-1 (x - u)
    weighted = tensor(estimator.components_) / tensor(estimator.noise_variance_)
    precision = torch.eye(len(weighted), dtype=torch.float64) + weighted @ tensor(estimator.components_).T
    return _projection(torch.linalg.solve(precision, weighted), estimator.mean_)


@stage_for.register(decomposition.SparsePCA)
@stage_for.register(decomposition.MiniBatchSparsePCA)
def _sparse_pca(estimator: Any) -> Stage:
    # Its transform is a ridge regression on the components: (C C^T + alpha)^-1 C (x - u).
    components = tensor(estimator.components_)
    ridge = components @ components.T + estimator.ridge_alpha * torch.eye(len(components), dtype=torch.float64)
    return _projection(torch.linalg.pinv(ridge, hermitian=True) @ components, estimator.mean_, inverse=components)


@transformer_for.register(PLSRegression)
def _pls(estimator: PLSRegression) -> Stage:
    scale = tensor(estimator._x_std)
    inverse = tensor(estimator.x_loadings_).T * scale
    return _projection(tensor(estimator.x_rotations_).T / scale, estimator._x_mean, inverse=inverse)


@transformer_for.register(LinearDiscriminantAnalysis)
def _discriminants(estimator: LinearDiscriminantAnalysis) -> Stage:
    if estimator.solver == "lsqr":
        raise NoClosedFormError("LinearDiscriminantAnalysis(solver='lsqr') transforms nothing: use 'svd' or 'eigen'.")
    mean = estimator.xbar_ if estimator.solver == "svd" else None
    components = tensor(estimator.scalings_).T[: estimator._max_components]
    return _projection(components, mean, weighted=estimator.priors is not None)


@stage_for.register(decomposition.KernelPCA)
def _kernel_pca(estimator: Any) -> Stage:
    scale = np.sqrt(estimator.eigenvalues_, where=estimator.eigenvalues_ != 0, out=np.ones_like(estimator.eigenvalues_))
    alphas = tensor(np.where(estimator.eigenvalues_ != 0, estimator.eigenvectors_ / scale, 0.0))
    # Centring the kernel is linear in it: K - mean_i(K) - rows + all.
    centred = alphas - alphas.mean(0)
    centerer = estimator._centerer
    offset = float(centerer.K_fit_all_) * alphas.sum(0) - tensor(centerer.K_fit_rows_) @ alphas
    points = tensor(estimator.X_fit_)
    kernel = _kernel(estimator, getattr(estimator, "gamma_", estimator.gamma), points.shape[1])
    return KernelMap(kernel, points, centred, offset, reduces=True)


@stage_for.register(Nystroem)
def _nystroem(estimator: Nystroem) -> Stage:
    if not callable(estimator.kernel) and estimator.kernel_params:
        raise NoClosedFormError("Nystroem(kernel_params=...) is not supported: pass gamma, degree and coef0 directly.")
    points, coefficients = tensor(estimator.components_), tensor(estimator.normalization_).T
    kernel = _kernel(estimator, estimator.gamma, points.shape[1])
    return KernelMap(kernel, points, coefficients, torch.zeros(coefficients.shape[1]).double(), reduces=False)


# --- classifiers and regressors -------------------------------------------------------------------------------------


@stage_for.register(svm.SVC)
@stage_for.register(svm.NuSVC)
def _svc(estimator: Any) -> Stage:
    classes = estimator.classes_
    if len(estimator.n_support_) != len(classes):
        raise ValueError(
            f"{type(estimator).__name__} knows {len(classes)} classes, but was fitted on samples of "
            f"{len(estimator.n_support_)}: where all samples of a class have the weight 0, its decisions lack that "
            "class, and scikit-learn's labels are shifted. Fit it without these samples."
        )
    if len(classes) == 2:
        return _machine(estimator, multiclass.Binary(zero_is_second=True), classes)
    pairwise = estimator.decision_function_shape == "ovo"
    break_ties = estimator.break_ties and not pairwise
    return _machine(
        estimator, multiclass.OneVsOne(len(classes), pairwise_scores=pairwise, break_ties=break_ties), classes
    )


def _machine(estimator: Any, votes: multiclass.Voting, classes: Any = None) -> Stage:
    points = tensor(estimator.support_vectors_)
    kernel = _kernel(estimator, estimator._gamma, points.shape[1])
    support = torch.as_tensor(estimator.support_).long()
    dual_coef, intercept = tensor(estimator.dual_coef_), tensor(estimator.intercept_)
    return KernelSVM(kernel, points, dual_coef, intercept, list(estimator.n_support_), support, votes, classes)


@stage_for.register(LinearClassifierMixin)
def _linear_classifier(estimator: Any) -> Stage:
    weight = torch.atleast_2d(tensor(estimator.coef_))
    if getattr(getattr(estimator, "_label_binarizer", None), "y_type_", "").startswith("multilabel"):
        raise _of_several_labels(estimator)
    votes = _plain_voting(len(estimator.classes_), _of_scores(estimator))
    return LinearDecision(weight, tensor(estimator.intercept_).expand(len(weight)).clone(), votes, estimator.classes_)


def _plain_voting(n_classes: int, calibration: Calibration | None) -> multiclass.Voting:
    """Return the voting of one decision value per class, or of one for two classes."""
    return (
        multiclass.Binary(calibration=calibration) if n_classes == 2 else multiclass.OneVsRest(n_classes, calibration)
    )


def _of_several_labels(estimator: Any) -> NoClosedFormError:
    kind = type(estimator).__name__
    return NoClosedFormError(f"{kind} was fitted on several labels per image: fit one per label.")


def _of_scores(estimator: Any) -> Calibration | None:
    """Return what makes ``predict_proba`` of the scores of a linear classifier, or None."""
    n_classes = len(estimator.classes_)
    sigmoids = PerClass([Platt(-1.0, 0.0)] * (1 if n_classes == 2 else n_classes))
    match estimator:
        case SGDClassifier(loss="log_loss"):
            return sigmoids
        case LinearDiscriminantAnalysis():
            return sigmoids if n_classes == 2 else Temperature(1.0)
        case LogisticRegression():
            # Up to scikit-learn 1.7 there is multi_class, and liblinear for several classes.
            multi_class = getattr(estimator, "multi_class", "auto")
            if n_classes == 2:
                return Temperature(1.0) if multi_class == "multinomial" else sigmoids
            return sigmoids if multi_class == "ovr" or estimator.solver == "liblinear" else Temperature(1.0)
    return None


@stage_for.register(SGDRegressor)
@stage_for.register(LinearModel)
@stage_for.register(PLSRegression)
def _linear_regressor(estimator: Any) -> Stage:
    weight = torch.atleast_2d(tensor(estimator.coef_))
    if len(weight) != 1:
        raise NoClosedFormError(f"{type(estimator).__name__} was fitted on {len(weight)} outputs: fit one for each.")
    bias = tensor(estimator.intercept_).reshape(-1).expand(1).clone()
    if isinstance(estimator, PLSRegression):  # it predicts from x - mean
        bias = bias - weight @ tensor(estimator._x_mean)
    return LinearDecision(weight, bias, multiclass.Regression(), None)


# --- several machines side by side ------------------------------------------------------------------------------------


@stage_for.register(OneVsRestClassifier)
def _one_vs_rest(estimator: OneVsRestClassifier) -> Stage:
    if estimator.multilabel_:
        raise _of_several_labels(estimator)
    members, decisions = _members(estimator, estimator.estimators_)
    # Each member's own probability, divided by their sum, if that is a sigmoid (no curve that ends in 0 everywhere).
    own = [decision.voting.calibration for decision in decisions]
    curves = [curve for each in own if isinstance(each, PerClass) for curve in each.curves]
    sigmoids = len(curves) == len(members) and all(isinstance(curve, Platt) for curve in curves)
    votes = _plain_voting(len(estimator.classes_), PerClass(curves) if sigmoids else None)
    return Ensemble(members, 1.0, votes, estimator.classes_)


@stage_for.register(OneVsOneClassifier)
def _one_vs_one(estimator: OneVsOneClassifier) -> Stage:
    members, decisions = _members(estimator, estimator.estimators_)
    zero_is_second = decisions[0].voting.zero_is_second
    if len(estimator.classes_) == 2:
        return Ensemble(members, 1.0, multiclass.BinaryVote(zero_is_second=zero_is_second), estimator.classes_)
    # Its members are positive for the second class of a pair, and the best score wins.
    votes = multiclass.OneVsOne(len(estimator.classes_), break_ties=True, zero_is_second=zero_is_second)
    return Ensemble(members, -1.0, votes, estimator.classes_)


@stage_for.register(CalibratedClassifierCV)
def _calibrated(estimator: CalibratedClassifierCV) -> Stage:
    folds = estimator.calibrated_classifiers_
    for fold in folds:
        # Temperature scaling fits on the classes' numbers.
        if list(fold.estimator.classes_) not in (list(estimator.classes_), list(range(len(estimator.classes_)))):
            raise NoClosedFormError("a fold of CalibratedClassifierCV saw only some classes: fit it with fewer folds.")
    members, decisions = _members(estimator, [fold.estimator for fold in folds], binary=False)
    votings = [decision.voting for decision in decisions]
    if folds[0].method == "temperature" and any(isinstance(each, multiclass.Calibrated) for each in votings):
        raise NoClosedFormError("temperature scaling of these probabilities is not supported.")
    sizes = [decision.n_outputs for decision in decisions]
    votes = multiclass.Calibrated(votings, sizes, [_calibration(fold) for fold in folds])
    return Ensemble(members, 1.0, votes, estimator.classes_)


def _members(estimator: Any, fitted: list[Any], *, binary: bool = True) -> tuple[list[Chain], list[Any]]:
    """Return the machines of a meta-estimator, each a decision between two classes if binary, and their decisions."""
    members = [Chain(stages_of(each)) for each in fitted]
    decisions = [member.stages[-1] for member in members]
    for each, decision in zip(fitted, decisions, strict=True):
        # A regressor is cut at 0.5, and of probabilities scikit-learn takes the second column.
        if not isinstance(decision, Decision) or (binary and type(decision.voting) is not multiclass.Binary):
            raise NoClosedFormError(
                f"{type(estimator).__name__} of {type(each).__name__} is not supported: fit it with a "
                "classifier that has one decision value for two classes, e.g. SVC."
            )
    return members, decisions


def _calibration(calibrated: Any) -> Calibration:
    """Return how the scores of one calibrated classifier become probabilities."""
    if calibrated.method == "temperature":
        return Temperature(float(calibrated.calibrators[0].beta_))
    return PerClass([
        Isotonic(curve.X_thresholds_.tolist(), curve.y_thresholds_.tolist())
        if isinstance(curve, IsotonicRegression)
        else Platt(float(curve.a_), float(curve.b_))
        for curve in calibrated.calibrators
    ])


def _kernel(estimator: Any, gamma: float | None, n_features: int) -> kernels.Kernel:
    # Where an estimator has no gamma of its own, pairwise_kernels takes 1 / n_features; coef0 is 1 there.
    gamma = 1.0 / n_features if gamma is None else float(gamma)
    coef0 = 1.0 if estimator.coef0 is None else float(estimator.coef0)
    degree = 3 if estimator.degree is None else estimator.degree
    known: dict[Any, kernels.Kernel] = {
        "linear": kernels.Linear(),
        "rbf": kernels.RBF(gamma),
        "poly": kernels.Polynomial(gamma, degree, coef0),
        "polynomial": kernels.Polynomial(gamma, degree, coef0),
        "sigmoid": kernels.Sigmoid(gamma, coef0),
    }
    if estimator.kernel not in known:
        raise NoClosedFormError(
            f"{type(estimator).__name__} has the kernel {estimator.kernel!r}, whose gradient is unknown here. "
            "Fit it with kernel='linear', 'rbf', 'poly' or 'sigmoid'."
        )
    return known[estimator.kernel]


# --- all that is one expression -------------------------------------------------------------------------------------

_IN_ONE: dict[type, Callable[[Any], Stage]] = {
    preprocessing.StandardScaler: lambda e: _scale(e, e.mean_ if e.with_mean else None, e.scale_, centre_is_mean=True),
    preprocessing.MinMaxScaler: lambda e: _scale(e, None, 1 / tensor(e.scale_), e.min_, e.feature_range),
    preprocessing.MaxAbsScaler: lambda e: _scale(e, None, e.scale_),
    preprocessing.RobustScaler: lambda e: _scale(e, e.center_, e.scale_),
    preprocessing.Normalizer: lambda e: Normalise(e.norm),
    decomposition.TruncatedSVD: lambda e: _projection(e.components_, inverse=torch.ones(len(e.components_)).double()),
    decomposition.FastICA: lambda e: _projection(
        e.components_, e.mean_ if e.whiten else None, inverse=tensor(e.mixing_).T
    ),
    random_projection.GaussianRandomProjection: lambda e: _projection(e.components_),
    random_projection.SparseRandomProjection: lambda e: _projection(e.components_),
    RBFSampler: lambda e: FourierFeatures(
        tensor(e.random_weights_), tensor(e.random_offset_), math.sqrt(2 / e.random_weights_.shape[1])
    ),
    svm.SVR: lambda e: _machine(e, multiclass.Regression()),
    svm.NuSVR: lambda e: _machine(e, multiclass.Regression()),
    svm.OneClassSVM: lambda e: _machine(e, multiclass.OneClass()),
}
for _kind, _stage in _IN_ONE.items():
    stage_for.register(_kind, _stage)
