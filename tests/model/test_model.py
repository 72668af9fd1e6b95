"""A model: what it is fitted with, what it explains, and the file that it is written to and read from."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors import safe_open
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torchvision.transforms import v2
from towers import Tower

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    ClosedFormGradCAM,
    ContributionCAM,
    Head,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    extract_features,
    fit_model,
    load_model,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.head.storage import TrainingSet

HEAD = make_pipeline(StandardScaler(), PCA(3), SVC())
LABELS = torch.arange(24) % 3
TRANSFORM = v2.Compose([v2.Resize((16, 16)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    noise = torch.randn(len(LABELS), *shape, generator=torch.Generator().manual_seed(seed))
    return noise + LABELS.reshape(-1, *[1] * len(shape))


def loader(*shape: int) -> list:
    x = images(*shape)
    return [(x[:16], LABELS[:16]), (x[16:], LABELS[16:])]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ).eval()


@pytest.fixture(scope="module")
def model():
    return fit_model(network(), loader(3, 16, 16), HEAD, transform=TRANSFORM, progress=False)


@pytest.fixture
def file(model, tmp_path):
    model.save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def picture(folder: Path, name: str, seed: int = 0) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)).save(path)
    return path


def test_a_model_is_what_one_would_write_by_hand(model):
    backbone, x = network(), images(3, 16, 16)
    features, labels = extract_features(backbone, loader(3, 16, 16), progress=False)
    net = PCASVMNet(backbone, clone(HEAD).fit(features, labels)).eval()
    mean = mean_activations(net, loader(3, 16, 16), "1", progress=False)
    by_hand = ContributionCAM(net, ["1"], mean=mean).explain(x[:4])
    maps = model.explain(x[:4])
    assert model.layers == ("1",)
    assert model.classes == [0, 1, 2]
    assert torch.equal(maps.maps, by_hand.maps)
    assert torch.equal(maps.values, by_hand.values)
    assert model.predict(x).tolist() == net.predict(x).tolist()
    grad = model.cam(ClosedFormGradCAM, layers=["0.0"]).explain(x[:2], [PCATarget(0)])
    assert torch.equal(grad.maps, ClosedFormGradCAM(net, ["0.0"]).explain(x[:2], [PCATarget(0)]).maps)
    assert model.about["images"] == 24
    assert model.about["classes"] == {"0": 8, "1": 8, "2": 8}


def model_of_names():
    return fit_model(network(), loader(3, 16, 16), HEAD, classes=["ant", "bee", "cat"], progress=False)


def test_classes_have_names():
    named, numbered = model_of_names(), fit_model(network(), loader(3, 16, 16), HEAD, progress=False)
    x = images(3, 16, 16)[:2]
    assert named.classes == ["ant", "bee", "cat"]
    assert torch.equal(named.explain(x, SVMTarget("bee")).maps, numbered.explain(x, SVMTarget(1)).maps)
    assert named.about["classes"] == {"ant": 8, "bee": 8, "cat": 8}


def test_the_head_that_was_passed_is_not_fitted_and_not_changed():
    head = clone(HEAD)
    fit_model(network(), loader(3, 16, 16), head, progress=False)
    assert not hasattr(head[-1], "classes_")
    features, labels = extract_features(network(), loader(3, 16, 16), progress=False)
    fitted = clone(HEAD).fit(features, labels)
    own = Head.of(clone(HEAD).fit(features, labels))
    for one in (fitted, own, [fitted[0], fitted[1], fitted[2]]):
        model = fit_model(network(), loader(3, 16, 16), one, normal=1, progress=False)
        assert model.normal == 1
        assert set(model.means) == {"0.1", "1.1", "1"}
        np.testing.assert_allclose(
            model.net(images(3, 16, 16)).detach().numpy(), fitted.decision_function(features), rtol=1e-6, atol=1e-9
        )
    assert own.training_set == TrainingSet()  # another network may have it


@pytest.mark.parametrize(
    ("backbone", "shape", "layer", "pool"),
    [
        pytest.param(network, (3, 16, 16), None, None, id="pictures"),
        pytest.param(lambda: Tower(before=2), (3, 12, 16), "norm", "cls", id="tokens"),
        pytest.param(
            lambda: nn.Sequential(
                nn.Conv1d(2, 6, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(6, 8, 3), nn.ReLU(),
                nn.AdaptiveAvgPool1d(1), nn.Flatten(),
            ), (2, 32), None, None, id="signals",
        ),
        pytest.param(
            lambda: nn.Sequential(
                nn.Conv3d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(6, 8, 3, padding=1), nn.ReLU(),
                nn.AdaptiveAvgPool3d(1), nn.Flatten(),
            ), (1, 8, 8, 8), None, None, id="volumes",
        ),
        pytest.param(network, (3, 16, 16), ["0", "1"], "mean", id="several layers"),
    ],
)  # fmt: skip
def test_means_of_all_blocks_are_kept_in_the_same_pass(backbone, shape, layer, pool, monkeypatch):
    torch.manual_seed(0)
    net = backbone().eval()
    x = images(*shape)
    passes = []
    net.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))
    model = fit_model(net, loader(*shape), HEAD, layer, pool=pool, progress=False)
    assert passes.count(16) + passes.count(8) <= 3  # one or two batches, the first of which may end early
    assert model.means
    assert not model.about["left_out"]
    for name, means in model.means.items():
        given = mean_activations(net, [x], name, progress=False)
        torch.testing.assert_close(means, given, rtol=1e-5, atol=1e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("error", BaselineWarning)
            maps = model.explain(x[:3], [SVMTarget(0)], layers=[name])
        if "." in name or (isinstance(layer, list) and name == "1"):  # features bypass it
            continue
        assert float(maps.baseline_values.abs().max()) < 1e-4 * float(maps.values.abs().max() + 1)


class Repeated(nn.Module):
    """A block that runs three times, and one that returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.pair, self.last = Pair(), nn.Conv2d(8, 8, 3, stride=2)

    def forward(self, x):
        x = self.stem(x)
        for _ in range(3):
            x = self.block(x).relu()
        return self.last(self.pair(x)[0]).mean((2, 3))


