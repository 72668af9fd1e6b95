"""1-D signals: the numbers of the same network written with convolutions of pictures one pixel high."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from cams import METHODS
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    HotellingTarget,
    PCASVMNet,
    PCATarget,
    ResidualTarget,
    SignedMaps,
    SVMTarget,
    extract_features,
    mean_activations,
    recombined,
    smoothed,
)

torch.manual_seed(0)
X = torch.randn(5, 2, 48, dtype=torch.float64)
LABELS = np.array(["ectopic", "sinus", "sinus", "ectopic", "noise"])


class Conv(nn.Module):
    """Convolutions, a norm, pooling and a skip, of signals or of pictures one pixel high."""

    def __init__(self, dims):
        super().__init__()
        conv, norm, pool = (
            (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d) if dims == 1 else (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d)
        )
        kernel = (lambda size: size) if dims == 1 else (lambda size: (1, size))
        same = (lambda size: size) if dims == 1 else (lambda size: (0, size))
        self.stem = nn.Sequential(conv(2, 6, kernel(5), kernel(2), same(2)), norm(6), nn.ReLU())
        self.pool = pool(kernel(2))
        self.block = nn.Sequential(conv(6, 6, kernel(3), 1, same(1)), norm(6), nn.ReLU())
        self.last = nn.Sequential(conv(6, 8, kernel(3), 1, same(1)), nn.Softplus())
        self.dims = dims

    def forward(self, x):
        x = self.pool(self.stem(x))
        return self.last(x + self.block(x)).flatten(2).mean(2)


def pair():
    torch.manual_seed(1)
    line = Conv(1).double().eval().requires_grad_(False)
    for module in line.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    flat = Conv(2).double().eval().requires_grad_(False)
    for ours, theirs in zip(line.state_dict().items(), flat.state_dict().values(), strict=True):
        theirs.copy_(ours[1].reshape(theirs.shape))
    return line, flat


LINE, FLAT = pair()


def nets(classifier, layer=None, pool=None):
    """Return the network of signals, that of pictures, and their head."""
    x = torch.randn(60, 2, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows, _ = extract_features(LINE, [x], layer, pool=pool, progress=False)
    sums = rows[:, :3].sum(1)
    labels = np.array(["ectopic", "noise", "sinus"])[np.digitize(sums, np.quantile(sums, [1 / 3, 2 / 3]))]
    head = make_pipeline(StandardScaler(), PCA(3), classifier).fit(rows, labels)
    return [PCASVMNet(backbone, copy.deepcopy(head), layer, pool=pool).eval() for backbone in (LINE, FLAT)], x, rows


def same(maps, expected):
    """Compare maps of a signal with those of a picture one pixel high."""
    assert maps.maps.shape == (expected.maps.shape[0], expected.maps.shape[1], expected.maps.shape[-1])
    for name in ("maps", "opposite"):
        ours, theirs = getattr(maps, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs.squeeze(2)).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1e-30), name
    for name in ("values", "baseline_values", "nu", "log_scale"):
        ours, theirs = getattr(maps, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            size = expected.values.abs().max() if name == "baseline_values" else theirs.abs().max()
            assert (ours - theirs).abs().max() <= 1e-10 * size.clamp(min=1.0), name


TARGETS = [PCATarget(1), SVMTarget("sinus"), SVMTarget(), SVMTarget("noise", versus="ectopic"), HotellingTarget()]


@pytest.mark.parametrize("layer", ["stem", "block", "last"])
@pytest.mark.parametrize(
    "name", ["ClosedFormGradCAM", "ClosedFormLayerCAM", "ClosedFormAblationCAM", "ContributionCAM", "ShapCAM"]
)
def test_every_way_gives_the_maps_of_a_picture_one_pixel_high(name, layer):
    (line, flat), x, _ = nets(SVC(gamma=0.2))
    method, options = METHODS[name], [{}, {}]
    if method.has_start:
        options = [
            {"mean": mean_activations(net, [images], layer, progress=False)}
            for net, images in ((line, x), (flat, x.unsqueeze(2)))
        ]
    with method(line, [layer], **options[0]) as ours, method(flat, [layer], **options[1]) as theirs:
        maps, expected = ours.explain(X, TARGETS), theirs.explain(X.unsqueeze(2), TARGETS)
        same(maps, expected)
        if maps.baseline_values is not None:
            total = maps.maps.sum(2) * maps.log_scale.exp() + maps.baseline_values
            if maps.remainder is not None:
                total = total + maps.remainder * maps.log_scale.exp()
            assert (total - maps.values).abs().max() < 1e-9 * maps.values.abs().max()


def test_several_layers_are_joined():
    (line, flat), x, _ = nets(SVC(gamma=0.2))
    layers = ["stem", "block", "last"]
    maps = ContributionCAM(line, layers, mean=mean_activations(line, [x], layers, progress=False)).explain(X, TARGETS)
    expected = ContributionCAM(
        flat, layers, mean=mean_activations(flat, [x.unsqueeze(2)], layers, progress=False)
    ).explain(X.unsqueeze(2), TARGETS)
    assert maps.maps.shape == (5, 5, 24)
    same(maps, expected)


def test_as_in_pytorch_grad_cam():
    """Called, a method gives one map for each signal, at the signal's length."""
    (line, flat), _, _ = nets(SVC(gamma=0.2))
    targets = [SVMTarget("sinus")] * 5
    with ClosedFormGradCAM(line, ["block"]) as ours, ClosedFormGradCAM(flat, ["block"]) as theirs:
        ours_maps, expected = ours(X, targets), theirs(X.unsqueeze(2), targets)
    assert ours_maps.shape == (5, 48)
    assert np.abs(ours_maps - expected[:, 0]).max() < 1e-5


