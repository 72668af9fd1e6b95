"""extract_features, and evaluation mode."""

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import Backbone, Step
from reference import relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, extract_features, mean_activations
from pytorch_grad_cam_pcasvm.network.features import compute_features, output_of
from pytorch_grad_cam_pcasvm.network.inputs import checked_images
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_layer_name
from pytorch_grad_cam_pcasvm.network.runner import Reached

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


@pytest.mark.parametrize(
    ("loader", "labels"),
    [
        ([{"image": X[:6], "label": Y[:6]}, {"image": X[6:], "label": Y[6:], "other": 1}], list(range(11))),
        ([{"pixel_values": X, "labels": Y[:, None]}], list(range(11))),
        ([{"img": X, "fine_label": ["a"] * 11}], ["a"] * 11),
        (DataLoader([{"image": x, "label": int(y)} for x, y in zip(X, Y, strict=True)], 4), list(range(11))),
        ([{"image": X}], None),
        ([{"label": None, "image": X[:6]}, {"image": X[6:]}], None),
        ([(X, None)], None),
        ([{"image": None, "pixel_values": X}], None),
    ],
)
def test_batches_that_are_dicts(backbone, loader, labels):
    features, found = extract_features(backbone, loader, "classifier.4", progress=False)
    assert relative(features, expected(backbone)) < 1e-6
    assert (found if found is None else found.tolist()) == labels


class Tagged(torch.Tensor):
    """A tensor that carries something along, as MONAI's MetaTensor."""


@pytest.mark.parametrize("wrap", [lambda x, y: (x, y), lambda x, y: {"image": x, "label": y}])
def test_tensors_of_a_subclass_are_plain_ones_for_the_network(backbone, wrap):
    seen = []
    backbone.features.register_forward_pre_hook(lambda module, args: seen.append(type(args[0])))
    batch = wrap(X.as_subclass(Tagged), Y.as_subclass(Tagged))
    features, labels = extract_features(backbone, [batch], as_numpy=False, progress=False)
    assert type(features) is type(labels) is torch.Tensor
    assert seen == [torch.Tensor]
    assert type(checked_images(X.as_subclass(Tagged))) is torch.Tensor
    assert checked_images(X) is X
    x = X.clone().requires_grad_()
    checked_images(x.as_subclass(Tagged)).sum().backward()
    assert bool((x.grad == 1).all())


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
        ([], "classifier.4", ValueError, "the loader yielded no batch"),
        ([X], "classifier.7", ValueError, "has no layer 'classifier.7'"),
        ([(X, Y[:3])], "classifier.4", ValueError, "one label for every image, or no labels at all"),
        ([(X, Y), X], "classifier.4", ValueError, "one label for every image, or no labels at all"),
        ([X.numpy()], "classifier.4", TypeError, "images must be a torch.Tensor, got ndarray: use torch.from_numpy"),
        ([(X[0], 3)], "classifier.4", ValueError, "one label for every image, or no labels at all"),
        ([[Image.new("RGB", (12, 12)), 1]], None, TypeError, r"got Image: give the data set transform=.*ToTensor\(\)"),
        ([([Image.new("RGB", (12, 12))], [1])], None, TypeError, r"got list: give .* v2.Compose\(.*v2.ToDtype"),
        ([(list(X), Y)], None, TypeError, r"images must be a torch.Tensor, got list: use torch.stack"),
        ([("name", 1)], None, TypeError, "images must be a torch.Tensor, got str: use a DataLoader"),
        ([[]], None, TypeError, "images must be a torch.Tensor, got NoneType"),
        ([{"scan": X, "label": Y}], None, ValueError, r"no image among \['scan', 'label'\]: one of \('image', 'pixel"),
        ([{"image": X, "label": Y}, {"image": X}], None, ValueError, "one label for every image, or no labels at all"),
        ([{"image": X}, {"image": X, "label": Y}], None, ValueError, "one label for every image, or no labels at all"),
        ([{"image": X[0], "label": 3}], None, ValueError, "one label for every image, or no labels at all"),
        ([{"image": X.numpy()}], None, TypeError, "images must be a torch.Tensor, got ndarray: use torch.from_numpy"),
        ([[{"image": [X[0]]}]], None, TypeError, "images must be a torch.Tensor, got dict: use a DataLoader"),
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

    with pytest.raises(TypeError, match="features must be one tensor, but the network, or the layer, returns a tuple"):
        extract_features(Pair(), [X], progress=False)


