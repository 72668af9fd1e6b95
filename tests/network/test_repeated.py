"""A feature layer that runs several times in a pass: its call is named, or it is refused."""

import copy

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
    Head,
    PCASVMNet,
    atlas,
    export,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.network.layer_means import LayerMeans

X, Y = torch.rand(24, 3, 12, 12), np.arange(24) % 2


class Twice(nn.Module):
    """One pool, and one convolution under two names, each of which runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.SiLU())
        self.conv = self.same = nn.Conv2d(6, 6, 3, padding=1)
        self.pool = nn.AvgPool2d(2)
        self.last = nn.Linear(54, 4)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        x = self.pool(self.conv(self.stem(x)).tanh())
        return self.last(self.pool(self.same(x).tanh()).flatten(1))


def calls(net, x):
    first = net.pool(net.conv(net.stem(x)).tanh())
    return first.flatten(1), net.pool(net.conv(first).tanh()).flatten(1)


def net_at(call):
    backbone = Twice().eval()
    features, _ = extract_features(backbone, [X], f"pool#{call}", progress=False)
    head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, Y)
    return PCASVMNet(backbone, head, f"pool#{call}").eval(), features


USES = {
    "features": lambda net, layer: extract_features(net.backbone, [X], layer, progress=False),
    "pooled": lambda net, layer: extract_features(net.backbone, [X], layer, pool="mean", progress=False),
    "several": lambda net, layer: extract_features(net.backbone, [X], ["stem", layer], progress=False),
    "scores": lambda net, layer: PCASVMNet(net.backbone, net.head, layer)(X),
    "predictions": lambda net, layer: PCASVMNet(net.backbone, net.head, layer).predict(X),
    "maps": lambda net, layer: ClosedFormGradCAM(PCASVMNet(net.backbone, net.head, layer).eval(), ["stem"]).explain(X),
    "mean": lambda net, layer: mean_activations(net, [X], layer, progress=False),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("layer", ["pool", "module", "conv", "same"])
def test_a_layer_without_a_call_is_refused_every_time(use, layer):
    net, _ = net_at(2)
    given = net.backbone.pool if layer == "module" else layer
    name = {"module": "pool", "same": "conv"}.get(layer, layer)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"'{name}' runs 2 times in a f.*: name .*, '{name}#1' or '{name}#2'$"):
            USES[use](net, given)


class Often(nn.Module):
    """A convolution that runs so often behind another one."""

    def __init__(self, times):
        super().__init__()
        self.stem, self.conv, self.times = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), times

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.times):
            x = self.conv(x).tanh()
        return x.mean((2, 3))


CALLS = {
    1: "'conv'",
    2: "'conv#1' or 'conv#2'",
    3: "'conv#1', 'conv#2' or 'conv#3'",
    4: "'conv#1', 'conv#2', 'conv#3' or 'conv#4'",
    7: "'conv#1', 'conv#2', 'conv#3', ... 'conv#7'",
}


@pytest.mark.parametrize("jacobian", ["closed_form", "autograd"])
@pytest.mark.parametrize("times", CALLS)
def test_the_calls_are_listed(times, jacobian):
    backbone, runs = Often(times).eval(), "once" if times == 1 else f"{times} times"
    with pytest.raises(
        ValueError, match=f"'conv#9' does not run in .* Often; 'conv' runs {runs}: choose {CALLS[times]}$"
    ):
        extract_features(backbone, [X], "conv#9", progress=False)
    head = PCA(2).fit(extract_features(backbone, [X], progress=False)[0])
    for layer, message in (
        ("conv#9", f"before the network's output, where 'conv' runs {runs}: choose {CALLS[times]}$"),
        ("conv", f"'conv' runs {runs}: name one of its calls, {CALLS[times]}, or choose the block around it"),
    )[: 1 if times == 1 else 2]:
        with pytest.raises(ValueError, match=message):
            ClosedFormGradCAM(PCASVMNet(backbone, head).eval(), [layer], jacobian=jacobian).explain(X[:2])


def test_only_calls_before_the_features_are_listed():
    net = PCASVMNet(Twice().eval(), net_at(1)[0].head, "pool#1").eval()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"before the features, 'pool#1', where 'conv' runs once: choose 'conv'$"):
            ClosedFormGradCAM(net, ["conv#2"]).explain(X[:2])
    ClosedFormGradCAM(net, ["conv"]).explain(X[:2])


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])
def test_a_named_call_is_meant_everywhere(call, tmp_path):
    net, features = net_at(call)
    expected = calls(net.backbone, X)[call - 1]
    assert net.layer == f"pool#{call}"
    assert relative(torch.as_tensor(features), expected) < 1e-6
    assert relative(net(X).features, expected) < 1e-6
    mean = mean_activations(net, [X], f"pool#{call}", progress=False)
    assert relative(mean.flatten(), expected.mean(0)) < 1e-5
    for method in (ClosedFormGradCAM, ContributionCAM):
        maps = method(net, ["stem"], **({"baseline": "zero"} if method is ContributionCAM else {})).explain(X[:3])
        by_autograd = ClosedFormGradCAM(net, ["stem"], jacobian="autograd").explain(X[:3])
        assert relative(maps.values, by_autograd.values) < 1e-5
        if method is ClosedFormGradCAM:
            assert relative(maps.maps, by_autograd.maps) < 1e-4
    net.head.save(tmp_path / "head.safetensors")
    again = PCASVMNet(net.backbone, Head.load(tmp_path / "head.safetensors"), f"pool#{call}").eval()
    assert relative(again(X), net(X)) < 1e-12
    images = [(image, int(label)) for image, label in zip(X, Y, strict=True)]
    store = atlas.build(net, images, ["stem"], out=tmp_path / "atlas", progress=False)
    assert len(store) == len(X)
    made = export.program(ClosedFormGradCAM(net, ["stem"]), X[:2])
    assert made is not None


def test_what_fails_behind_the_layer_is_of_no_concern_and_what_follows_is_run_once():
    backbone = Twice().eval()
    backbone.last = nn.Linear(7, 4)  # which does not fit
    features, _ = extract_features(backbone, [X[:12], X[12:]], "stem", progress=False)
    assert relative(torch.as_tensor(features), backbone.stem(X).flatten(1).detach()) < 1e-6
    assert backbone.runs == 2  # what the look wrote is put back
    with pytest.raises(ValueError, match="'pool' runs 2 times"):
        extract_features(backbone, [X], "pool", progress=False)


def test_a_network_that_was_changed_is_asked_anew():
    backbone = Twice().eval()
    backbone.forward = lambda x: backbone.pool(backbone.stem(x)).flatten(1)
    extract_features(backbone, [X], "pool", progress=False)
    del backbone.forward
    with pytest.raises(ValueError, match="'pool' runs 2 times"):
        extract_features(backbone, [X], "pool", progress=False)


def test_the_first_pass_alone_goes_on_to_the_end():
    backbone, seen = copy.deepcopy(Twice().eval()), []
    backbone.last.register_forward_hook(lambda *_: seen.append(1))
    extract_features(backbone, [X[:4], X[4:8], X[8:12]], "stem", progress=False)
    assert seen == [1]


def test_layer_means_count_the_named_call_of_every_batch():
    backbone = Twice().eval()
    means = LayerMeans(backbone, ["stem", "conv", "conv#1", "conv#2"], X)
    with means.counting(), torch.no_grad():
        backbone(X[:12])
        backbone(X[12:])
    with torch.no_grad():
        first = backbone.conv(backbone.stem(X))
        second = backbone.conv(backbone.pool(first.tanh()))
    assert list(means.means) == ["stem", "conv#1", "conv#2"]
    for name, activations in {"conv#1": first, "conv#2": second}.items():
        assert relative(means.means[name], activations.mean(0)) < 1e-5