def test_saved_combined_and_smoothed(tmp_path):
    (line, _), x, _ = nets(SVC(gamma=0.2))
    mean = mean_activations(line, [x], "block", progress=False)
    maps = ContributionCAM(line, ["block"], mean=mean).explain(X)
    maps.save(tmp_path / "maps.safetensors")
    loaded = SignedMaps.load(tmp_path / "maps.safetensors")
    assert torch.equal(loaded.maps, maps.maps)
    assert maps.positive((48,)).shape == (5, 4, 48)
    assert torch.equal(SignedMaps.cat([maps[:2], maps[2:]]).maps, maps.maps)
    cam = ContributionCAM(line, ["block"], baseline="mean", mean=mean)  # one start for all targets
    again = recombined(cam.explain(X, [PCATarget(b) for b in range(3)]), line.head, [SVMTarget("sinus")])
    expected = cam.explain(X, [SVMTarget("sinus")])
    assert (again.maps - expected.maps).abs().max() < 1e-9 * expected.maps.abs().max()
    noisy = smoothed(cam, X, [SVMTarget("sinus")], samples=3, noise=0.1, seed=0)
    assert noisy.maps.shape == (5, 1, 12)


@pytest.mark.parametrize("pool", ["dense", ("dense", 3)])
def test_heads_at_every_position(pool):
    (line, flat), x, rows = nets(SVC(gamma=0.2), "block", pool)
    flat_rows, _ = extract_features(FLAT, [x.unsqueeze(2)], "block", pool="dense", progress=False)
    assert rows.shape == (60 * 12, 6)
    if pool == "dense":
        assert np.abs(rows - flat_rows).max() < 1e-12
        targets = [SVMTarget("sinus", at=(3,)), PCATarget(0, at="max"), ResidualTarget(at=(5,)), SVMTarget()]
        places = [SVMTarget("sinus", at=(0, 3)), PCATarget(0, at="max"), ResidualTarget(at=(0, 5)), SVMTarget()]
        for layer in ("block", "stem"):
            mean = mean_activations(line, [x], layer, progress=False)
            mean2 = mean_activations(flat, [x.unsqueeze(2)], layer, progress=False)
            same(
                ContributionCAM(line, [layer], mean=mean).explain(X, targets),
                ContributionCAM(flat, [layer], mean=mean2).explain(X.unsqueeze(2), places),
            )
    output = line(X)
    assert output.shape == (5, 3, 12)
    assert output.components.shape == (5, 3, 12)
    own, _ = extract_features(LINE, [X], "block", pool=pool, progress=False)
    assert np.array_equal(line.predict(X).ravel(), line.head.labels(line.head(torch.from_numpy(own))))
    bank = PCASVMNet(LINE, NearestNeighbors(n_neighbors=2).fit(rows), "block", pool=pool).eval()
    assert bank.anomaly_map(X).shape == (5, 12)


