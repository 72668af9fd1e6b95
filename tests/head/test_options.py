"""Estimators with options that few set, and what is refused."""

import numpy as np
import pytest
import torch
from heads import HEADS, THREE, TWO, fitted_row, head_of, query_of, trace_of
from heads import MIXED as X
from heads import MIXED_QUERY as QUERY
from problems import closed_form
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    BaggingClassifier,
    StackingClassifier,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import FixedThresholdClassifier
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier, OutputCodeClassifier
from sklearn.naive_bayes import BernoulliNB, GaussianNB
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer
from sklearn.svm import SVC, LinearSVC

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError
from pytorch_grad_cam_pcasvm.head.fit_checks import Fit

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


def test_autograd_of_a_power_at_zero():
    """As where a channel behind a ReLU is off."""
    estimator = make_pipeline(PowerTransformer(), PCA(2), SVC()).fit(X, TWO)
    head, x = Head.of(estimator), torch.zeros(1, X.shape[1], dtype=torch.float64, requires_grad=True)
    trace = head(x)
    grad, log_scale = head.pullback(trace, {len(trace.values) - 1: torch.ones(1, 1, 1).double()})
    (expected,) = torch.autograd.grad(trace.values[-1].sum(), x)
    assert relative(grad[0] * log_scale.exp(), expected) < 1e-9


@pytest.mark.parametrize(("estimator", "words"), REFUSED, ids=str)
def test_what_is_refused_says_what_to_fit(estimator, words):
    with pytest.raises(NoClosedFormError, match=words):
        closed_form(estimator.fit(X, THREE))


@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith("threshold")])
def test_thresholds_are_where_the_value_is_zero(name):
    labels = fitted_row(name).predict(query_of(name))
    assert set(labels) == {0, 1}
    head = head_of(name)
    assert ((head.scores(trace_of(head, query_of(name)))[:, 1] > 0).numpy() == (labels == 1)).all()


def test_a_stack_that_has_predicted_was_not_fitted_again():
    stack = StackingClassifier([("a", LinearSVC())], final_estimator=SVC()).fit(X, TWO)
    fit = Fit(stack)
    stack.predict(QUERY)
    assert fit.fitted_again() is None
    stack.fit(X, TWO)
    assert fit.fitted_again() == "StackingClassifier"
