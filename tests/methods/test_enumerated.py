"""Heads without a gradient: their maps against coalitions that are enumerated here, by the estimators themselves."""

import copy
import math
import pickle
import warnings
from itertools import combinations

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.decomposition import PCA, KernelPCA, TruncatedSVD
from sklearn.ensemble import (
    AdaBoostClassifier,
    BaggingClassifier,
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    IsolationForest,
    RandomForestClassifier,
    RandomForestRegressor,
    StackingClassifier,
    VotingClassifier,
)
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import FeatureUnion, make_pipeline
from sklearn.preprocessing import KBinsDiscretizer, PolynomialFeatures, QuantileTransformer, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor
from torch import nn

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    ClosedFormScoreCAM,
    ContributionCAM,
    Head,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    RelevanceCAM,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    atlas,
    recombined,
)
from pytorch_grad_cam_pcasvm.head.enumerated import shapley_values
from pytorch_grad_cam_pcasvm.runtime.errors import (
    BaselineWarning,
    BlankMapWarning,
    CancellationWarning,
    NoClosedFormError,
)
from pytorch_grad_cam_pcasvm.studio.atlas.explorer.machine import machine_data

BINARY, SEVERAL = ("ill", "well"), ("ash", "elm", "fir")


class Backbone(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.block = nn.Sequential(nn.Conv2d(6, classes, 3, padding=1), nn.BatchNorm2d(classes), nn.ReLU())

    def forward(self, x):
        return self.block(self.stem(x)).mean((2, 3))


BACKBONE = Backbone().double().eval()
X = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
with torch.no_grad():
    FEATURES = BACKBONE(X).numpy()
_, _, _V = np.linalg.svd(FEATURES - FEATURES.mean(0), full_matrices=False)
SCORES = (FEATURES - FEATURES.mean(0)) @ _V[:2].T
LABELS = {
    BINARY: np.array(BINARY)[(SCORES[:, 0] > 0).astype(int)],
    SEVERAL: np.array(SEVERAL)[(SCORES[:, 0] > 0).astype(int) + (SCORES[:, 1] > 0)],
}


class OwnRule(ClassifierMixin, BaseEstimator):
    """A classifier that this package does not know, with its own predict alone."""

    def fit(self, x, y):
        self.classes_ = np.unique(y)
        return self

    def predict(self, x):
        return self.classes_[np.clip(np.round(x[:, 0] + x[:, 1] ** 2 / 4).astype(int), 0, len(self.classes_) - 1)]


class OwnMargins(ClassifierMixin, BaseEstimator):
    """A classifier with its own decision_function alone."""

    def fit(self, x, y):
        self.classes_ = np.unique(y)
        return self

    def decision_function(self, x):
        values = np.stack([np.abs(x[:, c]) - x[:, c - 1] for c in range(len(self.classes_))], 1)
        return values if len(self.classes_) > 2 else values[:, 1]


class OwnProbabilities(OwnMargins):
    """A classifier with its own predict_proba alone."""

    decision_function = property()  # it has none

    def predict_proba(self, x):
        values = 1 / (1 + np.stack([np.abs(x[:, 0] - c) for c in range(len(self.classes_))], 1))
        return values / values.sum(1, keepdims=True)


TREES = {"random_state": 0}
CLASSIFIERS = {
    "tree": lambda: DecisionTreeClassifier(max_depth=3, **TREES),
    "forest": lambda: RandomForestClassifier(5, **TREES),
    "extra trees": lambda: ExtraTreesClassifier(5, **TREES),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=8, **TREES),
    "histogram boosting": lambda: HistGradientBoostingClassifier(max_iter=8, min_samples_leaf=3, **TREES),
    "AdaBoost": lambda: AdaBoostClassifier(n_estimators=8, **TREES),
    "bag of trees": lambda: BaggingClassifier(n_estimators=8, **TREES),
    "soft vote": lambda: VotingClassifier(
        [("svc", LogisticRegression()), ("forest", RandomForestClassifier(5, **TREES))], voting="soft"
    ),
    "hard vote": lambda: VotingClassifier([("a", LogisticRegression()), ("b", DecisionTreeClassifier(**TREES))]),
    "stack": lambda: StackingClassifier([("forest", RandomForestClassifier(5, **TREES)), ("lr", LogisticRegression())]),
    "weighted neighbours": lambda: KNeighborsClassifier(5, weights="distance"),
    "own": OwnRule,
    "own margins": OwnMargins,
    "own probabilities": OwnProbabilities,
}
VALUES = {
    "forest regressor": lambda: RandomForestRegressor(5, **TREES),
    "extra trees regressor": lambda: ExtraTreesRegressor(5, **TREES),
    "histogram regressor": lambda: HistGradientBoostingRegressor(max_iter=8, min_samples_leaf=3, **TREES),
    "neighbours regressor": lambda: KNeighborsRegressor(3),
    "isolation forest": lambda: IsolationForest(n_estimators=5, **TREES),
}


def network(estimator, labels=None, *before):
    pipeline = make_pipeline(*(before or (StandardScaler(), PCA(3))), estimator).fit(FEATURES, labels)
    return PCASVMNet(BACKBONE, pipeline).eval(), pipeline


