"""Heads that divide rows by their length behind a PCA: the training mean is a pole, at which rounding decides."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.base import clone
from sklearn.decomposition import PCA, KernelPCA, TruncatedSVD
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler, normalize
from sklearn.svm import SVC, SVR, LinearSVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.starts.poles import find_pole

LABELS = np.arange(45) % 3
CLASSIFIERS = {
    "PCA, l2, SVC": [StandardScaler(), PCA(4), Normalizer(), SVC()],
    "PCA, l1, SVC": [PCA(4), Normalizer("l1"), SVC(kernel="poly")],
    "PCA, max, linear": [StandardScaler(), PCA(4), Normalizer("max"), LinearSVC()],
    "whitened, l2": [PCA(4, whiten=True), Normalizer(), LogisticRegression()],
    "l2, whitened, l2": [Normalizer(), PCA(4, whiten=True), Normalizer(), SVC()],
    "scaler, l2": [StandardScaler(), Normalizer(), SVC()],
    "forest": [PCA(4), Normalizer(), RandomForestClassifier(8, random_state=0)],
    "PCA, l2, PCA": [PCA(4), Normalizer(), PCA(2), LogisticRegression()],
    "PCA, l2, whitened PCA, SVC": [StandardScaler(), PCA(6), Normalizer(), PCA(3, whiten=True), SVC()],
    "PCA, l2, PCA, forest": [PCA(4), Normalizer(), PCA(2), RandomForestClassifier(8, random_state=0)],
}
CONTROLS = {"l2, PCA": [Normalizer(), PCA(4), SVC()], "PCA": [StandardScaler(), PCA(4), SVC()]}
WITHOUT_BOUNDARY = {
    "SVR": ([PCA(4), Normalizer(), SVR()], SVMTarget()),
    "forest": ([PCA(4), Normalizer(), RandomForestRegressor(8, random_state=0)], SVMTarget()),
    "nearest": ([PCA(4), Normalizer(), NearestNeighbors(n_neighbors=1)], SVMTarget(sign="-")),
    "cosines": ([PCA(4), NearestNeighbors(n_neighbors=1, metric="cosine")], SVMTarget(sign="-")),
}


def images(dtype=torch.float64):
    x = 0.3 * torch.rand(45, 3, 24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for number, label in enumerate(LABELS):
        x[number, label, 7 * label : 7 * label + 7, 4:12] += 0.6
    return x.to(dtype)


def backbone(dtype=torch.float64, *behind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 9, 5, 2), nn.ReLU(), nn.Conv2d(9, 12, 3, 2), nn.ReLU(), *behind)
    return net.to(dtype).eval()


def pooled(stages, dtype=torch.float64, labels=LABELS):
    net, x = backbone(dtype, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images(dtype)
    features, _ = extract_features(net, [x], progress=False)
    head = make_pipeline(*map(clone, stages)).fit(features, labels)
    return PCASVMNet(net, head).eval(), head, features, x


def gap(maps):
    sums = maps.maps.double().sum((2, 3)) * maps.log_scale.double().exp()
    return float((sums + maps.baseline_values - maps.values).abs().max() / maps.values.abs().max())


@pytest.mark.parametrize("layer", ["3", "1"])
@pytest.mark.parametrize("name", [*CLASSIFIERS, *CONTROLS])
def test_maps_of_decisions_add_up_from_where_they_are_undecided(name, layer):
    net, head, features, x = pooled((CLASSIFIERS | CONTROLS)[name])
    cam = ContributionCAM(net, [layer], mean=mean_activations(net, [x], layer, progress=False))
    maps = cam.explain(x[:6], [SVMTarget(2), SVMTarget(0, versus=1)])
    assert gap(maps) < 1e-10
    if hasattr(head, "decision_function"):
        own = np.asarray(net(x[:6]).detach())
        np.testing.assert_allclose(own.squeeze(), head.decision_function(features[:6]), rtol=1e-9, atol=1e-12)
    if "forest" not in name:  # which jumps over 0
        assert float(maps.baseline_values.abs().max()) < 1e-6 * float(maps.values.abs().max())
    assert float(maps.maps.abs().max()) < 20 * float(maps.values.abs().max())  # near a pole, it is 1e8
    report = cam.check(x[:3], SVMTarget(2) if name.count("PCA") > 1 and "forest" not in name else None)
    assert report.agrees, str(report)


@pytest.mark.parametrize("name", ["PCA, l2, SVC", "PCA, l2, PCA", "scaler, l2"])
def test_features_that_keep_positions_apart_start_where_decisions_are_undecided(name):
    net, x = backbone(torch.float64, nn.Flatten()), images()
    features, _ = extract_features(net, [x], progress=False)
    head = make_pipeline(*map(clone, CLASSIFIERS[name])).fit(features, LABELS)
    cam = ContributionCAM(PCASVMNet(net, head).eval(), ["3"], mean=mean_activations(net, [x], "3", progress=False))
    maps = cam.explain(x[:6], [SVMTarget(2), SVMTarget(0, versus=1)])
    assert gap(maps) < 1e-10
    assert float(maps.baseline_values.abs().max()) < 1e-6 * float(maps.values.abs().max())
    assert float(maps.maps.abs().max()) < 20 * float(maps.values.abs().max())


@pytest.mark.parametrize("pool", ["mean", None])
def test_a_decision_by_the_sign_of_one_component_has_no_start_at_its_jump(pool):
    """A row of one number, divided by its length, is 1 or -1: there is no boundary but the pole."""
    net = backbone(torch.float64, *([nn.AdaptiveAvgPool2d(1)] if pool else []), nn.Flatten())
    x, labels = images(), LABELS > 0
    features, _ = extract_features(net, [x], progress=False)
    head = make_pipeline(PCA(1), Normalizer(), SVC()).fit(features, labels)
    net = PCASVMNet(net, head).eval()
    mean = mean_activations(net, [x], "3", progress=False)
    for baseline in ("neutral", "mean"):
        with pytest.raises(ValueError, match=r"the training mean.*baseline='zero'"):
            ContributionCAM(net, ["3"], baseline=baseline, mean=mean).explain(x[:6], SVMTarget(True))
    maps = ContributionCAM(net, ["3"], baseline="zero").explain(x[:6], SVMTarget(True))
    assert gap(maps) < 1e-10
    at_zero = head.decision_function(np.zeros((1, features.shape[1])))
    np.testing.assert_allclose(maps.baseline_values[:, 0], np.broadcast_to(at_zero, 6), rtol=1e-9)


@pytest.mark.parametrize("name", ["PCA, l2, SVC", "PCA, max, linear"])
def test_in_single_precision_too(name):
    net, _, _, x = pooled(CLASSIFIERS[name], torch.float32)
    assert gap(ContributionCAM(net, ["3"]).explain(x[:6], [SVMTarget(label) for label in range(3)])) < 2e-6


def test_zeros_of_components_that_are_a_pole_are_no_start():
    """Components of a TruncatedSVD are all 0 near features of 0, whose size tells nothing of training images."""
    net, _, _, x = pooled([TruncatedSVD(4), Normalizer(), SVC()], torch.float32)
    cam = ContributionCAM(net, ["3"], mean=mean_activations(net, [x], "3", progress=False))
    maps = cam.explain(x[:6], [SVMTarget(label) for label in range(3)])
    assert gap(maps) < 1e-5
    assert float(maps.maps.abs().max()) < 20 * float(maps.values.abs().max())


@pytest.mark.parametrize("stage", [KernelPCA(3, kernel="cosine"), FunctionTransformer(normalize)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_pole_inside_of_a_decision_by_its_values_is_no_start_either(stage, dtype):
    net, head, features, x = pooled([PCA(4), stage, SVC()], dtype)
    with pytest.raises(ValueError, match=r"at the training mean, rounding decides what .* returns.*baseline='zero'"):
        ContributionCAM(net, ["3"], baseline="mean").explain(x[:6], SVMTarget(1, versus=0))
    own = head.decision_function(np.concatenate([features[:6], np.zeros_like(features[:1])]))
    for baseline in ("neutral", "zero"):
        maps = ContributionCAM(net, ["3"], baseline=baseline).explain(x[:6], SVMTarget(1, versus=0))
        np.testing.assert_allclose(maps.values[:, 0], own[:6, 1] - own[:6, 0], rtol=1e-5)
        assert gap(maps) < 1e-5
        assert float(maps.maps.abs().max()) < 20 * float(maps.values.abs().max())
    np.testing.assert_allclose(maps.baseline_values[:, 0], np.full(6, own[6, 1] - own[6, 0]), rtol=1e-5)


def test_sums_are_held_against_the_values_from_the_start_that_is_used(monkeypatch):
    net, _, _, x = pooled(CLASSIFIERS["PCA, l2, SVC"])
    cam = ContributionCAM(net, ["3"])
    right = cam.check(x[:3], SVMTarget(1))
    assert [row.what for row in right.comparisons] == ["gradient", "sum of contributions", "sums from the start"]
    explain = ContributionCAM.explain

    def wrong(self, *args, **kwargs):
        maps = explain(self, *args, **kwargs)
        return replace(maps, maps=1.01 * maps.maps)

    monkeypatch.setattr(ContributionCAM, "explain", wrong)
    assert [row.agrees for row in cam.check(x[:3], SVMTarget(1)).comparisons] == [True, True, False]


@pytest.mark.parametrize("name", ["PCA, l2, SVC", "PCA, l1, SVC", "scaler, l2", "forest"])
def test_the_mean_itself_is_refused_with_ways_out(name):
    net, _, _, x = pooled(CLASSIFIERS[name])
    with pytest.raises(ValueError, match=r"at the training mean of '3', rounding decides what .* returns") as refused:
        ContributionCAM(net, ["3"], baseline="mean").explain(x[:3], SVMTarget(1))
    assert "baseline='neutral'" in str(refused.value)
    ways = {"baseline='neutral'": {}, "baseline='zero'": {"baseline": "zero"}, "baseline=image": {"baseline": x[0]}}
    for way, options in ways.items():
        assert way in str(refused.value)
        assert gap(ContributionCAM(net, ["3"], **options).explain(x[1:4], SVMTarget(1))) < 1e-10
    assert "ClosedFormGradCAM" in str(refused.value)
    if "forest" not in name:
        assert ClosedFormGradCAM(net, ["3"]).explain(x[:3], SVMTarget(1)).maps.any()
    if name.count("PCA") == 1:  # for whose components no row is divided
        assert gap(ContributionCAM(net, ["3"], baseline="mean").explain(x[:3], PCATarget(0))) < 1e-10


UNION = [StandardScaler(), make_union(PCA(2), make_pipeline(PCA(4), Normalizer())), SVC()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("stages", [CLASSIFIERS["PCA, l2, PCA"], UNION], ids=["PCA, l2, PCA", "a branch of a union"])
def test_components_behind_a_pole_start_where_each_is_0(stages, dtype):
    net, head, features, x = pooled(stages, dtype)
    own = head[:-1].transform(features)
    targets = [PCATarget(component) for component in range(own.shape[1])]
    maps = ContributionCAM(net, ["3"]).explain(x[:3], targets)
    exact = 1e-10 if dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(maps.values, own[:3], rtol=1e-9 if dtype == torch.float64 else 1e-3, atol=exact)
    np.testing.assert_allclose(maps.maps.double().sum((2, 3)), own[:3], rtol=0, atol=exact * np.abs(own).max())
    assert float(maps.baseline_values.abs().max()) < exact * np.abs(own).max()


def test_components_behind_a_pole_are_refused_there_and_others_not():
    net, head, features, x = pooled(CLASSIFIERS["PCA, l2, PCA"])
    with pytest.raises(ValueError, match=r"at the training mean of '3', rounding decides what .*baseline='zero'"):
        ContributionCAM(net, ["3"], baseline="mean").explain(x[:3], PCATarget(0))
    maps = ContributionCAM(net, ["3"], baseline="zero").explain(x[:3], PCATarget(0))
    own = head[:-1].transform(np.concatenate([features[:3], np.zeros_like(features[:1])]))[:, 0]
    np.testing.assert_allclose(maps.maps.sum((1, 2, 3)), own[:3] - own[3], rtol=1e-8)
    for baseline in ("neutral", "mean"):
        net, *_ = pooled(CLASSIFIERS["l2, whitened, l2"])  # whose pole is behind the components
        mean = mean_activations(net, [x], "3", progress=False)
        assert gap(ContributionCAM(net, ["3"], baseline=baseline, mean=mean).explain(x[:3], PCATarget(0))) < 1e-10


def test_a_union_on_a_pole_is_refused_by_its_name():
    net, _, _, x = pooled([make_union(StandardScaler(), make_pipeline(StandardScaler(), Normalizer())), PCA(4), SVC()])
    mean = mean_activations(net, [x], "3", progress=False)
    with pytest.raises(ValueError, match=r"rounding decides what Union of the head returns") as refused:
        ContributionCAM(net, ["3"], mean=mean).explain(x[:3], [PCATarget(0)])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", WITHOUT_BOUNDARY)
def test_without_a_boundary_the_mean_is_refused_as_well(name):
    stages, target = WITHOUT_BOUNDARY[name]
    net, _, _, x = pooled(stages, labels=LABELS + 0.5)
    with pytest.raises(ValueError, match=r"at the training mean.*, rounding decides what") as refused:
        ContributionCAM(net, ["3"]).explain(x[:3], target)
    assert "baseline='neutral'" not in str(refused.value)
    assert "baseline='zero'" in str(refused.value)
    assert gap(ContributionCAM(net, ["3"], baseline="zero").explain(x[1:] * 0.9, target)) < 1e-10
    assert gap(ContributionCAM(net, ["3"], baseline=x[0] / 2).explain(x[1:] * 0.9, target)) < 1e-10


def test_dense_heads_name_the_same_cause():
    net, x = backbone(), images()
    rows, _ = extract_features(net, [x], "3", pool="dense", progress=False)
    head = make_pipeline(StandardScaler(), PCA(6), Normalizer(), NearestNeighbors(n_neighbors=1)).fit(rows[::5])
    dense = PCASVMNet(net, head, "3", pool="dense").eval()
    with pytest.raises(ValueError, match=r"at the training mean of '3', rounding decides what Normalise\(\)"):
        ContributionCAM(dense, ["3"]).explain(x[:2], SVMTarget(sign="-", at="max"))
    svm = make_pipeline(StandardScaler(), PCA(6), Normalizer(), SVC()).fit(rows[::5], rows[::5, 0] > rows[:, 0].mean())
    maps = ContributionCAM(PCASVMNet(net, svm, "3", pool="dense").eval(), ["3"]).explain(
        x[:2], SVMTarget(True, at="max")
    )
    assert gap(maps) < 1e-10


def test_zeros_that_are_exact_have_a_value():
    net, x = backbone(torch.float64, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images()
    features, _ = extract_features(net, [x], progress=False)
    head = make_pipeline(Normalizer(), SVC()).fit(features, LABELS)
    maps = ContributionCAM(PCASVMNet(net, head).eval(), ["3"], baseline="zero").explain(x[:3], SVMTarget(1))
    np.testing.assert_allclose(maps.baseline_values[0, 0], head[1].decision_function(np.zeros((1, 12)))[0, 1], atol=1)
    assert gap(maps) < 1e-10


@pytest.mark.parametrize("gamma", [1, 10, 100])
def test_a_kernel_that_is_0_everywhere_near_is_no_pole(gamma):
    net, _, _, x = pooled([StandardScaler(), SVC(gamma=gamma, C=10)])
    assert gap(ContributionCAM(net, ["3"], baseline="mean").explain(x[:3], SVMTarget(1))) < 1e-10


def test_a_pole_is_told_from_what_is_steep_and_from_rounding():
    """A head whose features vary by a ten thousandth of their size is badly conditioned, and not on a pole."""
    random = np.random.default_rng(0)
    rows = 1 + 1e-4 * random.normal(size=(60, 5))
    labels = (rows[:, 0] > 1).astype(int)
    smooth = [StandardScaler(), PCA(3), SVC(gamma=20)]
    for stages, on_pole in ((smooth, False), ([StandardScaler(), PCA(3), Normalizer(), Ridge()], True)):
        head = Head.of(make_pipeline(*stages).fit(rows, labels))
        poles = find_pole(head, head.feature_mean.unsqueeze(0), torch.finfo(torch.float32).eps)
        assert bool(poles.any()) is on_pole
        beside = head.feature_mean + 1e-4 * torch.ones(5, dtype=torch.float64)
        assert not bool(find_pole(head, beside.unsqueeze(0), 1e-16).any())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PCA, l2, SVC", "l2, whitened, l2"])
def test_programs_give_the_same(name):
    export = pytest.importorskip("pytorch_grad_cam_pcasvm.export")
    net, _, _, x = pooled(CLASSIFIERS[name], torch.float32)
    cam = ContributionCAM(net, ["3"], mean=mean_activations(net, [x], "3", progress=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maps, program = cam.explain(x[:3], SVMTarget(1)), export.program(cam, x[:2], [SVMTarget(1)])
    outputs = program.module()(x[:3])
    assert relative(outputs["maps"], maps.maps) < 1e-4
