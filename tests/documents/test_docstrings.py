"""Docstrings: everything public has an example, which runs, and a method tells all of its arguments."""

import doctest
import inspect
import re
import warnings
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import sklearn.base
import torch
from cams import METHODS
from sklearn.base import clone
from sklearn.decomposition import PCA, KernelPCA
from sklearn.feature_selection import VarianceThreshold
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.mixture import GaussianMixture
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier
from torch import nn

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import atlas, evaluation, export, figures, head, maps, methods, targets

PUBLIC = (package, head, targets, maps, methods, figures, atlas, evaluation, export)
THINGS = {name: getattr(module, name) for module in PUBLIC for name in module.__all__}
DOCUMENTED = {name: thing for name, thing in THINGS.items() if callable(thing)}


class MyScaler(sklearn.base.BaseEstimator):
    """An estimator of one's own."""

    def fit(self, x):
        self.mean_, self.std_ = x.mean(0), x.std(0)
        return self


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Return what examples are given: a tiny network on noisy pictures of three animals, each of a colour."""
    pytest.importorskip("pyarrow")
    torch.manual_seed(0)
    numbers, animals = torch.arange(12) % 3, np.array(["cat", "dog", "elk"] * 4)
    x = torch.rand(12, 3, 32, 32) / 2
    x[torch.arange(12), numbers] += 0.5
    blocks = [nn.Sequential(nn.Conv2d(n, m, 3, 2, 1), nn.ReLU()) for n, m in ((3, 6), (6, 8))]
    layers = OrderedDict(layer1=blocks[0], layer2=blocks[1], pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    backbone = nn.Sequential(layers).eval()
    features = backbone(x).detach().numpy()
    pipeline = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, animals)
    net = package.PCASVMNet(backbone, pipeline).eval()
    cam = package.ClosedFormGradCAM(net, ["layer2"])
    dataset = list(zip(x, animals.tolist(), strict=True))
    folder = tmp_path_factory.mktemp("examples")
    store = atlas.build(net, dataset, ["layer2"], out=folder / "atlas", progress=False)
    pooled = nn.Sequential(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))
    lines = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    estimators = (KernelPCA, LogisticRegression, Normalizer, OneVsRestClassifier, PCA, RBFSampler, StandardScaler, SVC)
    estimators += (GaussianMixture, DecisionTreeClassifier, MyScaler, NearestNeighbors, VarianceThreshold)
    return THINGS | {kind.__name__: kind for kind in estimators} | {
        "atlas": atlas, "evaluation": evaluation, "export": export, "make_pipeline": make_pipeline,
        "clone": clone, "np": np, "torch": torch, "warnings": warnings,
        "backbone": backbone, "cam": cam, "dataset": dataset, "features": features, "images": x[:2],
        "labels": animals, "loader": [(x[:6], animals[:6]), (x[6:], animals[6:])], "maps": cam.explain(x[:2]),
        "net": net, "net_of_volumes": pooled.eval(), "pipeline": pipeline, "training_images": x,
        "volumes": torch.rand(1, 1, 6, 8, 8), "net_of_signals": lines.eval(),
        "signals": torch.rand(1, 2, 24), "folder": folder, "store": store,
    }  # fmt: skip


@pytest.fixture
def estimators(rules):
    """Forget, at the end, the estimators and rules that an example registers."""
    yield
    registry = inspect.getclosurevars(package.stage_for.register).nonlocals["registry"]
    registry.pop(MyScaler, None)
    package.stage_for._clear_cache()


def examples(name):
    """Return the examples in the docstrings of a class and its methods, or of a function."""
    found = doctest.DocTestFinder(exclude_empty=True).find(DOCUMENTED[name], name, module=False, globs={})
    return [each for each in found if each.examples]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_everything_public_has_an_example(name):
    assert "\nExample:\n    >>> " in inspect.cleandoc(DOCUMENTED[name].__doc__)


SLOW = "layers", "Study", "report", "sensitivity", "program", "plot_mistake", "plot_component"
MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(("onnx", "Explainer"), pytest.mark.optional)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in DOCUMENTED])
def test_an_example_runs(name, given, estimators, monkeypatch):
    if name in ("onnx", "Explainer"):
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(given["folder"])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # another takes seconds
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in examples(name):
        torch.manual_seed(0)
        example.globs = dict(given)
        told: list[str] = []
        assert runner.run(example, out=told.append).failed == 0, "".join(told)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_all_of_its_arguments_in_order(name):
    text = METHODS[name].kind.__doc__
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Args", "Raises", "Example"]
    (arguments,) = re.findall(r"^Args:\n((?:    .*\n)*)", text, re.MULTILINE)
    assert re.findall(r"^    (\w+):", arguments, re.MULTILINE) == list(inspect.signature(METHODS[name].kind).parameters)


def test_a_method_of_ones_own_tells_what_its_bases_do_and_keeps_what_it_says():
    class Mine(package.ContributionCAM):
        """Mine.

        Args:
            baseline: another one.
            more: something
                that is new.

        Note:
            Look.

        Raises:
            KeyError: none.
        """

        def __init__(self, model, target_layers, *, more=1, baseline="mean", **options):
            super().__init__(model, target_layers, baseline=baseline, **options)

    class Silent(Mine):
        pass

    text = Mine.__doc__
    assert text.startswith("Mine.\n\nArgs:\n    model: ")
    assert "\n    more: something\n        that is new.\n    baseline: another one.\n\nRaises:\n" in text
    assert "\n    KeyError: none.\n" in text
    assert '\n\nExample:\n    >>> maps = Mine(net, ["layer2"])' in text
    assert text.endswith("\n\nNote:\n    Look.")
    assert "jacobian: " not in text  # not in the signature
    assert text.count("DataParallel") == 1  # of all classes on the way
    assert Silent.__doc__ is None  # as all are for python -OO
    assert inspect.getdoc(Silent) == text
