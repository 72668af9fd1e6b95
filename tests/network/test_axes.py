"""Layers whose shape can be read in several ways: what moves which number tells channels, positions and images."""

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
    ClosedFormHiResCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    extract_features,
)
from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.axes import UndecidedAxesError, UnknownAxesError, find_axes
from pytorch_grad_cam_pcasvm.network.features import FeatureSource, output_of
from pytorch_grad_cam_pcasvm.network.layout import find_sides, has_other_readings, lay_out_maps, list_readings


class Permute(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.permute(*self.dims)


class Mean(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.mean(self.dims)


class ChannelsLast(nn.Module):
    """A linear layer on channels that come last, as Keras and Swin have them."""

    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, x):
        return self.linear(x).tanh()


class Steps(nn.Module):
    """Spikes of an image in steps of time, (T, N, C, H, W)."""

    def __init__(self, steps):
        super().__init__()
        self.conv, self.steps = nn.Conv2d(3, 7, 3, stride=2, padding=1), steps

    def forward(self, x):
        return torch.stack([self.conv(x * (1 + step)).relu() for step in range(self.steps)])


class Electrodes(nn.Module):
    """Signals (N, 6, L), or (N, 6, L, 1), as a picture of electrodes that are added up: (N, 8, 1, T)."""

    def __init__(self):
        super().__init__()
        self.time, self.space, self.pool = nn.Conv2d(1, 4, (1, 9)), nn.Conv2d(4, 8, (6, 1)), nn.AvgPool2d((1, 8))

    def forward(self, x):
        x = x if x.dim() == 3 else x[..., 0]
        return self.pool(self.space(self.time(x.unsqueeze(1))).relu())


def seeded(*layers):
    torch.manual_seed(0)
    net = nn.Sequential(*[layer() if isinstance(layer, type) else layer for layer in layers]).double().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    return net


def fitted(net, x):
    features, _ = extract_features(net, [x], progress=False)
    return PCASVMNet(net, make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, torch.arange(len(x)) % 2)).eval()


def images(*shape, count=12):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_autograd(net, head, layer, x, to_maps):
    """Return the Grad-CAM of the first component, (N, H, W), by plain formulas."""
    leaf = net[: layer + 1](x).detach().requires_grad_()
    component = head(net[layer + 1 :](leaf).flatten(1)).values[2][:, 0].sum()
    (gradient,) = torch.autograd.grad(component, leaf)
    gradient, leaf = to_maps(gradient), to_maps(leaf.detach())
    return (gradient.flatten(2).mean(2)[..., None, None] * leaf).sum(1)


@pytest.mark.parametrize("channels", [6, 8, 9, 10, 24])
@pytest.mark.parametrize("side", [16, 32])
def test_channels_that_come_last_are_seen_whatever_their_number(channels, side):
    """Maps of 8x8 or 16x16 positions: as many channels, or nearly, and others."""
    net = seeded(nn.Conv2d(3, channels, 3, 2, 1), Permute(0, 2, 3, 1), ChannelsLast(channels), Mean(1, 2))
    x = images(3, side, side)
    model = fitted(net, x)
    with pytest.raises(ValueError, match=r"channels last|cannot be determined") as error:
        ClosedFormGradCAM(model, ["2"]).explain(x[:2], [PCATarget(0)])
    assert "reshape_transform" in str(error.value)
    maps = ClosedFormGradCAM(model, ["2"], "tokens").explain(x[:2], [PCATarget(0)])
    expected = by_autograd(net, model.head, 2, x[:2], lambda t: t.movedim(-1, 1))
    scaled = maps.maps[:, 0] * maps.log_scale.exp()[..., None]
    assert relative(scaled / scaled.norm(), expected / expected.norm()) < 1e-8


@pytest.mark.parametrize("channels", [8, 16])
def test_channels_that_come_first_are_taken_as_such_where_they_are_as_many_as_positions(channels):
    net = seeded(nn.Conv2d(3, channels, 3, 2, 1), nn.Tanh(), Mean(2, 3))
    x = images(3, 2 * channels, 2 * channels)
    maps = ClosedFormGradCAM(fitted(net, x), ["1"]).explain(x[:2], [PCATarget(0)])
    assert maps.maps.shape == (2, 1, channels, channels)
    layout = find_axes(net, lambda net, x: output_of(net, "1", x), x, net[:2](x).shape)
    assert (layout.batch, layout.channels, layout.grid) == (0, 1, (channels, channels))


