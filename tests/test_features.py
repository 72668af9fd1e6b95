"""extract_features, and evaluation mode."""

import contextlib
import threading

import numpy as np
import pytest
import torch
from problems import Backbone
from reference import relative
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_grad_cam_pcasvm import extract_features
from pytorch_grad_cam_pcasvm.features import features_of
from pytorch_grad_cam_pcasvm.modules import evaluating

X = torch.randn(11, 3, 12, 12, generator=torch.Generator().manual_seed(0))
Y = torch.arange(11)


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return Backbone()


def expected(backbone):
    backbone.eval()
    with torch.no_grad():
        return backbone.classifier[:5](backbone.flatten(backbone.features(X)))


def test_features_and_labels_of_a_loader(backbone):
    features, labels = extract_features(backbone, DataLoader(TensorDataset(X, Y), batch_size=4), layer="classifier.4")
    assert isinstance(features, np.ndarray)
    assert features.dtype == np.float32
    assert features.shape == (11, 9)
    assert labels.tolist() == list(range(11))
    assert all(module.training for module in backbone.modules())
    assert relative(features, expected(backbone)) < 1e-6


def test_tensors_stay_on_the_device(backbone):
    features, labels = extract_features(backbone, [(X, Y)], backbone.classifier[4], as_numpy=False, progress=False)
    assert isinstance(features, torch.Tensor)
    assert not features.requires_grad
    assert relative(features, expected(backbone)) < 1e-6
    assert labels.tolist() == list(range(11))


@pytest.mark.parametrize("loader", [[X[:6], X[6:]], [(X,)], [[X[:6], ["a"] * 6], [X[6:], ["b"] * 5]]])
def test_loaders_without_labels_and_with_names(backbone, loader):
    features, labels = extract_features(backbone, loader, "classifier.4", progress=False)
    assert features.shape == (11, 9)
    assert labels is None or labels.tolist() == ["a"] * 6 + ["b"] * 5


def test_names_as_labels_are_an_array_beside_tensors(backbone):
    names = [f"class {i % 2}" for i in range(11)]
    features, labels = extract_features(backbone, [(X, names)], as_numpy=False, progress=False)
    assert isinstance(features, torch.Tensor)
    assert labels.tolist() == names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(backbone, dtype):
    features, _ = extract_features(backbone.to(dtype), [X.to(dtype)], "classifier.4", progress=False)
    assert features.dtype == (np.float64 if dtype == torch.float64 else np.float32)


def test_the_progress_bar_can_be_turned_off(backbone, capsys):
    extract_features(backbone, [X], "classifier.4", progress=False)
    assert capsys.readouterr().err == ""
    extract_features(backbone, [X], "classifier.4")
    assert "features" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loader", "layer", "error", "message"),
    [
        ([], "classifier.4", ValueError, "the loader gave no batch"),
        ([X], "classifier.7", ValueError, "has no layer 'classifier.7'"),
        ([(X, Y[:3])], "classifier.4", ValueError, "one label for every image, or no labels at all"),
        ([(X, Y), X], "classifier.4", ValueError, "one label for every image, or no labels at all"),
        ([X.numpy()], "classifier.4", TypeError, "images must be a torch.Tensor, got ndarray"),
    ],
)
def test_bad_arguments_are_refused(backbone, loader, layer, error, message):
    with pytest.raises(error, match=message):
        extract_features(backbone, loader, layer, progress=False)
    assert all(module.training for module in backbone.modules())


def test_a_layer_that_gives_no_tensor_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match="features must be one tensor, but the layer gives a tuple"):
        extract_features(Pair(), [X], progress=False)


def test_evaluating_puts_every_module_back(backbone):
    backbone.features.eval()
    before = [module.training for module in backbone.modules()]
    with evaluating(backbone):
        with evaluating(backbone):
            assert not any(module.training for module in backbone.modules())
        assert not any(module.training for module in backbone.modules())
    assert [module.training for module in backbone.modules()] == before
    with contextlib.suppress(RuntimeError), evaluating(backbone):
        raise RuntimeError
    assert [module.training for module in backbone.modules()] == before


def test_threads_share_a_backbone(backbone):
    """A thread's pass is not stopped by another's, and nobody leaves evaluation mode too early."""
    exact = expected(backbone)
    backbone.train()
    wrong = []

    def work(layer, width):
        for _ in range(50):
            with evaluating(backbone), torch.no_grad():
                output = features_of(backbone, layer, X)
            if output.shape[1] != width or (width == 9 and relative(output, exact) > 1e-5):
                wrong.append(output)

    threads = [
        threading.Thread(target=work, args=pair) for pair in (("classifier.4", 9), (None, 3), ("classifier.1", 12))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(module.training for module in backbone.modules())
    assert not backbone.classifier[4]._forward_hooks


def test_networks_that_share_a_backbone_share_its_evaluation_mode(backbone):
    outer = nn.Sequential(backbone)
    backbone.train()
    with evaluating(outer):
        with evaluating(backbone):
            pass
        assert not backbone.training, "the inner user turned training on under the outer one"
    assert backbone.training