def test_evaluating_puts_every_module_back(backbone):
    backbone.features.eval()
    before = [module.training for module in backbone.modules()]
    with evaluation_mode(backbone):
        with evaluation_mode(backbone):
            assert not any(module.training for module in backbone.modules())
        assert not any(module.training for module in backbone.modules())
    assert [module.training for module in backbone.modules()] == before
    with contextlib.suppress(RuntimeError), evaluation_mode(backbone):
        raise RuntimeError
    assert [module.training for module in backbone.modules()] == before


def test_threads_share_a_backbone(backbone):
    """A thread's pass is not stopped by another's, and nobody leaves evaluation mode too early."""
    exact = expected(backbone)
    backbone.train()
    wrong = []

    def work(layer, width):
        for _ in range(50):
            with evaluation_mode(backbone), torch.no_grad():
                output = compute_features(backbone, layer, X)
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
    with evaluation_mode(outer):
        with evaluation_mode(backbone):
            pass
        assert not backbone.training, "the inner user turned training on under the outer one"
    assert backbone.training


@pytest.mark.parametrize("as_numpy", [True, False])
@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray, lambda labels: labels.tolist()])
@pytest.mark.parametrize("columns", [0, 1, 3])
def test_labels_in_a_column(backbone, columns, kind, as_numpy):
    labels = Y if not columns else Y.unsqueeze(1).expand(11, columns) + torch.arange(columns)
    loader = [(X[:6], kind(labels[:6])), (X[6:10], kind(labels[6:10])), (X[10:], kind(labels[10:]))]
    _, actual = extract_features(backbone, loader, as_numpy=as_numpy, progress=False)
    assert isinstance(actual, torch.Tensor) is (not as_numpy and kind is torch.as_tensor)
    assert actual.tolist() == (labels.flatten() if columns == 1 else labels).tolist()
    assert actual.shape == ((11, columns) if columns == 3 else (11,))


MISFITS = [
    (torch.float32, X.double(), TypeError, r"are torch.float32, but the images torch.float64: use images.float\(\)"),
    (torch.float32, X.half(), TypeError, r"are torch.float32, but the images torch.float16: use images.float\(\)"),
    (torch.float64, X, TypeError, r"are torch.float64, but the images torch.float32: use images.double\(\)"),
    (torch.bfloat16, X, TypeError, r"torch.bfloat16, but the images torch.float32: use images.to\(torch.bfloat16\)"),
    (torch.float32, X.byte(), TypeError, "images must have floating-point values, got torch.uint8: scale"),
    (torch.float32, X.long(), TypeError, "images must have floating-point values, got torch.int64: scale"),
    (torch.float32, X[:, :1], ValueError, r"1 channel, .* takes 3: use x.expand\(-1, 3, -1, -1\) or .*Grayscale\(3\)"),
    (torch.float32, X[:, [0, 1, 2, 0]], ValueError, "have 4 channels, but .*first convolution takes 3: give"),
    (torch.float32, X.movedim(1, -1), ValueError, r"\(11, 12, 12, 3\) has its channels last: use x.permute\(0, 3,"),
]


@pytest.mark.parametrize(("dtype", "images", "error", "message"), MISFITS, ids=str)
@pytest.mark.parametrize("layer", [None, "classifier.4"])
def test_images_that_do_not_fit_the_backbone(backbone, dtype, images, error, message, layer):
    backbone.to(dtype)
    with pytest.raises(error, match=message) as caught:
        extract_features(backbone, [images], layer, progress=False)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(error, match=message):
        compute_features(backbone, layer, images)


def test_a_grey_backbone_says_how_to_make_images_grey():
    with pytest.raises(ValueError, match=r"have 3 channels, .* takes 1: use x.mean\(1, keepdim=True\)"):
        compute_features(Backbone(channels=1), None, X)
    volume = nn.Conv3d(2, 2, 1)
    with pytest.raises(ValueError, match=r"use x.expand\(-1, 2, -1, -1, -1\)"):
        compute_features(volume, None, torch.ones(1, 1, 4, 4, 4))