def test_masks_of_signals_label_positions():
    truth = torch.zeros(5, 48, dtype=torch.long)
    truth[:, 8:20] = 1
    rows, labels, places = extract_features(LINE, [(X, truth)], "block", pool="dense", places=True, progress=False)
    assert rows.shape == (60, 6)
    assert labels.reshape(5, 12)[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert places[-1].tolist() == [4, 11]


def test_a_pool_of_positions_takes_the_channels_that_come_first():
    rows, _ = extract_features(LINE, [X], "block", pool="mean", progress=False)
    with torch.no_grad():
        expected = LINE.block(LINE.pool(LINE.stem(X))).mean(2)
    assert np.abs(rows - expected.numpy()).max() < 1e-12


class Transformer(nn.Module):
    """Patches of a signal as tokens behind a class token."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Conv1d(2, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )

    def forward(self, x):
        x = self.embed(x).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x)
        return x[:, 0]


def test_tokens_of_signals():
    torch.manual_seed(0)
    net = Transformer().double().eval().requires_grad_(False)
    x = torch.randn(40, 2, 48, dtype=torch.float64)
    rows, _ = extract_features(net, [x], progress=False)
    labels = (rows[:, 0] > np.median(rows[:, 0])).astype(int)
    whole = PCASVMNet(net, make_pipeline(PCA(3), SVC()).fit(rows, labels)).eval()
    mean = mean_activations(whole, [x], "blocks.0", progress=False)
    maps = ContributionCAM(whole, ["blocks.0"], "tokens", mean=mean).explain(X)
    assert maps.maps.shape == (5, 4, 12)
    total = maps.maps.sum(2) + maps.baseline_values + (0 if maps.remainder is None else maps.remainder)
    assert (total - maps.values).abs().max() < 1e-9
    patches, _ = extract_features(net, [x], "blocks.0", pool="dense", progress=False)
    with torch.no_grad():
        tokens = net.blocks[0](torch.cat([net.token.expand(40, -1, -1), net.embed(x).mT], 1))
    assert np.abs(patches - tokens[:, 1:].flatten(0, 1).numpy()).max() < 1e-12


def test_one_signal_or_one_picture_is_no_batch():
    picture = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    rows, _ = extract_features(picture, [torch.randn(9, 3, 8, 8)], progress=False)
    net = PCASVMNet(picture, make_pipeline(PCA(2), SVC()).fit(rows, np.arange(9) % 2)).eval()
    with pytest.raises(ValueError, match=r"use x.unsqueeze\(0\)"):
        ClosedFormGradCAM(net, ["0"]).explain(torch.randn(3, 8, 8))
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Tanh()).eval()
    rows, _ = extract_features(flat, [torch.randn(9, 1, 8, 8)], progress=False)
    net = PCASVMNet(flat, make_pipeline(PCA(2), SVC()).fit(rows, np.arange(9) % 2)).eval()
    with pytest.raises(ValueError, match=r"use x.unsqueeze\(0\)"):
        net.predict(torch.randn(3, 8, 8))


class Waves(nn.Module):
    """Takes raw waves (N, L), as networks of sound do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 5, 5, 2)

    def forward(self, x):
        return self.conv(x.unsqueeze(1)).tanh().mean(2)


def test_waves_without_a_channel_axis():
    net, x = Waves().eval(), torch.randn(20, 40)
    rows, _ = extract_features(net, [x], progress=False)
    net = PCASVMNet(net, make_pipeline(PCA(2), SVC()).fit(rows, np.arange(20) % 2)).eval()
    assert net.predict(x).shape == (20,)
    maps = ClosedFormGradCAM(net, ["conv"], lambda t: t.unsqueeze(2)).explain(x[:3])
    assert maps.maps.shape == (3, 3, 1, 18)


@pytest.mark.parametrize("layers", ["convolutions", "transformer", "LSTM"])
@pytest.mark.parametrize("width", [8, 16])
def test_as_many_channels_as_positions_are_not_mixed_up(layers, width):
    """(N, T, T) says nothing of which axis is which: where the signal changes does."""
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(6, 2, 4 * width)
        if layers == "convolutions":
            net = nn.Sequential(nn.Conv1d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv1d(4, width, 3, 2, 1), nn.ReLU()).eval()
            expected = net(x).mT
        else:
            net = Tokens(width, layers == "LSTM").eval()
            expected = net(x)
        rows, _ = extract_features(net, [x], pool="dense", progress=False)
        assert np.abs(rows - expected.detach().flatten(0, 1).numpy()).max() < 1e-6