@pytest.mark.parametrize("count", [2, 5, 6])
def test_steps_of_time_are_never_taken_for_images(count):
    net = seeded(Steps(5), Mean(0, 3, 4))
    x = images(3, 16, 16)
    model = fitted(net, x)
    for method in (ClosedFormGradCAM, ContributionCAM):
        with pytest.raises(
            ValueError, match=r"5 x 7 count neither images nor positions \(steps and channels\?\)"
        ) as error:
            method(model, ["0"]).explain(x[:count], [PCATarget(0)])
        assert "lambda t: t.transpose(0, 1).flatten(1, 2)" in str(error.value)
    maps = ClosedFormGradCAM(model, ["0"], lambda t: t.transpose(0, 1).flatten(1, 2)).explain(x[:count], [PCATarget(0)])
    assert maps.maps.shape == (count, 1, 8, 8)


def test_times_are_never_taken_for_channels():
    """As a signal, the last axis follows it; as a picture of one column, its positions would lie across."""
    net = seeded(Electrodes(), nn.Flatten())
    signals = images(6, 128)
    model = fitted(net, signals)
    maps = ClosedFormGradCAM(model, ["0"]).explain(signals[:2], [PCATarget(0)])
    expected = by_autograd(net, model.head, 0, signals[:2], lambda t: t)
    scaled = maps.maps[:, 0] * maps.log_scale.exp()[..., None]
    assert relative(scaled / scaled.norm(), expected / expected.norm()) < 1e-8
    assert find_last_blocks(net, FeatureSource.of(net, None), signals) == ["0"]  # the layer by default
    pictures = signals[..., None]
    with pytest.raises(ValueError, match=r"not in the picture's order.*pass reshape_transform=lambda t: t if"):
        ClosedFormGradCAM(model, ["0"]).explain(pictures[:2], [PCATarget(0)])
    named = ClosedFormGradCAM(model, ["0"], lambda t: t).explain(pictures[:2], [PCATarget(0)])
    assert relative(named.maps, maps.maps) < 1e-12


def test_positions_across_and_volumes():
    across = seeded(nn.Conv2d(3, 9, 3, 2, 1), Permute(0, 1, 3, 2), Mean(2, 3))
    x = images(3, 18, 18)
    with pytest.raises(ValueError, match="not in the picture's order"):
        ClosedFormGradCAM(fitted(across, x), ["1"]).explain(x[:2], [PCATarget(0)])
    volumes = seeded(nn.Conv3d(1, 6, 3, 2, 1), Permute(0, 2, 3, 4, 1), ChannelsLast(6), Mean(1, 2, 3))
    x = images(1, 12, 12, 12)
    with pytest.raises(ValueError, match="seem to have their channels last"):
        ClosedFormGradCAM(fitted(volumes, x), ["2"]).explain(x[:2], [PCATarget(0)])
    maps = ClosedFormGradCAM(fitted(volumes, x), ["2"], "tokens").explain(x[:2], [PCATarget(0)])
    assert maps.maps.shape == (2, 1, 6, 6, 6)


def test_what_nothing_moves_is_undecided():
    mixed = seeded(nn.Flatten(), nn.Linear(3 * 64, 64 * 8), nn.Unflatten(1, (8, 8, 8)))
    with pytest.raises(UndecidedAxesError, match=r"no axis alone of \(8, 8, 8\) follows the picture"):
        find_axes(mixed, lambda net, x: net(x), images(3, 8, 8), (12, 8, 8, 8))
    capsules = seeded(nn.Conv2d(3, 6, 3), nn.Unflatten(1, (2, 3)))
    with pytest.raises(UnknownAxesError, match="2 x 3 count neither images nor positions"):
        find_axes(capsules, lambda net, x: net(x), images(3, 8, 8), (12, 2, 3, 6, 6))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("seed", [15, 19, 35, 36])  # whose first noise does not tell
