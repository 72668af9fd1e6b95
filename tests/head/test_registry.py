"""Every estimator of scikit-learn: taken, with its own values, gradients and secants, or refused with a reason."""

import inspect
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from heads import check_gradients, trace_of
from problems import Problem, closed_form
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import QuadraticDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.svm import SVC, SVR, LinearSVC
from sklearn.utils import all_estimators

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError

WIDTH = 6
REFUSED = {
    "classifier": "AdaBoost Categorical Chain Tree Trees Dummy Boosting RadiusNeighbors Forest",
    "regressor": "AdaBoost Tree Trees Dummy Boosting Isotonic KNeighbors RadiusNeighbors Forest Chain",
}
OWN_MEMBERS = ("Voting", "Stacking")
# These decide by something else than the value that scikit-learn calls their decision function.
OTHER_SCORES = ("NearestCentroid", "FixedThresholdClassifier", "TunedThresholdClassifierCV")


def all_of(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(all_estimators(type_filter=kind))


def is_refused(name, kind):
    stem = name.removesuffix(kind.capitalize())
    return any(name.startswith(part) or stem.endswith(part) for part in REFUSED[kind].split())


def data(classes):
    rng = np.random.default_rng(1)
    labels = np.arange(90) % classes
    return rng.random((90, WIDTH)) + 0.4 * np.eye(3, WIDTH)[labels], labels


def options(name, kind, classifies):
    parameters = inspect.signature(kind).parameters
    given = {}
    if "estimator" in parameters and not name.startswith(("RANSAC", "MultiTask")):
        given["estimator"] = LogisticRegression() if classifies else Ridge()
    if name.startswith(OWN_MEMBERS):
        svm = CalibratedClassifierCV(SVC()) if name.startswith("Voting") else LinearSVC()
        given["estimators"] = [
            ("a", LogisticRegression() if name.startswith("Voting") else LinearSVC(C=0.1)),
            ("b", svm),
        ]
        if not classifies:
            given["estimators"] = [("a", Ridge()), ("b", SVR())]
    if "random_state" in parameters:
        given["random_state"] = 3
    if name in ("Lasso", "ElasticNet", "LassoLars", "MultiTaskLasso", "MultiTaskElasticNet"):
        given["alpha"] = 0.01  # the usual 1 leaves nothing
    return given | {
        "VotingClassifier": {"voting": "soft", "weights": [1, 2]},
        "BernoulliNB": {"binarize": None},
        "OutputCodeClassifier": {"code_size": 3},
        "GaussianProcessRegressor": {"alpha": 0.1, "normalize_y": True},
        "QuantileRegressor": {"alpha": 0.0},
    }.get(name, {})


@cache
def fitted(name, kind, *, classifies):
    two = ("Threshold", "GaussianProcessClassifier")
    x, labels = data(2 if any(part in name for part in two) else 3)
    if name == "BernoulliNB":
        x = (x > 0.5).astype(float)
    y = labels + (0 if classifies else 1.0 + x[:, 0])
    if name.startswith(("MultiTask", "MultiOutputReg", "CCA", "PLSCan", "RegressorChain")):
        y = np.stack([y, x[:, 1] + x[:, 2] ** 2], 1)
    if name in ("MultiOutputClassifier", "ClassifierChain"):
        y = np.stack([labels > 0, labels > 1], 1).astype(int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**options(name, kind, classifies)).fit(x, y)


def checked(head):
    """Hold gradients and secants against autograd and values, and return rows with their trace."""
    query = np.random.default_rng(2).random((7, WIDTH)) + 0.1
    return query, check_gradients(head, query)


@pytest.mark.parametrize("name", all_of("classifier"))
def test_classifiers(name):
    if is_refused(name, "classifier"):
        with pytest.raises(
            (NoClosedFormError, ValueError), match=r"closed-form Jacobian, since (its?|each) |non-negative"
        ):
            closed_form(fitted(name, all_of("classifier")[name], classifies=True))
        return
    estimator = fitted(name, all_of("classifier")[name], classifies=True)
    head = Head.of(estimator)
    query, trace = checked(head)
    assert head.labels(trace).tolist() == estimator.predict(query).tolist()
    if hasattr(estimator, "decision_function") and name not in OTHER_SCORES:
        expected = estimator.decision_function(query)
        assert relative(head.scores(trace)[:, -1] if expected.ndim == 1 else head.scores(trace), expected) < 1e-9
    if head.voting.calibration is not None:
        assert relative(head.voting.probabilities(trace.values[-1]), estimator.predict_proba(query)) < 1e-9


@pytest.mark.parametrize("name", all_of("regressor"))
def test_regressors(name):
    if is_refused(name, "regressor"):
        with pytest.raises((NoClosedFormError, ValueError), match=r"no closed-form Jacobian|1d array"):
            closed_form(fitted(name, all_of("regressor")[name], classifies=False))
        return
    estimator = fitted(name, all_of("regressor")[name], classifies=False)
    head = Head.of(estimator)
    query, trace = checked(head)
    assert relative(head.labels(trace).reshape(7, -1), estimator.predict(query).reshape(7, -1)) < 1e-9


@pytest.mark.parametrize("name", ["EllipticEnvelope", "SGDOneClassSVM", "OneClassSVM"])
def test_outlier_detectors(name):
    estimator = fitted(name, all_of(None)[name], classifies=True)
    head = Head.of(estimator)
    query, trace = checked(head)
    assert relative(trace.values[-1][:, 0], estimator.decision_function(query)) < 1e-9
    assert head.labels(trace).tolist() == estimator.predict(query).tolist()


@pytest.mark.parametrize("shape", ["full", "tied", "diag", "spherical"])
@pytest.mark.parametrize("name", ["GaussianMixture", "BayesianGaussianMixture"])
def test_mixtures(name, shape):
    estimator = all_of(None)[name](n_components=3, covariance_type=shape, random_state=0).fit(data(3)[0])
    head = Head.of(estimator)
    query, trace = checked(head)
    assert head.labels(trace).tolist() == estimator.predict(query).tolist()
    assert relative(trace.values[-2].logsumexp(-1), estimator.score_samples(query)) < 1e-9
    assert relative(head.voting.probabilities(trace.values[-1]), estimator.predict_proba(query)) < 1e-9


def test_margins_of_likelihoods_are_against_the_mean_of_the_others():
    x, labels = data(3)
    head = Head.of(QuadraticDiscriminantAnalysis().fit(x, labels))
    decision = trace_of(head, x[:9]).values[-1]
    margins = head.voting.margins(decision)
    assert relative(margins[:, 0], decision[:, 0] - decision[:, 1:].mean(1)) < 1e-12
    against = head.voting.seed(torch.tensor([0]), torch.tensor([2]))
    assert relative((decision * against).sum(-1), decision[:, 0] - decision[:, 2]) < 1e-12
    assert torch.equal(margins.argmax(-1), decision.argmax(-1))


@pytest.mark.parametrize(
    "name",
    [
        "NMF",
        "MiniBatchNMF",
        "LatentDirichletAllocation",
        "DictionaryLearning",
        "Isomap",
        "KBinsDiscretizer",
        "Binarizer",
    ],
)
def test_transformers_without_a_closed_form_say_why(name):
    estimator = fitted(name, all_of(None)[name], classifies=True)
    with pytest.raises(NoClosedFormError, match=f"{name} has no closed-form Jacobian, since its? "):
        Head.of([estimator, PCA(2)])


def test_outputs_go_by_their_names():
    from sklearn.multioutput import MultiOutputClassifier

    from pytorch_grad_cam_pcasvm import SVMTarget
    from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput

    x, labels = data(3)
    several = MultiOutputClassifier(SVC()).fit(x, np.stack([labels > 0, labels > 1, labels == 1], 1).astype(int))
    head = Head.of(several, outputs=["oedema", "mass", "nodule"])
    output = HeadOutput.of(head, trace_of(head, x[:9]))
    assert output.labels().tolist() == several.predict(x[:9]).tolist()
    for place, name in enumerate(["oedema", "mass", "nodule"]):
        assert relative(SVMTarget(name)(output), several.estimators_[place].decision_function(x[:9])) < 1e-9
    with pytest.raises(ValueError, match="has 3 outputs, but got 2 names"):
        Head.of(several, outputs=["oedema", "mass"])
    with pytest.raises(ValueError, match="no outputs that could have names"):
        Head.of(SVC().fit(x, labels), outputs=["a"])
    for head in (Head.of(Ridge().fit(x, x[:, :2])), Head.of(several)):
        with pytest.raises(ValueError, match=r"the head has . outputs: name one"):
            SVMTarget()(HeadOutput.of(head, trace_of(head, x[:3])))


def test_without_targets_all_outputs_are_explained(tmp_path):
    from sklearn.multioutput import MultiOutputClassifier

    from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, SVMTarget, atlas

    problem = Problem(classes=3)
    features = problem.net(problem.x).features.detach().numpy()
    several = MultiOutputClassifier(SVC()).fit(features, np.arange(2 * len(features)).reshape(-1, 2) % 3 % 2)
    net = PCASVMNet(problem.backbone, Head.of(several, outputs=["a", "b"]), layer="classifier.4").eval()
    maps = ContributionCAM(net, [problem.target_layer]).explain(problem.x)
    assert maps.targets == [SVMTarget("a"), SVMTarget("b")]
    with pytest.raises(ValueError, match="an atlas keeps one prediction for each image, but the head has several"):
        atlas.build(net, [problem.x[0]], [problem.target_layer], tmp_path)
