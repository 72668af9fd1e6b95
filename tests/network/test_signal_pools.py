"""Signals that a network makes pictures of inside: their batches, and layers with more axes than they have."""

import pytest
import torch
from reference import gap, relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCATarget, fit_model


class PooledAsPictures(nn.Module):
    """Takes signals (N, 6, L), and pools them as pictures of one row, as EEGNet does."""

    def __init__(self, pool):
        super().__init__()
        self.body, self.pool = nn.Conv1d(6, 16, 7, 2, 3), pool

    def forward(self, x):
        return self.pool(self.body(x).relu().unsqueeze(2)).flatten(1)


@pytest.mark.parametrize("size", [1, (1, 4)])
def test_signals_that_are_pooled_as_pictures(size):
    """Features come from a layer whose output has more axes than the signals, of which one may lie along them."""
    torch.manual_seed(0)
    net = PooledAsPictures(nn.AdaptiveAvgPool2d(size)).eval()
    x, labels = torch.randn(40, 6, 128), torch.arange(40) % 2
    x[labels == 1, :, 30:60] += 1
    head = make_pipeline(StandardScaler(), PCA(3), SVC())
    model = fit_model(net, [(x, labels)], head, layer="pool", progress=False)
    assert model.layers == ("body",)
    if size == 1:
        assert "no axis alone of (16, 1, 1) follows the picture" in model.about["left_out"]["pool"]
    else:
        assert model.means["pool"].shape == (16, 1, 4)
    assert gap(model.explain(x[:2])) < 1e-5
    maps = ClosedFormGradCAM(model.net, ["pool"]).explain(x[:2], [PCATarget(0)])
    pooled = net.pool(net.body(x[:2]).relu().unsqueeze(2)).detach().requires_grad_()
    component = model.net.head(pooled.flatten(1).double()).values[2][:, 0].sum()
    (grad,) = torch.autograd.grad(component, pooled)
    expected = (grad.sum((2, 3), keepdim=True) * pooled).sum(1, keepdim=True).detach()
    assert relative(maps.maps * maps.log_scale.exp()[..., None, None], expected) < 1e-5


def test_signals_that_a_network_makes_pictures_of_are_a_batch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Conv2d(1, 4, (6, 9)), nn.Flatten()).eval()
    x = torch.randn(3, 6, 64)
    assert ClosedFormGradCAM(net, ["1"]).explain(x, [lambda output: output[0]]).maps.shape == (3, 1, 1, 56)
    pictures = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).eval()
    with pytest.raises(ValueError, match=r"must be a batch \(N, C, H, W\), got \(3, 6, 64\): use x.unsqueeze\(0\)"):
        ClosedFormGradCAM(pictures, ["0"]).explain(x)
