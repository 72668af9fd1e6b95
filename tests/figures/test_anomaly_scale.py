"""The scale of anomalies: a good photo is as dark alone as beside a defect, whatever tells anomalies."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.covariance import EllipticEnvelope
from sklearn.decomposition import PCA
from sklearn.neighbors import KernelDensity, LocalOutlierFactor, NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from pytorch_grad_cam_pcasvm import Head, PCASVMNet, extract_features
from pytorch_grad_cam_pcasvm.figures import plot_positions
from pytorch_grad_cam_pcasvm.network.grid import AnomalyMaps

GENERATOR = torch.Generator().manual_seed(0)
GOOD = torch.rand(16, 3, 32, 48, generator=GENERATOR) / 8 + 0.5
DEFECT = GOOD[15:].clone()
DEFECT[:, :, 8:24, 8:32] = (torch.rand(1, 3, 16, 24, generator=GENERATOR) > 0.5).float()
ANOMALIES = {
    "nearest": NearestNeighbors(n_neighbors=1),
    "several": NearestNeighbors(n_neighbors=4),
    "behind a PCA": make_pipeline(StandardScaler(), PCA(4), NearestNeighbors(n_neighbors=1)),
    "centres": KMeans(4, n_init=1, random_state=0),
    "density": KernelDensity(bandwidth=0.01),
    "local": LocalOutlierFactor(n_neighbors=8, novelty=True),
    "ellipse": make_pipeline(PCA(4), EllipticEnvelope(random_state=0)),
}


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 5, 2, 2), nn.Tanh(), nn.Conv2d(8, 8, 3, 2, 1), nn.Tanh()).eval()


@pytest.fixture(scope="module")
def rows(backbone):
    return extract_features(backbone, [GOOD[:12]], "3", pool="dense", progress=False)[0]


def network(backbone, head, rows):
    return PCASVMNet(backbone, head if isinstance(head, Head) else head.fit(rows), "3", pool="dense").eval()


def panel(figure, number):
    """Return what is drawn over a picture, (H, W, 3)."""
    return np.asarray([axis for axis in figure.axes if axis.images][2 * number + 1].images[0].get_array())


@pytest.mark.parametrize("name", ANOMALIES)
def test_a_good_photo_is_as_dark_alone_as_beside_a_defect(name, backbone, rows):
    net = network(backbone, ANOMALIES[name], rows)
    both = torch.cat([GOOD[12:13], DEFECT])
    alone = panel(plot_positions(GOOD[12:13], net.anomaly_map(GOOD[12:13]), anomaly=True), 0)
    figure = plot_positions(both, net.anomaly_map(both), anomaly=True)
    np.testing.assert_allclose(panel(figure, 0), alone, atol=1e-2)  # one of 256 colours, by rounding of the features
    assert np.abs(panel(figure, 0) - alone).mean() < 1e-3
    assert panel(figure, 1).mean(-1).max() > alone.mean(-1).max() + 0.1
    # Half of the good photos are darker than halfway, at every position.
    low, high = net.anomaly_range()
    shares = (net.anomaly_map(GOOD[12:]).max((1, 2)) - low) / (high - low)
    assert np.median(shares) < 0.5


@pytest.mark.parametrize("k", [1, 3])
def test_rows_of_a_bank_are_compared_with_the_nearest_different_ones(k, backbone, rows):
    bank = rows[::7]
    net = network(backbone, NearestNeighbors(n_neighbors=k), np.concatenate([bank, bank[:40], bank[:40]]))
    distances = np.linalg.norm(bank[:, None].astype(float) - bank[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    # Each of the first forty is there three times: its like is at no distance from them all, and does not count.
    repeated = np.concatenate([distances, distances[:, :40], distances[:, :40]], 1)
    repeated = np.concatenate([repeated, repeated[:40], repeated[:40]])
    expected = np.sort(repeated, 1)[:, :k].mean(1)
    assert net.anomaly_range() == pytest.approx((0, 3 * np.quantile(expected, 0.999)), rel=1e-5)


def test_a_density_leaves_out_its_own_kernel(backbone, rows):
    bank = rows[::7].astype(float)
    net = network(backbone, KernelDensity(bandwidth=0.05), bank)
    left_out = np.array([
        -KernelDensity(bandwidth=0.05).fit(np.delete(bank, i, 0)).score_samples(bank[i : i + 1])[0]
        for i in range(len(bank))
    ]) + np.log(len(bank) / (len(bank) - 1))  # of a density of one kernel more
    low, top = left_out.min(), np.quantile(left_out, 0.999)
    assert net.anomaly_range() == pytest.approx((low, low + 3 * (top - low)), rel=1e-6)


def test_a_large_bank_is_asked_by_some_of_its_rows(backbone):
    bank = np.random.default_rng(0).normal(size=(5000, 8))
    net = network(backbone, NearestNeighbors(n_neighbors=1), bank)
    expected = np.quantile(NearestNeighbors(n_neighbors=1).fit(bank).kneighbors()[0], 0.999)
    assert net.anomaly_range() == pytest.approx((0, 3 * expected), rel=0.15)


def test_identical_rows_tell_nothing(backbone):
    net = network(backbone, NearestNeighbors(n_neighbors=1), np.ones((30, 8)) * np.arange(2).repeat(15)[:, None])
    assert net.anomaly_range() == pytest.approx((0, 3 * 8**0.5))


def test_what_nobody_knows_is_said(backbone, rows):
    net = network(backbone, PCA(3), rows)
    assert net.anomaly_range() is None
    figure = plot_positions(GOOD[12:14], net.anomaly_map(GOOD[12:14]), anomaly=True)
    assert "of these pictures" in " ".join(text.get_text() for text in figure.texts)


def test_parts_of_maps_know_their_scale_and_what_is_computed_does_not(backbone, rows):
    net = network(backbone, NearestNeighbors(n_neighbors=1), rows)
    maps = net.anomaly_map(GOOD[12:])
    for part in (maps[1:], maps[0], maps[:, ::2], maps.reshape(-1), maps.copy(), net.anomaly_map(GOOD[12:], blur=1)):
        assert part.ends == net.anomaly_range()
    for other in (maps * 2, np.log(maps), maps - maps.mean(), maps.mean((1, 2)), maps.max(), np.asarray(maps)):
        assert not isinstance(other, AnomalyMaps) or other.ends is None
    assert isinstance(maps.max(), np.floating)
    again = pickle.loads(pickle.dumps(maps))
    np.testing.assert_array_equal(again, maps)
    assert again.ends is None
    assert torch.from_numpy(maps).shape == maps.shape


def test_a_scale_can_be_given(backbone, rows):
    net = network(backbone, NearestNeighbors(n_neighbors=1), rows)
    maps = net.anomaly_map(GOOD[12:14])
    by_itself = plot_positions(GOOD[12:14], maps, anomaly=True)
    given = plot_positions(GOOD[12:14], torch.from_numpy(maps), anomaly=True, scale=net.anomaly_range())
    np.testing.assert_array_equal(panel(given, 1), panel(by_itself, 1))
    with pytest.raises(ValueError, match="numbers that rise"):
        plot_positions(GOOD[12:14], maps, anomaly=True, scale=(2, 1))
    with pytest.raises(ValueError, match="add anomaly=True"):
        plot_positions(GOOD[12:14], maps, scale=(0, 1))


def test_a_head_keeps_its_scale_in_its_file(backbone, rows, tmp_path):
    net = network(backbone, KMeans(4, n_init=1, random_state=0), rows)
    net.head.save(tmp_path / "head.safetensors")
    assert network(backbone, Head.load(tmp_path / "head.safetensors"), rows).anomaly_range() == net.anomaly_range()