def deciding(estimator, rows):
    """The numbers that decide, a column for each class (one for a value): what is explained, minus the others' mean."""
    if isinstance(estimator, IsolationForest):
        return estimator.decision_function(rows)[:, None]
    if not hasattr(estimator, "classes_"):
        return estimator.predict(rows)[:, None]
    if hasattr(estimator, "decision_function"):
        values = estimator.decision_function(rows)
        if values.ndim == 1:
            return np.stack([-values, values], 1)
    elif hasattr(estimator, "predict_proba"):
        values = estimator.predict_proba(rows)
    else:
        values = (estimator.predict(rows)[:, None] == estimator.classes_).astype(float)
    count = values.shape[1]
    return values - (values.sum(1, keepdims=True) - values) / (count - 1)


def shapley(function, p, p0):
    """Shapley values of the numbers of p by their definition: a sum over all coalitions of the others."""
    count = len(p)
    phi = np.zeros((count, function(p[None]).shape[1]))
    for b in range(count):
        others = [other for other in range(count) if other != b]
        for size in range(count):
            share = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            for coalition in combinations(others, size):
                without = p0.copy()
                without[list(coalition)] = p[list(coalition)]
                joined = without.copy()
                joined[b] = p[b]
                phi[b] += share * (function(joined[None]) - function(without[None]))[0]
    return phi


def expected(net, pipeline, layers, mean, k, x=None):
    """sum_b J_b S_b, S_b the contributions to component b from these activations, and J_b = phi_b / (p_b - p0_b)."""
    x = X[:4] if x is None else x
    components = net.components_only
    maps = ContributionCAM(components, layers, baseline=mean).explain(x)
    p, p0 = maps.values.numpy(), maps.baseline_values.numpy()
    rows = []
    for n in range(len(x)):
        phi = shapley(lambda rows: deciding(pipeline, rows), p[n], p0[n])[:, k]
        slopes = np.divide(phi, p[n] - p0[n], out=np.zeros_like(phi), where=p[n] != p0[n])
        rows.append(np.tensordot(slopes, maps.maps[n].numpy(), 1))
    return np.stack(rows)


def with_components(net, pipeline):
    net.components_only = PCASVMNet(BACKBONE, list(pipeline[:-1])).eval()
    return net


def adds_up(maps, tolerance=1e-9):
    remainder = 0 if maps.remainder is None else maps.remainder
    sums = (maps.maps.flatten(2).sum(-1) + remainder) * maps.log_scale.exp() + maps.baseline_values
    return float((sums - maps.values).abs().max()) < tolerance


def test_cancellation_compares_the_size_of_a_map_with_the_effects_of_its_components(tmp_path):
    net, pipeline = network(CLASSIFIERS["forest"](), LABELS[SEVERAL])
    with_components(net, pipeline)
    with torch.no_grad():
        mean = BACKBONE.block(BACKBONE.stem(X)).mean(0, keepdim=True)
    targets = [PCATarget(0), *map(SVMTarget, SEVERAL)]
    maps = ContributionCAM(net, ["block"], baseline=mean).explain(X[:4], targets)
    components = ContributionCAM(net.components_only, ["block"], baseline=mean).explain(X[:4])
    p, p0 = components.values.numpy(), components.baseline_values.numpy()
    effects = [abs(shapley(lambda rows: deciding(pipeline[-1], rows), p[n], p0[n])).sum(0) for n in range(4)]
    np.testing.assert_allclose(maps.effects[:, 1:], effects, atol=1e-9)
    assert not maps.effects[:, 0].any()
    expected_size = maps.maps[:, 1:].abs().sum((2, 3)).numpy()
    sizes = np.divide(expected_size, effects, out=np.zeros((4, 3)), where=np.array(effects) > 0)
    np.testing.assert_allclose(maps.cancellation[:, 1:], sizes, atol=1e-9)
    maps.save(tmp_path / "maps.safetensors")
    again = SignedMaps.load(tmp_path / "maps.safetensors")
    assert again.cancellation.equal(maps.cancellation)
    assert again[1:3, 1].cancellation.equal(maps.cancellation[1:3, 1:2])
    svm, _ = network(SVC(), LABELS[SEVERAL])
    assert ContributionCAM(svm, ["block"], baseline=mean).explain(X[:4]).cancellation is None


def test_evidence_that_cancels_is_warned_of_once():
    net, _ = network(RandomForestClassifier(12, **TREES), LABELS[SEVERAL])
    cam = ContributionCAM(net, ["block"])
    with pytest.warns(CancellationWarning, match=r"on 2 of 8 maps of SVMTarget\(\), colours of both signs cancel"):
        maps = cam.explain(X[:8])
    assert maps.cancellation[:, -1].max() > 10
    with warnings.catch_warnings():
        warnings.simplefilter("error", CancellationWarning)
        cam.explain(X[:8])
        ContributionCAM(net, ["block"]).explain(X[1:6])


