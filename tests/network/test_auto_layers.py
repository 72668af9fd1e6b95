"""The trunk of a backbone: the last layer of every map size."""

from types import SimpleNamespace

import pytest
import torch
import torchvision
from reference import gap
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from towers import Tower

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, SVMTarget, fit_model
from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.features import FeatureSource
from pytorch_grad_cam_pcasvm.studio.cli.fitting import _check_maps

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


class Encoder(nn.Module):
    """Returns maps of several sizes, the images among them, as encoders for segmentation do; its blocks are in a list.

    The branch of the last one is bypassed by a skip.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 6, 3, 2, 1)])
        self.branch = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        maps = [x, self.stem(x)]
        for block in self.blocks:
            maps.append(block(maps[-1]).relu())
        return [*maps, maps[-1] + self.branch(maps[-1])]


class Segmenting(nn.Module):
    """A network for segmentation: features come from the end or the middle of its encoder, or are pooled."""

    def __init__(self, pooled):
        super().__init__()
        self.encoder, self.decoder, self.pooled = Encoder(), nn.Conv2d(6, 1, 1), pooled

    def forward(self, x):
        maps = self.encoder(x)
        return maps[-1].mean((2, 3)) if self.pooled else self.decoder(maps[-1])


@pytest.mark.parametrize(("pooled", "layer"), [(True, None), (False, "encoder.blocks.1"), (False, "encoder.branch")])
def test_layers_in_an_encoder_are_found_unless_something_bypasses_them(pooled, layer):
    torch.manual_seed(0)
    net, pool = Segmenting(pooled).eval(), None if layer is None else "mean"
    x, labels = torch.randn(24, 3, 16, 16), torch.arange(24) % 2
    found = find_last_blocks(net, FeatureSource.of(net, layer), x)
    last = "encoder.branch" if layer == "encoder.branch" else "encoder.blocks.1"
    assert found == ["encoder.stem", "encoder.blocks.0", last]
    model = fit_model(net, [(x + labels.reshape(-1, 1, 1, 1), labels)], SVC(), layer, pool=pool, progress=False)
    assert model.layers == (last,)
    assert gap(model.explain(x[:2])) < 1e-5


def test_a_model_without_a_layer_for_maps_is_told():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Tanh()).eval()
    x, labels = torch.randn(24, 3, 4, 4), torch.arange(24) % 2
    with pytest.warns(UserWarning, match="explain has no layer by default; name one"):
        model = fit_model(net, [(x, labels)], SVC(), progress=False)
    assert model.predict(x).shape == (24,)
    with pytest.raises(ValueError, match=r"no layer of flat:net was found.*name one, --layer NAME"):
        _check_maps(SimpleNamespace(layer=[], backbone="flat:net"), net, FeatureSource(), x)
    _check_maps(SimpleNamespace(layer=["0"], backbone=""), nn.Sequential(nn.Conv2d(3, 3, 1), net), FeatureSource(), x)


@pytest.mark.parametrize("pool", ["cls", "cls+mean"])
def test_maps_of_a_class_token_are_of_the_norm_before_its_last_attention(pool):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = Tower().eval(), torch.randn(12, 3, 16, 16)
    loader = [(x, torch.arange(12) % 2)]
    model = fit_model(
        net, loader, make_pipeline(StandardScaler(), SVC()), "norm", pool=pool, resample=0, progress=False
    )
    assert model.layers == ("blocks.1.norm1",)
    assert bool(model.explain(x[:3]).nu.all())


@pytest.mark.parametrize("layer", ["norm", ["blocks.0", "blocks.1"], "blocks.0"])
@pytest.mark.parametrize("pool", ["dense", "mean"])
def test_maps_of_patches_are_of_a_block_which_nothing_passes_by(layer, pool):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = Tower().eval(), torch.randn(12, 3, 16, 16)
    loader = [(x, torch.arange(12) % 2)]
    model = fit_model(net, loader, make_pipeline(StandardScaler(), SVC()), layer, pool=pool, resample=0, progress=False)
    assert model.layers == ({"norm": "blocks.1"}.get(str(layer), "blocks.0"),)
    maps = model.explain(x[:3], SVMTarget(at="max" if pool == "dense" else None))
    assert gap(maps) < 1e-4
    assert (maps.sums - maps.values + maps.baseline_values).abs().max() < 1e-4
    starts = model.explain(x[3:6], SVMTarget(at="max" if pool == "dense" else None)).baseline_values
    if pool == "mean" or layer == "blocks.0":  # where the start is the same for all
        assert torch.allclose(starts, maps.baseline_values, atol=1e-4)
    found = find_last_blocks(net, FeatureSource.of(net, layer), x)  # of all tokens
    assert all(name.endswith("norm1") for name in found)
