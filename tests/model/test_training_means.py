"""Means of the training images that a model keeps: where contributions start at inner layers, position by position."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from reference import relative
from safetensors.torch import load_file
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    fit_model,
    load_model,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.head import storage

HEAD = make_pipeline(StandardScaler(), PCA(3, svd_solver="full"), SVC())
LABELS = torch.arange(24) % 3
TARGETS = [PCATarget(0), PCATarget(2), SVMTarget(1)]


class FunctionalPool(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return F.adaptive_avg_pool2d(x, self.size).flatten(1)


def network(*behind):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(6, 10, 3, padding=1), nn.ReLU(), *behind
    ).eval()  # fmt: skip


def images(side, count=24):
    noise = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(side))
    place = torch.linspace(0, 1, side)  # what is in a picture depends on the position
    return noise + LABELS[:count].reshape(-1, 1, 1, 1) * place + place[:, None]


def fitted(net, *sides, head=HEAD, **options):
    batches = [(images(side), LABELS) for side in sides]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the features are the output of")
        return fit_model(net, batches, head, layers=["1", "3"], progress=False, **options)


@pytest.mark.parametrize(
    ("behind", "layer"),
    [
        ((), "3"),
        ((nn.AdaptiveAvgPool2d(4),), "3"),
        ((nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(160, 9)), "3"),
        ((nn.AdaptiveAvgPool2d(1), nn.Flatten()), "3"),
        ((nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 9)), "3"),
    ],
    ids=["flattened maps", "pooled to a grid", "behind a dense layer", "pooled", "pooled, behind a dense layer"],
)
def test_component_maps_are_0_in_the_mean_over_the_training_images(behind, layer):
    """Every step behind the layer is affine, and so are components: F - mean(F) is 0 in the mean, at each position."""
    x, net = images(16), network(*behind)
    model = fitted(net, 16)
    maps = model.explain(x, [PCATarget(0), PCATarget(1)], layers=[layer])
    assert float(maps.maps.mean(0).abs().max()) < 1e-6 * float(maps.maps.abs().max())
    with torch.no_grad():
        activations, features = net[:4](x), net(x).flatten(1)
    scaler, pca = clone(HEAD[0]).fit(features), None
    pca = clone(HEAD[1]).fit(scaler.transform(features))
    assert relative(maps.values.mT, (pca.transform(scaler.transform(features)).T[:2])) < 1e-5
    # By autograd: a component is affine in the activations, so that its map is gradient times difference.
    leaf = activations.clone().requires_grad_()
    scaled = (net[4:](leaf).flatten(1) - torch.tensor(scaler.mean_)) / torch.tensor(scaler.scale_)
    component = (scaled @ torch.tensor(pca.components_[1])).sum()
    (gradient,) = torch.autograd.grad(component, leaf)
    assert relative(maps.maps[:, 1], (gradient * (activations - activations.mean(0))).sum(1)) < 1e-5


@pytest.mark.parametrize("baseline", ["neutral", "mean"])
def test_a_pooled_start_varies_over_positions_as_the_training_mean_and_has_the_means_of_the_head(baseline):
    x, net = images(16), network()
    model = fitted(net, 16, pool="mean")
    maps = model.cam(layers=["3"], baseline=baseline).explain(x, TARGETS)
    assert relative(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values) < 1e-5
    with torch.no_grad():
        mean = net(x).mean(0)
    asked = slice(2 if baseline == "neutral" else 3)  # a decision starts on its boundary
    given = model.cam(layers=["3"], baseline=mean).explain(x, TARGETS)
    assert relative(given.maps[:, asked], maps.maps[:, asked]) < 1e-5
    by_hand = PCASVMNet(net, model.net.head, pool="mean").eval()
    by_hand.head.training_set.means.clear()
    without = ContributionCAM(by_hand, ["3"], baseline=baseline).explain(x, TARGETS)
    assert float(without.maps[:, 0].mean(0).abs().max()) > 0.1 * float(without.maps[:, 0].abs().max())
    passed = ContributionCAM(by_hand, ["3"], baseline=baseline, mean=mean).explain(x, TARGETS)
    assert relative(passed.maps, maps.maps) < 1e-5
    larger = images(20, 3)  # has other positions: the head's means are at all of them
    assert (
        relative(
            ContributionCAM(by_hand, ["3"], baseline=baseline, mean=mean).explain(larger, TARGETS).maps,
            ContributionCAM(by_hand, ["3"], baseline=baseline).explain(larger, TARGETS).maps,
        )
        < 1e-5
    )


def test_means_are_those_of_mean_activations_and_may_be_passed():
    net = network(nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model = fitted(net, 16)
    for name, mean in model.means.items():
        assert relative(mean, mean_activations(net, [images(16)], name, progress=False)) < 1e-6
    given = ContributionCAM(model.net, ["1"], mean=model.means["1"]).explain(images(16, 3), TARGETS)
    assert torch.equal(given.maps, model.explain(images(16, 3), TARGETS, layers=["1"]).maps)


POOLED = [
    (nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    (FunctionalPool(1), nn.Linear(10, 5)),
    (nn.Conv2d(10, 5, 3, padding=1), nn.AdaptiveMaxPool2d(1), nn.Flatten()),
]
APART = [
    (nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(90, 5)),
    (FunctionalPool(2),),
    (nn.AdaptiveAvgPool2d(2),),
]


@pytest.mark.parametrize("behind", POOLED, ids=["module", "function", "largest"])
@pytest.mark.parametrize(("sides", "side"), [((16, 24), 16), ((16, 24), 20), ((16,), 20)])
def test_of_several_sizes_heads_on_pooled_features_start_at_the_means_of_channels(behind, sides, side):
    net = network(*behind)
    model = fitted(net, *sides)
    maps = model.explain(images(side, 3), TARGETS, layers=["1"])
    with torch.no_grad():
        by_image = torch.cat([net[:2](images(one)).mean((2, 3)) for one in sides])
    kept = model.means["1"].double().mean((1, 2)).float()  # a search would make more of the last digit of others
    assert model.means["1"].shape[1:] == ((1, 1) if len(sides) > 1 else (sides[0] // 2, sides[0] // 2))
    assert relative(kept, by_image.mean(0)) < 1e-6
    spread = kept.reshape(-1, 1, 1).expand(6, side // 2, side // 2)
    expected = ContributionCAM(model.net, ["1"], mean=spread).explain(images(side, 3), TARGETS)
    assert relative(maps.maps, expected.maps) < 1e-5


@pytest.mark.parametrize("behind", APART, ids=["behind a dense layer", "function", "flattened"])
@pytest.mark.parametrize(("sides", "side"), [((16, 24), 16), ((16,), 20)], ids=["in training", "now"])
def test_of_several_sizes_heads_on_positions_are_refused_with_ways_out(behind, sides, side):
    net, x = network(*behind), images(side, 3)
    model = fitted(net, *sides)
    with pytest.raises(ValueError, match="Their training mean cannot be made of it") as error:
        model.explain(x, TARGETS, layers=["1"])
    for way in ("bring all images to one size", "mean=mean_activations(net, loader, layer)", "baseline='zero'"):
        assert way in str(error.value)
    mean = mean_activations(net, [images(side)], "1", progress=False)
    for cam in (model.cam(layers=["1"], mean=mean), model.cam(layers=["1"], baseline="zero")):
        maps = cam.explain(x, TARGETS)
        sums = maps.maps.sum((2, 3)) + maps.baseline_values
        assert relative(sums, maps.values) < 1e-5
    assert fitted(net, side).explain(x, TARGETS, layers=["1"]).maps.isfinite().all()


@pytest.mark.slow
def test_programs_start_at_the_means_of_channels():
    export = pytest.importorskip("pytorch_grad_cam_pcasvm.export")
    net, x = network(*POOLED[0]), images(16, 3)
    cam = fitted(net, 16, 24).cam(layers=["1"])
    program = export.program(cam, x[:2], [PCATarget(0)])
    assert relative(program.module()(x)["maps"], cam.explain(x, [PCATarget(0)]).maps) < 1e-4


def test_means_serve_layers_that_a_function_lays_out():
    net, x = network(nn.AdaptiveAvgPool2d(4), nn.Flatten()), images(16, 3)
    model = fitted(net, 16)
    usual = model.explain(x, TARGETS, layers=["1"])
    named = model.cam(layers=["1"], reshape_transform=lambda t: t).explain(x, TARGETS)
    assert relative(named.maps, usual.maps) < 1e-6


def test_of_pictures_in_two_shapes_heads_on_positions_are_refused_at_each_layer():
    """Tapes of two sizes may differ in values that lead nowhere."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.SiLU()),
        *(nn.Conv2d(12, 6, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
    ).eval()
    x, other = torch.randn(24, 3, 32, 40), torch.randn(24, 3, 48, 32)
    with pytest.warns(UserWarning, match="24 features of 48 photos"):
        model = fit_model(net, [(x, LABELS), (other, LABELS)], HEAD, layer="7", layers=["1", "4", "6"], progress=False)
    for layer in ("1", "4", "6"):
        with pytest.raises(ValueError, match="Their training mean cannot be made of it"):
            model.explain(x[:2], TARGETS, layers=[layer])


def test_features_position_by_position_are_told_with_their_number():
    told = partial(pytest.warns, UserWarning)
    batches = [(images(16), LABELS)]
    with told(match=r"640 features of 24 photos.*pool=\"mean\" has one feature a channel"):
        fit_model(network(), batches, HEAD, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_model(network(), batches, HEAD, pool="mean", progress=False)
        fit_model(network(nn.AdaptiveAvgPool2d(1)), batches, HEAD, progress=False)


def test_means_by_channel_of_older_files_are_left_out_and_said(tmp_path):
    model, path, x = fitted(network(), 16), tmp_path / "model.safetensors", images(16, 3)
    model.net.head.resamples = None
    model.save(path)
    metadata, tensors = storage.read(path, "", [storage.MODEL])
    by_channel = {
        name.replace("activations/", "means/"): tensor.mean((1, 2), keepdim=True)[..., 0] for name, tensor in
        tensors.items() if name.startswith("activations/")
    }  # fmt: skip
    assert {"activations/1", "activations/3"} < set(load_file(path))
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("activations/")}
    storage.write(path, others | by_channel, metadata)
    with pytest.warns(UserWarning, match="one mean a channel of the layers 1, 3"):
        old = load_model(path, network())
    assert not old.means
    with pytest.warns(BaselineWarning):
        maps = old.explain(x, TARGETS, layers=["1"])
    without = PCASVMNet(network(), old.net.head, pool=old.net.pool).eval()
    with pytest.warns(BaselineWarning):
        expected = ContributionCAM(without, ["1"]).explain(x, TARGETS)
    np.testing.assert_allclose(maps.maps, expected.maps, rtol=1e-6, atol=1e-9)