def test_a_double_image_in_autocast_is_explained(backbone):
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_features(backbone, "classifier.4", X.half()).shape == (11, 9)
        with pytest.raises(TypeError, match=r"the images torch.float64: use images.float\(\)"):
            compute_features(backbone, "classifier.4", X.double())


class Own(nn.Module):
    """A backbone that does with its images what it likes before they reach the layers."""

    def __init__(self, backbone, before, after=lambda x: x):
        super().__init__()
        self.backbone, self.before, self.after = backbone, before, after

    def forward(self, x):
        return self.after(self.backbone(self.before(x)))


def test_a_backbone_that_fits_images_itself_takes_them(backbone):
    exact = expected(backbone)
    own = Own(backbone, lambda x: x.float())
    assert relative(compute_features(own, "backbone.classifier.4", X.double()), exact) < 1e-6
    own = Own(backbone, lambda x: x.float().div(255).expand(-1, 3, -1, -1))
    assert compute_features(own, None, X[:, :1].byte()).shape == (11, 3)


def test_errors_of_the_networks_own_pass_unchanged(backbone):
    def fails(x):
        raise RuntimeError("no type of weather, and no channels")

    for images in (X, X.double(), X.byte()):
        with pytest.raises(RuntimeError, match="no type of weather"):
            compute_features(Own(backbone, lambda x: x.float(), fails), None, images)
    wrong = Own(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)), lambda x: x)
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4 channels"):
        compute_features(wrong, None, X)


def test_images_that_are_no_tensors():
    image = Image.new("RGB", (12, 12))
    for images in (image, [image, image]):
        with pytest.raises(TypeError, match=r"input_tensor must be a torch.Tensor, got \w+: give .*ToTensor\(\)"):
            checked_images(images)
    with pytest.raises(TypeError, match=r"use torch.stack"):
        checked_images([X[0], X[1]])


def test_a_data_set_of_pil_images_is_told_of_transforms(backbone):
    loader = DataLoader([(Image.new("RGB", (12, 12)), 0)] * 4, batch_size=2)
    with pytest.raises(TypeError, match=r"a batch of PIL images: give its data set transform=.*ToTensor\(\)"):
        extract_features(backbone, loader, progress=False)

    def broken():
        raise TypeError("of the loader's own")
        yield

    with pytest.raises(TypeError, match="of the loader's own"):
        extract_features(backbone, broken(), progress=False)


@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_a_network_that_catches_exceptions_stops_at_the_layer(backbone, kind):
    ran = []

    class Careful(Backbone):
        def forward(self, x):
            try:
                return super().forward(x)
            except kind:
                ran.append(1)
                return self.classifier(self.flatten(self.features(x)) * 0)

    careful = Careful()
    careful.load_state_dict(backbone.state_dict())
    exact = expected(backbone)
    actual = compute_features(careful.eval(), "classifier.4#1", X)
    assert relative(actual, exact) < 1e-6
    assert bool(ran) is (kind is BaseException)  # nothing gets through a bare "except:", but its rerun is not used
    assert not careful.classifier[4]._forward_hooks


def test_the_end_of_a_pass_leaves_a_pass_inside_it(backbone):
    """A network whose layer takes the features of another network that has the outer feature layer in it."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = backbone

        def forward(self, x):
            return compute_features(self.backbone, "classifier.4", x)

    exact = expected(backbone)
    outer = Outer().eval()
    first = compute_features(outer, "backbone.classifier.0", X)
    assert relative(first, backbone.classifier[0](backbone.flatten(backbone.features(X)))) < 1e-6
    assert relative(compute_features(outer, None, X), exact) < 1e-6
    assert not issubclass(Reached, Exception)


class Aliased(nn.Module):
    """One dense layer under three names, one activation at two places."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.dense = nn.Linear(4, 6)
        self.neck = self.dense
        self.parts = nn.ModuleDict({"dense": self.dense, "relu": self.features[1]})

    def forward(self, x):
        return self.parts["relu"](self.neck(self.features(x).mean((2, 3))))


