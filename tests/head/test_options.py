"""Estimators with options that few set: scikit-learn's labels and values, gradients and secants, or refused."""

import warnings

import numpy as np
import pytest
import torch
from problems import closed_form
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.ensemble import (
    BaggingClassifier,
    BaggingRegressor,
    StackingClassifier,
    StackingRegressor,
    VotingClassifier,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import GammaRegressor, LogisticRegression, Ridge, SGDClassifier, TweedieRegressor
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier, OutputCodeClassifier
from sklearn.naive_bayes import BernoulliNB, ComplementNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid, NeighborhoodComponentsAnalysis
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, PowerTransformer, RobustScaler, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC, NuSVC
from test_registry import check

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError
from pytorch_grad_cam_pcasvm.head.fit_checks import Fit

RNG = np.random.default_rng(0)
X, QUERY = RNG.normal(size=(90, 6)), 1.3 * RNG.normal(size=(200, 6))
TWO = (X[:, 0] * X[:, 1] + X[:, 2] > 0).astype(int)
THREE = (X[:, 0] + X[:, 1] ** 2 > 0.3).astype(int) + (X[:, 2] > 0.5)
NUMBERS = X @ RNG.normal(size=6) + np.sin(X[:, 0])
COLUMNS = np.array([True, False, True, False, True, True])

CLASSIFIERS = [
    QuadraticDiscriminantAnalysis(reg_param=0.3),
    KNeighborsClassifier(3, metric="cosine"),
    KNeighborsClassifier(1),
    MLPClassifier((5,), activation="logistic", max_iter=30),
    MLPClassifier((5, 4), activation="tanh", max_iter=30, early_stopping=True),
    MLPClassifier((), max_iter=30),
    VotingClassifier(
        [("a", LogisticRegression()), ("b", GaussianNB()), ("c", "drop")], voting="soft", weights=[2, 1, 3]
    ),
    StackingClassifier([("a", LinearSVC())], final_estimator=SVC(), passthrough=True),
    CalibratedClassifierCV(SVC(), ensemble=True),
    CalibratedClassifierCV(LinearSVC(), method="isotonic", ensemble=False),
    make_pipeline(
        ColumnTransformer([("a", StandardScaler(), [0, 2]), ("b", "drop", [1]), ("c", PCA(2), slice(3, 6))]), SVC()
    ),
    make_pipeline(ColumnTransformer([("a", StandardScaler(), [-1, 0])], remainder="passthrough"), SVC()),
    make_pipeline(
        ColumnTransformer([("a", StandardScaler(), COLUMNS)], remainder=MinMaxScaler(), transformer_weights={"a": 3.0}),
        SVC(),
    ),
    make_pipeline(
        FeatureUnion([("a", PCA(2)), ("b", "drop"), ("c", "passthrough")], transformer_weights={"a": 2.5}), SVC()
    ),
    make_pipeline(ColumnTransformer([("a", StandardScaler(), [1, 4, 1]), ("b", "passthrough", [4])]), SVC()),
    make_pipeline(PowerTransformer(standardize=False), LinearSVC()),
    make_pipeline(FunctionTransformer(np.tanh), SVC()),
    make_pipeline(MinMaxScaler(clip=True), SVC()),
    make_pipeline(RobustScaler(with_centering=False), SVC()),
    make_pipeline(MinMaxScaler(), ComplementNB(norm=True)),
    make_pipeline(MinMaxScaler(), MultinomialNB(fit_prior=False)),
    OutputCodeClassifier(LinearSVC(), code_size=2, random_state=0),
    OneVsOneClassifier(LogisticRegression()),
    OneVsRestClassifier(SVC()),
    BaggingClassifier(LogisticRegression(), 5, max_features=0.5, random_state=0),
    BaggingClassifier(GaussianNB(), 4, bootstrap_features=True, random_state=1),
    NearestCentroid(shrink_threshold=0.3),
    LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
    LinearDiscriminantAnalysis(solver="eigen"),
    SGDClassifier(loss="modified_huber"),
    make_pipeline(NeighborhoodComponentsAnalysis(2), KNeighborsClassifier(3)),
    make_pipeline(PCA(2, whiten=True), QuadraticDiscriminantAnalysis()),
    NuSVC(nu=0.2, kernel="poly", coef0=1),
]
THRESHOLDS = [
    *[FixedThresholdClassifier(LogisticRegression(), threshold=at) for at in (0.05, 0.3, 0.8)],
    FixedThresholdClassifier(LogisticRegression(), threshold=0.3, pos_label=0),
    FixedThresholdClassifier(CalibratedClassifierCV(LinearSVC(), ensemble=False), threshold=0.35),
    *[FixedThresholdClassifier(SVC(), threshold=at, response_method="decision_function") for at in (-0.3, 0.4)],
    FixedThresholdClassifier(SVC(), threshold=0.4, response_method="decision_function", pos_label=0),
    TunedThresholdClassifierCV(LogisticRegression(class_weight={0: 3, 1: 1}), scoring="f1"),
]
REGRESSORS = [
    KernelRidge(kernel="poly", degree=2),
    GaussianProcessRegressor(2.0 * RBF([1, 1, 2, 2, 3, 3]) + WhiteKernel(), normalize_y=True, alpha=0.1),
    GaussianProcessRegressor(alpha=0.1),
    TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
    BaggingRegressor(SVR(), 3, max_features=0.7),
    StackingRegressor([("a", Ridge()), ("b", SVR())], final_estimator=SVR(), passthrough=True),
]
POSITIVE = [
    GammaRegressor(),
    TweedieRegressor(power=0, link="log"),
    TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp),
]
REFUSED = [
    (KNeighborsClassifier(3, metric="manhattan"), "metric 'manhattan': fit it with 'euclidean' or 'cosine'"),
    (KNeighborsClassifier(4), "lets 4 neighbours vote, which often tie: fit it with an odd n_neighbors"),
    (KNeighborsClassifier(3, weights="distance"), "fit it with weights='uniform'"),
    (BernoulliNB(binarize=0.2), "cuts its features at a threshold, a step whose gradient is 0"),
    (CalibratedClassifierCV(GaussianNB()), "fit it with a classifier that has one decision value for two classes"),
    (BaggingClassifier(SVC(), 3), "a classifier that has probabilities, or it counts votes"),
    (NearestCentroid(metric="manhattan"), "fit it with 'euclidean'"),
    (GaussianProcessRegressor(Matern()), r"sums and multiples of RBF, DotProduct and WhiteKernel"),
    (KernelRidge(kernel="laplacian"), "fit it with kernel='linear', 'rbf', 'poly' or 'sigmoid'"),
]


