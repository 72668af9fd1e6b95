"""The host's call, its other methods, its metrics and its seams, on networks that end in a PCA and an SVM."""

import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import pytorch_grad_cam
import torch
import torchvision
from packaging.version import Version
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.metrics.cam_mult_image import CamMultImageConfidenceChange, DropInConfidence, IncreaseInConfidence
from pytorch_grad_cam.metrics.road import ROADLeastRelevantFirst, ROADMostRelevantFirst
from pytorch_grad_cam.utils import model_targets
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from sklearn.decomposition import PCA
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm import (
    BlankMapWarning,
    ClosedFormGradCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    extract_features,
)

HOST_TOLERANCE = 1e-4
SIGNED_TOLERANCE = 1e-5
LABELS = ("cat", "dog", "hen")


# --- networks ---------------------------------------------------------------------------------------------------------


class ChannelsLast(nn.Module):
    """(N, C, H, W) to (N, H, W, C), as in Swin transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class Tokens(nn.Module):
    """(N, C, H, W) to (N, H W, C), as in vision transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class Backbone(nn.Module):
    """Two convolutions and a dense end; ``dense`` gives the features of the head, ``classifier`` ordinary scores."""

    def __init__(self, shape: tuple[int, ...], *, inplace: bool = False, layout: nn.Module | None = None) -> None:
        super().__init__()
        conv, pool = (nn.Conv3d, nn.MaxPool3d) if len(shape) == 4 else (nn.Conv2d, nn.MaxPool2d)
        self.features = nn.Sequential(
            conv(shape[0], 6, 3, padding=1), nn.ReLU(inplace), pool(2), conv(6, 8, 3, padding=1), nn.ReLU(inplace)
        )
        self.layout = nn.Identity() if layout is None else layout
        pooled = int(np.prod([size // 2 for size in shape[1:]]))
        self.dense = nn.Sequential(nn.Linear(8 * pooled, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.classifier = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dense(self.layout(self.features(x)).flatten(1)))


class Components(nn.Module):
    """The components as the scores of a plain network: what PCATarget explains, without the package."""

    def __init__(self, backbone: Backbone, head: Pipeline) -> None:
        super().__init__()
        self.backbone = backbone
        self.scaler, self.pca = head[0], head[1]

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone.dense(self.backbone.features(x).flatten(1)).double()
        standard = (features - torch.from_numpy(self.scaler.mean_)) / torch.from_numpy(self.scaler.scale_)
        return (standard - torch.from_numpy(self.pca.mean_)) @ torch.from_numpy(self.pca.components_).double().T


def draw(shape: tuple[int, ...], count: int, classes: int, seed: int) -> tuple[Tensor, np.ndarray]:
    """Return noise with a bright slab whose place along the last axis is the class."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator)
    index = torch.arange(count) % classes
    width = shape[-1] // classes
    for image, place in zip(x, index.tolist(), strict=True):
        image[..., place * width : (place + 1) * width] += 2.0
    return x, np.array(LABELS)[index.numpy()]


@dataclass(frozen=True)
class Problem:
    """A backbone, the head fitted on its features, both as one network, and images to explain."""

    backbone: Backbone
    head: Pipeline
    net: PCASVMNet
    x: Tensor
    fitted_on: tuple[np.ndarray, np.ndarray]

    def layers(self, *names: str) -> list[nn.Module]:
        return [self.backbone.get_submodule(name) for name in names]


SHAPES = {"rgb": (3, 32, 32), "grey": (1, 32, 32), "wide": (3, 24, 40), "volume": (1, 8, 12, 16)}
LAYOUTS: dict[str, type[nn.Module]] = {"channels-last": ChannelsLast, "tokens": Tokens}
# Of the weights: with these no map below is blank, those of components have both signs, and the SVM separates classes.
SEEDS = {"rgb": 50, "grey": 121, "wide": 140, "volume": 107, "channels-last": 50, "tokens": 50}
RESHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "channels-last": lambda t: t.permute(0, 3, 1, 2),
    "tokens": lambda t: t.transpose(1, 2).unflatten(2, (16, 16)),
}


@cache
def problem(kind: str = "rgb", classes: int = 3, *, inplace: bool = False, svm: bool = True) -> Problem:
    shape = SHAPES.get(kind, (3, 32, 32))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS[kind])
        backbone = Backbone(shape, inplace=inplace, layout=LAYOUTS[kind]() if kind in LAYOUTS else None).eval()
    x, labels = draw(shape, 90, classes, seed=1)
    fitted_on = extract_features(backbone, [(x, labels)], layer="dense", progress=False)
    steps = [StandardScaler(), PCA(3), SVC(kernel="rbf")] if svm else [StandardScaler(), PCA(3)]
    head = make_pipeline(*steps).fit(*fitted_on)
    return Problem(backbone, head, PCASVMNet(backbone, head, "dense"), draw(shape, 4, classes, seed=2)[0], fitted_on)


@cache
def resnet() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torchvision.models.resnet18(num_classes=5).eval()


@pytest.mark.parametrize(("kind", "classes"), [("rgb", 3), ("rgb", 2), *[(kind, 3) for kind in SEEDS if kind != "rgb"]])
def test_the_problems_are_worth_explaining(kind: str, classes: int) -> None:
    p = problem(kind, classes)
    features, labels = p.fitted_on
    assert p.head.score(features, labels) > 0.9
    assert set(p.net.predict(p.x)) == set(LABELS[:classes])


# --- the host's numbers -----------------------------------------------------------------------------------------------


def host_maps(
    net: nn.Module, layers: list[nn.Module], x: Tensor, targets: Any, reshape: Any = None, **smoothing: bool
) -> np.ndarray:
    with GradCAM(net, layers, reshape) as cam:
        return cam(x, targets, **smoothing)


def our_maps(
    net: nn.Module, layers: list[nn.Module], x: Tensor, targets: Any, reshape: Any = None, **smoothing: bool
) -> np.ndarray:
    with ClosedFormGradCAM(net, layers, reshape) as cam:
        return cam(x, targets, **smoothing)


def assert_same_as_host(actual: np.ndarray, expected: np.ndarray) -> None:
    # Blank maps agree too easily. (Test-time augmentation averages maps that reach 1 at different pixels.)
    assert expected.reshape(len(expected), -1).max(1).min() > 0.3
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=HOST_TOLERANCE)


def nonlinear(output: Tensor) -> Tensor:
    return output[0] - 0.5 * output[1].square()


TARGETS: dict[str, Any] = {
    "label": SVMTarget("dog"),
    "label-against": SVMTarget("dog", sign="-"),
    "predicted": SVMTarget(),
    "versus-label": SVMTarget("cat", versus="dog"),
    "versus-runner-up": SVMTarget(versus="runner-up"),
    "label-versus-runner-up": SVMTarget("dog", versus="runner-up"),
    "score": ClassifierOutputTarget(1),
    "softmax": ClassifierOutputSoftmaxTarget(0),
    "lambda": nonlinear,
    "lambda-on-components": lambda output: output.components[0] * output.components[1],
    "lambda-on-margins": lambda output: output.margins[1] - output.components[2],
}
# Targets without a closed form are differentiated together: here they are not neighbours.
MIXED = [nonlinear, SVMTarget("dog"), ClassifierOutputTarget(0), SVMTarget(versus="runner-up")]


@pytest.mark.parametrize("classes", [3, 2], ids=["three-classes", "two-classes"])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_target_gives_the_host_map(target: Any, classes: int) -> None:
    p = problem(classes=classes)
    layers, targets = p.layers("features.4"), [target] * len(p.x)
    assert_same_as_host(our_maps(p.net, layers, p.x, targets), host_maps(p.net, layers, p.x, targets))


LAYERS = {
    names.replace("features.", ""): tuple(names.split("+"))
    for names in (
        "features.4",
        "features.2",
        "features.2+features.4",
        "features.2+features.1",
        "features.4+features.0+features.3",
    )
}


@pytest.mark.parametrize("targets", [[SVMTarget("dog")] * 4, MIXED], ids=["label", "mixed"])
@pytest.mark.parametrize("names", LAYERS.values(), ids=LAYERS)
def test_target_layers_in_any_order(names: tuple[str, ...], targets: Any) -> None:
    p = problem()
    layers = p.layers(*names)
    assert_same_as_host(our_maps(p.net, layers, p.x, targets), host_maps(p.net, layers, p.x, targets))


@pytest.mark.parametrize("smoothing", [{}, {"eigen_smooth": True}], ids=["plain", "eigen"])
@pytest.mark.parametrize("kind", SHAPES)
def test_no_targets_and_several_layers(kind: str, smoothing: dict[str, bool]) -> None:
    # The host scales each layer's map by its largest value + 1e-7, so the size of the gradient shows in their average.
    p = problem(kind)
    layers = p.layers("features.3", "features.2")
    expected = host_maps(p.net, layers, p.x, None, **smoothing)
    assert_same_as_host(our_maps(p.net, layers, p.x, None, **smoothing), expected)


@pytest.mark.parametrize("names", LAYERS.values(), ids=LAYERS)
def test_inplace_relu_behind_the_target_layer(names: tuple[str, ...]) -> None:
    # The host's own maps are wrong here on the CPU, where its stored activations are those that the ReLU overwrites.
    p, reference = problem(inplace=True), problem(inplace=False)
    expected = host_maps(reference.net, reference.layers(*names), p.x, MIXED)
    assert_same_as_host(our_maps(p.net, p.layers(*names), p.x, MIXED), expected)


SMOOTHING: dict[str, dict[str, bool]] = {
    "aug": {"aug_smooth": True},
    "eigen": {"eigen_smooth": True},
    "aug-eigen": {"aug_smooth": True, "eigen_smooth": True},
}


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ([SVMTarget("dog")] * 4, ("features.4",)),
        (MIXED, ("features.4",)),
        (None, ("features.4",)),
        ([SVMTarget("dog")] * 4, ("features.4", "features.2")),
        (MIXED, ("features.4", "features.2")),
    ],
    ids=["label", "mixed", "none", "label-two-layers", "mixed-two-layers"],
)
@pytest.mark.parametrize(
    "smoothing",
    [pytest.param(each, marks=pytest.mark.slow if len(each) > 1 else (), id=name) for name, each in SMOOTHING.items()],
)
def test_smoothing(smoothing: dict[str, bool], targets: Any, names: tuple[str, ...]) -> None:
    p = problem()
    layers = p.layers(*names)
    expected = host_maps(p.net, layers, p.x, targets, **smoothing)
    assert_same_as_host(our_maps(p.net, layers, p.x, targets, **smoothing), expected)


@pytest.mark.parametrize("smoothing", [{}, {"eigen_smooth": True}, {"aug_smooth": True}], ids=["plain", "eigen", "aug"])
@pytest.mark.parametrize("targets", [[SVMTarget("dog")] * 4, MIXED, None], ids=["label", "mixed", "none"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_reshape_transform(kind: str, targets: Any, smoothing: dict[str, bool]) -> None:
    p = problem(kind)
    layers, reshape = p.layers("layout"), RESHAPES[kind]
    actual = our_maps(p.net, layers, p.x, targets, reshape, **smoothing)
    assert_same_as_host(actual, host_maps(p.net, layers, p.x, targets, reshape, **smoothing))
    if not smoothing:
        assert_same_as_host(actual, host_maps(p.net, p.layers("features.4"), p.x, targets))


# --- ordinary classifiers ---------------------------------------------------------------------------------------------


CLASSIFIERS: dict[str, Callable[[], tuple[nn.Module, list[nn.Module], Tensor]]] = {
    "resnet18-layer4": lambda: (resnet(), [resnet().layer4[-1]], draw((3, 64, 64), 2, 3, seed=3)[0]),
    "resnet18-layer3": lambda: (resnet(), [resnet().layer3[-1]], draw((3, 64, 64), 2, 3, seed=3)[0]),
    "resnet18-both": lambda: (resnet(), [resnet().layer4[-1], resnet().layer3[-1]], draw((3, 64, 64), 2, 3, seed=3)[0]),
    "dense-end": lambda: (problem().backbone, problem().layers("features.4"), problem().x),
    "dense-end-conv": lambda: (problem().backbone, problem().layers("features.3"), problem().x),
    "svm": lambda: (problem().net, problem().layers("features.4"), problem().x),
}
CLASSIFIER_TARGETS = {
    "score": ("ClassifierOutputTarget", (1,)),
    "softmax": ("ClassifierOutputSoftmaxTarget", (1,)),
    "rest": ("ClassifierOutputReST", (1,)),
    "finer": ("FinerWeightedTarget", (0, [1, 2], 0.7)),
}


def host_target(name: str, arguments: tuple[Any, ...]) -> Any:
    kind = getattr(model_targets, name, None)
    if kind is None:
        pytest.skip(f"this version of the host has no {name}")
    return kind(*arguments)


@pytest.mark.parametrize("classifier", CLASSIFIERS.values(), ids=CLASSIFIERS)
@pytest.mark.parametrize(("name", "arguments"), CLASSIFIER_TARGETS.values(), ids=CLASSIFIER_TARGETS)
def test_targets_of_the_host(name: str, arguments: tuple[Any, ...], classifier: Callable[[], Any]) -> None:
    model, layers, x = classifier()
    targets = [host_target(name, arguments)] * len(x)
    assert_same_as_host(our_maps(model, layers, x, targets), host_maps(model, layers, x, targets))


@pytest.mark.slow
def test_swin_with_its_norm_layer_and_a_reshape_transform() -> None:
    torch.manual_seed(0)
    swin = torchvision.models.swin_t(weights=None, num_classes=5).eval()
    x = torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    options = {"target_layers": [swin.norm], "reshape_transform": lambda maps: maps.permute(0, 3, 1, 2)}
    targets = [ClassifierOutputTarget(1), ClassifierOutputTarget(3)]
    expected = GradCAM(swin, **options)(x, targets)
    assert_same_as_host(ClosedFormGradCAM(swin, **options)(x, targets), expected)


# --- the host's methods -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostMethod:
    """A method of the host; whether its map depends on the target; what it is called with."""

    name: str
    uses_target: bool = True
    arguments: tuple[tuple[str, Any], ...] = ()
    layers: tuple[str, ...] = ("features.4",)

    def maps(self, net: nn.Module, p: Problem, x: Tensor, targets: Any, **arguments: Any) -> np.ndarray:
        kind = getattr(pytorch_grad_cam, self.name, None)
        if kind is None:
            pytest.skip(f"this version of the host has no {self.name}")
        np.random.seed(0)  # of the host's RandomCAM
        cam = kind(net, p.layers(*self.layers), **dict(self.arguments) | arguments)
        maps = cam(x, targets)
        if hasattr(cam, "activations_and_grads"):
            # ShapleyCAM's gradients are views, at which the host's release() fails and leaves its hooks behind.
            cam.activations_and_grads.gradients = []
        return maps


OF_HOST = {
    "GradCAM": HostMethod("GradCAM"),
    "HiResCAM": HostMethod("HiResCAM"),
    "XGradCAM": HostMethod("XGradCAM"),
    "GradCAMPlusPlus": HostMethod("GradCAMPlusPlus"),
    "LayerCAM": HostMethod("LayerCAM"),
    "GradCAMElementWise": HostMethod("GradCAMElementWise"),
    "ScoreCAM": HostMethod("ScoreCAM"),
    "AblationCAM": HostMethod("AblationCAM"),
    "EigenCAM": HostMethod("EigenCAM", uses_target=False),
    "EigenGradCAM": HostMethod("EigenGradCAM"),
    "RandomCAM": HostMethod("RandomCAM", uses_target=False),
    "FullGrad": HostMethod("FullGrad"),
    "ShapleyCAM": HostMethod("ShapleyCAM"),
    "FinerCAM": HostMethod("FinerCAM"),
    "FEM": HostMethod("FEM", uses_target=False),
    "KPCA_CAM": HostMethod("KPCA_CAM", uses_target=False),
    "SegEigenCAM": HostMethod("SegEigenCAM"),
    "RefineCAM": HostMethod("RefineCAM", layers=("features.1", "features.4")),
    "SESS": HostMethod("SESS", arguments=(("num_scales", 2),)),
    "SESS-raw-scores": HostMethod("SESS", arguments=(("num_scales", 2), ("use_softmax_scores", False))),
}
META_METHODS = {name: method for name, method in OF_HOST.items() if method.name in ("FinerCAM", "RefineCAM", "SESS")}
METHOD_TARGETS = {
    "component": PCATarget(0),
    "component-minus": PCATarget(1, sign="-"),
    "label": SVMTarget("cat"),
    "score": ClassifierOutputTarget(1),
    "none": None,
}


def skip_what_the_host_cannot(method: HostMethod, target: Any) -> None:
    if method.name == "FinerCAM" and target is None and Version(version("grad-cam")) < Version("1.5.6"):
        pytest.skip("this grad-cam's FinerCAM needs more classes than three")


def assert_is_a_map(maps: np.ndarray, x: Tensor) -> None:
    assert maps.shape == (len(x), *x.shape[2:])
    assert np.isfinite(maps).all()
    assert maps.min() >= 0
    assert maps.max() <= 1
    assert np.ptp(maps) > 0.5


@pytest.mark.parametrize("target", METHOD_TARGETS.values(), ids=METHOD_TARGETS)
@pytest.mark.parametrize("method", OF_HOST.values(), ids=OF_HOST)
def test_every_method_of_the_host_runs(method: HostMethod, target: Any) -> None:
    skip_what_the_host_cannot(method, target)
    p = problem()
    x = p.x[:2]
    assert_is_a_map(method.maps(p.net, p, x, None if target is None else [target] * len(x)), x)


@pytest.mark.parametrize("target", METHOD_TARGETS.values(), ids=METHOD_TARGETS)
@pytest.mark.parametrize("method", META_METHODS.values(), ids=META_METHODS)
def test_meta_methods_run_with_closed_form_maps(method: HostMethod, target: Any) -> None:
    skip_what_the_host_cannot(method, target)
    p = problem()
    x = p.x[::2]  # none of their patches' maps is blank
    targets = None if target is None else [target] * len(x)
    actual = method.maps(p.net, p, x, targets, base_method=ClosedFormGradCAM)
    assert_is_a_map(actual, x)
    # SESS adds up the maps of patches, and those of components are on the scale of nu: another sum than the host's.
    if not (method.name == "SESS" and isinstance(target, PCATarget)):
        assert_same_as_host(actual, method.maps(p.net, p, x, targets, base_method=GradCAM))


@pytest.mark.parametrize("sign", ["+", "-"])
@pytest.mark.parametrize("method", [m for m in OF_HOST if m != "SESS"])
def test_every_method_explains_components_as_on_a_network_that_ends_in_them(method: str, sign: str) -> None:
    # Not SESS with softmax scores: a softmax over components is not what a PCATarget is a target of.
    p = problem()
    x = p.x[:2]
    factor = 1.0 if sign == "+" else -1.0
    actual = OF_HOST[method].maps(p.net, p, x, [PCATarget(1, sign)] * len(x))
    expected = OF_HOST[method].maps(Components(p.backbone, p.head), p, x, [lambda output: factor * output[..., 1]] * 2)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=HOST_TOLERANCE)


# --- the host's metrics -----------------------------------------------------------------------------------------------


def by_scikit_learn(p: Problem, x: Tensor, quantity: str) -> np.ndarray:
    """Return what the targets of METRIC_TARGETS are, for a batch of images."""
    features, _ = extract_features(p.backbone, [x], layer="dense", progress=False)
    components = p.head[:2].transform(features)
    if quantity == "score":
        return p.head.decision_function(features)[:, 1]
    if quantity == "margin":
        pairwise = SVC(kernel="rbf", decision_function_shape="ovo").fit(
            p.head[:2].transform(p.fitted_on[0]), p.fitted_on[1]
        )
        cat_dog, _, dog_hen = pairwise.decision_function(components).T
        return dog_hen - cat_dog
    return components[:, 0] if quantity == "component" else -components[:, 1]


METRIC_TARGETS = {
    "component": PCATarget(0),
    "component-minus": PCATarget(1, sign="-"),
    "margin": SVMTarget("dog"),
    "score": ClassifierOutputTarget(1),
}


@pytest.fixture(params=METRIC_TARGETS)
def question(request: pytest.FixtureRequest) -> tuple[str, Problem, tuple[Tensor, np.ndarray, list[Any], nn.Module]]:
    """A quantity, its problem, and the arguments of a metric."""
    p = problem()
    targets = [METRIC_TARGETS[request.param]] * len(p.x)
    cams = our_maps(p.net, p.layers("features.4"), p.x, targets)
    return request.param, p, (p.x, cams, targets, p.net)


def test_confidence_change(question: Any) -> None:
    quantity, p, (x, cams, targets, net) = question
    change = by_scikit_learn(p, x * torch.from_numpy(cams).unsqueeze(1), quantity) - by_scikit_learn(p, x, quantity)
    np.testing.assert_allclose(CamMultImageConfidenceChange()(x, cams, targets, net), change, rtol=0, atol=1e-4)
    np.testing.assert_allclose(DropInConfidence()(x, cams, targets, net), np.maximum(-change, 0), rtol=0, atol=1e-4)
    assert IncreaseInConfidence()(x, cams, targets, net).tolist() == (change > 0).astype(float).tolist()
    assert np.abs(change).max() > 0.01


@pytest.mark.parametrize("metric", [ROADMostRelevantFirst, ROADLeastRelevantFirst])
def test_road(metric: Any, question: Any) -> None:
    quantity, p, (x, cams, targets, net) = question
    with torch.random.fork_rng(devices=[]):
        scores, imputed = metric(percentile=75)(x, cams, targets, net, return_visualization=True)
    change = by_scikit_learn(p, imputed, quantity) - by_scikit_learn(p, x, quantity)
    np.testing.assert_allclose(scores, change, rtol=0, atol=1e-4)
    assert np.abs(change).max() > 0.01


# --- the host's seams -------------------------------------------------------------------------------------------------


def test_an_index_error_gets_out_of_a_with_block() -> None:
    p = problem()
    with pytest.raises(IndexError, match="mine"), ClosedFormGradCAM(p.net, p.layers("features.4")):
        raise IndexError("mine")


class Careless:
    """What the host's classes do: clean up in __del__ what __init__ may not have made."""

    def __init__(self, model: nn.Module, target_layers: Any) -> None:
        self.layers = list(target_layers)

    def __del__(self) -> None:
        self.layers.clear()


@pytest.mark.parametrize(("kind", "errors"), [(ClosedFormGradCAM, []), (Careless, [AttributeError])])
def test_deleting_what_was_never_made(kind: type, errors: list[type], monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: caught.append(unraisable.exc_type))
    with pytest.raises(TypeError) as raised:
        kind(problem().net, 3)
    del raised
    gc.collect()
    assert caught == errors


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("target", [SVMTarget("cat"), PCATarget(0), nonlinear], ids=["svm", "pca", "lambda"])
def test_as_many_targets_as_images(target: Any, count: int) -> None:
    p = problem()
    cam = ClosedFormGradCAM(p.net, p.layers("features.4"))
    with pytest.raises(ValueError, match=f"{count} targets? for 4 images"):
        cam(p.x, [target] * count)
    with pytest.raises(ValueError, match=f"{count} targets? for 4 images"):
        cam(p.x, [target] * count, aug_smooth=True)


def test_no_targets_at_all_is_not_none() -> None:
    p = problem()
    with pytest.raises(ValueError, match="targets is empty"):
        ClosedFormGradCAM(p.net, p.layers("features.4"))(p.x, [])


@pytest.mark.parametrize("target", [PCATarget(3), SVMTarget("cow")], ids=["component", "label"])
def test_a_bad_target_gets_out_of_a_with_block(target: Any) -> None:
    p = problem()
    with pytest.raises(ValueError), ClosedFormGradCAM(p.net, p.layers("features.4")) as cam:
        cam(p.x, [target] * len(p.x))


def test_an_open_cam_of_the_host_does_not_disturb() -> None:
    model, x = resnet(), draw((3, 64, 64), 2, 3, seed=3)[0]
    targets = [ClassifierOutputTarget(1)] * len(x)
    ours = ClosedFormGradCAM(model, [model.layer4[-1]])
    expected = ours(x, targets)
    with GradCAM(model, [model.layer4[-1]]) as host, GradCAM(model, [model.layer3]) as other:
        for cam in (ours, ClosedFormGradCAM(model, [model.layer4[-1]])):
            np.testing.assert_allclose(cam(x, targets), expected, rtol=0, atol=1e-6)
        assert_same_as_host(expected, host(x, targets))
        assert all(isinstance(kept, Tensor) for kept in other.activations_and_grads.activations)


@pytest.mark.parametrize("names", [("features.4",), ("features.4", "features.0")], ids=["one-layer", "two-layers"])
def test_no_hooks_and_no_activations_are_left(names: tuple[str, ...]) -> None:
    p = problem()
    layers = p.layers(*names)
    with GradCAM(p.net, layers) as stock:
        stock(p.x, None)
        assert all(len(layer._forward_hooks) > 0 for layer in layers)
    cam = ClosedFormGradCAM(p.net, layers)
    for call in (lambda: None, lambda: cam(p.x), lambda: cam(p.x, aug_smooth=True), lambda: cam(p.x, [nonlinear] * 4)):
        call()
        assert all(len(module._forward_hooks) == 0 for module in p.net.modules())
        assert all(len(module._backward_hooks) == 0 for module in p.net.modules())
        held = cam.activations_and_grads
        assert (held.activations, held.gradients) == ([], [])


def test_gradients_and_training_flags_are_left_alone() -> None:
    p = problem.__wrapped__()
    backbone, net = p.backbone, p.net
    backbone.train()
    backbone.dense.eval()
    backbone.features.requires_grad_(False)
    for parameter in backbone.dense.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    flags = {name: module.training for name, module in net.named_modules()}
    cam = ClosedFormGradCAM(net, [backbone.features[4]])
    cam(p.x)
    cam(p.x, [nonlinear] * 4)
    assert {name: module.training for name, module in net.named_modules()} == flags
    assert all(bool((parameter.grad == 7.0).all()) for parameter in backbone.dense.parameters())
    assert all(parameter.grad is None for parameter in backbone.features.parameters())


# --- signs ------------------------------------------------------------------------------------------------------------


def signed_by_autograd(p: Problem, layer: nn.Module, component: int, x: Tensor) -> Tensor:
    """Return P_b / nu_b of the paper, shape (N, H, W), from autograd on a network that ends in the components."""
    kept: list[Tensor] = []
    handle = layer.register_forward_hook(lambda module, args, output: kept.append(output))
    components = Components(p.backbone, p.head)(x)
    handle.remove()
    (grad,) = torch.autograd.grad(components[:, component].sum(), kept)
    spatial = tuple(range(2, grad.dim()))
    maps = (grad.sum(spatial, keepdim=True) * kept[0]).sum(1).detach()
    return maps / maps.abs().amax(tuple(range(1, maps.dim())), keepdim=True)


def upsample(maps: Tensor, size: Any) -> np.ndarray:
    """Upsample maps of shape (N, H, W) or (N, D, H, W)."""
    mode = "bilinear" if maps.dim() == 3 else "trilinear"
    return F.interpolate(maps.unsqueeze(1), tuple(size), mode=mode, align_corners=False).squeeze(1).numpy()


@pytest.mark.parametrize("component", [0, 1, 2])
@pytest.mark.parametrize("layer", ["features.4", "features.3"])
@pytest.mark.parametrize(
    ("kind", "svm"), [("rgb", True), ("rgb", False), ("grey", True), ("wide", True), ("volume", True)]
)
def test_signed_maps_of_components(kind: str, svm: bool, layer: str, component: int) -> None:
    p = problem(kind, svm=svm)
    size = p.x.shape[2:]
    cam = ClosedFormGradCAM(p.net, p.layers(layer))
    plus, minus = (cam(p.x, [PCATarget(component, sign)] * len(p.x)) for sign in "+-")
    explained = cam.explain(p.x, [PCATarget(component)])
    signed = (explained.maps / explained.nu[..., None, None].reshape(4, 1, *[1] * len(size)))[:, 0]
    reference = signed_by_autograd(p, *p.layers(layer), component, p.x)
    assert plus.dtype == minus.dtype == np.float32
    np.testing.assert_allclose(plus - minus, upsample(signed, size), rtol=0, atol=SIGNED_TOLERANCE)
    np.testing.assert_allclose(plus, upsample(reference.relu(), size), rtol=0, atol=SIGNED_TOLERANCE)
    np.testing.assert_allclose(minus, upsample((-reference).relu(), size), rtol=0, atol=SIGNED_TOLERANCE)
    # One of them is the weaker: a host that stretches each map to [0, 1] would hide it.
    assert min(plus.reshape(4, -1).max(1).min(), minus.reshape(4, -1).max(1).min()) < 0.9


def test_component_maps_of_several_layers_are_averaged_on_their_shared_scale() -> None:
    p = problem()
    names, targets = ("features.4", "features.3"), [PCATarget(0, sign="-")] * len(p.x)
    expected = np.mean([our_maps(p.net, p.layers(name), p.x, targets) for name in names], axis=0)
    for ordered in (names, names[::-1]):
        actual = our_maps(p.net, p.layers(*ordered), p.x, targets)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=SIGNED_TOLERANCE)


def test_components_and_decisions_in_one_batch() -> None:
    p = problem()
    layers = p.layers("features.4")
    targets = [PCATarget(0), SVMTarget("dog"), PCATarget(1, sign="-"), ClassifierOutputTarget(0)]
    together = our_maps(p.net, layers, p.x, targets)
    for row, target in enumerate(targets):
        alone = our_maps(p.net, layers, p.x[row : row + 1], [target])
        np.testing.assert_allclose(together[row : row + 1], alone, rtol=0, atol=SIGNED_TOLERANCE)
    decisions = [1, 3]
    expected = host_maps(p.net, layers, p.x[decisions], [targets[row] for row in decisions])
    assert_same_as_host(together[decisions], expected)


@pytest.mark.parametrize("sign", ["+", "-"])
def test_component_maps_with_test_time_augmentation(sign: str) -> None:
    p = problem()
    layers, targets = p.layers("features.4"), [PCATarget(0, sign)] * len(p.x)
    parts = [our_maps(p.net, layers, p.x * factor, targets) for factor in (0.9, 1.0, 1.1)]
    parts += [our_maps(p.net, layers, p.x.flip(-1) * factor, targets)[..., ::-1] for factor in (0.9, 1.0, 1.1)]
    actual = our_maps(p.net, layers, p.x, targets, aug_smooth=True)
    np.testing.assert_allclose(actual, np.mean(parts, axis=0), rtol=0, atol=SIGNED_TOLERANCE)


def test_component_maps_with_eigen_smoothing_keep_their_sign() -> None:
    p = problem()
    (layer,) = p.layers("features.4")
    cam = ClosedFormGradCAM(p.net, [layer])
    explained = cam.explain(p.x, [PCATarget(0)])
    activations = p.backbone.features(p.x).detach()
    smooth = torch.from_numpy(get_2d_projection((explained.weights[:, 0, :, None, None] * activations).numpy()))
    # An SVD has no sign of its own: take that of the map which it smooths.
    smooth *= (smooth * explained.maps[:, 0]).sum((1, 2), keepdim=True).sign()
    signed = smooth / smooth.abs().amax((1, 2), keepdim=True)
    for sign, part in (("+", signed.relu()), ("-", (-signed).relu())):
        actual = cam(p.x, [PCATarget(0, sign)] * len(p.x), eigen_smooth=True)
        np.testing.assert_allclose(actual, upsample(part, p.x.shape[2:]), rtol=0, atol=SIGNED_TOLERANCE)


@pytest.mark.parametrize("quantised", [True, False])
def test_a_network_without_parameters_is_refused(quantised: bool) -> None:
    backbone, way = nn.Sequential(nn.Flatten()), "device$"
    if quantised:
        backbone, way = (
            nn.Sequential(nn.Flatten(), nn.Linear(12, 6)).eval(),
            "device: explain .* before it was quantised$",
        )
        backbone = torch.ao.quantization.quantize_dynamic(backbone, {nn.Linear}, dtype=torch.qint8)
    head = PCA(2).fit(extract_features(backbone, [torch.rand(9, 3, 2, 2)], progress=False)[0])
    with pytest.raises(ValueError, match=way):
        ClosedFormGradCAM(PCASVMNet(backbone, head).eval(), ["0"])


def test_a_blank_component_map_says_why() -> None:
    # Both channels are never negative and rise together, so the only component's map has one sign.
    backbone = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.ones_(backbone[0].weight)
    nn.init.zeros_(backbone[0].bias)
    x = draw((1, 8, 8), 6, 2, seed=4)[0] * torch.linspace(0.5, 2.0, 6).reshape(-1, 1, 1, 1)
    head = PCA(1).fit(extract_features(backbone, [x], progress=False)[0])
    present, absent = ("+", "-") if head.components_.sum() > 0 else ("-", "+")
    cam = ClosedFormGradCAM(PCASVMNet(backbone, head), [backbone[1]])
    np.testing.assert_allclose(cam(x, PCATarget(0, present)).max((1, 2)), 1.0, rtol=0, atol=SIGNED_TOLERANCE)
    name = re.escape(repr(PCATarget(0, absent)))
    message = rf"image 1, {name}: all its evidence has the other sign\. Use explain\(\), which keeps both signs$"
    with pytest.warns(BlankMapWarning, match=message):
        maps = cam(x[:2], [PCATarget(0, present), PCATarget(0, absent)])
    assert maps.reshape(2, -1).max(1).tolist() == [1.0, 0.0]