@pytest.mark.parametrize("positive", ["ill", "well", None])
@pytest.mark.parametrize("response", ["predict_proba", "decision_function"])
def test_a_moved_threshold_is_where_the_value_is_0(positive, response):
    kind = RandomForestClassifier if response == "predict_proba" else GradientBoostingClassifier
    inside = kind(n_estimators=8, **TREES)
    at = 0.8 if response == "predict_proba" else 0.4
    options = {"threshold": at, "pos_label": positive, "response_method": response}
    net, pipeline = network(FixedThresholdClassifier(inside, **options), LABELS[BINARY])
    assert net.predict(X).tolist() == pipeline.predict(FEATURES).tolist()
    maps = ContributionCAM(net, ["block"]).explain(X, [SVMTarget(), SVMTarget("well")])
    assert adds_up(maps)
    assert float(maps.values[:, 0].min()) >= 0
    rows = pipeline[:-1].transform(FEATURES)
    fitted = pipeline[-1].estimator_
    score = fitted.predict_proba(rows)[:, 1] if response == "predict_proba" else fitted.decision_function(rows)
    at = (1 - at if response == "predict_proba" else -at) if positive == "ill" else at
    np.testing.assert_allclose(maps.values[:, 1], score - at, atol=1e-9)


def test_what_changes_nothing_is_blank_and_not_rounding():
    rows = np.random.default_rng(0).normal(size=(5, 6))
    constant = shapley_values(lambda rows: np.full((len(rows), 1), 0.7), rows, 0 * rows)
    assert not constant.any()
    one = shapley_values(lambda rows: 0.1 + rows[:, :1] ** 3, rows, 0 * rows)
    assert not one[:, 1:].any()
    net, _ = network(DecisionTreeClassifier(max_depth=1, **TREES), LABELS[BINARY])
    with pytest.warns(BlankMapWarning):
        maps = ContributionCAM(net, ["block"]).explain(X[:20], SVMTarget())
    same = maps.values == maps.baseline_values
    assert same.any()
    assert not maps.maps[same].any()


def test_the_path_to_a_forest_is_checked_by_its_components():
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    report = ContributionCAM(net, ["stem"]).check(X[:2])
    assert report.agrees
    assert "agrees with autograd" in str(report)


def test_the_probability_of_the_predicted_class_adds_up():
    net, pipeline = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    maps = ContributionCAM(net, ["block"]).explain(X[:9], [ProbabilityTarget(), *map(ProbabilityTarget, SEVERAL)])
    assert adds_up(maps)
    np.testing.assert_allclose(maps.values[:, 0], pipeline.predict_proba(FEATURES[:9]).max(1), atol=1e-12)
    places = torch.from_numpy(pipeline.predict_proba(FEATURES[:9]).argmax(1)) + 1
    assert len(set(places.tolist())) > 1
    for image, place in enumerate(places.tolist()):
        assert torch.allclose(maps.maps[image, 0], maps.maps[image, place], rtol=0, atol=1e-12)


def test_a_decision_without_a_boundary_near_the_mean_starts_there():
    net, _ = network(HistGradientBoostingClassifier(max_iter=2, **TREES), LABELS[SEVERAL])
    maps = ContributionCAM(net, ["block"]).explain(X[:6])
    assert adds_up(maps)
    never, _ = network(RandomForestClassifier(3, max_depth=1, **TREES), np.where(np.arange(60) < 58, "a", "b"))
    maps = ContributionCAM(never, ["block"]).explain(X[:6], SVMTarget("a"))
    assert adds_up(maps)


def test_recombined_maps_do_not_depend_on_the_other_images():
    pipeline = make_pipeline(TruncatedSVD(3, random_state=0), RandomForestClassifier(5, **TREES))
    net = PCASVMNet(BACKBONE, pipeline.fit(FEATURES, LABELS[SEVERAL])).eval()
    with pytest.warns(BaselineWarning):
        direct = ContributionCAM(net, ["block"], mean=torch.zeros(8).double()).explain(X[:6], SVMTarget("elm"))
    components = ContributionCAM(net, ["block"], mean=torch.zeros(8).double()).explain(X[:6])
    for some in (components, components[:2]):
        maps = recombined(some, pipeline, SVMTarget("elm"))
        assert torch.allclose(maps.maps, direct.maps[: len(some)])


def test_a_head_is_as_it_was_when_it_was_passed():
    net, pipeline = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    before = ContributionCAM(net, ["block"]).explain(X[:3])
    pipeline[-1].estimators_ = pipeline[-1].estimators_[:1]
    after = ContributionCAM(net, ["block"]).explain(X[:3])
    assert after.maps.equal(before.maps)


def test_fingerprints_tell_small_differences_and_no_rounding():
    rows = FEATURES[:, :1] * 1e-4
    heads = [
        Head.of([DecisionTreeRegressor(max_depth=1).fit(rows, rows[:, 0] > at)]) for at in np.quantile(rows, [0.4, 0.6])
    ]
    one, other = (head.enumerated.fingerprint() for head in heads)
    assert one != other
    noisy = RandomForestRegressor(40, n_jobs=2, **TREES).fit(FEATURES, 1e6 * FEATURES[:, 0])
    assert len({Head.of([noisy]).enumerated.fingerprint() for _ in range(5)}) == 1