# scikit-learn makes something of their decision_function that is not what they decide by, or not what is explained.
_THRESHOLD = FixedThresholdClassifier(SVC(), threshold=0.8, response_method="decision_function")
_OF_PROBABILITY = FixedThresholdClassifier(LogisticRegression(), threshold=0.8, response_method="predict_proba")
NO_MEMBERS = [
    *(
        (kind, member)
        for kind in (
            lambda member: StackingClassifier([("a", member)], stack_method="decision_function", cv=2),
            OneVsRestClassifier,
            OneVsOneClassifier,
            lambda member: OutputCodeClassifier(member, random_state=0),
            lambda member: CalibratedClassifierCV(member, cv=2),
            lambda member: CalibratedClassifierCV(member, cv=2, method="isotonic"),
            lambda member: FixedThresholdClassifier(member, threshold=0.1, response_method="decision_function"),
        )
        for member in (NearestCentroid(), _THRESHOLD, _OF_PROBABILITY)
    ),
    (lambda member: StackingClassifier([("a", member)], cv=2), OneVsOneClassifier(SVC())),
]


@pytest.mark.parametrize(("kind", "member"), NO_MEMBERS, ids=[str(n) for n in range(len(NO_MEMBERS))])
def test_members_whose_scores_are_others_are_refused(kind, member):
    estimator = kind(member).fit(X, TWO)
    with pytest.raises(NoClosedFormError, match="is not supported: fit it with"):
        closed_form(estimator)
    assert isinstance(closed_form(member.fit(X, TWO)), Head)  # alone it is taken


def test_a_probability_that_falls_with_the_value_has_no_threshold():
    def fitted(seed):
        x = np.random.default_rng(seed).normal(size=(40, 2))
        calibrated = CalibratedClassifierCV(LinearSVC(), cv=2, ensemble=False)
        return FixedThresholdClassifier(calibrated, threshold=0.45, response_method="predict_proba").fit(x, TWO[:40])

    found = [fitted(seed) for seed in range(12)]
    falls = [each.estimator_.calibrated_classifiers_[0].calibrators[0].a_ > 0 for each in found]
    assert any(falls), "nothing is tested"
    for estimator, down in zip(found, falls, strict=True):
        if down:
            with pytest.raises(NoClosedFormError, match="of a sigmoid probability"):
                closed_form(estimator)
        else:
            assert isinstance(closed_form(estimator), Head)


