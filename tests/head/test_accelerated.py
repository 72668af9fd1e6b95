"""Heads that were fitted elsewhere: imitations of cuML and cuml.accel, scikit-learn-intelex where it is installed."""

import subprocess
import sys
from functools import singledispatch

import numpy as np
import pytest
import torch
from problems import closed_form
from reference import relative
from sklearn.base import BaseEstimator
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble._forest import ForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError
from pytorch_grad_cam_pcasvm.head.convert import register_originals
from pytorch_grad_cam_pcasvm.head.elsewhere import of_sklearn

RNG = np.random.default_rng(0)
LABELS = np.arange(60) % 3
X = RNG.normal(size=(60, 5)) + RNG.normal(size=(3, 5))[LABELS]


class OfCuml:
    """What cuML's estimators have: a fit on the device, and scikit-learn's with the same fit on request."""

    def __init__(self, of_sklearn):
        self._of_sklearn = of_sklearn

    def as_sklearn(self, deepcopy=False):
        return self._of_sklearn


class ProxyBase(BaseEstimator):
    """What cuml.accel puts in the place of a class: its fit comes to the CPU when it is asked for."""

    def __init__(self, of_sklearn):
        self._synced_later, self._cpu = of_sklearn, SVC()

    def _sync_attrs_to_cpu(self):
        self._cpu = self._synced_later


class Patched(SVC):
    """As sklearnex's SVC: the same values by a function of its own."""

    def decision_function(self, X):  # noqa: N803 - scikit-learn's name
        return super().decision_function(X) + 0.0


class Different(SVC):
    """Another function under the same name."""

    def decision_function(self, X):  # noqa: N803 - scikit-learn's name
        return super().decision_function(X) * 1.01


class Neighbours(NearestNeighbors):
    """As sklearnex's: it predicts nothing."""

    def kneighbors(self, X):  # noqa: N803 - scikit-learn's name
        return super().kneighbors(X)


class FarNeighbours(NearestNeighbors):
    """Other distances under the same name."""

    def kneighbors(self, X):  # noqa: N803 - scikit-learn's name
        distances, places = super().kneighbors(X)
        return distances * 1.01, places


class Means(KMeans):
    """As sklearnex's: its predictions are numbers of clusters, and it has no classes."""


class FarMeans(KMeans):
    """Other distances under the same name."""

    def transform(self, X):  # noqa: N803 - scikit-learn's name
        return super().transform(X) * 1.01


for kind in (Neighbours, FarNeighbours, Means, FarMeans):
    kind.__module__ = "sklearnex.neighbors"
OfCuml.__module__, ProxyBase.__module__ = "cuml.svm.svc", "cuml.accel.estimator_proxy"
Patched.__module__ = Different.__module__ = "sklearnex.svm._classes"


class Proxy(ProxyBase):
    """The class itself says that it is scikit-learn's."""

    __module__ = "sklearn.svm"


def values(head):
    return head.scores(head(torch.tensor(X[:9])))


@pytest.mark.parametrize("kind", [OfCuml, Proxy])
def test_the_fit_of_a_gpu_is_taken_as_scikit_learns(kind):
    reduction = PCA(3).fit(X)
    svm = SVC().fit(reduction.transform(X), LABELS)
    head = Head.of([kind(reduction), kind(svm)])
    assert relative(values(head), svm.decision_function(reduction.transform(X[:9]))) < 1e-12


def test_another_implementation_is_compared_once():
    same = make_pipeline(PCA(3), Patched()).fit(X, LABELS)
    assert relative(values(Head.of(same)), same.decision_function(X[:9])) < 1e-12
    with pytest.raises(NoClosedFormError, match="Different of sklearnex computes other values than scikit-learn's"):
        closed_form(make_pipeline(PCA(3), Different()).fit(X, LABELS))


def test_other_implementations_without_a_prediction_are_compared_by_their_distances():
    query = torch.tensor(X[:9]) + 0.1
    for near, far in ((Neighbours(n_neighbors=3), FarNeighbours(n_neighbors=3)), (Means(4, n_init=1), FarMeans(4))):
        head = Head.of(near.fit(X + 100))
        neighbours = isinstance(near, NearestNeighbors)
        distances = near.kneighbors(query + 100)[0].mean(1) if neighbours else near.transform(query + 100).min(1)
        assert relative(head.scores(head(query + 100))[:, 0], -distances) < 1e-9
        with pytest.raises(NoClosedFormError, match=f"{type(far).__name__} of sklearnex computes other values"):
            Head.of(far.fit(X))


