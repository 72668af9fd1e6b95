"""Heads that are refused with the true cause in the message, or asked in the form that they take; the advice works."""

import re

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import euclidean_distances, rbf_kernel
from sklearn.model_selection import cross_validate
from sklearn.neighbors import KNeighborsClassifier, RadiusNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler, normalize
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError

X = np.random.default_rng(0).normal(size=(80, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


class Words(ClassifierMixin, BaseEstimator):
    """The share of a class among the training rows of the nearest centre, as bags of visual words have it."""

    def fit(self, X, y):  # noqa: N803 - scikit-learn's name
        self.classes_, self.n_features_in_ = np.unique(y), X.shape[1]
        self.means_ = KMeans(6, n_init=1, random_state=0).fit(X)
        self.share_ = np.array([y[self.means_.labels_ == k].mean() for k in range(6)])
        return self

    def predict_proba(self, X):  # noqa: N803 - scikit-learn's name
        share = self.share_[self.means_.predict(X)]
        return np.stack([1 - share, share], 1)

    def predict(self, X):  # noqa: N803 - scikit-learn's name
        return self.classes_[self.predict_proba(X).argmax(1)]


def test_an_estimator_is_asked_in_the_dtype_that_it_takes(tmp_path):
    pipeline = make_pipeline(PCA(3), Words()).fit(X, Y)
    with pytest.raises(ValueError, match="dtype mismatch"):  # what scikit-learn says of float64
        pipeline[-1].predict(np.zeros((2, 3)))
    head = Head.of(pipeline)
    trace = head(torch.from_numpy(X))
    assert (head.labels(trace) == pipeline.predict(X)).all()
    assert relative(head.voting.probabilities(trace.values[-1]), pipeline.predict_proba(X)) < 1e-6
    assert Head.of(make_pipeline(PCA(3), Words()).fit(X.astype(float), Y)).enumerated.predictor.dtype is np.float64


@pytest.mark.parametrize(
    "estimator", [RadiusNeighborsClassifier(0.2), BaggingClassifier(RadiusNeighborsClassifier(0.2), 2, random_state=0)]
)
def test_why_an_estimator_has_no_values_is_told(estimator):
    with pytest.raises(NoClosedFormError, match=r"No neighbors found for test samples.*giving a label for outliers"):
        Head.of(make_pipeline(PCA(3), estimator).fit(X, Y))


def test_the_missing_label_of_outliers_is_named():
    refused = make_pipeline(PCA(3), RadiusNeighborsClassifier(0.2)).fit(X, Y)
    with pytest.raises(NoClosedFormError, match="fit it with outlier_label='most_frequent'"):
        Head.of(refused)
    followed = make_pipeline(PCA(3), RadiusNeighborsClassifier(0.2, outlier_label="most_frequent")).fit(X, Y)
    head = Head.of(followed)
    assert (head.labels(head(torch.from_numpy(X))) == followed.predict(X)).all()


class Broken(ClassifierMixin, BaseEstimator):
    def __init__(self, error):
        self.error = error

    def fit(self, X, y):  # noqa: N803 - scikit-learn's name
        self.classes_ = np.unique(y)
        return self

    def predict(self, X):  # noqa: N803 - scikit-learn's name
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("the licence has run out"), KeyError("weights")])
def test_what_an_estimator_raises_is_part_of_the_refusal(error):
    with pytest.raises(NoClosedFormError, match=re.escape(f"{type(error).__name__}: {error}")) as caught:
        Head.of(make_pipeline(PCA(3), Broken(error)).fit(X, Y))
    assert str(caught.value.__cause__) == str(error)


@pytest.mark.parametrize(
    ("make", "parameter"),
    [
        (lambda rows: SVC(kernel="precomputed").fit(rbf_kernel(rows, rows), Y), "kernel"),
        (lambda rows: KNeighborsClassifier(metric="precomputed").fit(euclidean_distances(rows, rows), Y), "metric"),
        (
            lambda rows: BaggingClassifier(SVC(kernel="precomputed"), 2).fit(rbf_kernel(rows, rows), Y),
            "estimator__kernel",
        ),
    ],
)
@pytest.mark.parametrize("reduced", [True, False])
def test_a_table_of_similarities_is_no_features(make, parameter, reduced):
    reduction = PCA(3).fit(X)
    last = make(reduction.transform(X) if reduced else X)
    with pytest.raises(NoClosedFormError, match=f"{parameter}='precomputed', on a table .* takes no features"):
        Head.of([reduction, last] if reduced else last)


