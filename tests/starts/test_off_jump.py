"""Starts that would lie on a jump: trees that split beside 0, where the training mean's components are."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ContributionCAM,
    Head,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    SVMTarget,
    mean_activations,
    recombined,
)
from pytorch_grad_cam_pcasvm.network.inputs import Inputs
from pytorch_grad_cam_pcasvm.starts.boundary_path import leave_jump
from pytorch_grad_cam_pcasvm.starts.poles import off_jump

IMAGES = torch.randn(60, 2, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = np.arange(60) % 3
IMAGES[LABELS == 1, 0] += 0.4
IMAGES[LABELS == 2, 1] -= 0.4


class BesideZero(BaseEstimator):
    """Trees as LightGBM grows them: what is beyond 1e-35 is decided by its sign, and a little elsewhere."""

    def fit(self, x, y):
        self.n_features_in_ = x.shape[1]
        if isinstance(self, ClassifierMixin):
            self.classes_ = np.unique(y)
        return self

    def values(self, x):
        places = np.arange(1, x.shape[1] + 1)
        return (x > 1e-35) @ places - (x < -1e-35) @ places / 2 + (x[:, 0] > 0.7)


class Classes(ClassifierMixin, BesideZero):
    def decision_function(self, x):
        return np.stack([self.values(x), -self.values(x), np.cos(self.values(x))], 1)

    def predict(self, x):
        return self.classes_[self.decision_function(x).argmax(1)]


class Numbers(RegressorMixin, BesideZero):
    def predict(self, x):
        return self.values(x)


def network(last, dtype=torch.float64, reduce=True):
    torch.manual_seed(1)
    cnn = nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    cnn = cnn.to(dtype).eval()
    x = cnn(IMAGES.to(dtype)).detach().double().numpy()
    return PCASVMNet(cnn, make_pipeline(StandardScaler(), *[PCA(4)] * reduce, last).fit(x, LABELS)).eval()


def added(maps):
    return ((maps.maps * maps.log_scale.exp()[..., None, None]).sum((2, 3)) + maps.baseline_values).double()


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("last", [Classes(), Numbers()], ids=["classes", "numbers"])
def test_the_mean_is_moved_into_a_cell_whatever_the_precision(last, reduce):
    values = []
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
        net = network(last, dtype, reduce)
        images, target = IMAGES[:9].to(dtype), [SVMTarget(0) if isinstance(last, Classes) else SVMTarget()]
        maps = ContributionCAM(net, ["3"], baseline="mean").explain(images, target)
        torch.testing.assert_close(added(maps), maps.values.double(), rtol=0, atol=tolerance)
        value = float(maps.baseline_values[0])
        torch.testing.assert_close(maps.baseline_values, torch.full_like(maps.baseline_values, value))
        values.append(value)
        # It is that of the features that were found, which the activations give.
        given = net.head(off_jump(net.head, net.head.feature_mean)[None]).values[-1]
        given = net.head.voting.margins(given)[0, 0] if isinstance(last, Classes) else given[0, 0]
        assert value == pytest.approx(float(given), rel=1e-6)
        # It is what the estimator says of a row a little off the mean, whatever rounding does to that.
        signs = np.array(np.meshgrid(*[[-1, 1]] * last.n_features_in_)).reshape(last.n_features_in_, -1).T
        at_corners = last.values(1e-3 * signs)
        if isinstance(last, Classes):  # the margin of a class: its score, less the mean of the others
            at_corners = at_corners - (-at_corners + np.cos(at_corners)) / 2
        assert np.isclose(at_corners, value).any()
    assert values[0] == pytest.approx(values[1])


@pytest.mark.parametrize("layer", ["1", "3"])
def test_regressors_start_there_by_default(layer):
    net = network(Numbers())
    mean = None if layer == "3" else mean_activations(net, [IMAGES], layer, progress=False)
    maps = ContributionCAM(net, [layer], mean=mean).explain(IMAGES[:9], SVMTarget())
    torch.testing.assert_close(added(maps), maps.values, rtol=0, atol=1e-9)
    again = ContributionCAM(net, [layer], mean=None if mean is None else mean + 1e-12).explain(IMAGES[:9], SVMTarget())
    torch.testing.assert_close(again.baseline_values, maps.baseline_values, rtol=0, atol=0)


def test_probabilities_start_there_by_default():
    class Probable(Classes):
        def predict_proba(self, x):
            scores = np.exp(self.decision_function(x))
            return scores / scores.sum(1, keepdims=True)

    starts = []
    for dtype in (torch.float64, torch.float32):
        net = network(Probable(), dtype)
        maps = ContributionCAM(net, ["3"]).explain(IMAGES[:9].to(dtype), [ProbabilityTarget(0), PCATarget(0)])
        torch.testing.assert_close(added(maps), maps.values.double(), rtol=0, atol=1e-9 if dtype.itemsize > 4 else 2e-3)
        assert maps.baseline_values[:, 1].abs().max() < 1e-5
        starts.append(float(maps.baseline_values[0, 0]))
    assert starts[0] == pytest.approx(starts[1])


def test_recombined_maps_start_there_too():
    net = network(Numbers())
    cam = ContributionCAM(net, ["3"])
    direct, components = cam.explain(IMAGES[:9], SVMTarget()), cam.explain(IMAGES[:9], [PCATarget(b) for b in range(4)])
    whole = recombined(components, net.head, SVMTarget())
    torch.testing.assert_close(whole.baseline_values, direct.baseline_values)
    torch.testing.assert_close(whole.maps * whole.log_scale.exp()[..., None, None],
                               direct.maps * direct.log_scale.exp()[..., None, None], rtol=1e-6, atol=1e-9)  # fmt: skip


def test_components_still_start_at_the_mean_by_default():
    net = network(Classes())
    maps = ContributionCAM(net, ["3"]).explain(IMAGES[:9], [PCATarget(0), PCATarget(3)])
    assert maps.baseline_values.abs().max() < 1e-12


def test_starts_that_lie_on_no_jump_stay():
    net = network(RandomForestClassifier(20, random_state=0))
    assert off_jump(net.head, net.head.feature_mean) is None
    maps = ContributionCAM(net, ["3"], baseline="mean").explain(IMAGES[:9], [SVMTarget(0), PCATarget(1)])
    at_mean = net.head(net.head.feature_mean[None]).values
    expected = net.head.voting.margins(at_mean[-1])[0, 0]
    torch.testing.assert_close(maps.baseline_values[:, 0], expected.expand(9))
    assert maps.baseline_values[:, 1].abs().max() < 1e-12


def test_activations_of_one_of_several_inputs_are_not_moved():
    net = network(Classes())
    run = ContributionCAM(net, ["3"])._run_network(IMAGES[:1], [net.backbone[3]])
    start = net.head.feature_mean.reshape(1, -1, 1, 1).expand_as(run.recorded.activations[0])
    assert leave_jump(run, 0, start) is not start
    run = replace(run, images=Inputs((IMAGES[:1], IMAGES[:1])))
    assert leave_jump(run, 0, start) is start


def test_without_variances_nothing_is_moved():
    x = network(Classes()).backbone(IMAGES).detach().numpy()
    head = Head.of(Classes().fit(x, LABELS))
    assert off_jump(head, torch.zeros(6, dtype=torch.float64)) is None


@pytest.mark.optional
def test_lightgbm_starts_inside_of_a_cell():
    lightgbm = pytest.importorskip("lightgbm")
    last = lightgbm.LGBMClassifier(n_estimators=15, min_child_samples=3, n_jobs=1, verbose=-1)
    values = []
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-3)):
        net = network(last, dtype)
        maps = ContributionCAM(net, ["3"], baseline="mean").explain(IMAGES[:9].to(dtype), SVMTarget(1))
        torch.testing.assert_close(added(maps), maps.values.double(), rtol=0, atol=tolerance)
        values.append(float(maps.baseline_values[0, 0]))
    assert values[0] == pytest.approx(values[1], abs=1e-6)