class Tokens(nn.Module):
    """Patches of a signal as tokens, (N, T, T)."""

    def __init__(self, width, recurrent):
        super().__init__()
        self.embed = nn.Conv1d(2, width, 4, 4)
        self.mix = (
            nn.LSTM(width, width, batch_first=True)
            if recurrent
            else nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        )

    def forward(self, x):
        x = self.mix(self.embed(x).mT)
        return x[0] if isinstance(x, tuple) else x


def test_tokens_without_a_transform_are_refused():
    torch.manual_seed(0)
    net = Transformer().double().eval().requires_grad_(False)
    x = torch.randn(40, 2, 48, dtype=torch.float64)
    rows, _ = extract_features(net, [x], progress=False)
    whole = PCASVMNet(
        net, make_pipeline(PCA(3), SVC()).fit(rows, (rows[:, 0] > np.median(rows[:, 0])).astype(int))
    ).eval()
    with pytest.raises(ValueError, match="pass reshape_transform='tokens'"):
        ClosedFormGradCAM(whole, ["blocks.0"]).explain(X)


class Behind(nn.Module):
    """Convolutions of short signals, and what makes (N, C, L) or (N, L, C) of what they give."""

    def __init__(self, seed, behind):
        super().__init__()
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        channels = [int(random.integers(1, 5)), *map(int, random.integers(2, 13, random.integers(1, 4)))]
        parts = []
        for before, after in pairwise(channels):
            kernel, stride = int(random.integers(1, 7)), int(random.integers(1, 3))
            parts += [nn.Conv1d(before, after, kernel, stride, kernel // 2), nn.ReLU(inplace=bool(random.integers(2)))]
            parts += [nn.MaxPool1d(2, ceil_mode=True)] * int(random.integers(5) == 0)
        self.body, self.behind = nn.Sequential(*parts), behind
        self.rnn = nn.GRU(channels[-1], channels[-1], batch_first=True)
        self.gate = nn.Conv1d(1, 1, 3, padding=1)
        inputs = (torch.randn(5, channels[0], int(length)) for length in random.permutation(np.arange(8, 120)))
        with torch.no_grad():
            self.x = next(x for x in inputs if 3 <= self.body(x).shape[2] <= 16)

    def forward(self, x):
        if self.behind == "no_grad":
            with torch.no_grad():
                return self.body(x) + 0
        x = self.body(x)
        if self.behind == "gate":  # a convolution whose positions are channels
            return x * self.gate(x.mean(2, keepdim=True).mT).mT.sigmoid()
        if self.behind == "GRU":
            return self.rnn(x.mT)[0]
        return x.mT.tanh() if self.behind == "transposed" else x


@pytest.mark.parametrize("behind", [None, "no_grad", "gate", "transposed", "GRU"])
def test_short_signals(behind):
    """Modules say which axis is which before chance does, whatever the weights."""
    for seed in range(10):
        net = Behind(seed, behind).eval()
        rows, _ = extract_features(net, [net.x], pool="mean", progress=False)
        with torch.no_grad():
            expected = net(net.x).mean(1 if behind in ("transposed", "GRU") else 2)
        np.testing.assert_allclose(rows, expected, atol=1e-6, err_msg=str(seed))


@pytest.mark.parametrize("length", [3, 7])
def test_signals_behind_units_that_are_never_active(length):
    net = nn.Sequential(nn.Conv1d(2, 5, 3, padding=1), nn.ReLU()).eval()
    nn.init.constant_(net[0].bias, -100.0)
    rows, _ = extract_features(net, [torch.randn(4, 2, length)], pool="mean", progress=False)
    assert rows.shape == (4, 5)
    assert not rows.any()


class Mixed(nn.Module):
    """Mixes positions and channels, so that neither axis lies along the signal; one of them is shuffled."""

    def __init__(self, how, count=8):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.mix = nn.Conv1d(2, count, 4, 4), nn.Linear(10 * count, 10 * count)
        self.how, self.order = how, torch.randperm(10)

    def forward(self, x):
        x = self.conv(x)
        return self.mix(x.flatten(1)).view_as(x) if self.how == "linear" else x[:, :, self.order]


@pytest.mark.parametrize("how", ["linear", "shuffled"])
def test_outputs_that_do_not_lie_along_the_signal_are_refused_with_advice_that_keeps_all_channels(how):
    net, x = Mixed(how).eval(), torch.randn(20, 2, 40)
    with torch.no_grad():
        expected = net(x)
    with pytest.raises(ValueError, match=r"no position follows the signal; pass a function as pool") as error:
        extract_features(net, [x], pool="mean", progress=False)
    assert "pool=lambda t: t.mean(2) if it is (N, C, L), or pool=lambda t: t.mean(1)" in str(error.value)
    for axis, pool in ((2, lambda t: t.mean(2)), (1, lambda t: t.mean(1))):
        rows, _ = extract_features(net, [x], pool=pool, progress=False)
        np.testing.assert_allclose(rows, expected.mean(axis), atol=1e-6)


@pytest.mark.parametrize("length", [9, 40])
def test_signals_without_a_channel_axis_are_given_one(length):
    """The way out that the message names: the same values, and maps that add up."""
    torch.manual_seed(0)
    net, x = Waves().double().eval(), torch.randn(20, length, dtype=torch.float64)
    rows, _ = extract_features(net, [x], progress=False)
    pipeline = make_pipeline(PCA(2), SVC()).fit(rows, np.arange(20) % 2)
    way = (
        r"pass x\.unsqueeze\(1\), and if the network adds the channel itself, nn\.Sequential\(nn\.Flatten\(\), network"
    )
    with pytest.raises(ValueError, match=r"signals of shape \(20, \d+\) have no channel axis.*" + way):
        ContributionCAM(PCASVMNet(net, pipeline).eval(), ["conv"]).explain(x, SVMTarget(1))
    with pytest.raises(ValueError, match=way):
        extract_features(net, [x], "conv", pool="mean", progress=False)
    whole = PCASVMNet(nn.Sequential(nn.Flatten(), net), pipeline).eval()
    maps = ContributionCAM(whole, ["1.conv"], baseline="zero").explain(x.unsqueeze(1), SVMTarget(1))
    assert maps.maps.shape == (20, 1, (length - 3) // 2)
    np.testing.assert_allclose(maps.values[:, 0], pipeline.decision_function(rows), atol=1e-12)
    sums = (maps.maps * maps.log_scale.exp()[..., None]).sum(2) + maps.baseline_values
    assert (sums - maps.values).abs().max() < 1e-12


class Recurrent(nn.Module):
    """Takes (N, L) in pieces, which a layer without layers in it reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = nn.GRU(8, 6, batch_first=True), nn.Identity()

    def forward(self, x):
        return self.out(self.rnn(x.unflatten(1, (-1, 8)))[0])[:, -1]


def test_recurrent_layers_of_signals_without_a_channel_axis():
    net, x = nn.Sequential(nn.Flatten(), Recurrent()).double().eval(), torch.randn(20, 1, 48, dtype=torch.float64)
    rows, _ = extract_features(net, [x], progress=False)
    pipeline = make_pipeline(PCA(2), SVC()).fit(rows, np.arange(20) % 2)
    whole = PCASVMNet(net, pipeline).eval()
    with pytest.raises(
        TypeError, match=r"returns a tuple, not a tensor: pass its tensor on through an nn.Identity\(\)"
    ):
        ContributionCAM(whole, ["1.rnn"]).explain(x)
    with pytest.raises(ValueError, match=r"lambda t: t\.mT if it is tokens \(N, L, C\)"):
        ContributionCAM(whole, ["1.out"], "tokens").explain(x)
    maps = ContributionCAM(whole, ["1.out"], lambda t: t.mT, baseline="zero").explain(x, SVMTarget(1))
    assert maps.maps.shape == (20, 1, 6)
    assert not maps.maps[:, :, :-1].any()  # the head reads the last piece alone
    np.testing.assert_allclose(maps.values[:, 0], pipeline.decision_function(rows), atol=1e-12)


def test_places_of_signals_that_are_no_whole_strides():
    """A raw IndexError in between 0.4 and now: the grid of 7 positions lies on 26 numbers."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv1d(2, 5, 3, 2, 1), nn.ReLU(), nn.Conv1d(5, 4, 3, 2, 1)).eval(), torch.randn(6, 2, 26)
    rows, _ = extract_features(net, [x], pool="mean", progress=False)
    with torch.no_grad():
        np.testing.assert_allclose(rows, net(x).mean(2), atol=1e-6)
