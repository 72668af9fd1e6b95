"""Features of several layers, pooled and concatenated, against a network that concatenates by hand."""

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
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

TARGETS = [PCATarget(0), SVMTarget("b"), SVMTarget(versus="runner-up")]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 5, 3, 2), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(5, 6, 3), nn.SiLU())
        self.three = nn.Sequential(nn.Conv2d(6, 7, 3, 2), nn.ReLU())
        self.rest = nn.Linear(7, 10)

    def forward(self, x):
        return self.rest(self.three(self.two(self.one(x))).mean((2, 3)))


class ByHand(nn.Module):
    def __init__(self, blocks, pool):
        super().__init__()
        self.blocks, self.pool = blocks, pool

    def forward(self, x):
        two = self.blocks.two(self.blocks.one(x))
        return torch.cat([self.pool(self.blocks.three(two)).flatten(1), self.pool(two).flatten(1)], 1)


POOLS = {"mean": lambda t: t.mean((2, 3)), "max": lambda t: t.amax((2, 3)), None: lambda t: t}


@pytest.fixture(scope="module", params=POOLS, ids=str)
def networks(request):
    torch.manual_seed(0)
    blocks = Blocks().double().eval()
    x = torch.randn(24, 3, 21, 17, dtype=torch.float64)
    labels = np.array(["a", "b", "c"])[np.arange(24) % 3]
    features, _ = extract_features(blocks, [x], ["three", blocks.two], pool=request.param, progress=False)
    hand = ByHand(blocks, POOLS[request.param]).eval()
    with torch.no_grad():
        assert np.array_equal(features, hand(x).numpy())
    head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels)
    nets = PCASVMNet(blocks, head, ["three", blocks.two], pool=request.param), PCASVMNet(hand, head)
    return *(net.eval() for net in nets), x


@pytest.mark.parametrize("layer", ["one", "two", "three"])
@pytest.mark.parametrize("method", [ClosedFormGradCAM, ContributionCAM])
def test_maps_equal_those_of_concatenation_by_hand(networks, method, layer):
    net, hand, x = networks
    images, options = x[:4], {}
    if method is ContributionCAM:
        means = [mean_activations(n, [x], [name]) for n, name in ((net, layer), (hand, f"blocks.{layer}"))]
        options = [{"baseline": "mean", "mean": mean} for mean in means]
    else:
        options = [{}, {}]
    actual = method(net, [layer], **options[0]).explain(images, TARGETS)
    expected = method(hand, [f"blocks.{layer}"], **options[1]).explain(images, TARGETS)
    assert relative(actual.maps, expected.maps) < 1e-10
    assert relative(actual.values, expected.values) < 1e-12
    assert net.layer == ("three", "two")


def test_gradients_equal_autograds(networks):
    net, _, x = networks
    maps = ClosedFormGradCAM(net, ["one"]).explain(x[:3], [SVMTarget("b")])
    by_autograd = ClosedFormGradCAM(net, ["one"], jacobian="autograd").explain(x[:3], [SVMTarget("b")])
    assert relative(maps.maps * maps.log_scale.exp()[..., None, None], by_autograd.maps) < 1e-10


def test_what_is_no_list_of_layers(networks):
    net, _, _ = networks
    for layers in ([], ["one", ""]):
        with pytest.raises(ValueError, match="layer must be a layer or a list of layers"):
            PCASVMNet(net.backbone, net.head, layers)
    with pytest.raises(ValueError, match="has no layer 'four'"):
        PCASVMNet(net.backbone, net.head, ["one", "four"])
    assert PCASVMNet(net.backbone, net.head, ["one"]).layer == "one"
