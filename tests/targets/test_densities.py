"""The log-density of mixtures: values against scikit-learn, gradients against autograd, secants against differences."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.mixture import BayesianGaussianMixture, GaussianMixture
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    DensityTarget,
    Head,
    PCASVMNet,
    SVMTarget,
    extract_features,
    recombined,
)
from pytorch_grad_cam_pcasvm.studio.export.outputs import about
from pytorch_grad_cam_pcasvm.studio.figures.blocks import write_title
from pytorch_grad_cam_pcasvm.targets import decoded, encoded

MIXTURES = {
    "full": GaussianMixture(3, random_state=0),
    "two": GaussianMixture(2, random_state=0),
    "tied": GaussianMixture(3, covariance_type="tied", random_state=0),
    "diag": GaussianMixture(4, covariance_type="diag", random_state=0),
    "spherical": GaussianMixture(3, covariance_type="spherical", random_state=0),
    "bayesian": BayesianGaussianMixture(n_components=3, random_state=0),
}
torch.manual_seed(0)
BACKBONE = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.Tanh(), nn.Conv2d(6, 7, 3, 1, 1), nn.Softplus()).double().eval()
GOOD = torch.randn(12, 3, 12, 16, dtype=torch.float64)
GOOD[:6] += 1.5
IMAGES = torch.randn(3, 3, 12, 16, dtype=torch.float64)
IMAGES[1, :, 4:8, 6:10] += 6
ROWS = {pool: extract_features(BACKBONE, [GOOD], pool=pool, progress=False)[0] for pool in ("dense", "mean")}


def network(name, pool, *before):
    pipeline = make_pipeline(*before, MIXTURES[name]).fit(ROWS[pool])
    return PCASVMNet(BACKBONE, pipeline, "3", pool=pool).eval(), pipeline


def features():
    return BACKBONE(IMAGES).flatten(2).mT.flatten(0, 1).detach().numpy()


@pytest.mark.parametrize("name", MIXTURES)
def test_anomalies_are_minus_the_log_density(name):
    net, pipeline = network(name, "dense", StandardScaler(), PCA(3))
    expected = -pipeline.score_samples(features()).reshape(3, 6, 8)
    size = np.abs(expected).max()
    np.testing.assert_allclose(net.anomaly_map(IMAGES), expected, atol=1e-10 * size)
    np.testing.assert_allclose(net.anomaly_score(IMAGES), expected.max((1, 2)), atol=1e-10 * size)
    np.testing.assert_allclose(
        DensityTarget("-", at=(2, 3))(net(IMAGES)).detach(), expected[:, 2, 3], atol=1e-10 * size
    )
    np.testing.assert_array_equal(net.predict(IMAGES), pipeline.predict(features()).reshape(3, 6, 8))  # clusters


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_maps_add_up_to_the_log_density(name, baseline):
    net, pipeline = network(name, "dense", StandardScaler(), PCA(3))
    target = DensityTarget("-", at="max")
    maps = ContributionCAM(net, ["3"], baseline=baseline).explain(IMAGES, target)
    total = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
    torch.testing.assert_close(total, maps.values, rtol=1e-9, atol=1e-9)
    expected = -pipeline.score_samples(features()).reshape(3, -1)
    np.testing.assert_allclose(maps.values[:, 0], expected.max(1), rtol=1e-9)


@pytest.mark.parametrize("name", MIXTURES)
def test_gradients_are_those_of_autograd(name):
    net, _ = network(name, "mean", PCA(3))
    output = net(IMAGES)
    x = output.features.detach().requires_grad_()
    values = DensityTarget()(net.of_features(x))
    (expected,) = torch.autograd.grad(values.sum(), x)
    trace = net.head(output.features.detach())
    seeds = DensityTarget().seeds(net.of_features(output.features.detach()))
    grad, log_scale = net.head.pullback(trace, {place: seed.unsqueeze(1) for place, seed in seeds.items()})
    torch.testing.assert_close((grad * log_scale.exp().unsqueeze(-1))[:, 0], expected)
    assert ClosedFormGradCAM(net, ["3"]).explain(IMAGES, DensityTarget()).maps.any()


@pytest.mark.parametrize("name", ["full", "two"])
def test_one_row_for_each_image(name, tmp_path):
    net, pipeline = network(name, "mean", PCA(3))
    rows = BACKBONE(IMAGES).mean((2, 3)).detach().numpy()
    np.testing.assert_allclose(net.anomaly_score(IMAGES), -pipeline.score_samples(rows), rtol=1e-9)
    net.head.save(tmp_path / "head.safetensors")
    again = PCASVMNet(BACKBONE, Head.load(tmp_path / "head.safetensors"), pool="mean").eval()
    np.testing.assert_array_equal(again.anomaly_score(IMAGES), net.anomaly_score(IMAGES))
    assert again.head.digest() == net.head.digest()
    cam = ContributionCAM(net, ["3"])
    maps = cam.explain(IMAGES, [DensityTarget(), SVMTarget(0)])  # the default start; clusters as they were
    total = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
    torch.testing.assert_close(total, maps.values, rtol=1e-9, atol=1e-9)
    components = ContributionCAM(net, ["3"], baseline="mean").explain(IMAGES)
    direct = ContributionCAM(net, ["3"], baseline="mean").explain(IMAGES, DensityTarget("-"))
    whole = recombined(components[:, :3], net.head, DensityTarget("-"))
    torch.testing.assert_close(whole.maps * whole.log_scale.exp()[..., None, None],
                               direct.maps * direct.log_scale.exp()[..., None, None])  # fmt: skip


def test_the_secant_of_a_density_is_the_mean_of_its_gradient():
    net, _ = network("full", "mean", StandardScaler(), PCA(3))
    here, start = net(IMAGES), net(GOOD[:1])
    ((position, gradient),) = DensityTarget("-").seeds(here).items()
    y, y0 = (output.head_trace.values[position] for output in (here, start))
    torch.testing.assert_close(gradient, -y.softmax(-1))
    places = (torch.arange(2000, dtype=torch.float64) + 0.5).reshape(-1, 1, 1) / 2000
    mean = (y0 + places * (y - y0)).softmax(-1).mean(0)
    assert (DensityTarget("-").seeds(here, start)[position] + mean).norm() < 0.05 * mean.norm()


def test_secants_do_not_mind_densities_that_underflow():
    net, _ = network("full", "mean", PCA(3))
    far = net.of_features(1e4 * net(IMAGES).features.detach())
    near = net(IMAGES)
    ((place, seed),) = DensityTarget().seeds(far, near).items()
    change = far.head_trace.values[place] - near.head_trace.values[place]
    expected = DensityTarget()(far) - DensityTarget()(near)
    torch.testing.assert_close((seed * change).sum(-1), expected, rtol=1e-12, atol=0)


def test_the_scale_of_colours_is_that_of_the_mixture():
    net, pipeline = network("full", "dense", PCA(3))
    rows, _ = pipeline[-1].set_params(random_state=1).sample(20_000)
    drawn = -pipeline[-1].score_samples(rows)
    low, high = net.anomaly_range()
    assert low == pytest.approx(drawn.min(), abs=0.3)
    assert low + (high - low) / 3 == pytest.approx(np.quantile(drawn, 0.999), rel=0.2)


def test_it_has_words_and_a_place_in_files():
    net, _ = network("full", "dense", PCA(3))
    target = DensityTarget("-", at=(1, 2))
    assert decoded(encoded(target)) == target
    assert about([target, DensityTarget()], net)["titles"] == ["anomaly at (1, 2)", "log-density"]
    assert write_title(DensityTarget(), net(IMAGES), None) == "log-density"
    assert repr(target) == "DensityTarget('-', at=(1, 2))"


def test_other_heads_have_no_log_density():
    naive = PCASVMNet(BACKBONE, GaussianNB().fit(ROWS["mean"], np.arange(12) % 2), pool="mean").eval()
    with pytest.raises(ValueError, match="does not end with one: fit GaussianMixture"):
        DensityTarget()(naive(IMAGES))
    with pytest.raises(ValueError, match="KernelDensity, GaussianMixture"):
        naive.anomaly_score(IMAGES)
    with pytest.raises(ValueError, match="sign must be"):
        DensityTarget("up")
