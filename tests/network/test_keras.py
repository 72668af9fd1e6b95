"""Keras models on torch: layers by their Keras names, channels where Keras has them, and maps by autograd's numbers."""

import os

import numpy as np
import pytest
import torch
from reference import gap, relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    extract_features,
    fit_model,
    load_model,
)
from pytorch_grad_cam_pcasvm.network.auto_layers import find_last_blocks
from pytorch_grad_cam_pcasvm.network.features import FeatureSource
from pytorch_grad_cam_pcasvm.network.modules import find_network

pytestmark = pytest.mark.optional
LABELS = torch.arange(24) % 2
IMAGES = torch.rand(24, 16, 16, 3, generator=torch.Generator().manual_seed(0))
IMAGES[LABELS == 1, 3:9, 6:12] += 0.7


@pytest.fixture
def keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    module = pytest.importorskip("keras")
    if module.backend.backend() != "torch":
        pytest.skip(f"Keras runs on {module.backend.backend()}, not on torch: {os.environ['KERAS_BACKEND']}")
    module.utils.set_random_seed(0)
    return module


def functional(keras, first="channels_last"):
    """A residual block between two convolutions, with as many channels as rows behind the first."""
    layers, form = keras.layers, {"data_format": first, "padding": "same"}
    shape = (16, 16, 3) if first == "channels_last" else (3, 16, 16)
    x = inputs = keras.Input(shape)
    x = layers.Conv2D(16, 3, activation="tanh", name="first", **form)(x)
    y = layers.Conv2D(16, 3, activation="tanh", name="branch", **form)(x)
    x = layers.Add(name="joined")([x, y])
    x = layers.Conv2D(8, 3, 2, activation="relu", name="last", **form)(x)
    return keras.Model(inputs, layers.GlobalAveragePooling2D(data_format=first)(x))


def sequential(keras):
    layers = keras.layers
    inner = keras.Sequential([layers.Conv2D(8, 3, activation="relu", name="last")], name="inner")
    return keras.Sequential([keras.Input((16, 16, 3)), inner, layers.GlobalAveragePooling2D()])


def subclass(keras):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [keras.layers.Conv2D(8, 3, activation="tanh", name=name) for name in ("first", "last")]
            self.pool = keras.layers.GlobalAveragePooling2D()

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return self.pool(x)

    model = Own()
    model(IMAGES[:1])
    return model


MODELS = {"functional": functional, "sequential": sequential, "subclass": subclass}


def inner_layer(model, name):
    return next(layer for layer in model._flatten_layers() if layer.name == name)


def fitted(model, **options):
    head = make_pipeline(StandardScaler(), PCA(3), SVC())
    return fit_model(model, [(IMAGES[:12], LABELS[:12]), (IMAGES[12:], LABELS[12:])], head, progress=False, **options)


@pytest.mark.parametrize("kind", MODELS)
def test_maps_of_keras_layers_are_autograds(keras, kind, tmp_path):
    network = MODELS[kind](keras)
    layer, kept = inner_layer(network, "last"), {}
    model = fitted(network)
    hook = layer.register_forward_hook(lambda module, args, output: kept.update(output=output))
    features = network(IMAGES[:2], training=False)
    hook.remove()
    component = model.net.head(features.double()).values[2][:, 0].sum()
    (grad,) = torch.autograd.grad(component, kept["output"])  # (N, H, W, C)
    expected = (grad.sum((1, 2), keepdim=True) * kept["output"]).sum(-1).detach()
    for named in ("last", layer):
        maps = model.cam(ClosedFormGradCAM, layers=[named]).explain(IMAGES[:2], [PCATarget(0)])
        assert relative(maps.maps[:, 0] * maps.log_scale.exp()[..., None], expected) < 1e-5
    assert model.layers == ("inner" if kind == "sequential" else "last",)
    assert gap(model.explain(IMAGES[:2])) < 1e-5
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", network)
    assert torch.equal(again.explain(IMAGES[:2]).maps, model.explain(IMAGES[:2]).maps)


def test_what_a_skip_bypasses_is_no_default(keras):
    network = find_network(functional(keras))
    found = find_last_blocks(network, FeatureSource(), network.arrange(IMAGES))
    assert found == ["joined", "last"]
    model = fitted(functional(keras))
    assert ContributionCAM(model.net, "auto").explain(IMAGES[:1]).layers == ("joined", "last")


def test_channels_that_come_first_are_taken_so(keras):
    network, same, x = functional(keras, "channels_first"), functional(keras), IMAGES.permute(0, 3, 1, 2)
    same.set_weights(network.get_weights())
    head = fitted(same).net.head
    first, last = (PCASVMNet(net, head).eval() for net in (network, same))
    torch.testing.assert_close(first(x), last(IMAGES), rtol=1e-4, atol=1e-4)
    maps, expected = (
        ClosedFormGradCAM(first, ["last"]).explain(x[:2]),
        ClosedFormGradCAM(last, ["last"]).explain(IMAGES[:2]),
    )
    torch.testing.assert_close(maps.maps, expected.maps, rtol=1e-3, atol=1e-4)


def test_features_are_flattened_as_keras_does(keras):
    network = functional(keras)
    inner = keras.Model(network.inputs, network.get_layer("last").output)
    with torch.no_grad():
        output = inner(IMAGES, training=False)
    rows = output.flatten(1).numpy()
    head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, LABELS)
    net = PCASVMNet(network, head, layer="last").eval()
    np.testing.assert_allclose(net(IMAGES)[:, 1].detach(), head.decision_function(rows), rtol=1e-4, atol=1e-5)
    for pool, expected in (("mean", output.mean((1, 2))), ("dense", output.flatten(0, 2))):
        features, _ = extract_features(network, [IMAGES], "last", pool=pool, progress=False)
        np.testing.assert_allclose(features, expected, rtol=1e-5, atol=1e-6)
    features, _ = extract_features(network, [IMAGES], "last", pool=lambda t: t.mean((1, 2)), progress=False)
    np.testing.assert_allclose(features, output.mean((1, 2)), rtol=1e-5, atol=1e-6)


def test_a_keras_layer_in_a_module_of_torch_has_to_be_told(keras):
    class Shown(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network, self.layers = network, nn.ModuleDict({"last": network.get_layer("last")})

        def forward(self, x):
            return self.network(x, training=False)

    network = functional(keras)
    net = PCASVMNet(Shown(network), fitted(network).net.head).eval()
    for transform in (None, "tokens"):
        with pytest.raises(ValueError, match="is a layer of Keras in a module of torch"):
            ClosedFormGradCAM(net, ["layers.last"], transform).explain(IMAGES[:2])
    maps = ClosedFormGradCAM(net, ["layers.last"], lambda t: t.movedim(-1, 1)).explain(IMAGES[:2])
    expected = fitted(network).cam(ClosedFormGradCAM, layers=["last"]).explain(IMAGES[:2])
    torch.testing.assert_close(maps.maps, expected.maps, rtol=1e-4, atol=1e-5)


def test_models_that_cannot_be_read_are_refused(keras):
    with pytest.raises(ValueError, match="or is not built: run it once on pictures"):
        find_network(keras.Sequential([keras.layers.Conv2D(4, 3)]))
    with pytest.raises(ValueError, match="has no layer 'lost'; did you mean 'last'"):
        ClosedFormGradCAM(fitted(functional(keras)).net, ["lost"])