def test_a_layer_of_several_names():
    network = Aliased().eval()
    dense = network.dense(network.features(X).mean((2, 3)))
    for layer in ("dense", "neck", "parts.dense", network.neck):
        name = find_layer_name(network, layer)
        assert name == "dense"
        assert relative(compute_features(network, name, X), dense) == 0
        features, _ = extract_features(network, [X], layer, progress=False)
        assert relative(features, dense) == 0
    assert relative(compute_features(network, "parts.dense", X), dense) == 0
    assert relative(output_of(network, "parts.relu#1", X), network.features(X)) == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_network_that_sets_the_gradient_mode_itself(backbone, mode):
    class Region(Backbone):
        def forward(self, x):
            with mode():
                return super().forward(x)

    region = Region()
    region.load_state_dict(backbone.state_dict())
    exact = expected(backbone)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            features = compute_features(region.eval(), "classifier.4", X)
            assert torch.is_grad_enabled() is enabled
            assert not torch.is_inference_mode_enabled()
        assert relative(features, exact) < 1e-6
    tensors, _ = extract_features(region, [X], "classifier.4", as_numpy=False, progress=False)
    assert not tensors.is_inference()


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        ("photos", r"which a str does not: use DataLoader\(torchvision.datasets.ImageFolder\('photos', transform\)"),
        (
            Path("photos"),
            r"which a \w+Path does not: use DataLoader\(torchvision.datasets.ImageFolder\('photos', trans",
        ),
        (
            ["a.png", "b.png"],
            r"which a list of names does not: use DataLoader\(data_set, batch_size=32\) of a data set",
        ),
    ],
)
def test_what_is_no_loader(backbone, loader, told):
    with pytest.raises(TypeError, match=told):
        extract_features(backbone, loader, "features")
    with pytest.raises(TypeError, match=told):
        mean_activations(backbone, loader, "features")


@pytest.mark.optional
def test_a_data_frame_is_no_loader(backbone):
    frame = pytest.importorskip("pandas").DataFrame({"file": ["a.png"], "label": [1]})
    with pytest.raises(TypeError, match=r"which a DataFrame does not: use DataLoader\(data_set, batch_size=32\)"):
        extract_features(backbone, frame, "features")


class Several(nn.Module):
    """A network that returns tokens and what came before, in one form or another."""

    def __init__(self, form):
        super().__init__()
        self.body, self.form = nn.Conv2d(3, 4, 3), form

    def forward(self, x):
        maps = self.body(x)
        return self.form(maps.flatten(2).mT, maps)


FORMS = {
    "tuple": (lambda tokens, maps: (tokens, [maps]), "output[0].mean(1)", lambda output: output[0].mean(1)),
    "list": (lambda tokens, maps: [maps, tokens], "output[0].mean((2, 3))", lambda output: output[0].mean((2, 3))),
    "dict": (lambda tokens, maps: {"out": maps}, "output['out'].mean((2, 3))", lambda o: o["out"].mean((2, 3))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pool", [None, "mean", "cls"])
def test_several_outputs_are_refused_in_their_own_words(form, pool):
    make, way, function = FORMS[form]
    net = Several(make).eval()
    with pytest.raises(TypeError, match=rf"the network, or the layer, returns a {form}") as caught:
        extract_features(net, [X], pool=pool, progress=False)
    assert f"pool=lambda output: {way}" in str(caught.value)
    assert form == "dict" or "last_hidden_state" not in str(caught.value)
    features, _ = extract_features(net, [X], pool=function, progress=False)
    torch.testing.assert_close(torch.from_numpy(features), net.body(X).mean((2, 3)).detach())


def test_a_network_that_ends_in_squeeze_has_ways_out():
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)).eval()
    net = nn.Sequential(pooled, Step(lambda x: x.squeeze())).eval()
    loader, expected = [X[:4], X[4:5]], pooled(X[:5]).detach().flatten(1)
    with pytest.raises(ValueError, match=r"of one image, a network that ends in .squeeze\(\) has lost the axis"):
        extract_features(net, loader, progress=False)
    head = make_pipeline(StandardScaler(), PCA(2), SVC()).fit(pooled(X).detach().flatten(1), Y % 2)
    for options in ({"pool": lambda t: t.reshape(-1, 4)}, {"layer": "0"}):
        features, _ = extract_features(net, loader, **options, progress=False)
        torch.testing.assert_close(torch.from_numpy(features), expected)
        cam = ContributionCAM(PCASVMNet(net, head, **options).eval(), ["0.0"], baseline="zero")
        torch.testing.assert_close(cam.explain(X[:1]).maps, cam.explain(X[:3]).maps[:1])