class Pair(nn.Module):
    def forward(self, x):
        return x, x


def test_blocks_that_have_no_means_are_named():
    model = fit_model(Repeated().eval(), loader(3, 16, 16), HEAD, layers=["pair", "last"], progress=False)
    assert set(model.means) == {"stem", "last"}
    assert model.about["left_out"].keys() == {"block", "pair"}
    assert "several times" in model.about["left_out"]["block"]


class Branches(nn.Module):
    """A branch for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rgb = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, stride=2))
        self.depth = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())

    def forward(self, rgb, depth):
        return torch.cat([self.rgb(rgb).mean((2, 3)), self.depth(depth).mean((2, 3))], 1)


@pytest.mark.parametrize("names", [False, True])
def test_of_several_inputs_the_blocks_of_the_branches_have_means(names, tmp_path):
    x = (images(3, 16, 16), images(1, 12, 12, seed=1))
    inputs = dict(zip(("rgb", "depth"), x, strict=True)) if names else x
    model = fit_model(Branches().eval(), [(inputs, LABELS)], HEAD, progress=False)
    assert set(model.means) == {"rgb.1", "rgb.2", "depth.1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", BaselineWarning)
        rgb, depth = model.cam(baseline="mean").explain(inputs)
    assert rgb.maps.shape[2:] == (6, 6)
    assert depth.maps.shape[2:] == (10, 10)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", model.net.backbone)
    assert torch.equal(again.cam(baseline="mean").explain(inputs)[0].maps, rgb.maps)


def test_pictures_in_files_are_prepared_and_explained(model, tmp_path):
    paths = [picture(tmp_path, f"{name}.png", seed) for seed, name in enumerate("ab")]
    x = torch.stack([TRANSFORM(Image.open(path)) for path in paths])
    expected = model.explain(x).maps
    for given in (paths, [str(path) for path in paths], tmp_path):
        assert torch.equal(model.explain(given).maps, expected)
    torch.testing.assert_close(model.explain(paths[0]).maps, expected[:1], rtol=1e-5, atol=1e-6)
    assert model.predict(tmp_path).shape == (2,)


def test_pictures_that_cannot_be_read_are_named_all_at_once(model, tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"no picture")
    with pytest.raises(OSError, match=r"2 of 3 pictures cannot be read: .*a\.png.*b\.png"):
        model.explain([picture(tmp_path, "c.png"), tmp_path / "a.png", tmp_path / "b.png"])
    with pytest.raises(FileNotFoundError, match=r"there are no files .*d\.png, .*e\.png"):
        model.explain([tmp_path / "d.png", tmp_path / "e.png"])


def test_without_a_transform_paths_are_refused_by_name(tmp_path):
    model = fit_model(network(), loader(3, 16, 16), HEAD, progress=False)
    path = picture(tmp_path, "a.png")
    with pytest.raises(ValueError, match=r"how .*a\.png becomes an image is not known"):
        model.explain(path)
    model.transform = TRANSFORM  # the first way out
    assert model.explain(path).maps.shape == (1, 4, 4, 4)
    assert model.explain(images(3, 16, 16)[:1]).maps.shape == (1, 4, 4, 4)  # the second


def test_a_file_holds_all_but_the_backbone(model, file):
    x = images(3, 16, 16)[:4]
    again = load_model(file, network(), TRANSFORM)
    assert torch.equal(again.explain(x).maps, model.explain(x).maps)
    assert again.about == model.about
    assert again.layers == model.layers
    assert again.means.keys() == model.means.keys()
    assert all(torch.equal(again.means[name], means) for name, means in model.means.items())
    assert torch.equal(Head.load(file).feature_mean, model.net.head.feature_mean)  # the head alone is in it, too
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pytorch_grad_cam_pcasvm model 2"  # with resampled heads
        assert not any("weight" in name for name in opened.keys())  # noqa: SIM118


def test_dense_models_keep_their_pool(tmp_path):
    good = [(x, None) for x, _ in loader(3, 16, 16)]
    neighbours = NearestNeighbors(n_neighbors=1)
    model = fit_model(
        network(), [x for x, _ in good], neighbours, ["0", "1"], pool=("dense", 3), sample=6, coreset=0.5,
        progress=False,
    )  # fmt: skip
    model.save(tmp_path / "parts.safetensors")
    again = load_model(tmp_path / "parts.safetensors", network())
    assert again.net.pool == ("dense", 3)
    assert model.about["rows"] == 72
    x = images(3, 16, 16)[:2]
    np.testing.assert_array_equal(again.net.anomaly_map(x), model.net.anomaly_map(x))


def test_another_backbone_is_refused_when_it_is_loaded(model, file):
    with pytest.raises(ValueError, match="fitted behind a Sequential that was passed as a module"):
        load_model(file)
    assert load_model(file, network()).classes == [0, 1, 2]  # the way out
    with pytest.raises(ValueError, match="has other weights, or another dtype, than the Sequential behind which"):
        load_model(file, network(seed=1))
    with pytest.raises(ValueError, match="has other weights, or another dtype"):
        load_model(file, network().half())


def test_another_code_and_another_transform_are_refused_when_they_are_loaded(file):
    other = network()
    other[1][1] = nn.Tanh()  # no weight has changed
    with pytest.raises(ValueError, match="the features of noise are others"):
        load_model(file, other)
    darker = v2.Compose([TRANSFORM, v2.Normalize([0.5] * 3, [0.5] * 3)])
    with pytest.raises(ValueError, match="the features of a picture, which the transform prepares,"):
        load_model(file, network(), darker)


def test_a_transform_that_does_more_is_passed_again(tmp_path):
    model = fit_model(network(), loader(3, 16, 16), HEAD, transform=lambda p: TRANSFORM(p).flip(2), progress=False)
    model.save(tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors", network()).transform is None
    again = load_model(tmp_path / "model.safetensors", network(), lambda p: TRANSFORM(p).flip(2))
    path = picture(tmp_path, "a.png")
    assert torch.equal(again.explain(path).maps, model.explain(path).maps)


def test_what_is_no_model_is_refused(model, tmp_path, file):
    with pytest.raises(FileNotFoundError, match="there is no model"):
        load_model(tmp_path / "none.safetensors")
    model.net.head.save(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="the file of a head alone"):
        load_model(tmp_path / "head.safetensors", network())
    damaged = file.read_bytes()
    file.write_bytes(damaged[:-8])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_model(file, network())


def test_pools_that_are_functions_are_refused_and_the_way_out_works(tmp_path):
    model = fit_model(network(), loader(3, 16, 16), HEAD, "1", pool=lambda t: t.mean((2, 3)), progress=False)
    with pytest.raises(ValueError, match="the pool is a function"):
        model.save(tmp_path / "model.safetensors")
    fit_model(network(), loader(3, 16, 16), HEAD, "1", pool="mean", progress=False).save(tmp_path / "m.safetensors")
    assert load_model(tmp_path / "m.safetensors", network()).net.pool == "mean"


def test_labels_classes_and_arguments_are_checked():
    with pytest.raises(ValueError, match="the loader yields no labels"):
        fit_model(network(), [images(3, 16, 16)], HEAD, progress=False)
    with pytest.raises(ValueError, match=r"normal='good': this head has the classes \[0, 1, 2\]"):
        fit_model(network(), loader(3, 16, 16), HEAD, normal="good", progress=False)
    with pytest.raises(TypeError, match="the head must be an estimator"):
        fit_model(network(), loader(3, 16, 16), 3, progress=False)
    for classes, told in (("ab", "classes= has 2 names, but the labels go from 0 to 2"), ("", "classes= has 0 names")):
        with pytest.raises(ValueError, match=told):
            fit_model(network(), loader(3, 16, 16), HEAD, classes=list(classes), progress=False)
    with pytest.raises(ValueError, match="classes= are names for a head that is fitted here"):
        fit_model(network(), loader(3, 16, 16), Head.of(model_of_names().net.head), classes=["a"], progress=False)
    model = fit_model(network(), loader(3, 16, 16), HEAD, progress=False)
    model.layers = ()
    with pytest.raises(ValueError, match="has no layer whose output has positions"):
        model.explain(images(3, 16, 16))


def test_layers_are_checked_with_the_first_images():
    net = network()
    given = fit_model(net, loader(3, 16, 16), HEAD, layers=[net[0]], progress=False)
    assert given.layers == ("0",)
    assert fit_model(net, loader(3, 16, 16), HEAD, layers="1.1", progress=False).layers == ("1.1",)
    forever = (pytest.fail("went on") if n else batch for n, batch in enumerate(loader(3, 16, 16)))
    for layers, told in (
        (["1.9"], r"has no layer '1\.9'; did you mean '1\.[0-9.]*'"),
        (["1"], r"the layer '1' does not run before the features, '0': name a layer that does, such as .*0"),
    ):
        with pytest.raises(ValueError, match=told):
            fit_model(net, forever, HEAD, "0", pool="mean", layers=layers, progress=False)
    with pytest.raises(ValueError, match=r"the layer '2' has no positions on the image: name a layer that does, such"):
        fit_model(net, loader(3, 16, 16), HEAD, layers=["2"], progress=False)
    with pytest.raises(TypeError, match="layers= are names of layers"):
        fit_model(net, loader(3, 16, 16), HEAD, layers=[1], progress=False)


@pytest.mark.parametrize("layer", ["blocks.0", "blocks.1.norm1", "norm"])
def test_default_layers_of_transformers_run_before_the_features(layer):
    net = Tower(before=1).eval()
    model = fit_model(net, loader(3, 12, 16), HEAD, layer, pool="mean", progress=False)
    assert model.explain(images(3, 12, 16)[:2]).maps.shape[:2] == (2, 4)
    expected = {"blocks.0": "blocks.0", "blocks.1.norm1": "blocks.0", "norm": "blocks.1"}[layer]
    assert model.layers == (expected,)


@pytest.mark.parametrize("transform", [TRANSFORM, lambda picture: TRANSFORM(picture).flip(2)], ids=["steps", "own"])
@pytest.mark.parametrize("before", [None, v2.Compose([TRANSFORM, v2.Normalize([0.5] * 3, [0.5] * 3)])])
def test_a_transform_that_is_reassigned_is_in_the_file(before, transform, tmp_path):
    model = fit_model(network(), loader(3, 16, 16), HEAD, transform=before, normal=1, progress=False)
    model.transform = transform
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", network(), None if transform is TRANSFORM else transform)
    path = picture(tmp_path, "a.png")
    torch.testing.assert_close(again.read(path)[0], transform(Image.open(path)), rtol=0, atol=1e-6)
    torch.testing.assert_close(again.explain(path).maps, model.explain(path).maps, rtol=1e-4, atol=1e-6)
    assert again.normal == 1
    again.save(tmp_path / "again.safetensors")
    assert load_model(tmp_path / "again.safetensors", network(), transform).read(path).shape == (1, 3, 16, 16)
    model.transform = None
    model.save(tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors", network()).transform is None


@pytest.mark.parametrize("normal", [np.int64(1), np.float32(1), 1])
def test_the_normal_class_is_stored_as_the_head_has_it(normal, tmp_path):
    model = fit_model(network(), loader(3, 16, 16), HEAD, normal=normal, progress=False)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", network()).normal
    assert again == model.normal == 1
    assert type(again) is type(model.normal) is int


def test_training_flags_survive(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten()).train()
    net[0].eval()
    flags = [module.training for module in net.modules()]
    model = fit_model(net, loader(3, 16, 16), HEAD, progress=False)
    x = images(3, 16, 16)[:4]
    maps, labels = model.explain(x).maps, model.predict(x)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", net)
    assert [module.training for module in net.modules()] == flags
    assert net[1].num_batches_tracked == 0
    net.eval()  # in which the head was fitted, and explains
    assert torch.equal(again.explain(x).maps, maps)
    assert again.net(x).labels().tolist() == labels.tolist()


def test_a_model_of_several_inputs_may_have_a_transform(tmp_path):
    x = images(3, 16, 16), images(1, 12, 12, seed=1)
    model = fit_model(Branches().eval(), [(x, LABELS)], HEAD, transform=TRANSFORM, progress=False)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors", model.net.backbone)
    assert torch.equal(again.explain(x)[0].maps, model.explain(x)[0].maps)


def test_pictures_are_explained_as_their_files(model, tmp_path):
    paths = [picture(tmp_path, f"{name}.png", seed) for seed, name in enumerate("ab")]
    expected = model.explain(paths).maps
    assert torch.equal(model.explain([Image.open(path) for path in paths]).maps, expected)
    assert model.explain(Image.open(paths[0]).convert("L")).maps.shape == expected[:1].shape
    without = fit_model(network(), loader(3, 16, 16), HEAD, progress=False)
    with pytest.raises(ValueError, match="how a picture becomes an image is not known"):
        without.explain(Image.open(paths[0]))


def test_what_is_no_image_is_refused_with_what_to_pass(model):
    batches, x = loader(3, 16, 16), images(3, 16, 16)[:2]
    for given, told in (
        ([], "got an empty list"),
        (None, "got nothing"),
        (torch.utils.data.DataLoader(range(3)), "of a DataLoader take the batches, model.explain"),
        ((x, LABELS[:2]), "this network takes one tensor, got two: leave out labels"),
    ):
        for method in (model.explain, model.predict):
            with pytest.raises(TypeError, match=f"what is explained are images.*{told}"):
                method(given)
    maps = [model.explain(images).maps for images, _ in torch.utils.data.DataLoader(batches, None)]  # the ways out
    assert torch.equal(torch.cat(maps)[:2], model.explain(x).maps)


def test_layers_that_are_reassigned_are_explained():
    model = fit_model(network(), loader(3, 16, 16), HEAD, progress=False)
    x = images(3, 16, 16)[:2]
    assert model.explain(x).maps.shape[2:] == (4, 4)
    model.layers = ("0.1",)
    assert model.explain(x).maps.shape[2:] == (16, 16)


# --- backbones by name ------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """The weights of a torchvision network, as a file and as torchvision would download them."""
    torch.manual_seed(0)
    state = torchvision.models.squeezenet1_1().state_dict()
    (tmp_path / "elsewhere").mkdir()
    torch.save(state, tmp_path / "elsewhere" / "weights.pth")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *args, **kwargs: state)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *args, **kwargs: state)
    return tmp_path / "elsewhere" / "weights.pth"


def fitted_by_name(**options):
    data = [(images(3, 64, 64), LABELS)]
    return fit_model("squeezenet1_1", data, HEAD, "features", pool="mean", progress=False, **options)


def test_a_network_with_a_name_is_made_again_with_the_exact_name_of_its_weights(weights, tmp_path):
    model = fitted_by_name()
    assert model.origin.weights == "IMAGENET1K_V1"
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    assert again.origin == model.origin
    path = picture(tmp_path, "a.png")
    own = torchvision.models.SqueezeNet1_1_Weights.IMAGENET1K_V1.transforms()
    torch.testing.assert_close(again.read(path)[0], own(Image.open(path)), rtol=0, atol=1e-6)
    assert torch.equal(again.explain(path).maps, model.explain(again.read(path)).maps)


def test_a_file_of_weights_is_looked_for_beside_the_model_and_then_where_it_was(weights, tmp_path):
    from pytorch_grad_cam_pcasvm.studio.model.backbones import make_backbone
    from pytorch_grad_cam_pcasvm.studio.model.fitting import fit_made

    made = make_backbone("squeezenet1_1", weights)
    assert made.origin.file == str(weights)
    model = fit_made(made, [(images(3, 64, 64), LABELS)], HEAD, "features", pool="mean", progress=False)
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "model.safetensors"
    model.save(file)
    assert load_model(file).origin.file == str(weights)
    beside = weights.rename(tmp_path / "models" / weights.name)
    assert load_model(file).classes == [0, 1, 2]
    moved = beside.rename(tmp_path / "moved.pth")
    with pytest.raises(FileNotFoundError, match=r"weights\.pth, are neither beside"):
        load_model(file)
    assert load_model(file, weights=moved).classes == [0, 1, 2]
    torch.save(torchvision.models.squeezenet1_1().state_dict(), beside)
    with pytest.raises(ValueError, match="has other weights"):
        load_model(file)


def test_code_in_a_file_runs_only_if_it_is_named_again(tmp_path, monkeypatch):
    from pytorch_grad_cam_pcasvm.studio.model.backbones import make_backbone
    from pytorch_grad_cam_pcasvm.studio.model.fitting import fit_made

    (tmp_path / "own_net.py").write_text(
        "import torch\nfrom torch import nn\nran = []\n\n\ndef make():\n    ran.append(1)\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), transform\n\n\n"
        "def transform(picture):\n    import torchvision.transforms.v2.functional as F\n"
        "    return F.pil_to_tensor(picture.resize((16, 16))).float() / 255\n"
    )
    monkeypatch.chdir(tmp_path)
    made = make_backbone("own_net:make")
    model = fit_made(made, loader(3, 16, 16), HEAD, progress=False)
    model.save("model.safetensors")
    import own_net

    assert own_net.ran == [1]
    with pytest.raises(ValueError, match="names a backbone that runs code of yours, own_net:make"):
        load_model("model.safetensors")
    assert own_net.ran == [1]
    again = load_model("model.safetensors", "own_net:make")
    assert own_net.ran == [1, 1]
    assert again.explain(picture(tmp_path, "a.png")).maps.shape[0] == 1


def test_names_that_there_are_not_are_told_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'resnet18'"):
        fit_model("resnet-18", loader(3, 16, 16), HEAD, progress=False)


def test_the_file_says_what_the_head_was_fitted_with(model, file):
    with safe_open(file, "pt") as opened:
        described = json.loads(opened.metadata()["model"])
    assert described["about"]["versions"].keys() == {"pytorch_grad_cam_pcasvm", "torch", "sklearn"}
    assert described["layers"] == ["1"]
    assert described["inputs"] == [{"name": None, "shape": [3, 16, 16], "dtype": "float32"}]