def quick(kinds, chosen):
    """Kinds of estimators as parameters, of which all but a few are slow."""
    return [kind if kind in chosen else pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(kinds)]


@pytest.mark.parametrize("layer", ["block", pytest.param("stem", marks=pytest.mark.slow)])
@pytest.mark.parametrize("classes", [BINARY, SEVERAL], ids=["2", "3"])
@pytest.mark.parametrize("kind", quick(CLASSIFIERS, {"tree", "forest", "boosting", "hard vote", "own"}))
def test_maps_of_classes_are_component_maps_times_enumerated_slopes(kind, classes, layer):
    net, pipeline = network(CLASSIFIERS[kind](), LABELS[classes])
    with_components(net, pipeline)
    with torch.no_grad():
        mean = BACKBONE.stem(X) if layer == "stem" else BACKBONE.block(BACKBONE.stem(X))
    mean = mean.mean(0, keepdim=True)
    maps = ContributionCAM(net, [layer], baseline=mean).explain(X[:4], [SVMTarget(label) for label in classes])
    decide = deciding(pipeline[-1], pipeline[:-1].transform(FEATURES[:4]))
    np.testing.assert_allclose(maps.values, decide, atol=1e-9)
    for k in range(len(classes)):
        np.testing.assert_allclose(maps.maps[:, k], expected(net, pipeline[-1], [layer], mean, k), atol=1e-8)
    assert adds_up(maps)
    components, last = pipeline[:-1].transform(FEATURES), pipeline[-1]
    alone = not hasattr(last, "predict")
    predicted = last.classes_[deciding(last, components).argmax(1)] if alone else last.predict(components)
    assert net.predict(X).tolist() == predicted.tolist()


@pytest.mark.parametrize("kind", quick(VALUES, {"neighbours regressor", "isolation forest"}))
def test_maps_of_values(kind):
    net, pipeline = network(VALUES[kind](), SCORES[:, 0] + SCORES[:, 1] ** 2)
    with_components(net, pipeline)
    mean = torch.zeros(1, 8, 4, 4, dtype=torch.float64)
    maps = ContributionCAM(net, ["block"], baseline=mean).explain(X[:4], SVMTarget())
    np.testing.assert_allclose(maps.maps[:, 0], expected(net, pipeline[-1], ["block"], mean, 0), atol=1e-8)
    assert adds_up(maps)
    np.testing.assert_allclose(net.predict(X), pipeline.predict(FEATURES), atol=1e-9)


def test_a_linear_head_has_the_maps_of_its_closed_form():
    for estimator, labels in ((LogisticRegression(), LABELS[BINARY]), (Ridge(), SCORES[:, 1])):

        class Unknown(type(estimator)):  # with a predict of its own, which is not read as a linear one
            def predict(self, x):
                return super().predict(x)

        closed, _ = network(estimator, labels)
        own, _ = network(Unknown(), labels)
        assert closed.head.enumerated is None
        assert own.head.enumerated is not None
        one, other = (ContributionCAM(net, ["stem"], baseline="zero").explain(X[:3]) for net in (closed, own))
        assert torch.allclose(one.maps, other.maps, rtol=0, atol=1e-9 * float(one.maps.abs().max()))


@pytest.mark.parametrize("before", [
    (PCA(3), StandardScaler()),
    (FeatureUnion([("a", PCA(2)), ("b", PCA(1, svd_solver="full"))]),),
    (StandardScaler(), PCA(2), PolynomialFeatures()),
    (StandardScaler(), PCA(3), QuantileTransformer(n_quantiles=10)),
], ids=["scaler behind", "union", "polynomials", "quantiles"])  # fmt: skip
def test_steps_around_the_reduction(before):
    net, pipeline = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL], *before)
    assert net.predict(X).tolist() == pipeline.predict(FEATURES).tolist()
    maps = ContributionCAM(net, ["block"]).explain(X[:3])
    assert adds_up(maps)
    count = net.head.enumerated.n_inputs
    assert f"{2**count} coalitions of its {count} inputs" in repr(net.head)
    decision = net.head.enumerated.predictor
    p = net(X[:1]).head_trace.values[-2][0].detach().numpy()
    phi = shapley(decision, p, 0 * p)
    np.testing.assert_allclose(shapley_values(decision, p[None], 0 * p[None])[0], phi, atol=1e-12)


@pytest.mark.parametrize("encode", ["onehot", "onehot-dense"])
@pytest.mark.parametrize(
    "classifier", [RandomForestClassifier(5, **TREES), LogisticRegression(), KNeighborsClassifier(3)]
)
def test_steps_that_give_sparse_rows(encode, classifier):
    bins = KBinsDiscretizer(4, encode=encode, strategy="uniform")
    net, pipeline = network(classifier, LABELS[SEVERAL], PCA(3), bins)
    assert net.predict(X).tolist() == pipeline.predict(FEATURES).tolist()
    maps = ContributionCAM(net, ["block"], baseline="mean").explain(X[:3], ProbabilityTarget("elm"))
    np.testing.assert_allclose(maps.values[:, 0], pipeline.predict_proba(FEATURES[:3])[:, 1], atol=1e-12)
    assert adds_up(maps)
    p = pipeline[:1].transform(FEATURES)

    def probabilities(rows):
        return pipeline[2].predict_proba(pipeline[1].transform(rows))

    phi = shapley(probabilities, p[0], np.zeros(3))[:, 1]
    components = ContributionCAM(PCASVMNet(BACKBONE, PCA(3).fit(FEATURES)).eval(), ["block"], baseline="mean")
    expected = np.tensordot(phi / p[0], components.explain(X[:1]).maps[0].numpy(), 1)
    np.testing.assert_allclose(maps.maps[0, 0], expected, atol=1e-8)