def test_the_own_classes_of_scikit_learn_are_known_where_others_stand_in_their_places():
    # As after patch_sklearn(): the names that were registered are those of subclasses.
    table = singledispatch(lambda estimator: "unknown")
    table.register(Patched, lambda estimator: "an SVC")
    table.register(KMeans, lambda estimator: "scikit-learn's")
    table.register(Means, lambda estimator: "sklearnex's")
    assert table(SVC()) == "unknown"
    register_originals(table)
    assert table(SVC()) == table(Patched()) == "an SVC"
    assert (table(KMeans()), table(Means())) == ("scikit-learn's", "sklearnex's")
    assert (of_sklearn(Patched), of_sklearn(SVC), of_sklearn(ForestClassifier)) == (SVC, SVC, ForestClassifier)


@pytest.mark.parametrize(
    "estimator",
    [
        GaussianMixture(2, random_state=0),
        GaussianMixture(2, covariance_type="tied", random_state=0),
        GaussianMixture(2, covariance_type="diag", random_state=0),
        GaussianMixture(2, covariance_type="spherical", random_state=0),
        BayesianGaussianMixture(n_components=2, random_state=0),
        LinearDiscriminantAnalysis(),
        LogisticRegression(),
    ],
)
def test_estimators_with_tensors_in_the_place_of_arrays(estimator):
    # What a fit on tensors leaves, by scikit-learn's array-API dispatch.
    fitted = make_pipeline(StandardScaler(), PCA(3, whiten=True), estimator).fit(X, LABELS)
    expected = fitted.predict(X[:9])
    values = fitted.predict_proba(X[:9])
    for step in fitted:
        for name, value in list(vars(step).items()):
            if isinstance(value, np.ndarray) and value.dtype.kind in "if":
                setattr(step, name, torch.tensor(value))
    head = Head.of(fitted)
    trace = head(torch.tensor(X[:9]))
    assert (head.labels(trace) == expected).all()
    assert relative(head.voting.probabilities(trace.values[-1]), values) < 1e-9
    assert isinstance(fitted[-1].__dict__["classes_" if hasattr(estimator, "classes_") else "means_"], torch.Tensor)


@pytest.mark.optional
def test_heads_of_before_and_after_a_patch():
    pytest.importorskip("sklearnex")
    code = """
import numpy as np
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
x, y = np.random.default_rng(0).normal(size=(60, 5)), np.arange(60) % 2
before = [make_pipeline(PCA(3), last).fit(x, y) for last in (SVC(), LogisticRegression())]
from sklearnex import patch_sklearn
patch_sklearn(verbose=False)
import torch
from pytorch_grad_cam_pcasvm import Head
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA as Patched
from sklearn.neighbors import NearestNeighbors
assert Patched is not PCA
for head in (*before, make_pipeline(Patched(3), before[0][-1]).fit(x, y)):
    made = Head.of(head)
    assert np.abs(made.scores(made(torch.from_numpy(x)))[:, 1].numpy() - head.decision_function(x)).max() < 1e-6
made = Head.of(before[1])
shares = made.voting.probabilities(made(torch.from_numpy(x)).values[-1]).numpy()
assert np.abs(shares - before[1].predict_proba(x)).max() < 1e-6
near, means = NearestNeighbors(n_neighbors=3).fit(x), KMeans(3, random_state=0).fit(x)
for head, distances in ((near, near.kneighbors(x + 1)[0].mean(1)), (means, means.transform(x + 1).min(1))):
    made = Head.of(head)
    assert np.abs(made.scores(made(torch.from_numpy(x + 1))).numpy()[:, 0] + distances).max() < 1e-6
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("classes", [2, 3])
def test_scikit_learn_intelex(classes):
    svm = pytest.importorskip("sklearnex.svm")
    from sklearnex import decomposition, linear_model, neighbors

    labels = LABELS % classes
    for last in (svm.SVC(), svm.NuSVC(), svm.SVC(kernel="linear"), linear_model.LogisticRegression()):
        pipeline = make_pipeline(decomposition.PCA(3), last).fit(X, labels)
        scores = values(Head.of(pipeline))
        assert relative(scores[:, 1] if classes == 2 else scores, pipeline.decision_function(X[:9])) < 1e-9
    for last in (svm.SVR(), linear_model.Ridge(), neighbors.KNeighborsClassifier(3)):
        pipeline = make_pipeline(decomposition.PCA(3), last).fit(X, labels)
        head = Head.of(pipeline)
        assert relative(head.labels(head(torch.tensor(X[:9]))), pipeline.predict(X[:9])) < 1e-9
