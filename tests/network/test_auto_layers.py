"""The trunk of a backbone: the last layer of every map size."""

import pytest
import torch
import torchvision
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM
from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.features import FeatureSource

KNOWN = {
    "resnet18": ("avgpool", ["bn1", "layer1", "layer2", "layer3", "layer4"]),
    "mobilenet_v2": ("features", ["features.1", "features.3", "features.6", "features.13", "features"]),
    "squeezenet1_1": ("features", ["features.0", "features.4", "features.7", "features"]),
    "vit_b_16": (None, ["encoder.layers.encoder_layer_10.ln_1", "encoder.layers.encoder_layer_11.ln_1"]),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "vit" in n else n for n in KNOWN])
def test_last_blocks_of_known_networks(name):
    layer, expected = KNOWN[name]
    net = torchvision.models.get_model(name, weights=None).eval()
    found = find_last_blocks(net, FeatureSource.of(net, layer), torch.zeros(2, 3, 224, 224))
    assert found == expected


def test_features_from_the_middle_of_a_sequence_have_blocks_before_them():
    net = torchvision.models.squeezenet1_1(weights=None).eval()
    found = find_last_blocks(net, FeatureSource.of(net, "features.10"), torch.zeros(2, 3, 224, 224))
    assert found == ["features.0", "features.4", "features.7", "features.10"]


class Ways(nn.Module):
    """Two ways beside each other, then one; features are means."""

    def __init__(self):
        super().__init__()
        self.begin = nn.Conv2d(3, 4, 3, padding=1)
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.end = nn.Sequential(nn.Conv2d(8, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1))

    def forward(self, x):
        x = self.begin(x)
        return self.end(torch.cat([self.left(x), self.right(x)], 1)).mean((2, 3))


def test_ways_beside_each_other_are_no_trunk():
    net = Ways().eval()
    found = find_last_blocks(net, FeatureSource.of(net, None), torch.zeros(1, 3, 8, 8))
    assert found[-1] == "end"
    assert "left" not in found


def test_auto_takes_the_two_coarsest_sizes_for_contributions_and_the_coarsest_otherwise():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = Ways().double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    cam = ContributionCAM(net, "auto", baseline="zero")
    maps = cam.explain(x)
    assert maps.layers == tuple(find_last_blocks(net, FeatureSource.of(net, None), x)[-2:])
    assert torch.equal(maps.maps, ContributionCAM(net, list(maps.layers), baseline="zero").explain(x).maps)
    assert cam.explain(x[:, :, :4, :4]).maps.shape[2:] == (4, 4)
    assert [name for name, module in net.named_modules() if module in cam.target_layers] == list(maps.layers)
    last = ClosedFormGradCAM(net, "auto")
    assert last.explain(x).layers == ("end",)
    assert last(x).shape == (2, 8, 8)
    with pytest.raises(TypeError, match="or 'auto', got a str"):
        ContributionCAM(net, "end")


def test_a_network_without_positions_has_no_blocks():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).eval()
    with pytest.raises(ValueError, match="name the target layers"):
        ClosedFormGradCAM(net, "auto").explain(torch.zeros(1, 3, 2, 2))
