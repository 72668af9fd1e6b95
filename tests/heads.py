"""One row for each estimator, and for what heads are made of them; and what all heads are asked.

A row is fitted on samples of its own kind. Properties that hold for each head are functions over all rows
(head/test_estimators.py); a test of few of them, as on the features of a network (cases.py, problems.py), selects these
by name.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import FeatureAgglomeration
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import (
    PCA,
    FactorAnalysis,
    FastICA,
    IncrementalPCA,
    KernelPCA,
    MiniBatchSparsePCA,
    SparsePCA,
    TruncatedSVD,
)
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
    VotingRegressor,
)
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, SelectPercentile, VarianceThreshold
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct, WhiteKernel
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import (
    GammaRegressor,
    LinearRegression,
    LogisticRegression,
    LogisticRegressionCV,
    Perceptron,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    SGDClassifier,
    SGDRegressor,
    TweedieRegressor,
)
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier, OutputCodeClassifier
from sklearn.naive_bayes import ComplementNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid, NeighborhoodComponentsAnalysis
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import FeatureUnion, Pipeline, make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PowerTransformer,
    RobustScaler,
    StandardScaler,
)
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection
from sklearn.svm import SVC, SVR, LinearSVC, LinearSVR, NuSVC, NuSVR, OneClassSVM

from pytorch_grad_cam_pcasvm import CovariancePCA, Head, PCADistance

RNG = np.random.default_rng(0)
WIDTH = 10
CENTRES = 2 * RNG.normal(size=(4, WIDTH))


def samples_around_centres(classes: int) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(120) % classes
    return CENTRES[labels] + RNG.normal(size=(120, WIDTH)) + 1, labels


DATA = {classes: samples_around_centres(classes) for classes in (2, 4)}
QUERY = CENTRES[np.arange(8) % 4] + 1.5 * RNG.normal(size=(8, WIDTH)) + 1
NEAR = QUERY / 3  # nearer to where classes meet: probabilities between 0 and 1
# Classes that overlap, and numbers.
MIXED, MIXED_QUERY = RNG.normal(size=(90, 6)), 1.3 * RNG.normal(size=(200, 6))
TWO = (MIXED[:, 0] * MIXED[:, 1] + MIXED[:, 2] > 0).astype(int)
THREE = (MIXED[:, 0] + MIXED[:, 1] ** 2 > 0.3).astype(int) + (MIXED[:, 2] > 0.5)
NUMBERS = MIXED @ RNG.normal(size=6) + np.sin(MIXED[:, 0])


def mislabelled(classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = DATA[classes]
    return x, np.where(np.arange(len(y)) % 7 == 0, (y + 1) % classes, y), NEAR


SAMPLES: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]]] = {
    "apart": lambda classes: (*DATA[classes], QUERY),
    "near": lambda classes: (*DATA[classes], NEAR),
    "mislabelled": mislabelled,  # calibration curves of separated classes are steps
    "mixed": lambda classes: (MIXED, TWO if classes == 2 else THREE, MIXED_QUERY),
    "numbers": lambda classes: (MIXED, NUMBERS, MIXED_QUERY),
    "positive": lambda classes: (MIXED, np.exp(NUMBERS / 3), MIXED_QUERY),
}


@dataclass(frozen=True)
class Row:
    """A head.

    Attributes:
        parts: of a pipeline, not fitted.
        classes: numbers of classes to fit it on, each a case.
        samples: what it is fitted on, and asked about.
        no_slope: why scikit-learn's own values have no slope to compare with.
        scores: whether scikit-learn's scores are what the head decides by.
    """

    parts: list[Any]
    classes: tuple[int, ...] = (4,)
    samples: str = "apart"
    no_slope: str | None = None
    scores: bool = True

    def make(self) -> Pipeline:
        """Return the pipeline, not fitted."""
        return make_pipeline(*copy.deepcopy(self.parts))


def mixed(*parts: Any, classes: tuple[int, ...] = (3,), samples: str = "mixed", **options: Any) -> Row:
    return Row(list(parts), classes, samples, **options)


def behind(*parts: Any, **options: Any) -> Row:
    return Row([StandardScaler(), PCA(5), *parts], **options)


REDUCED = (StandardScaler(), PCA(4))


def reduced(*parts: Any, **options: Any) -> Row:
    return Row([*REDUCED, *parts], **options)


SCALERS = [
    StandardScaler(),
    StandardScaler(with_mean=False),
    MinMaxScaler((-1, 2)),
    MinMaxScaler(clip=True),
    MaxAbsScaler(),
    RobustScaler(),
    RobustScaler(with_centering=False, with_scaling=False),
    Normalizer("l1"),
    Normalizer("max"),
    VarianceThreshold(0.1),
    SelectKBest(k=6),
    SelectPercentile(percentile=50),
    SelectFromModel(LinearSVC()),
    RFE(LinearSVC(), n_features_to_select=5),
    FunctionTransformer(),
    FunctionTransformer(np.arcsinh),
    FunctionTransformer(np.tanh),
    PowerTransformer(),
    PowerTransformer(standardize=False),
    ColumnTransformer([("a", StandardScaler(), [2, 0, 5]), ("b", Normalizer(), [1, 7])], transformer_weights={"b": 2}),
]
REDUCTIONS = [
    PCA(4),
    PCA(4, whiten=True),
    PCA(4, svd_solver="covariance_eigh"),
    IncrementalPCA(4),
    IncrementalPCA(4, whiten=True),
    CovariancePCA(4),
    PCADistance(0.2),
    SparsePCA(3, alpha=0.1, ridge_alpha=0.3, random_state=0, max_iter=20),
    MiniBatchSparsePCA(3, alpha=0.1, random_state=0, max_iter=20),
    TruncatedSVD(4, random_state=0),
    FastICA(4, random_state=0),
    FastICA(whiten=False, random_state=0),
    FactorAnalysis(3, random_state=0),
    KernelPCA(4),
    KernelPCA(4, kernel="rbf"),
    KernelPCA(3, kernel="poly", degree=2, gamma=0.2, coef0=0.5),
    KernelPCA(3, kernel="sigmoid", gamma=0.01),
    GaussianRandomProjection(5, random_state=0),
    SparseRandomProjection(5, random_state=0),
    NeighborhoodComponentsAnalysis(4, max_iter=5, random_state=0),
    FeatureAgglomeration(4),
    make_union(PCA(2), KernelPCA(3, kernel="rbf", gamma=0.1)),
]
DISCRIMINANTS = [LinearDiscriminantAnalysis(), LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.2)]
MAPS = [
    Nystroem(n_components=20, random_state=0),
    Nystroem(kernel="poly", gamma=0.1, degree=2, coef0=1, n_components=15, random_state=0),
    Nystroem(kernel="linear", n_components=5, random_state=0),
    RBFSampler(gamma=0.1, n_components=30, random_state=0),
]
CLASSIFIERS = [
    SVC(),
    SVC(kernel="linear"),
    SVC(kernel="poly", degree=2, decision_function_shape="ovo"),
    SVC(kernel="sigmoid", gamma=0.02),
    NuSVC(nu=0.3),
    LinearSVC(),
    SGDClassifier(random_state=0),
    Perceptron(random_state=0),
    LogisticRegression(),
    RidgeClassifier(),
    RidgeClassifierCV(),
    LinearDiscriminantAnalysis(),
    QuadraticDiscriminantAnalysis(reg_param=0.1),
    StackingClassifier([("a", LinearSVC()), ("b", LinearDiscriminantAnalysis())], stack_method="decision_function"),
    StackingClassifier([("a", LinearSVC())], LinearSVC(C=0.1), passthrough=True),
]
REGRESSORS = [
    SVR(kernel="linear"),
    NuSVR(kernel="poly"),
    LinearSVR(),
    Ridge(),
    LinearRegression(),
    KernelRidge(kernel="rbf", gamma=0.1),
    GaussianProcessRegressor(2 * RBF([1, 2, 3, 4, 5]) + DotProduct() + WhiteKernel(), optimizer=None, normalize_y=True),
    MLPRegressor(hidden_layer_sizes=(7, 5), activation="tanh", random_state=0, max_iter=50),
    VotingRegressor([("a", Ridge()), ("b", SVR())], weights=[1, 3]),
    BaggingRegressor(SVR(), 3, max_features=0.5, random_state=0),
    StackingRegressor([("a", Ridge()), ("b", SVR())], SVR(), passthrough=True),
    TransformedTargetRegressor(SVR(), transformer=StandardScaler()),
]
PROBABLE = {
    "LogisticRegression": LogisticRegression(),
    "LogisticRegressionCV": LogisticRegressionCV(Cs=2, cv=2, scoring="accuracy"),
    "discriminants": LinearDiscriminantAnalysis(),
    "SGD": SGDClassifier(loss="log_loss", random_state=0),
    "one vs rest": OneVsRestClassifier(LogisticRegression()),
    "one vs rest of pipelines": OneVsRestClassifier(make_pipeline(PCA(3), LogisticRegression(C=0.1))),
}
CALIBRATED = {
    "sigmoid": CalibratedClassifierCV(SVC(), ensemble=False),
    "isotonic": CalibratedClassifierCV(LinearSVC(), method="isotonic", ensemble=False),
    "isotonic ensemble": CalibratedClassifierCV(LinearSVC(), method="isotonic", cv=3),
    "of a pipeline": CalibratedClassifierCV(make_pipeline(StandardScaler(), LinearSVC()), ensemble=False),
    "of an ovo": CalibratedClassifierCV(SVC(decision_function_shape="ovo"), ensemble=False),
}
SEVERAL = {
    "OneVsRest SVC": OneVsRestClassifier(SVC()),
    "OneVsRest LinearSVC": OneVsRestClassifier(LinearSVC()),
    "OneVsRest pipeline": OneVsRestClassifier(make_pipeline(StandardScaler(), PCA(4), SVC(kernel="poly"))),
    "OneVsOne SVC": OneVsOneClassifier(SVC()),
    "OneVsOne Logistic": OneVsOneClassifier(LogisticRegression()),
    "a bag": BaggingClassifier(LogisticRegression(), 3, max_features=0.5, random_state=0),
}
BENT = QuadraticDiscriminantAnalysis(reg_param=0.1)
if "solver" in BENT.get_params():  # from scikit-learn 1.8 on
    BENT.set_params(solver="eigen", shrinkage=0.1)
COLUMNS = np.array([True, False, True, False, True, True])
_VOTES, _CURVES, _SHARES = "votes jump", "curves have corners", "it has probabilities alone"
_FIXED = {"response_method": "decision_function"}

HEADS = {
    **{f"{scaler}, PCA, SVC": Row([scaler, PCA(4), SVC()]) for scaler in SCALERS},
    **{f"scaler, {reduction}, SVC": Row([StandardScaler(), reduction, SVC()]) for reduction in REDUCTIONS},
    # Two classes make one decision value: of the parts in front, only discriminants depend on their number.
    **{f"scaler, {part}, SVC": Row([StandardScaler(), part, SVC()], (2, 4)) for part in DISCRIMINANTS},
    **{f"{reduction}, scaler": Row([reduction, StandardScaler(), LinearSVC()]) for reduction in (PCA(4), KernelPCA(4))},
    **{f"{kernel_map}, LinearSVC": Row([MinMaxScaler(), PCA(6), kernel_map, LinearSVC()]) for kernel_map in MAPS},
    **{f"bare {classifier}": Row([classifier], (2, 4)) for classifier in CLASSIFIERS},
    **{f"PCA, {regressor}": behind(regressor) for regressor in REGRESSORS},
    **{f"probable, {name}": behind(each, classes=(2, 4), samples="near") for name, each in PROBABLE.items()},
    **{
        f"calibrated, {name}": behind(each, classes=(2, 4), samples="mislabelled", no_slope=_CURVES)
        for name, each in CALIBRATED.items()
    },
    **{f"several, {name}": behind(each, classes=(2, 4), no_slope=_VOTES) for name, each in SEVERAL.items()},
    **{
        f"SVC {kernel}": Row([StandardScaler(), PCA(4, whiten=True), SVC(kernel=kernel, coef0=0.3)], (2, 4))
        for kernel in ("linear", "rbf", "poly", "sigmoid")
    },
    # Those that are fitted on the features of networks, too.
    "rbf": reduced(SVC(C=2.0)),
    "gamma=10": reduced(SVC(gamma=10.0)),
    "linear": reduced(SVC(kernel="linear", C=2.0)),
    "poly": reduced(SVC(kernel="poly", coef0=0.5)),
    "quadratic": reduced(SVC(kernel="poly", degree=2, coef0=0.5)),
    "sigmoid": reduced(SVC(kernel="sigmoid", gamma=0.05, coef0=0.2)),
    "whitened": Row([PCA(4, whiten=True), SVC(gamma=1.0)]),
    "two classes": Row([PCA(4, whiten=True), SVC(class_weight="balanced")], (2,)),
    "normalised": Row([Normalizer(), PCA(4), SVC()]),
    "kernel pca": Row([StandardScaler(), KernelPCA(4, kernel="rbf", gamma=0.05), SVC()]),
    "calibrated": reduced(CalibratedClassifierCV(SVC(), cv=3), classes=(2, 4), samples="mislabelled", no_slope=_CURVES),
    "one vs rest": reduced(LinearSVC()),
    "regressor": reduced(SVR()),
    "one class": reduced(OneClassSVM(nu=0.3)),
    "no reduction": Row([StandardScaler(), SVC()]),
    "neighbours": reduced(KNeighborsClassifier(3), no_slope=_VOTES),
    "likelihoods": Row([StandardScaler(), PowerTransformer(), PCA(4), QuadraticDiscriminantAnalysis()]),
    "break_ties": Row([PCA(4), SVC(gamma="auto", class_weight="balanced", break_ties=True)], (2, 4)),
    "without intercept": Row([StandardScaler(with_std=False), MinMaxScaler(), PCA(3), LinearSVC(fit_intercept=False)]),
    "OneClassSVM linear": Row([OneClassSVM(kernel="linear", nu=0.4)]),
    "fractional degree": Row([MinMaxScaler(clip=True), KernelPCA(2, kernel="poly", degree=2.5), SVC()]),
    "arpack": Row([PCA(2, svd_solver="arpack"), TruncatedSVD(1, algorithm="arpack", random_state=0), SVC()]),
    "singular ridge": Row([SparsePCA(WIDTH + 2, alpha=0.1, ridge_alpha=0, random_state=0, max_iter=5), SVC()]),
    "normalised members": Row(
        [CalibratedClassifierCV(OneVsRestClassifier(make_pipeline(Normalizer(), SVC())))], (2, 4), no_slope=_CURVES
    ),
    "clipped members": behind(
        CalibratedClassifierCV(make_pipeline(MinMaxScaler(clip=True), SVC()), cv=3), classes=(2, 4), no_slope=_CURVES
    ),
    "selected then decided": Row([RFE(LinearSVC(), n_features_to_select=4), LinearSVC()]),
    "selected": Row([SelectKBest(k=6), PCA(3), StandardScaler(), SVC()]),
    "SGDRegressor": Row([StandardScaler(), PCA(3), SGDRegressor(random_state=0)]),
    "of positive numbers": Row([MinMaxScaler((1, 2), clip=True), PowerTransformer("box-cox"), PCA(3), SVC()]),
    "perceptron": behind(
        PowerTransformer(), MLPClassifier((5,), random_state=0, max_iter=30), classes=(2, 4), no_slope=_SHARES
    ),
    "stack of components": Row(
        [make_union(PCA(2), KernelPCA(2, kernel="rbf")), StackingClassifier([("a", LinearSVC())], LinearSVC())], (2, 4)
    ),
    # Options that few set.
    "cosine neighbours": mixed(KNeighborsClassifier(3, metric="cosine"), no_slope=_VOTES),
    "one neighbour": mixed(KNeighborsClassifier(1), no_slope=_VOTES),
    "neighbours of components": mixed(NeighborhoodComponentsAnalysis(2), KNeighborsClassifier(3), no_slope=_VOTES),
    "logistic perceptron": mixed(MLPClassifier((5,), activation="logistic", max_iter=30), no_slope=_SHARES),
    "perceptron stopped early": mixed(
        MLPClassifier((5, 4), activation="tanh", max_iter=30, early_stopping=True), classes=(2,), no_slope=_SHARES
    ),
    "perceptron of one layer": mixed(MLPClassifier((), max_iter=30), no_slope=_SHARES),
    "soft votes": mixed(
        VotingClassifier(
            [("a", LogisticRegression()), ("b", GaussianNB()), ("c", "drop")], voting="soft", weights=[2, 1, 3]
        ),
        classes=(2, 3),
        no_slope=_SHARES,
    ),
    "stack of an SVC": mixed(
        StackingClassifier([("a", LinearSVC())], final_estimator=SVC(), passthrough=True), no_slope=_VOTES
    ),
    "columns": mixed(
        ColumnTransformer([("a", StandardScaler(), [0, 2]), ("b", "drop", [1]), ("c", PCA(2), slice(3, 6))]), SVC()
    ),
    "columns passed on": mixed(ColumnTransformer([("a", StandardScaler(), [-1, 0])], remainder="passthrough"), SVC()),
    "columns by truth": mixed(
        ColumnTransformer([("a", StandardScaler(), COLUMNS)], remainder=MinMaxScaler(), transformer_weights={"a": 3.0}),
        SVC(),
    ),
    "columns twice": mixed(ColumnTransformer([("a", StandardScaler(), [1, 4, 1]), ("b", "passthrough", [4])]), SVC()),
    "union": mixed(
        FeatureUnion([("a", PCA(2)), ("b", "drop"), ("c", "passthrough")], transformer_weights={"a": 2.5}), SVC()
    ),
    "union without its first": mixed(
        FeatureUnion([("none", "drop"), ("components", PCA(2)), ("all", "passthrough")]), SVC(), classes=(2,)
    ),
    "not centred": mixed(RobustScaler(with_centering=False), SVC()),
    "complements": mixed(MinMaxScaler(), ComplementNB(norm=True), classes=(2, 3), no_slope=_SHARES),
    "counts": mixed(MinMaxScaler(), MultinomialNB(fit_prior=False), no_slope=_SHARES),
    "codes": mixed(OutputCodeClassifier(LinearSVC(), code_size=2, random_state=0), classes=(2, 3), no_slope=_VOTES),
    "bag of columns twice": mixed(
        BaggingClassifier(GaussianNB(), 4, bootstrap_features=True, random_state=1), no_slope=_VOTES
    ),
    "bag of scores": mixed(
        BaggingClassifier(BENT, 3, random_state=0),
        no_slope=_VOTES,
    ),
    "bag of scores, calibrated": mixed(
        CalibratedClassifierCV(BaggingClassifier(BENT, 3, random_state=0), cv=2),
        no_slope=_CURVES,
    ),
    "nearest centre": mixed(NearestCentroid(shrink_threshold=0.3), classes=(2, 3), scores=False),  # see docs/heads.md
    "least squares": mixed(LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"), classes=(2, 3)),
    "Huber": mixed(SGDClassifier(loss="modified_huber", random_state=0)),
    "whitened likelihoods": mixed(PCA(2, whiten=True), QuadraticDiscriminantAnalysis(), classes=(2,)),
    "nu and powers": mixed(NuSVC(nu=0.2, kernel="poly", coef0=1)),
    **{
        f"threshold {number}": mixed(each, classes=(2,), scores=False)
        for number, each in enumerate([
            *[FixedThresholdClassifier(LogisticRegression(), threshold=at) for at in (0.05, 0.8)],
            FixedThresholdClassifier(LogisticRegression(), threshold=0.3, pos_label=0),
            FixedThresholdClassifier(CalibratedClassifierCV(LinearSVC(), ensemble=False), threshold=0.35),
            *[FixedThresholdClassifier(SVC(), threshold=at, **_FIXED) for at in (-0.3, 0.4)],
            FixedThresholdClassifier(SVC(), threshold=0.4, pos_label=0, **_FIXED),
            TunedThresholdClassifierCV(LogisticRegression(class_weight={0: 3, 1: 1}), scoring="f1"),
        ])
    },
    "powers of numbers": mixed(KernelRidge(kernel="poly", degree=2), samples="numbers"),
    "process": mixed(
        GaussianProcessRegressor(2.0 * RBF([1, 1, 2, 2, 3, 3]) + WhiteKernel(), normalize_y=True, alpha=0.1),
        samples="numbers",
    ),
    "usual process": mixed(GaussianProcessRegressor(alpha=0.1), samples="numbers"),
    **{
        f"positive {each}": mixed(each, samples="positive", scores=False)
        for each in (
            GammaRegressor(),
            TweedieRegressor(power=0, link="log"),
            TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp),
        )
    },
}
CASES = [(name, classes) for name, row in HEADS.items() for classes in row.classes]


def fitted(parts: list[Any], classes: int, samples: str = "apart") -> Pipeline:
    x, y, _ = SAMPLES[samples](classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that are cut short
        return make_pipeline(*copy.deepcopy(parts)).fit(x, y)


@cache
def fitted_row(name: str, classes: int | None = None) -> Pipeline:
    """Return the pipeline of a row, fitted once for all tests of a process."""
    row = HEADS[name]
    return fitted(row.parts, classes or row.classes[-1], row.samples)


@cache
def head_of(name: str, classes: int | None = None) -> Head:
    """Return the head of a row."""
    return Head.of(fitted_row(name, classes))


def query_of(name: str) -> np.ndarray:
    return SAMPLES[HEADS[name].samples](HEADS[name].classes[-1])[2]


def values(pipeline: Any, x: np.ndarray) -> np.ndarray:
    """Return scikit-learn's own numbers: scores as columns, probabilities where there are no scores, or predictions."""
    method = next(name for name in ("decision_function", "predict_proba", "predict") if hasattr(pipeline, name))
    scores = getattr(pipeline, method)(x)
    if scores.ndim == 2:
        return scores
    return np.stack([-scores, scores], 1) if hasattr(pipeline, "classes_") else scores[:, None]


