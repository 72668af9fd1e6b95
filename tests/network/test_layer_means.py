"""Means of layers over a training set, near which contributions start wherever the head holds them."""

import warnings

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from towers import Tower

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.network.layer_means import LayerMeans, average_positions
from pytorch_grad_cam_pcasvm.network.layout import Layout


class Last(nn.Module):
    """Channels last, as Swin has them."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1)


class First(nn.Module):
    def forward(self, x):
        return x.permute(0, 3, 1, 2).mean((2, 3))


def images(count=24, side=16):
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 2
    return torch.randn(count, 3, side, side, generator=generator) + y.reshape(-1, 1, 1, 1), y.numpy()


def networks():
    torch.manual_seed(0)
    yield "conv", nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(294, 5)), "1", None
    tower = Tower(before=2, after=1)
    yield (
        "tokens",
        nn.Sequential(tower, nn.Flatten(), nn.Linear(tower(images(1)[0]).flatten(1).shape[1], 5)),
        "0.blocks.0",
        "tokens",
    )
    last = nn.Sequential(nn.Conv2d(3, 24, 4, stride=4), Last(), nn.LayerNorm(24), First(), nn.Linear(24, 5))
    yield "channels last", last, "2", "tokens"


@pytest.mark.parametrize(
    ("name", "backbone", "layer", "reshape"), [pytest.param(*each, id=each[0]) for each in networks()]
)
def test_contributions_start_at_the_means_that_a_head_holds(name, backbone, layer, reshape):
    x, y = images()
    backbone = backbone.eval()
    with torch.no_grad():
        means = LayerMeans(backbone, [layer], x)
        with means.counting():
            features, _ = extract_features(backbone, [(part, y[:8]) for part in x.split(8)], progress=False)
    full = mean_activations(backbone, x.split(8), layer, progress=False)
    (stored,) = means.means.values()
    assert stored.dtype == torch.float32
    assert relative(stored, full) < 1e-6
    match name:
        case "conv":
            by_channel = full.mean((1, 2), keepdim=True)
        case "tokens":  # two before the patches and one behind them
            by_channel = torch.cat([full[:2], full[2:-1].mean(0, keepdim=True), full[-1:]])
        case _:
            by_channel = full.mean((0, 1), keepdim=True)
    assert relative(average_positions(stored, means.layouts[layer]), by_channel) < 1e-6
    assert torch.equal(average_positions(by_channel, means.layouts[layer]), by_channel)
    head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, y)
    net = PCASVMNet(backbone, head).eval()
    targets = [PCATarget(0), SVMTarget(1)]
    given = ContributionCAM(net, [layer], reshape, mean=full).explain(x[:3], targets)
    with pytest.warns(BaselineWarning, match="the training set's mean at"):
        ContributionCAM(net, [layer], reshape).explain(x[:3], targets)
    net.head.training_set.means[layer] = stored
    with warnings.catch_warnings():
        warnings.simplefilter("error", BaselineWarning)
        maps = ContributionCAM(net, [layer], reshape).explain(x[:3], targets)
        at_mean = ContributionCAM(net, [layer], reshape, baseline="mean").explain(x[:3], targets)
    assert relative(maps.maps, given.maps) < 2e-2  # two searches for a start, in single precision
    assert float(maps.baseline_values.abs().max()) < 1e-4
    at_given = ContributionCAM(net, [layer], reshape, baseline=full).explain(x[:3], targets)
    assert relative(at_mean.maps, at_given.maps) < 1e-4


def test_what_cannot_be_placed_is_left_out():
    x, _ = images(4)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(784, 5)).eval()
    means = LayerMeans(backbone, ["0", "1", "2"], x)
    with means.counting(), torch.no_grad():
        backbone(x)
    assert [*means.means] == ["0"]


def test_the_inverse_of_a_layout():
    for layout, shape in ((Layout((2, 3), 3, 0, 2, 1, 2), (1, 9, 5)), (Layout((2, 3), 4, 0, 3), (1, 2, 3, 5)),
                          (Layout((2, 3), 3, 1, 2, 1), (7, 1, 5))):  # fmt: skip
        means = torch.randn(1, 5, layout.before + 1 + layout.after)
        filled = layout.expand_means(means)
        assert filled.shape == shape
        before, on_grid, after = layout.split_tokens(filled)
        assert torch.equal(torch.cat([before, on_grid[..., :1], after], -1), means)
        assert np.ptp(on_grid.numpy(), axis=-1).max() == 0