@pytest.mark.parametrize(
    "kind", [lambda member: member, lambda member: CalibratedClassifierCV(member, cv=2)], ids=["alone", "calibrated"]
)
def test_scores_of_a_bag_are_the_mean_of_its_members_scores(kind):
    estimator = kind(
        BaggingClassifier(
            QuadraticDiscriminantAnalysis(reg_param=0.1, solver="eigen", shrinkage=0.1), 3, random_state=0
        )
    )
    head, trace = head_of(estimator, THREE)
    wanted = estimator.predict_proba if hasattr(estimator, "calibrated_classifiers_") else estimator.decision_function
    assert relative(head.scores(trace), wanted(QUERY)) < 1e-9
    assert head.labels(trace).tolist() == estimator.predict(QUERY).tolist()


def test_a_union_whose_first_part_is_dropped():
    union = FeatureUnion([("none", "drop"), ("components", PCA(2)), ("all", "passthrough")])
    estimator = make_pipeline(union, SVC()).fit(X, TWO)
    assert relative(Head.of(estimator)(torch.tensor(QUERY)).values[-1][:, 0], estimator.decision_function(QUERY)) < 1e-9


def test_autograd_of_a_power_at_zero():
    """As where a channel behind a ReLU is off."""
    estimator = make_pipeline(PowerTransformer(), PCA(2), SVC()).fit(X, TWO)
    head, x = Head.of(estimator), torch.zeros(1, X.shape[1], dtype=torch.float64, requires_grad=True)
    trace = head(x)
    grad, log_scale = head.pullback(trace, {len(trace.values) - 1: torch.ones(1, 1, 1).double()})
    (expected,) = torch.autograd.grad(trace.values[-1].sum(), x)
    assert relative(grad[0] * log_scale.exp(), expected) < 1e-9


def head_of(estimator, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fits that are cut short
        head = Head.of(estimator.fit(X, y))
    check(head)
    return head, head(torch.from_numpy(QUERY))


def shown(estimator):
    return " ".join(repr(estimator).split())[:90]


@pytest.mark.parametrize("y", [TWO, THREE], ids=["two classes", "three"])
@pytest.mark.parametrize("estimator", CLASSIFIERS, ids=shown)
def test_classifiers(estimator, y):
    head, trace = head_of(estimator, y)
    assert head.labels(trace).tolist() == estimator.predict(QUERY).tolist()
    if hasattr(estimator, "decision_function") and not isinstance(estimator, NearestCentroid):  # see docs/heads.md
        expected = estimator.decision_function(QUERY)
        assert relative(head.scores(trace)[:, -1] if expected.ndim == 1 else head.scores(trace), expected) < 1e-9
    if head.voting.calibration is not None:
        assert relative(head.voting.probabilities(trace.values[-1]), estimator.predict_proba(QUERY)) < 1e-9


@pytest.mark.parametrize("estimator", THRESHOLDS, ids=shown)
def test_thresholds_are_where_the_value_is_zero(estimator):
    head, trace = head_of(estimator, TWO)
    labels = estimator.predict(QUERY)
    assert set(labels) == {0, 1}
    assert head.labels(trace).tolist() == labels.tolist()
    assert ((head.scores(trace)[:, 1] > 0).numpy() == (labels == 1)).all()
    if head.voting.calibration is not None:
        assert relative(head.voting.probabilities(trace.values[-1]), estimator.predict_proba(QUERY)) < 1e-9


@pytest.mark.parametrize("estimator", [*REGRESSORS, *POSITIVE], ids=shown)
def test_regressors(estimator):
    head, trace = head_of(estimator, np.exp(NUMBERS / 3) if estimator in POSITIVE else NUMBERS)
    assert relative(head.labels(trace).reshape(-1), estimator.predict(QUERY)) < 1e-9


@pytest.mark.parametrize(("estimator", "words"), REFUSED, ids=str)
def test_what_is_refused_says_what_to_fit(estimator, words):
    with pytest.raises(NoClosedFormError, match=words):
        closed_form(estimator.fit(X, THREE))


def test_a_stack_that_has_predicted_was_not_fitted_again():
    stack = StackingClassifier([("a", LinearSVC())], final_estimator=SVC()).fit(X, TWO)
    fit = Fit(stack)
    stack.predict(QUERY)
    assert fit.fitted_again() is None
    stack.fit(X, TWO)
    assert fit.fitted_again() == "StackingClassifier"