def test_a_step_before_a_reduction_is_refused_as_ever():
    with pytest.raises(NoClosedFormError, match="QuantileTransformer has no closed-form"):
        network(SVC(), LABELS[BINARY], QuantileTransformer(n_quantiles=10), PCA(3))


def test_probabilities_have_secants_of_their_own():
    net, pipeline = network(GradientBoostingClassifier(n_estimators=8, **TREES), LABELS[SEVERAL])
    with_components(net, pipeline)
    maps = ContributionCAM(net, ["block"], baseline="mean").explain(X[:3], [ProbabilityTarget("elm"), SVMTarget("elm")])
    np.testing.assert_allclose(maps.values[:, 0], pipeline.predict_proba(FEATURES[:3])[:, 1], atol=1e-9)
    assert adds_up(maps)
    p = net.components_only(X[:1]).components.detach().numpy()
    phi = shapley(pipeline[-1].predict_proba, p[0], np.zeros(3))[:, 1]
    components = ContributionCAM(net.components_only, ["block"], baseline="mean").explain(X[:1])
    np.testing.assert_allclose(maps.maps[0, 0], np.tensordot(phi / p[0], components.maps[0].numpy(), 1), atol=1e-8)


@pytest.mark.parametrize("layer", ["block", "stem"])
@pytest.mark.parametrize("kind", quick(["forest", "histogram boosting", "AdaBoost", "hard vote"], {"forest"}))
def test_a_neutral_start_is_where_the_value_is_about_0(kind, layer):
    net, _ = network(CLASSIFIERS[kind](), LABELS[BINARY])
    with torch.no_grad():
        mean = (BACKBONE.stem(X) if layer == "stem" else BACKBONE.block(BACKBONE.stem(X))).mean(0)
    cam = ContributionCAM(net, [layer], mean=mean)
    maps = cam.explain(X[:5], SVMTarget("well"))
    assert adds_up(maps)
    start = maps.baseline_values
    assert torch.allclose(start, start[:1])  # the same for all images
    at_mean = ContributionCAM(net, [layer], baseline="mean", mean=mean).explain(X[:5], SVMTarget("well"))
    assert float(start[0].abs()) <= float(at_mean.baseline_values[0].abs())
    again = ContributionCAM(net, [layer], mean=mean + 1e-7 * torch.randn_like(mean)).explain(X[:5], SVMTarget("well"))
    assert torch.allclose(start, again.baseline_values, atol=1e-6)


def test_where_nothing_is_known_maps_start_at_the_mean_with_a_warning():
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[BINARY], KernelPCA(3, kernel="rbf"))
    with pytest.warns(BaselineWarning, match="RandomForestClassifier has no gradient"):
        maps = ContributionCAM(net, ["block"], mean=torch.zeros(8)).explain(X[:2], SVMTarget())
    assert adds_up(maps)


def test_decisions_in_tiny_units_have_the_maps_of_others():
    """Behind a kernel, gradients this small have a factor of their own."""
    target, units = SCORES[:, 0] * SCORES[:, 1], (1.0, 2.0**-60)
    heads = [
        make_pipeline(
            KernelPCA(3, kernel="rbf", gamma=0.3, eigen_solver="dense"),
            GradientBoostingRegressor(n_estimators=1, learning_rate=unit, init="zero", random_state=0),
        ).fit(FEATURES, target)
        for unit in units
    ]
    usual, tiny = (
        ContributionCAM(PCASVMNet(BACKBONE, head), ["block"], baseline="zero").explain(X[:8], SVMTarget())
        for head in heads
    )
    assert float(tiny.log_scale.min()) < -30
    assert usual.log_scale.eq(0).all()
    scale = tiny.log_scale.exp() / units[1]
    assert relative((tiny.maps.sum((2, 3)) + tiny.remainder) * scale, usual.values - usual.baseline_values) < 1e-12
    assert relative(tiny.maps * scale[..., None, None], usual.maps) < 1e-10


