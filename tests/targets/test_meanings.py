"""What numbers are called where they stand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC, LinearSVC, OneClassSVM

from pytorch_grad_cam_pcasvm import DensityTarget, Head, LogRatioTarget, PCATarget, ProbabilityTarget, SVMTarget
from pytorch_grad_cam_pcasvm.targets.catalogue import _is_decided_by_sign, describe_anomaly, describe_meaning

FEATURES = np.random.default_rng(0).normal(size=(60, 4))
TWO = np.where(FEATURES[:, 0] > 0, "crack", "good")
THREE = np.select([FEATURES[:, 0] > 0.5, FEATURES[:, 1] > 0], ["a", "b"], "c")
FEATURES_TENSOR = torch.tensor(FEATURES)


def head_of(estimator, labels=None):
    return Head.of(make_pipeline(PCA(3), estimator).fit(FEATURES, labels))


@pytest.mark.parametrize(
    ("classifier", "labels", "target", "words"),
    [
        (SVC(), TWO, SVMTarget(), "margin {}: above 0 is predicted class"),
        (LogisticRegression(), TWO, SVMTarget("crack"), "margin {}: above 0 is crack"),
        (SVC(), TWO, SVMTarget("crack", sign="-"), "margin {}: above 0 is not crack"),
        (SVC(), TWO, SVMTarget(versus="good"), "margin {}: above 0 is anything but good"),
        (SVC(), TWO, SVMTarget(versus="good", sign="-"), "margin {}: above 0 is good"),
        (SVC(), THREE, SVMTarget("a"), "margin of a {}: above 0 is more a than the others"),
        (LinearSVC(), THREE, SVMTarget("a"), "margin of a {}: above 0 is more a than the others"),
        (LogisticRegression(), THREE, SVMTarget("a"), "margin of a {}: above 0 is more a than the others"),
        (RandomForestClassifier(5), THREE, SVMTarget("a"), "margin of a {}: higher is more a"),
        (SVC(), THREE, SVMTarget("a", versus="b"), "margin {}: above 0 is a rather than b"),
        (SVC(), THREE, SVMTarget("a", versus="runner-up"), "margin {}: above 0 is a rather than the runner-up"),
        (
            SVC(),
            THREE,
            SVMTarget("a", versus="others"),
            "margin of a {}: above 0 is more a than the mean of the others",
        ),
        (LogisticRegression(), TWO, ProbabilityTarget("crack"), "probability {} (0 to 1)"),
        (SVC(), TWO, PCATarget(0), "position {}"),
        (Ridge(), FEATURES[:, 0], SVMTarget(), "predicted value {} (in the unit of the labels)"),
        (OneClassSVM(), None, SVMTarget(sign="-"), "anomaly {}: above 0 is unlike good ones"),
        (OneClassSVM(), None, SVMTarget(), "normality {}: above 0 is like good ones"),
        (NearestNeighbors(n_neighbors=1), None, SVMTarget(), "normality {}: higher is more like good ones"),
        (
            NearestNeighbors(n_neighbors=1),
            None,
            SVMTarget(sign="-"),
            "anomaly {} (distance to the nearest good photo)",
        ),
        (SVC(), THREE, SVMTarget("a", versus=("b", "c")), "margin of a {}: above 0 is more a than the mean of b, c"),
        (
            SVC(),
            THREE,
            SVMTarget("a", sign="-", versus="others"),
            "margin of a against the others {}: higher is less a",
        ),
        (
            SVC(),
            THREE,
            SVMTarget("a", versus="others", strength=0.5),
            "margin of a against the others {}: higher is more a",
        ),
        (GaussianMixture(2), None, DensityTarget(), "log-density {}"),
        (GaussianMixture(2), None, DensityTarget("-"), "anomaly {} (minus the log-density)"),
        (GaussianNB(), TWO, LogRatioTarget("crack"), "log-ratio {}: above 0 is crack"),
        (RandomForestClassifier(5), TWO, SVMTarget("crack"), "margin of crack {}: higher is more crack"),
        (LogisticRegression(), THREE, SVMTarget("a", sign="-"), "margin of a {}: above 0 is less a than the others"),
    ],
)
def test_a_value_says_what_it_is(classifier, labels, target, words):
    assert describe_meaning(target, head_of(classifier, labels)) == words


@pytest.mark.parametrize(
    ("target", "words"),
    [(SVMTarget("a"), "value {}"), (PCATarget(0), "position {}")],
)
def test_without_a_head_a_value_is_a_value(target, words):
    assert describe_meaning(target, None) == words


@pytest.mark.parametrize(
    ("decide", "compare", "by_sign"),
    [
        ("sign", "margins", True),
        ("votes", "values", True),
        ("comparison", "margins", True),
        ("comparison", "probabilities", False),
        ("last", "margins", False),
    ],
)
def test_above_0_decides_where_margins_are_opposite(decide, compare, by_sign):
    for second, expected in ((1.0, by_sign), (0.5, False)):
        matrix = torch.tensor([[-1.0], [second]])
        assert _is_decided_by_sign(SimpleNamespace(matrix=matrix, decide=decide, compare=compare)) is expected


@pytest.mark.parametrize(("classifier", "labels"), [(SVC(), TWO), (SVC(), THREE), (LinearSVC(), THREE)])
def test_above_0_is_what_is_said(classifier, labels):
    head = head_of(classifier, labels)
    trace = head.values_of(FEATURES_TENSOR)
    margins = head.voting.margins(trace.values[head.decision_position])
    predicted = head.voting.predicted(trace.values[head.decision_position])
    for number in range(len(head.classes_)):
        above = margins[:, number] > 0
        if len(head.classes_) == 2:
            assert (above == (predicted == number)).all()
        else:
            assert margins[predicted == number, number].mean() > 0 > margins[predicted != number, number].mean()


def test_anomalies_say_what_they_are():
    assert describe_anomaly(head_of(NearestNeighbors(n_neighbors=1)), True) == "distance to the nearest good patch"
    assert describe_anomaly(head_of(NearestNeighbors(n_neighbors=3)), True) == "distance to the nearest good patches"
    assert describe_anomaly(head_of(GaussianMixture(2)), False) == "minus the log-density"
    assert describe_anomaly(head_of(OneClassSVM()), False) == "above 0 is unlike good ones"
    alone = Head.of(PCA(3).fit(FEATURES))
    assert describe_anomaly(alone, True) == "squared distance from what the components can express"