def differences(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Return the derivative of a function of rows (N, D) to (N, P) by central differences, shape (N, P, D)."""
    steps = step * np.eye(x.shape[1])
    moved = np.concatenate([(x[:, None] + sign * steps).reshape(-1, x.shape[1]) for sign in (1, -1)])
    ahead, behind = function(moved).reshape(2, len(x), x.shape[1], -1)
    return ((ahead - behind) / (2 * step)).transpose(0, 2, 1)


def trace_of(head: Head, x: Any) -> Any:
    with torch.no_grad():
        return head(torch.as_tensor(x))


def seeds_of(head: Head, trace: Any) -> list[dict[int, Any]]:
    """Return seeds by position: of every component, of every class's margin, of one class against another."""
    seeds: list[dict[int, Any]] = []
    if head.component_position is not None:
        seeds.append({head.component_position: None})
    if head.decision_position is not None:
        decision, voting = trace.values[-1], head.voting
        rows = [voting.seed(torch.tensor([c]), None) for c in range(voting.n_classes)]
        if voting.n_classes > 1:
            rows.append(voting.seed(torch.tensor([1]), torch.tensor([0])))
        seeds.append({len(head.stages): torch.stack(rows, 1)})
        if voting.kind != "Outputs":  # of which none is predicted
            seeds.append({len(head.stages): voting.seed(voting.predicted(decision), None).unsqueeze(1)})
    return seeds


def pulled_back(head: Head, trace: Any, seeds: dict[int, Any], start: Any = None) -> torch.Tensor:
    """Return the closed form's gradient, or secant from a start, (N, K, D), whatever was factored out of it."""
    grad, log_scale = head.pullback(trace, seeds, start)
    rows = next(value for value in trace.values if value is not None)
    return (grad * log_scale.exp().unsqueeze(-1)).expand(len(rows), -1, -1)


def of_seeds(trace: Any, seeds: dict[int, Any]) -> torch.Tensor:
    """Return the sums of values that seeds stand for, shape (N, K)."""
    total = 0
    for position, seed in seeds.items():
        seed = torch.eye(trace.values[position].shape[1]).double()[None] if seed is None else seed
        total = total + (trace.values[position].unsqueeze(1) * seed).sum(-1)
    return total


def by_autograd(head: Head, x: Any, *all_seeds: dict[int, Any]) -> torch.Tensor:
    """Return gradients by autograd, target by target, of one dict of seeds after the other."""
    leaf = torch.tensor(x).requires_grad_()
    trace = head(leaf)
    rows = [row for seeds in all_seeds for row in of_seeds(trace, seeds).unbind(1)]
    return torch.stack([torch.autograd.grad(row.sum(), leaf, retain_graph=True)[0] for row in rows], 1)


def added(grad: torch.Tensor, x: torch.Tensor, x0: torch.Tensor) -> torch.Tensor:
    return (grad * (x - x0).unsqueeze(1)).sum(-1)


def check_gradients(head: Head, query: np.ndarray) -> Any:
    """Compare gradients with autograd's, and secants with differences of values; return the trace."""
    trace = trace_of(head, query)
    last, questions = len(head.stages), seeds_of(head, trace)
    if head.component_position not in (None, last):  # both at once
        weights = torch.linspace(-1, 2, trace.values[head.component_position].shape[1]).double()
        questions.append({head.component_position: weights[None, None], last: questions[-1][last][:, :1]})
    for seeds in questions:
        gradients = pulled_back(head, trace, seeds)
        assert relative(gradients, by_autograd(head, query, seeds)) < 1e-9
        assert relative(pulled_back(head, trace, seeds, trace), gradients) < 1e-9
        for x0 in (query[::-1].copy(), np.zeros((1, query.shape[1]))):
            start = trace_of(head, x0)
            changes = of_seeds(trace, seeds) - of_seeds(start, seeds)
            found = added(pulled_back(head, trace, seeds, start), trace.values[0], start.values[0])
            assert relative(found, changes) < 1e-9
    return trace
