"""TorchScript on the path: after runs with gradients it has a graph of its own, which detaches what it is given."""

import warnings

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    AutogradFallbackWarning,
    ClosedFormHiResCAM,
    ContributionCAM,
    NoClosedFormError,
    PCASVMNet,
    PCATarget,
)

SWISH = "def function(x): return x * torch.sigmoid(x) + 0.1\n"
OWN_DETACH = "def function(x): return x * x.detach()\n"


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x) + 0.1


class Skip(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class OwnDetach(nn.Module):
    def forward(self, x):
        return x * x.detach().sigmoid()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + torch.tanh(self.conv(x))


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


class Keyword(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x=torch.tanh(x))


RUNS = {"none": (), "with gradients": (True,) * 3, "both": (True, False, True, False, False), "without": (False,) * 3}


def explained(inner, runs, method, **options):
    """Return the network and the map of a component by a method, and the activations."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), inner, nn.Conv2d(4, 5, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    net = net.double().eval()
    x = torch.randn(20, 2, 8, 8, dtype=torch.float64)
    for gradients in RUNS[runs]:
        with torch.set_grad_enabled(gradients):
            net(x[:3])
    with torch.no_grad():
        features = net(x).numpy()
    head = make_pipeline(PCA(3), SVC()).fit(features, np.arange(20) % 2)
    maps = method(PCASVMNet(net, head).eval(), ["0"], **options).explain(x[:2], [PCATarget(0)])
    return net, head[0], maps, x[:2]


def expected(net, pca, x):
    """Return the map by autograd, which knows TorchScript's own graphs."""
    leaf = net[0](x).detach().requires_grad_()
    component = (net[1:](leaf) - torch.tensor(pca.mean_)) @ torch.tensor(pca.components_[0])
    (gradient,) = torch.autograd.grad(component.sum(), leaf)
    return (gradient * leaf).sum(1).detach()


MODULES = {
    "module": lambda: scripted(Swish()),
    "beside a skip": lambda: Skip(scripted(Swish())),
    "with its skip": lambda: scripted(Skip(Swish())),
    "with a detach of its own": lambda: Skip(scripted(OwnDetach())),
    "by keyword": lambda: Keyword(scripted(Swish())),
    "with weights": lambda: scripted(Weighted()),
    "traced": lambda: torch.jit.trace(Weighted().double(), torch.randn(1, 4, 6, 6, dtype=torch.float64)),
}


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("case", MODULES)
def test_scripted_modules_are_explained_as_before_their_first_run(case, runs):
    net, pca, maps, x = explained(MODULES[case](), runs, ClosedFormHiResCAM)
    assert relative(maps.maps[:, 0], expected(net, pca, x)) < 1e-12
    _, _, sums, _ = explained(MODULES[case](), runs, ContributionCAM, baseline="zero")
    assert relative(sums.sums, sums.values - sums.baseline_values) < 1e-12


def as_forward(inner):
    module = nn.Module()
    module.forward = inner.function
    return module


class Function(nn.Module):
    """Calls a function that is scripted anew, as what it has run with is kept with it."""

    def __init__(self, source):
        super().__init__()
        self.function = torch.jit.CompilationUnit(source).function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize(
    "beside",
    [lambda inner: inner, Skip, lambda inner: Skip(as_forward(inner))],
    ids=["alone", "beside a skip", "as the forward of a module"],
)
def test_scripted_functions_are_right_or_refused_by_name(beside, runs):
    def maps_of():
        return explained(beside(Function(SWISH)), runs, ClosedFormHiResCAM)

    if runs in ("none", "without"):
        net, pca, maps, x = maps_of()
        assert relative(maps.maps[:, 0], expected(net, pca, x)) < 1e-12
        return
    with pytest.raises(NoClosedFormError, match=r"a function scripted by torch\.jit is on the path") as error:
        maps_of()
    assert "call the function without torch.jit.script" in str(error.value)
    assert "torch.jit.script(module)" in str(error.value)
    with pytest.warns(AutogradFallbackWarning):
        net, pca, maps, x = explained(beside(Function(SWISH)), runs, ClosedFormHiResCAM, jacobian="auto")
    assert relative(maps.maps[:, 0], expected(net, pca, x)) < 1e-12


def test_a_detach_in_a_function_cannot_be_told_from_torchscripts():
    with pytest.raises(NoClosedFormError, match="which cannot be told from a detach of your own"):
        explained(Function(OWN_DETACH), "none", ClosedFormHiResCAM)