def test_several_layers_and_heads_of_many_inputs():
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    maps = ContributionCAM(net, ["stem", "block"], baseline="zero").explain(X[:3])
    assert adds_up(maps)
    assert maps.standard_errors is None  # of all coalitions
    wide = PCASVMNet(BACKBONE, RandomForestClassifier(5, **TREES).fit(np.repeat(FEATURES, 2, 1), LABELS[SEVERAL]),
                     pool=lambda t: t.repeat_interleave(2, 1)).eval()  # fmt: skip
    assert "sampled permutations of its 16 inputs" in repr(wide.head)
    cam = ContributionCAM(wide, ["block"], baseline="zero")
    one, other = cam.explain(X[:3], SVMTarget("elm")), cam.explain(X[1:3], SVMTarget("elm"))
    assert adds_up(one)
    assert one.standard_errors.shape == one.maps.shape
    assert torch.allclose(one.maps[1:], other.maps)  # whatever else is in the batch
    # The pairs of equal inputs are those of the head behind 8 of them, exactly.
    plain = ContributionCAM(wide, ["block"], baseline="zero", samples=2048, seed=1).explain(X[:3], SVMTarget("elm"))
    error = (one.maps - plain.maps).abs()
    assert float((error > 6 * one.standard_errors + 1e-3 * plain.maps.abs().max()).double().mean()) < 0.02
    assert LIFTCAM(wide, ["block"]).explain(X[:2], SVMTarget("elm")).standard_errors.shape == (2, 1, 4, 4)


def test_recombined_maps_of_many_components_are_those_of_the_network():
    labels = LABELS[SEVERAL]
    reduction = FeatureUnion([("pca", PCA(8)), ("other", PCA(5))]).fit(FEATURES)
    forest = RandomForestClassifier(5, **TREES).fit(reduction.transform(FEATURES), labels)
    net = PCASVMNet(BACKBONE, [reduction, forest]).eval()
    cam = ContributionCAM(net, ["block"], baseline="mean", mean=torch.from_numpy(FEATURES.mean(0)))
    targets = [SVMTarget(label) for label in SEVERAL]
    direct = cam.explain(X[:3], targets)
    made = recombined(cam.explain(X[:3], [PCATarget(b) for b in range(13)]), net.head, targets)
    for name in ("maps", "values", "baseline_values", "standard_errors", "effects"):
        assert torch.allclose(getattr(made, name), getattr(direct, name), atol=1e-8), name
    assert bool((made.standard_errors > 0).any())
    assert adds_up(made)


def test_many_decisions_at_once_tell_their_cancellation():
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    cam = ContributionCAM(net, ["block"])
    targets = [SVMTarget(one, versus=other) for one in SEVERAL for other in SEVERAL if one != other]
    together = cam.explain(X[:3], targets)  # more than components: they are sums of these
    alone = cam.explain(X[:3], targets[:2])
    assert torch.allclose(together.cancellation[:, :2], alone.cancellation)


def test_other_methods_that_need_values_alone():
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[BINARY])
    mean = torch.zeros(8, dtype=torch.float64)
    for method in (LIFTCAM, RelevanceCAM, ShapCAM, ClosedFormAblationCAM, ClosedFormScoreCAM):
        options = {"samples": 8} if method is ShapCAM else {}
        maps = method(net, ["block"], **options).explain(X[:2], [SVMTarget("well"), PCATarget(0)])
        assert bool(maps.maps.isfinite().all())
        assert bool(maps.maps[:, 0].any()), method
    assert ContributionCAM(net, ["block"], mean=mean)(X[:2]).shape == (2, 8, 8)


@pytest.mark.parametrize("method", [ClosedFormGradCAM, ClosedFormLayerCAM])
def test_gradient_methods_refuse_decisions_and_explain_components(method):
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[BINARY])
    with pytest.raises(NoClosedFormError, match=r"RandomForestClassifier has no closed-form .*ContributionCAM"):
        method(net, ["block"]).explain(X[:2])
    assert bool(method(net, ["block"]).explain(X[:2], PCATarget(0)).maps.any())
    with pytest.raises(NoClosedFormError, match="its gradient 0"):
        net(X[:1].requires_grad_()).sum().backward()
    X.requires_grad_(False)


def test_a_component_that_differs_by_rounding_alone_is_no_colour():
    """A jump between two numbers that are the same but for rounding would be a slope without end."""

    class Sign(RandomForestRegressor):
        def predict(self, x):
            return np.sign(x[:, 0] - 1e-15) + x[:, 1]

    net, _ = network(Sign(2), SCORES[:, 0], PCA(2))
    p = net(X[:1]).components[0]
    start = X[:1].clone()
    cam = ContributionCAM(net, ["block"], baseline=BACKBONE.block(BACKBONE.stem(start)).detach() * (1 + 1e-16))
    assert adds_up(cam.explain(X[:1], SVMTarget()))
    assert p.isfinite().all()


def test_heads_fitted_later_on_the_same_components():
    pca = PCA(3).fit(FEATURES)
    first = PCASVMNet(BACKBONE, [pca, SVC().fit(pca.transform(FEATURES), LABELS[BINARY])]).eval()
    forest = RandomForestClassifier(5, **TREES).fit(pca.transform(FEATURES), LABELS[SEVERAL])
    components = ContributionCAM(first, ["block"]).explain(X[:4], [PCATarget(b) for b in range(3)])
    later = PCASVMNet(BACKBONE, [pca, forest]).eval()
    direct = ContributionCAM(later, ["block"]).explain(X[:4], [SVMTarget(), SVMTarget("elm")])
    made = recombined(components, [pca, forest], [SVMTarget(), SVMTarget("elm")])
    assert adds_up(made)
    assert torch.allclose(made.values, direct.values)
    assert torch.allclose(made.baseline_values, direct.baseline_values)
    assert torch.allclose(made.maps, direct.maps, atol=1e-8)