def test_a_few_channels_that_are_as_many_as_positions_are_told_by_more_noise(last, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 2, 3, 2, 1)).eval()
    net = nn.Sequential(net, Permute(0, 2, 3, 1)).eval() if last else net
    layout = find_axes(net, lambda backbone, x: backbone(x).detach(), torch.randn(2, 3, 16, 16), (2, 2, 2, 2))
    assert (layout.channels, layout.grid) == (3 if last else 1, (2, 2))


def test_numbers_that_depend_on_the_whole_picture_are_not_told_by_chance():
    for seed in range(10):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 4, 1)).eval()
        with pytest.raises(UndecidedAxesError, match=r"no axis alone of \(4, 4, 4\) follows the picture"):
            find_axes(net, lambda backbone, x: backbone(x).detach(), torch.randn(2, 3, 16, 16), (2, 4, 4, 4))


class LastConv(nn.Module):
    """A convolution of what has its channels last, as in Keras."""

    def __init__(self, *sizes):
        super().__init__()
        self.inner = nn.Conv2d(*sizes, stride=2, padding=1)

    def forward(self, x):
        return self.inner(x.permute(0, 3, 1, 2)).relu().permute(0, 2, 3, 1)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("sides", [(64, 64), (64, 80), (80, 64)])
def test_pictures_with_their_channels_last_have_positions_before_them(sides, pooled):
    """As many rows or columns as channels: HiResCAM is the gradient times the activations, summed over the channels."""
    torch.manual_seed(0)
    end = Mean(1, 2) if pooled else nn.Flatten()
    net = nn.Sequential(LastConv(3, 8, 3), LastConv(8, 16, 3), end).eval()
    x = torch.rand(20, *sides, 3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = net(x)
    pca = PCA(2, svd_solver="full").fit(features)
    cam = ClosedFormHiResCAM(PCASVMNet(net, make_pipeline(pca)).eval(), ["1"], "tokens")
    maps = cam.explain(x[:3], [PCATarget(1)]).maps[:, 0]
    activations = net[:2](x[:3]).detach().requires_grad_()
    component = (net[2](activations) @ torch.tensor(pca.components_[1], dtype=torch.float32)).sum()
    (gradient,) = torch.autograd.grad(component, activations)
    expected = (gradient * activations).sum(-1)
    assert maps.shape == expected.shape
    assert float((maps - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize(("image", "sides"), [
    ((1, 3, 24, 36), (2, 3)),
    ((1, 24, 36, 3), (1, 2)),
    ((1, 10, 40, 3), (1, 2)),
    ((1, 10, 41, 3), (2, 3)),  # a strip: channels, electrodes and times
    ((1, 4, 15, 3), (2, 3)),  # four channels
    ((1, 24, 36, 5), (2, 3)),
    ((1, 16, 4), (2,)),  # a signal of four times
    ((1, 8, 24, 24, 1), (1, 2, 3)),
])  # fmt: skip
def test_the_sides_of_a_picture_are_told_from_its_channels(image, sides):
    assert tuple(find_sides(image)) == sides


def test_an_output_lies_on_a_picture_by_its_proportions():
    image = (2, 3, 48, 72)
    (first,), (last,) = list_readings((2, 40, 8, 12), image), list_readings((2, 8, 12, 40), image)
    assert first == lay_out_maps((2, 40, 8, 12))
    assert (last.grid, last.dims, last.batch, last.channels) == ((8, 12), 4, 0, 3)
    assert [one.channels for one in list_readings((2, 12, 12, 12), (2, 3, 48, 48))] == [1, 3]
    assert list_readings((2, 8, 60), image) == list_readings((2, 5, 20, 4), image) == []
    assert not has_other_readings((2, 40, 8, 12), image)
    for shape in ((2, 8, 12, 40), (2, 5, 12, 30), (2, 8, 60)):
        assert has_other_readings(shape, image)
    assert has_other_readings((2, 12, 12, 12), (2, 3, 48, 48))
    assert not has_other_readings((2, 5, 1, 1), image)
