"""1-D signals: the numbers of the same network written with convolutions of pictures one pixel high."""

import copy

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
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
    methods,
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
@pytest.mark.parametrize("name", methods.__all__)
def test_every_method_gives_the_maps_of_a_picture_one_pixel_high(name, layer):
    (line, flat), x, _ = nets(SVC(gamma=0.2))
    method, options = getattr(methods, name), [{}, {}]
    few = {"samples": 4} if name == "ShapCAM" else {}
    if issubclass(method, ContributionCAM) or name in ("ShapCAM", "LIFTCAM"):
        options = [
            {"mean": mean_activations(net, [images], layer, progress=False)}
            for net, images in ((line, x), (flat, x.unsqueeze(2)))
        ]
    with method(line, [layer], **options[0], **few) as ours, method(flat, [layer], **options[1], **few) as theirs:
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


@pytest.mark.parametrize("classifier", [RandomForestClassifier(10, random_state=0), LogisticRegression()])
def test_other_heads(classifier):
    (line, flat), x, _ = nets(classifier)
    same(
        ContributionCAM(line, ["block"], mean=mean_activations(line, [x], "block", progress=False)).explain(X),
        ContributionCAM(
            flat, ["block"], mean=mean_activations(flat, [x.unsqueeze(2)], "block", progress=False)
        ).explain(X.unsqueeze(2)),
    )


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
    refused = 0
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(6, 2, 4 * width)
        if layers == "convolutions":
            net = nn.Sequential(nn.Conv1d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv1d(4, width, 3, 2, 1), nn.ReLU()).eval()
            expected = net(x).mT
        else:
            net = Tokens(width, layers == "LSTM").eval()
            expected = net(x)
        try:
            rows, _ = extract_features(net, [x], pool="dense", progress=False)
        except ValueError:  # refused rather than guessed
            refused += 1
            continue
        assert np.abs(rows - expected.detach().flatten(0, 1).numpy()).max() < 1e-6
    assert refused <= 2


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