def by_length(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("function", "options", "named"),
    [
        (normalize, {}, "fit Normalizer(), which"),
        (normalize, {"kw_args": {"norm": "l1"}}, "fit Normalizer('l1'), which"),
        (by_length, {}, "fit Normalizer(), which"),
    ],
)
def test_a_function_that_does_what_a_normalizer_does_names_it(function, options, named):
    with pytest.raises(NoClosedFormError, match=re.escape(named)):
        Head.of(make_pipeline(FunctionTransformer(function, **options), PCA(3), SVC()).fit(X, Y))
    norm = options.get("kw_args", {}).get("norm", "l2")
    followed = make_pipeline(Normalizer(norm), PCA(3), SVC()).fit(X, Y)
    head = Head.of(followed)
    assert relative(head.scores(head(torch.from_numpy(X)))[:, 1], followed.decision_function(X)) < 1e-6
    with pytest.raises(NoClosedFormError, match=r"log2") as caught:
        Head.of(make_pipeline(FunctionTransformer(np.log2), PCA(3), SVC()).fit(abs(X) + 1, Y))
    assert "Normalizer" not in str(caught.value)


def test_a_function_that_makes_nan_of_the_training_mean_is_named():
    with pytest.raises(NoClosedFormError, match=r"by_length.* makes NaN or infinity of a row of zeros.*fit Normalizer"):
        Head.of(make_pipeline(StandardScaler(), PCA(4), FunctionTransformer(by_length), SVC()).fit(X, Y))
    Head.of(make_pipeline(StandardScaler(), PCA(4), Normalizer(), SVC()).fit(X, Y))


def test_a_list_of_heads_is_no_head():
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC())
    heads = cross_validate(pipeline, X, Y, cv=3, return_estimator=True)["estimator"]
    with pytest.raises(ValueError, match=r"3 of its 3 members predict something \(Pipeline .*pass one of them, heads"):
        Head.of(heads)
    assert Head.of(heads[0]).n_features == 5
    parts = pipeline.fit(X, Y)
    assert Head.of([parts[:-1], parts[-1]]).n_features == 5  # steps in order


class Plain:
    """An estimator of another library, without scikit-learn's classes."""

    n_features_in_ = 5

    def __init__(self, **attributes):
        vars(self).update(attributes)


class Numbers(Plain):
    def predict(self, X):  # noqa: N803 - scikit-learn's name
        raise RuntimeError("asked")


class Detector(Numbers):
    decision_function = Numbers.predict


class OwnStep(BaseEstimator):
    def fit(self, X, y=None):  # noqa: N803 - scikit-learn's name
        self.width_ = X.shape[1]
        return self

    def transform(self, X):  # noqa: N803 - scikit-learn's name
        return X


@pytest.mark.parametrize(
    ("estimator", "way"),
    [
        (Numbers(), "fit SVC for classes, or SVR for numbers"),
        (Numbers(classes_=np.arange(2)), "fit SVC"),
        (Detector(), "fit OneClassSVM or EllipticEnvelope"),
        (Detector(classes_=np.arange(2)), "fit SVC"),
    ],
)
def test_what_is_advised_has_the_role_of_what_is_refused(estimator, way):
    with pytest.raises(NoClosedFormError) as caught:
        Head.of(estimator)
    assert caught.value.ways_out[0].startswith(way)
    assert "fit PCA," not in str(caught.value)


def test_a_step_without_a_role_is_a_reduction_or_nothing():
    with pytest.raises(NoClosedFormError, match="OwnStep has no closed-form Jacobian here: fit PCA, or add yours"):
        Head.of([OwnStep().fit(X), SVC().fit(X, Y)])


class Detects(BaseEstimator):
    """As PyOD's detectors: scores above 0 everywhere, and a threshold of its own."""

    threshold_ = 2.0

    def fit(self, X, y=None):  # noqa: N803 - scikit-learn's name
        self.n_features_in_ = X.shape[1]
        return self

    def decision_function(self, X):  # noqa: N803 - scikit-learn's name
        return np.linalg.norm(X, axis=1)

    def predict(self, X):  # noqa: N803 - scikit-learn's name
        return (self.decision_function(X) > self.threshold_).astype(int)


class Agrees(Detects):
    def decision_function(self, X):  # noqa: N803 - scikit-learn's name
        return np.linalg.norm(X, axis=1) - 2

    threshold_ = 0.0


def test_values_that_contradict_the_labels_are_told(recwarn):
    reduction = PCA(3).fit(X)
    for order, kind, threshold in (([0, 1], Detects, 2.0), ([0, 1], Detects, 0.3), ([1, 0], Agrees, 0.0)):
        detector = kind().fit(reduction.transform(X))
        detector.threshold_ = threshold
        detector.classes_ = np.array(order)
        with pytest.warns(UserWarning, match="predicts another class than the one of its largest value for"):
            Head.of([reduction, detector])
    recwarn.clear()
    fine = Agrees().fit(reduction.transform(X))
    fine.classes_ = np.arange(2)
    Head.of([reduction, fine])
    Head.of(make_pipeline(PCA(3), BaggingClassifier(LogisticRegression(), 3)).fit(X, Y))
    assert not [one for one in recwarn if "largest value" in str(one.message)]