def test_an_atlas_explains_from_its_components(tmp_path):
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    store = atlas.build(net, [(x, 0) for x in X[:6]], ["block"], tmp_path / "atlas", progress=False)
    targets = [SVMTarget(), SVMTarget("elm")]
    direct, kept = ContributionCAM(net, ["block"]).explain(X[:6], targets), store.explain(range(6), targets)
    for name in ("values", "baseline_values", "maps"):
        one, other = getattr(direct, name), getattr(kept, name)
        assert torch.allclose(one, other.to(one), rtol=0, atol=1e-3 * float(one.abs().max())), name  # kept in float16
    reason = machine_data(Head(list(net.head.stages)[2:]), SCORES)["reason"]
    assert "RandomForestClassifier needs Python" in reason


def test_copies_and_pickles():
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    cam = ContributionCAM(net, ["block"])
    maps = cam.explain(X[:2])
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(ContributionCAM(other, ["block"]).explain(X[:2]).maps, maps.maps)
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    other, _ = network(RandomForestClassifier(8, random_state=1), LABELS[SEVERAL])
    with pytest.raises((ValueError, RuntimeError), match="another kernel, calibration or other classes"):
        net.load_state_dict(other.state_dict())


@pytest.mark.parametrize("kind", quick({*CLASSIFIERS, *VALUES}, {"tree", "boosting", "own margins"}))
def test_files(kind, tmp_path):
    pytest.importorskip("skops")
    of_classes = kind in CLASSIFIERS
    estimator = (CLASSIFIERS if of_classes else VALUES)[kind]()
    net, _ = network(estimator, LABELS[SEVERAL] if of_classes else SCORES[:, 0])
    net.head.save(tmp_path / "head.safetensors")
    own = f"{type(estimator).__module__}.{type(estimator).__name__}"
    trusted = [own] if kind.startswith("own") else []
    other = PCASVMNet(BACKBONE, Head.load(tmp_path / "head.safetensors", trusted)).eval()
    assert torch.equal(other(X).as_subclass(torch.Tensor), net(X).as_subclass(torch.Tensor))
    assert other.head.digest() == net.head.digest()
    targets = [SVMTarget(), PCATarget(0)]
    one, two = (ContributionCAM(each, ["block"]).explain(X[:2], targets).maps for each in (net, other))
    assert torch.equal(one, two)


def test_files_of_types_that_are_not_known_are_refused(tmp_path):
    pytest.importorskip("skops")
    net, _ = network(OwnRule(), LABELS[BINARY])
    net.head.save(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="OwnRule, which are not read from files"):
        Head.load(tmp_path / "head.safetensors")


def test_programs_refuse_it_by_name():
    net, _ = network(RandomForestClassifier(5, **TREES), LABELS[BINARY])
    with pytest.raises(Exception, match="RandomForestClassifier runs outside of PyTorch"):
        torch.export.export(net, (X[:2],), strict=False)


def test_a_forest_that_was_fitted_again_is_told():
    net, pipeline = network(RandomForestClassifier(5, **TREES), LABELS[SEVERAL])
    pipeline.fit(FEATURES, LABELS[SEVERAL])
    with pytest.warns(UserWarning, match="was fitted again"):
        net(X[:1])


def test_labels_that_are_no_quantities_are_refused():
    class Plain:
        n_features_in_ = 3

        def predict(self, x):
            return np.array(["a", "b"])[(x[:, 0] > 0).astype(int)]

    pca = PCA(3).fit(FEATURES)
    with pytest.raises(NoClosedFormError, match="Plain predicts labels, but has no classes_"):
        PCASVMNet(BACKBONE, [pca, Plain()])
    Plain.classes_ = np.array(["a", "b"])
    assert set(PCASVMNet(BACKBONE, [pca, Plain()]).eval().predict(X)) == {"a", "b"}


def test_values_alone_are_enough_and_tell_how_many_classes_there_are():
    class Values:
        n_features_in_ = 3

        def __init__(self, values):
            self.decision_function = values

    class Probabilities(Values):
        def __init__(self, values):
            self.predict_proba = lambda rows: np.exp(values(rows)) / np.exp(values(rows)).sum(1, keepdims=True)

    class Predicted(Probabilities):
        predict = property(lambda self: lambda rows: self.predict_proba(rows).argmax(1))

    def of_three(rows):
        return np.stack([rows[:, 0], np.sign(rows[:, 1]), np.abs(rows[:, 2])], 1)

    pca = PCA(3).fit(FEATURES)
    rows = torch.from_numpy(pca.transform(FEATURES))
    for kind in (Values, Probabilities, Predicted):
        head = Head.of([pca, kind(of_three)])
        assert list(head.classes_) == [0, 1, 2]
        assert (
            head(torch.from_numpy(FEATURES)).values[-1][:, -3:].argmax(1).tolist()
            == of_three(rows.numpy()).argmax(1).tolist()
        )
    net = PCASVMNet(BACKBONE, [pca, Values(lambda rows: np.sign(rows[:, 0]) + rows[:, 1])]).eval()
    maps = ContributionCAM(net, ["block"]).explain(X[:3], SVMTarget())
    assert torch.allclose(maps.values[:, 0], torch.sign(rows[:3, 0]) + rows[:3, 1])
    assert adds_up(maps)


