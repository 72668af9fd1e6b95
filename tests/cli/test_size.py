"""`fit --size`: images of another size than the weights', from the fit to a model's file, and what does not take it."""

import json
from argparse import ArgumentTypeError

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors import safe_open
from torchvision.transforms.functional import normalize, to_tensor

from pytorch_grad_cam_pcasvm import ContributionCAM, SVMTarget, extract_features, load_model
from pytorch_grad_cam_pcasvm.studio.cli import main, training
from pytorch_grad_cam_pcasvm.studio.cli.options import parse_size
from pytorch_grad_cam_pcasvm.studio.model.backbones import make_backbone

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for number in range(8):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 40, 3), np.uint8) // (1 + number % 2)
        path = root / ["good", "hole"][number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


@pytest.fixture
def fit(photos, weights, tmp_path, monkeypatch, capsys):
    """Fits a model by a line; returns the exit status, its file and what was printed."""
    monkeypatch.setattr(training, "cache_folder", lambda: tmp_path / "cache")

    def command(*words, backbone="squeezenet1_1", file=None, features="features"):
        path = tmp_path / "model.safetensors"
        line = ["fit", photos, "--out", path, "--backbone", backbone, "--features", features, "--components", 3, *words]
        line += ["--weights", file or weights]
        return main(list(map(str, line))), path, capsys.readouterr()

    return command


def test_sizes_are_typed_as_photos_are_named():
    assert parse_size("448") == (448, 448)
    assert parse_size("672x448") == (448, 672)
    for text in ("448px", "0", "x448", "4x4x4", ""):
        with pytest.raises(ArgumentTypeError, match="WIDTHxHEIGHT"):
            parse_size(text)


def test_a_model_is_fitted_on_images_of_the_size_and_explains_these(fit, photos, weights, tmp_path):
    code, path, printed = fit("--size", "96x64")
    assert code == 0, printed.err
    net = torchvision.models.squeezenet1_1(weights=None).eval()
    net.load_state_dict(torch.load(weights, weights_only=True))
    paths = sorted(photos.rglob("*.png"))
    x = torch.stack([
        normalize(to_tensor(Image.open(one).convert("RGB").resize((96, 64), Image.Resampling.BILINEAR)), *IMAGENET)
        for one in paths
    ])
    features, _ = extract_features(net, [x], "features", pool="mean", progress=False)
    model = load_model(path)
    assert np.allclose(model.net.head.feature_mean.numpy(), features.mean(0), rtol=1e-5, atol=1e-6 * features.max())
    assert torch.allclose(model.read(paths), x, atol=1e-6)
    assert model.transform(Image.open(paths[0])).shape == (3, 64, 96)
    assert model.inputs[0]["shape"] == [3, 64, 96]
    maps = model.explain(paths[:2], SVMTarget("hole"))
    sums = maps.maps.sum((2, 3)) * maps.log_scale.exp() + maps.baseline_values
    assert torch.allclose(sums, maps.values, atol=1e-4)
    before, _, told = fit("--size", "64")
    assert before == 0
    assert "taken from" not in told.out  # of another size they are others
    assert "taken from" in fit("--size", "64")[2].out


def test_a_crop_sees_the_same_part_of_a_square_picture(fit):
    code, path, printed = fit("--size", "112", "--resize", "crop")
    assert code == 0, printed.err
    model, usual = load_model(path), torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    ramp = Image.fromarray(np.tile(np.linspace(0, 255, 512).astype(np.uint8), (512, 1))).convert("RGB")
    ours, theirs = model.transform(ramp), usual(ramp)
    assert ours.shape == (3, 112, 112)
    assert torch.allclose(ours[:, 0, [0, -1]], theirs[:, 0, [0, -1]], atol=0.05)


@pytest.mark.parametrize(
    ("name", "why"),
    [("vit_b_32", "Wrong image"), pytest.param("timm:convit_tiny", "", marks=pytest.mark.optional)],
)
def test_networks_with_positions_of_one_size_are_refused_by_name(name, why):
    if ":" in name:
        pytest.importorskip("timm")
    with pytest.raises(ValueError, match=rf"{name} does not take images of 448x320 pixels.*{why}.*--tiles 3x2"):
        _made(name, (320, 448))


def _made(name, size):
    from pytorch_grad_cam_pcasvm.studio.model import backbones

    net = backbones._make_timm(name[5:], None, size, downloads=False) if ":" in name else None
    with torch.device("meta"):  # whose weights take no time
        net = (torchvision.models.get_model(name, weights=None), None, None, None) if net is None else net
    backbones._refuse_size(net[0].eval(), name, size)
    return net


def test_a_transform_of_the_user_decides_the_size_itself(fit, tmp_path, monkeypatch):
    (tmp_path / "own_sized.py").write_text(
        "import torchvision\n\n\ndef make():\n"
        "    return torchvision.models.squeezenet1_1(weights=None), transform\n\n\n"
        "def transform(picture):\n    import torchvision.transforms.v2.functional as F\n"
        "    return F.pil_to_tensor(picture.resize((64, 64))).float() / 255\n"
    )
    monkeypatch.chdir(tmp_path)
    code, path, printed = fit("--size", "96", backbone="own_sized:make")
    assert code == 2
    assert not path.exists()
    assert "--size decides the size of images, but so does the transform of own_sized:make" in printed.err


@pytest.mark.optional
def test_positions_of_timm_are_resampled_for_a_size_and_again_when_the_model_is_loaded(fit, photos, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    own = timm.create_model("vit_tiny_patch16_224", num_classes=0)
    file = tmp_path / "vit.pth"
    torch.save(own.state_dict(), file)
    code, path, printed = fit(
        "--size", "96x64", "--pool", "cls", backbone="timm:vit_tiny_patch16_224", file=file, features="norm"
    )
    assert code == 0, printed.err
    with safe_open(path, "pt") as opened:
        described = json.loads(opened.metadata()["model"])
    assert described["backbone"]["size"] == [64, 96]
    model = load_model(path)
    expected = timm.create_model("vit_tiny_patch16_224", num_classes=0, dynamic_img_size=True).eval()
    expected.load_state_dict(own.state_dict())
    x = model.read(sorted(photos.rglob("*.png"))[:2])
    assert x.shape == (2, 3, 64, 96)
    with torch.no_grad():
        # timm reads weights of another size, and resamples at each pass, by the same interpolation.
        assert torch.allclose(model.net(x).features.float(), expected.forward_features(x)[:, 0], atol=1e-4)
    maps = model.cam(ContributionCAM, ["blocks.11.norm1"], reshape_transform="tokens").explain(x, SVMTarget("hole"))
    assert maps.maps.shape[2:] == (4, 6)


@pytest.mark.optional
def test_the_usual_size_is_no_other_network():
    timm = pytest.importorskip("timm")
    del timm
    from pytorch_grad_cam_pcasvm.studio.model import backbones

    assert backbones._make_timm("vit_tiny_patch16_224", None, (224, 224), downloads=False)[3] is None
    assert backbones._make_timm("resnet18", None, (320, 448), downloads=False)[3] is None
    assert make_backbone.__kwdefaults__["size"] is None
