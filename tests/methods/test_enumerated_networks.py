"""Heads without a gradient behind transformers, volumes and several inputs, on CUDA, and against shap's explainers."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor
from test_enumerated import BACKBONE, BINARY, FEATURES, LABELS, SEVERAL, X, adds_up, deciding, network, shapley
from torch import nn
from towers import Tower

from pytorch_grad_cam_pcasvm import ContributionCAM, Head, PCASVMNet, ProbabilityTarget, SVMTarget
from pytorch_grad_cam_pcasvm.head.enumerated import shapley_values


class ClassToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower(before=1, width=12, depth=2)

    def forward(self, x):
        return self.tower(x)[:, 0]


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 5, 3, padding=1), nn.ReLU())
        self.block = nn.Sequential(nn.Conv3d(5, 7, 3, padding=1), nn.ReLU())

    def forward(self, x):
        return self.block(self.stem(x)).amax((2, 3, 4))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU()) for _ in range(2))
        self.mixed = nn.Linear(10, 8)

    def forward(self, left, right):
        parts = [self.left(left).mean((2, 3)), self.right(right).mean((2, 3))]
        return self.mixed(torch.cat(parts, 1)).tanh()


FOREST = partial(RandomForestClassifier, 12)


def fitted(backbone, x, kind=FOREST):
    """A network with a forest, the same without it, the forest, and the components of the images."""
    backbone = backbone.double().eval()
    with torch.no_grad():
        features = (backbone(*x) if isinstance(x, tuple) else backbone(x)).numpy()
    p = PCA(2).fit_transform(features)
    labels = np.array(SEVERAL)[(p[:, 0] > 0).astype(int) + (p[:, 1] > 0)]
    pipeline = make_pipeline(StandardScaler(), PCA(3), kind(random_state=0)).fit(features, labels)
    return PCASVMNet(backbone, pipeline).eval(), PCASVMNet(backbone, list(pipeline[:-1])).eval(), pipeline[-1]


def slopes(forest, components):
    """phi_b / (p_b - p0_b) of every image and class, (N, C, B), from the values of maps of components."""
    p, p0 = components.values.numpy(), components.baseline_values.numpy()
    phi = np.stack([shapley(lambda rows: deciding(forest, rows), *pair) for pair in zip(p, p0, strict=True)])
    return torch.from_numpy(phi / (p - p0)[..., None]).mT


@pytest.mark.parametrize(
    ("backbone", "shape", "layer", "reshape"),
    [
        (ClassToken, (3, 16, 16), "tower.blocks.0", "tokens"),
        (Volumes, (1, 6, 6, 6), "stem", None),
    ],
    ids=["class token", "volume"],
)
def test_maps_and_remainders_are_those_of_components_times_slopes(backbone, shape, layer, reshape):
    torch.manual_seed(0)
    x = torch.randn(40, *shape, dtype=torch.float64)
    net, without, forest = fitted(backbone(), x)
    one, parts = (
        ContributionCAM(of, [layer], reshape, baseline="zero").explain(x[:3], targets)
        for of, targets in ((net, [SVMTarget(label) for label in SEVERAL]), (without, None))
    )
    factors = slopes(forest, parts)
    assert one.effects.min() > 0
    expected = torch.einsum("ncb,nb...->nc...", factors, parts.maps)
    assert torch.allclose(one.maps, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    beside = torch.einsum("ncb,nb->nc", factors, parts.remainder)
    assert torch.allclose(one.remainder, beside, rtol=0, atol=1e-9 * float(1 + beside.abs().max()))
    assert adds_up(one)
    if reshape:
        assert beside.abs().max() > 1e-3  # what the class token says is on no map
    assert adds_up(ContributionCAM(net, [layer], reshape).explain(x[:3]))


def test_the_maps_of_two_inputs_add_up_together():
    torch.manual_seed(0)
    x = tuple(torch.randn(40, 3, 8, 8, dtype=torch.float64) for _ in range(2))
    net, without, forest = fitted(TwoInputs(), x)
    some = tuple(images[:3] for images in x)
    layers = ["left", "right"]
    maps, parts = (
        ContributionCAM(of, layers, baseline="zero").explain(some, targets)
        for of, targets in ((net, [SVMTarget(label) for label in SEVERAL]), (without, None))
    )
    factors = slopes(forest, parts[0])
    for one, of_components in zip(maps, parts, strict=True):
        expected = torch.einsum("ncb,nb...->nc...", factors, of_components.maps)
        assert torch.allclose(one.maps, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
        assert adds_up(one)
    together = sum(one.maps.sum((2, 3)) for one in maps) + maps[0].baseline_values
    assert torch.allclose(together, maps[0].values, atol=1e-9)


TREES = {
    "forest": lambda: RandomForestClassifier(12, random_state=0),
    "extra trees": lambda: ExtraTreesClassifier(12, random_state=0),
    "tree": lambda: DecisionTreeRegressor(random_state=0),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=8, random_state=0),
}


def ours_and_rows(kind, labels):
    _, pipeline = network(kind(), labels)
    rows = pipeline[:-1].transform(FEATURES)
    return pipeline[-1], rows, rows.mean(0)


@pytest.mark.optional
@pytest.mark.parametrize("kind", sorted(TREES))
def test_shapley_values_equal_those_of_shaps_tree_explainer(kind):
    shap = pytest.importorskip("shap")
    labels = FEATURES[:, 0] if kind == "tree" else LABELS[SEVERAL] == "fir"
    estimator, rows, start = ours_and_rows(TREES[kind], labels)
    # shap reads the numbers of trees in single precision, in which no row may lie on the other side of a threshold.
    rows, start = (numbers.astype(np.float32).astype(float) for numbers in (rows, start))
    theirs = shap.TreeExplainer(estimator, start[None], feature_perturbation="interventional")
    theirs = np.asarray(theirs.shap_values(rows[:6], check_additivity=False)).reshape(6, 3, -1)[..., -1]

    def value(points):
        if kind == "tree":
            return estimator.predict(points)[:, None]
        if kind == "boosting":
            return estimator.decision_function(points)[:, None]
        return estimator.predict_proba(points)[:, 1:]

    mine = shapley_values(value, rows[:6], np.repeat(start[None], 6, 0))[..., 0]
    np.testing.assert_allclose(mine, theirs, atol=1e-6 * abs(theirs).max())
    assert abs(theirs).max() > 1e-3


@pytest.mark.optional
def test_shapley_values_equal_those_of_shaps_exact_explainer():
    shap = pytest.importorskip("shap")
    kind = HistGradientBoostingClassifier(max_iter=8, min_samples_leaf=3)
    estimator, rows, start = ours_and_rows(lambda: kind, LABELS[SEVERAL] == "fir")

    def value(points):
        return estimator.decision_function(points)

    exact = shap.explainers.Exact(value, shap.maskers.Independent(start[None]))
    mine = shapley_values(lambda points: value(points)[:, None], rows[:6], np.repeat(start[None], 6, 0))[..., 0]
    theirs = exact(rows[:6]).values
    np.testing.assert_allclose(mine, theirs, atol=1e-9 * abs(theirs).max())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu():
    import copy

    net, _ = network(RandomForestClassifier(12, random_state=0), LABELS[SEVERAL])
    there = copy.deepcopy(net).cuda()
    one, other = (
        ContributionCAM(of, ["stem"]).explain(x, [*map(SVMTarget, SEVERAL)])
        for of, x in ((net, X[:4]), (there, X[:4].cuda()))
    )
    assert other.maps.device.type == "cuda"
    assert torch.allclose(one.maps, other.maps.cpu(), atol=1e-8)
    assert next(BACKBONE.parameters()).device.type == "cpu"


BOOSTED = {
    "xgboost": ("XGBClassifier", "XGBRegressor", {"n_estimators": 12}, {"output_margin": True}),
    "lightgbm": ("LGBMClassifier", "LGBMRegressor", {"n_estimators": 12, "verbose": -1}, {"raw_score": True}),
    "catboost": (
        "CatBoostClassifier",
        "CatBoostRegressor",
        {"iterations": 12, "verbose": 0, "allow_writing_files": False},
        {"prediction_type": "RawFormulaVal"},
    ),
}


@pytest.mark.optional
@pytest.mark.parametrize("library", sorted(BOOSTED))
def test_boosting_of_other_libraries(library, tmp_path):
    module = pytest.importorskip(library)
    classifier, regressor, options, raw = BOOSTED[library]
    for classes in (BINARY, SEVERAL):
        labels = np.searchsorted(sorted(classes), LABELS[classes])  # XGBoost takes numbers alone
        net, pipeline = network(getattr(module, classifier)(**options), labels)
        maps = ContributionCAM(net, ["block"]).explain(X[:5], [SVMTarget(1), ProbabilityTarget(0)])
        rows = pipeline[:-1].transform(FEATURES[:5])
        margins = np.asarray(pipeline[-1].predict(rows, **raw), float).reshape(5, -1)
        decide = margins[:, 0] if len(classes) == 2 else margins[:, 1] - margins[:, [0, 2]].mean(1)
        np.testing.assert_allclose(maps.values[:, 0], decide, atol=1e-9)
        np.testing.assert_allclose(maps.values[:, 1], pipeline.predict_proba(FEATURES[:5])[:, 0], atol=1e-9)
        assert adds_up(maps)
        assert net.predict(X).tolist() == pipeline.predict(FEATURES).ravel().tolist()
        net.head.save(tmp_path / "head.safetensors")
        again = PCASVMNet(BACKBONE, Head.load(tmp_path / "head.safetensors")).eval()
        one, other = (ContributionCAM(of, ["block"]).explain(X[:5]).maps for of in (net, again))
        assert one.equal(other)
    net, pipeline = network(getattr(module, regressor)(**options), FEATURES[:, 0])
    assert adds_up(ContributionCAM(net, ["block"]).explain(X[:5]))
    np.testing.assert_allclose(net.predict(X), pipeline.predict(FEATURES), rtol=1e-6)