def test_estimators_of_ones_own_decide_by_their_decision_function():
    class Own:
        n_features_in_ = 3

        def __init__(self, values, labels=None):
            self.decision_function = values
            if labels is not None:
                self.predict = lambda rows: labels[(values(rows) > 0).astype(int)]

    def one(rows):
        return np.sign(rows[:, 0]) + rows[:, 1]

    pca = PCA(3).fit(FEATURES)
    rows = pca.transform(FEATURES)
    two = Head.of([pca, Own(lambda rows: np.stack([0 * one(rows), one(rows)], 1))])
    np.testing.assert_allclose(two.voting.margins(two(torch.from_numpy(FEATURES)).values[-1])[:, 1], one(rows))
    assert list(Head.of([pca, Own(one, np.array([0, 1]))]).classes_) == [0, 1]
    for labels in (np.array([-1, 1]), np.array([-1.0, 1.0])):
        head = Head.of([pca, Own(one, labels)])
        assert head.classes_ is None
        np.testing.assert_allclose(head(torch.from_numpy(FEATURES)).values[-1][:, 0], one(rows))
    with pytest.raises(NoClosedFormError, match="Own has no classes_, and predicts another class"):
        Head.of([pca, Own(one, np.array([2, 5]))])


def test_a_start_is_elsewhere_if_both_sides_of_the_nearest_jumps_are_far_from_0():
    pca = PCA(3, whiten=True).fit(FEATURES)

    class Jumps:
        """Confident on both sides of the mean, and in doubt further on."""

        n_features_in_ = 3

        @staticmethod
        def decision_function(rows):
            near = np.where(rows[:, 0] > 0.05, 10.0, -10.0)
            return np.where(rows[:, 1] > 0.7, 0.1 * np.sign(rows[:, 0]), near)

    net = PCASVMNet(BACKBONE, [pca, Jumps()]).eval()
    maps = ContributionCAM(net, ["block"], mean=torch.zeros(8)).explain(X[:3], SVMTarget())
    assert bool((maps.baseline_values.abs() <= 0.1 + 1e-9).all())
    assert adds_up(maps)


def test_hard_votes_have_no_runner_up():
    net, _ = network(OwnRule(), LABELS[SEVERAL])
    with pytest.raises(ValueError, match="hard votes do not tell which class came second"):
        ContributionCAM(net, ["block"]).explain(X[:2], SVMTarget(versus="runner-up"))
    assert adds_up(ContributionCAM(net, ["block"]).explain(X[:2], SVMTarget(versus="others")))


def test_labels_of_numpy_can_be_compared():
    net, _ = network(RandomForestClassifier(5, **TREES), (SCORES[:, 0] > 0).astype(np.int64))
    first, second = net.head.classes_
    maps = ContributionCAM(net, ["block"]).explain(X[:2], [SVMTarget(first, versus=second), SVMTarget(0)])
    assert torch.allclose(maps.maps[:, 0], maps.maps[:, 1])


def test_component_maps_from_a_file_know_no_reduction(tmp_path):
    pca = PCA(3).fit(FEATURES)
    forest = RandomForestClassifier(5, **TREES).fit(pca.transform(FEATURES), LABELS[SEVERAL])
    components = ContributionCAM(PCASVMNet(BACKBONE, pca).eval(), ["block"]).explain(X[:4])
    components.save(tmp_path / "maps.safetensors")
    loaded = SignedMaps.load(tmp_path / "maps.safetensors")
    with pytest.warns(BaselineWarning, match="the reduction that the components came from is not known"):
        recombined(loaded, forest, SVMTarget("elm"))
    whole = recombined(loaded, [pca, forest], SVMTarget("elm"))
    assert torch.allclose(whole.maps, recombined(components, forest, SVMTarget("elm")).maps)


def test_a_value_that_does_not_decide_is_refused():
    class Outliers:
        """As PyOD's detectors, whose decision_function is larger for what is outside, with another threshold than 0."""

        n_features_in_ = 3
        decision_function = staticmethod(lambda rows: np.abs(rows).sum(1))
        predict = staticmethod(lambda rows: (np.abs(rows).sum(1) > 9).astype(int))
        predict_proba = staticmethod(lambda rows: np.full((len(rows), 2), 0.5))

    with pytest.raises(NoClosedFormError, match="Outliers has no classes_, and predicts another class than"):
        PCASVMNet(BACKBONE, [PCA(3).fit(FEATURES), Outliers()])


@pytest.mark.optional
def test_warnings_of_names_are_not_given():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(PCA(3).fit_transform(FEATURES), columns=["a", "b", "c"])
    forest = RandomForestClassifier(4, **TREES).fit(table, LABELS[BINARY])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PCASVMNet(BACKBONE, [PCA(3).fit(FEATURES), forest]).eval().predict(X)
