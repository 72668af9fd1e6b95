"""Meta-estimators around whole pipelines: the components are those of the reduction that all members share, or none."""

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingClassifier, VotingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV, TunedThresholdClassifierCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC
from torch import nn

from pytorch_grad_cam_pcasvm import Head, HotellingTarget, PCASVMNet, PCATarget, ResidualTarget

RNG = np.random.default_rng(0)
Y = np.arange(90) % 2
THREE = np.arange(90) % 3
X = RNG.normal(size=(90, 8)) + RNG.normal(size=(3, 8))[THREE] + 2 * Y[:, None] * np.eye(8)[0]
QUERY = X[:5] + 0.1


def pipeline(last=None, **options):
    return make_pipeline(StandardScaler(), PCA(4, **options), SVC() if last is None else last)


class Own(ClassifierMixin, BaseEstimator):
    """A meta-estimator of the user's."""

    def __init__(self, estimator):
        self.estimator = estimator

    def fit(self, X, y):  # noqa: N803 - scikit-learn's name
        self.estimator_ = clone(self.estimator).fit(X, y)
        self.classes_, self.n_features_in_ = self.estimator_.classes_, X.shape[1]
        return self

    def decision_function(self, X):  # noqa: N803 - scikit-learn's name
        return 2 * self.estimator_.decision_function(X)

    def predict(self, X):  # noqa: N803 - scikit-learn's name
        return self.estimator_.predict(X)


def prefit_stack():
    fitted = pipeline().fit(X, Y)
    other = make_pipeline(fitted[0], fitted[1], LinearSVC().fit(fitted[:-1].transform(X), Y))
    return StackingClassifier([("a", fitted), ("b", other)], cv="prefit").fit(X, Y)


SHARED = {
    "threshold": lambda: FixedThresholdClassifier(pipeline(), threshold=0.2, response_method="decision_function"),
    "tuned": lambda: TunedThresholdClassifierCV(pipeline(), cv=3),
    "calibrated": lambda: CalibratedClassifierCV(pipeline(), ensemble=False),
    "threshold of a calibrated one": lambda: FixedThresholdClassifier(
        CalibratedClassifierCV(pipeline(), ensemble=False), threshold=0.4, response_method="predict_proba"
    ),
    "stack of one": lambda: StackingClassifier([("a", pipeline())], cv=3),
    "stack with a PCA of decisions": lambda: StackingClassifier(
        [("a", pipeline())], make_pipeline(PCA(1), LogisticRegression()), cv=3
    ),
    "stack, prefit": prefit_stack,
    "stack of refits on the same rows": lambda: StackingClassifier([("a", pipeline()), ("b", pipeline(LinearSVC()))]),
    "vote": lambda: VotingClassifier(
        [("a", pipeline(LogisticRegression())), ("b", pipeline(LogisticRegression(C=0.1)))], voting="soft"
    ),
    "bag of all rows": lambda: BaggingClassifier(pipeline(LogisticRegression()), 2, bootstrap=False),
    "one against the rest": lambda: (OneVsRestClassifier(pipeline()), THREE),
    "regressor": lambda: (VotingRegressor([("a", pipeline(SVR())), ("b", pipeline(Ridge()))]), X[:, 1]),
    "target": lambda: (TransformedTargetRegressor(pipeline(SVR()), transformer=StandardScaler()), X[:, 1]),
    "search": lambda: GridSearchCV(FixedThresholdClassifier(pipeline()), {"estimator__svc__C": [1, 2]}, cv=2),
}  # fmt: skip
APART = {
    "calibrated by folds": lambda: CalibratedClassifierCV(pipeline(), cv=3),
    "stack of two reductions": lambda: StackingClassifier([("a", pipeline()), ("b", pipeline(whiten=True))]),
    "stack with the features": lambda: StackingClassifier([("a", pipeline())], passthrough=True),
    "stack that reduces decisions": lambda: StackingClassifier(
        [("a", SVC()), ("b", LinearSVC())], make_pipeline(PCA(2), LogisticRegression())
    ),
    "bag of columns": lambda: BaggingClassifier(pipeline(LogisticRegression()), 2, max_features=0.8, random_state=0),
    "pairs": lambda: (OneVsOneClassifier(pipeline()), THREE),
    "own": lambda: Own(pipeline()),
}  # fmt: skip


def fit(made):
    estimator, labels = made if isinstance(made, tuple) else (made, Y)
    return estimator.fit(X, labels)


@pytest.mark.parametrize("name", SHARED)
def test_components_are_those_of_the_reduction_that_all_share(name):
    fitted = fit(SHARED[name]())
    plain = make_pipeline(StandardScaler(), PCA(4)).fit(X)  # scikit-learn's own reduction of these rows
    expected = plain.transform(QUERY)
    net = PCASVMNet(nn.Identity(), fitted).eval()
    output = net(torch.from_numpy(QUERY))
    assert relative(output.components, expected) < 1e-10
    for b in range(4):
        assert relative(PCATarget(b)(output), expected[:, b]) < 1e-10
    scaled = plain[0].transform(QUERY)
    t2 = (expected**2 / plain[1].explained_variance_).sum(1)
    q = ((scaled - plain[1].inverse_transform(expected)) ** 2).sum(1)
    assert relative(HotellingTarget()(output), t2) < 1e-8
    assert relative(ResidualTarget()(output), q) < 1e-8
    predicted = fitted.predict(QUERY)
    if name in ("regressor", "target"):
        assert relative(net.predict(torch.from_numpy(QUERY)), predicted) < 1e-8
    else:
        assert (net.predict(torch.from_numpy(QUERY)) == predicted).all()


@pytest.mark.parametrize("name", APART)
def test_without_a_shared_reduction_there_are_no_components(name):
    net = PCASVMNet(nn.Identity(), fit(APART[name]())).eval()
    output = net(torch.from_numpy(QUERY))
    assert output.components is None
    why = "which is asked for its values as a whole" if name == "own" else "not the same one for all that decides"
    with pytest.raises(ValueError, match=f"the PCA is inside a meta-estimator, .*{why}; put it in front"):
        PCATarget(0)(output)


@pytest.mark.parametrize("name", ["stack, prefit", "threshold of a calibrated one", "one against the rest"])
def test_what_is_brought_forward_is_explained_whole(name, tmp_path):
    fitted = fit(SHARED[name]())
    head = Head.of(fitted)
    trace, start = head(torch.from_numpy(QUERY)), head(torch.from_numpy(X.mean(0, keepdims=True)))
    grad, log_scale = head.pullback(trace, {len(head.stages): None}, start)
    sums = ((grad * log_scale.exp().unsqueeze(-1)) * (trace.values[0] - start.values[0]).unsqueeze(1)).sum(-1)
    assert relative(sums, trace.values[-1] - start.values[-1]) < 1e-10
    head.save(tmp_path / "head.safetensors")
    loaded = Head.load(tmp_path / "head.safetensors")
    assert loaded.digest() == head.digest()
    assert torch.equal(loaded(torch.from_numpy(QUERY)).values[-1], trace.values[-1])


def test_an_outer_reduction_stays_the_one_that_sees_the_features():
    fitted = make_pipeline(PCA(6), CalibratedClassifierCV(make_pipeline(PCA(3), SVC()), cv=3)).fit(X, Y)
    output = PCASVMNet(nn.Identity(), fitted).eval()(torch.from_numpy(QUERY))
    assert relative(output.components, fitted[:-1].transform(QUERY)) < 1e-10
