"""PatchCore on dense features, against the algorithm written out with numpy, and against anomalib where it is."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors
from torch import nn
from torch.nn.functional import avg_pool2d, interpolate

from pytorch_grad_cam_pcasvm import PCASVMNet, extract_features
from pytorch_grad_cam_pcasvm.network.grid import blurred
from pytorch_grad_cam_pcasvm.network.patches import coreset


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer2 = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU())
        self.layer3 = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU())

    def forward(self, x):
        return self.layer3(self.layer2(x))


def parts(count, seed, defects=False):
    """Return pictures of a texture, with a blot on each if there are defects, and where it is."""
    random = np.random.default_rng(seed)
    x, masks = 0.3 * random.normal(size=(count, 3, 48, 64)), np.zeros((count, 48, 64), bool)
    for n in range(count if defects else 0):
        y, left = random.integers(0, 40), random.integers(0, 56)
        masks[n, y : y + 8, left : left + 8] = True
        x[n][:, masks[n]] += 0.7
    return torch.from_numpy(x).float(), masks


def patches_by_hand(backbone, x):
    """The means over 3x3 neighbours of both layers, on the finer grid, one row for each position."""
    with torch.no_grad():
        fine = backbone.layer2(x)
        coarse = backbone.layer3(fine)
    fine, coarse = (avg_pool2d(part, 3, 1, 1) for part in (fine, coarse))
    joined = torch.cat([fine, interpolate(coarse, fine.shape[2:], mode="bilinear")], 1)
    return joined.permute(0, 2, 3, 1).numpy().astype(np.float64)


def scores_by_hand(bank, patches, neighbours):
    """The re-weighted score of each image, as the paper writes it (Roth et al., CVPR 2022, equations 6 and 7)."""
    scores = []
    for rows in patches.reshape(len(patches), -1, patches.shape[-1]):
        distances = np.linalg.norm(rows[:, None] - bank, axis=-1)
        patch = distances.min(1).argmax()
        nearest = distances[patch].argmin()
        around = np.linalg.norm(bank - bank[nearest], axis=1).argsort()[:neighbours]
        of_them = np.exp(np.linalg.norm(rows[patch] - bank[around], axis=1))
        score = distances[patch, nearest]
        scores.append((1 - np.exp(score) / of_them.sum()) * score)
    return np.array(scores)


def blurred_by_hand(maps, size, sigma):
    large = interpolate(torch.from_numpy(maps)[:, None], size, mode="bilinear")[:, 0].numpy()
    # scipy's mirror is torch's reflection, and it cuts the Gaussian off at the same place.
    return np.stack([gaussian_filter(one, sigma, mode="mirror", truncate=4.0) for one in large])


def test_scores_and_maps_are_those_of_the_algorithm_written_out():
    torch.manual_seed(0)
    backbone = Backbone().eval()
    good, test = parts(6, 0)[0], parts(5, 1, defects=True)[0]
    rows, _ = extract_features(backbone, [good], ["layer2", "layer3"], pool=("dense", 3), coreset=0.1, progress=False)
    expected = patches_by_hand(backbone, good).reshape(-1, 20)
    assert len(rows) == round(0.1 * len(expected))
    chosen = np.sort(coreset(expected.astype(np.float32), 0.1))
    assert np.abs(rows - expected[chosen]).max() < 1e-6
    bank = rows.astype(np.float64)
    net = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(bank), ["layer2", "layer3"], pool=("dense", 3)).eval()
    patches = patches_by_hand(backbone, test)
    distances = np.linalg.norm(patches[..., None, :] - bank, axis=-1).min(-1)
    assert np.abs(net.anomaly_map(test) - distances).max() < 1e-6
    for neighbours in (3, 9, 10_000):
        by_hand = scores_by_hand(bank, patches, neighbours)
        assert np.abs(net.anomaly_score(test, neighbours=neighbours) - by_hand).max() < 1e-6
    output = net(test)
    assert np.array_equal(net.anomaly_map(output), net.anomaly_map(test))
    assert np.array_equal(net.anomaly_score(output, neighbours=9), net.anomaly_score(test, neighbours=9))
    for sigma in (2, 0.9):
        maps = net.anomaly_map(output, size=(48, 64), blur=sigma)
        assert maps.shape == (5, 48, 64)
        assert np.abs(maps - blurred_by_hand(distances, (48, 64), sigma)).max() < 1e-6


def test_the_coreset_is_greedy():
    """Each next row is the farthest from those before, if nothing is projected."""
    rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    chosen = coreset(rows, 12)
    for count in range(1, 12):
        distances = np.linalg.norm(rows[:, None] - rows[chosen[:count]], axis=-1).min(1)
        assert distances[chosen[count]] == pytest.approx(distances.max(), rel=1e-5)


def test_what_is_no_patchcore_is_refused():
    torch.manual_seed(0)
    backbone, x = Backbone().eval(), parts(3, 0)[0]
    rows, _ = extract_features(backbone, [x], "layer3", pool="mean", progress=False)
    net = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(rows), "layer3", pool="mean").eval()
    with pytest.raises(ValueError, match="fit NearestNeighbors on features of positions"):
        net.anomaly_score(x, neighbours=9)
    rows, _ = extract_features(backbone, [x], "layer3", pool="dense", progress=False)
    net = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(rows), "layer3", pool="dense").eval()
    with pytest.raises(ValueError, match="upsample them, size="):
        net.anomaly_map(x, blur=4)
    other = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(rows), "layer3", pool="dense").eval()
    for output in (other(x), net(x)[0]):
        with pytest.raises(ValueError, match="no output of this network for a batch"):
            net.anomaly_score(output)


@pytest.mark.optional
def test_numbers_are_those_of_anomalib():
    torch_model = pytest.importorskip("anomalib.models.image.patchcore.torch_model")
    torch.manual_seed(0)
    model = torch_model.PatchcoreModel(["layer1", "layer2"], backbone="resnet18", pre_trained=False, num_neighbors=9)
    good, (test, masks) = parts(6, 0)[0], parts(8, 1, defects=True)
    test, masks = torch.cat([test, parts(8, 2)[0]]), np.concatenate([masks, np.zeros_like(masks)])
    model.train()
    with torch.no_grad():
        model(good)
        model.subsample_embedding(0.2)
        model.eval()
        theirs = model(test)
    backbone = model.feature_extractor.feature_extractor.eval()
    arguments = {"layer": ["layer1", "layer2"], "pool": ("dense", 3)}
    same = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(model.memory_bank.numpy()), **arguments).eval()
    maps, scores = same.anomaly_map(test, size=(48, 64), blur=4), same.anomaly_score(test, neighbours=9)
    # It repeats numbers where the paper, and we, interpolate between them.
    repeated = torch.from_numpy(same.anomaly_map(test)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    expected = blurred(repeated[:, None].float(), 4)
    assert (expected - theirs.anomaly_map).abs().max() < 1e-4 * maps.max()
    assert np.abs(scores - theirs.pred_score.numpy()).max() < 1e-3 * scores.max()
    rows, _ = extract_features(backbone, [good], **arguments, coreset=0.2, progress=False)
    own = PCASVMNet(backbone, NearestNeighbors(n_neighbors=1).fit(rows), **arguments).eval()
    own_maps, own_scores = own.anomaly_map(test, size=(48, 64), blur=4), own.anomaly_score(test, neighbours=9)
    defective = masks.any((1, 2))
    for truth, numbers, expected in (
        (defective, scores, theirs.pred_score), (masks.ravel(), maps.ravel(), theirs.anomaly_map.flatten()),
    ):  # fmt: skip
        assert abs(roc_auc_score(truth, numbers) - roc_auc_score(truth, expected)) < 0.005
    assert roc_auc_score(masks.ravel(), own_maps.ravel()) > roc_auc_score(masks.ravel(), maps.ravel()) - 0.03
    assert roc_auc_score(defective, own_scores) > roc_auc_score(defective, scores) - 0.1
