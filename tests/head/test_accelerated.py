"""Heads that were fitted elsewhere: imitations of cuML and cuml.accel, scikit-learn-intelex where it is installed."""

import numpy as np
import pytest
import torch
from problems import closed_form
from reference import relative
from sklearn.base import BaseEstimator
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError

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
